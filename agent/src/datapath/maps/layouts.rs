//! `LAYOUTS`: what the agents before this one meant by the bytes of the pinned maps.

use super::{error, lock, shape::Expected};
use crate::datapath::{DatapathError, sys};
use aya::maps::{HashMap, Map, MapData};
use sinabro_common::abi::layout::{MapRecord, key};
use std::{collections::BTreeMap, os::fd::AsFd as _, path::Path, sync::Mutex};

const NAME: &str = "LAYOUTS";

pub struct Layouts(Mutex<HashMap<MapData, u64, MapRecord>>);

impl Layouts {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Writes down what the pinned maps mean from now on.
    pub fn note(&self, directory: &Path, maps: &[Expected]) -> Result<(), DatapathError> {
        let mut records = lock(&self.0);
        for map in maps {
            // The acceleration's are there only where it was loaded.
            let Ok(pinned) = sys::obj_get(&directory.join(map.shape.name)) else {
                continue;
            };
            let info = sys::map_info(pinned.as_fd()).map_err(DatapathError::Probe)?;
            let record = MapRecord {
                layout: map.layout,
                id: info.id,
                pad: 0,
            };
            records
                .insert(key(map.shape.name), record, 0)
                .map_err(error(NAME, "writing to"))?;
        }
        Ok(())
    }
}

/// What was written down.
pub struct Recorded(BTreeMap<u64, MapRecord>);

impl Recorded {
    /// Reads the pinned map; one that is not there, or is something else, says nothing.
    pub fn read(directory: &Path) -> Self {
        let read = || -> Option<BTreeMap<u64, MapRecord>> {
            let data = MapData::from_pin(directory.join(NAME)).ok()?;
            let map = HashMap::<MapData, u64, MapRecord>::try_from(Map::HashMap(data)).ok()?;
            map.iter().collect::<Result<_, _>>().ok()
        };
        Self(read().unwrap_or_default())
    }

    /// Why a pinned map of the right shape does not fit, if so. Of a map that nobody wrote down, the
    /// bytes mean what they meant at first.
    pub fn misfit(&self, map: &Expected, id: u32) -> Option<String> {
        let record = self.0.get(&key(map.shape.name));
        match record.filter(|record| record.id == id) {
            Some(record) if record.layout == map.layout => None,
            None if map.number == 1 => None,
            Some(record) => Some(format!(
                "its bytes mean what they do in layout {:016x}, not in {:016x}",
                record.layout, map.layout
            )),
            None => Some(format!(
                "nobody wrote down what its bytes mean, and they mean something else since number {}",
                map.number
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::{DatapathConfig, maps::shape};

    #[test]
    fn what_nobody_wrote_down_is_what_it_was_at_first() {
        let all = shape::expected(&DatapathConfig::default());
        let map = *all.iter().find(|map| map.shape.name == "NAT").unwrap();
        let changed = Expected {
            layout: map.layout + 1,
            number: 2,
            ..map
        };
        let record = |layout, id| {
            let record = MapRecord { layout, id, pad: 0 };
            Recorded(BTreeMap::from([(key("NAT"), record)]))
        };
        let none = Recorded(BTreeMap::new());
        assert_eq!(none.misfit(&map, 7), None);
        assert!(none.misfit(&changed, 7).is_some());
        // On the way up, and on the way down.
        assert!(record(map.layout, 7).misfit(&changed, 7).is_some());
        assert!(record(changed.layout, 7).misfit(&map, 7).is_some());
        assert_eq!(record(changed.layout, 7).misfit(&changed, 7), None);
        // Somebody put another map in its place who writes nothing down.
        assert_eq!(record(changed.layout, 7).misfit(&map, 8), None);
        assert!(record(changed.layout, 7).misfit(&changed, 8).is_some());
    }
}
