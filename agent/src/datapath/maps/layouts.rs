//! `LAYOUTS` and `LAYOUT_FIELDS`: what agents mean by the bytes of the pinned maps, written down for each
//! other.

use super::{error, fields::Moves, lock, removed, shape::Expected};
use crate::datapath::{DatapathError, sys};
use aya::maps::{HashMap, Map, MapData, MapError};
use sinabro_common::abi::layout::{FieldKey, FieldSpan, MapRecord, OF_KEY, OF_VALUE, Place, key};
use std::{collections::BTreeMap, os::fd::AsFd as _, path::Path, sync::Mutex};

const NAME: &str = "LAYOUTS";
const FIELDS: &str = "LAYOUT_FIELDS";

pub struct Layouts {
    records: Mutex<HashMap<MapData, u64, MapRecord>>,
    fields: Mutex<HashMap<MapData, FieldKey, FieldSpan>>,
}

impl Layouts {
    pub fn new(records: Map, fields: Map) -> Result<Self, DatapathError> {
        let records = records.try_into().map_err(error(NAME, "opening"))?;
        let fields = fields.try_into().map_err(error(FIELDS, "opening"))?;
        Ok(Self {
            records: Mutex::new(records),
            fields: Mutex::new(fields),
        })
    }

    /// The maps that are pinned.
    pub fn pinned(directory: &Path) -> Result<Self, DatapathError> {
        let open = |name: &'static str| {
            let data = MapData::from_pin(directory.join(name));
            data.map(Map::HashMap).map_err(error(name, "opening"))
        };
        Self::new(open(NAME)?, open(FIELDS)?)
    }

    /// Forgets what is in no place any more.
    pub fn forget(&self, place: Place<'_>) -> Result<(), DatapathError> {
        self.forget_fields(place)?;
        removed(lock(&self.records).remove(&key(place))).map_err(error(NAME, "removing from"))
    }

    fn forget_fields(&self, place: Place<'_>) -> Result<(), DatapathError> {
        let mut fields = lock(&self.fields);
        let known: Result<Vec<FieldKey>, MapError> = fields.keys().collect();
        let known = known.map_err(error(FIELDS, "reading from"))?;
        known
            .iter()
            .filter(|field| field.map == key(place))
            .try_for_each(|field| removed(fields.remove(field)))
            .map_err(error(FIELDS, "removing from"))
    }

    /// Writes down what the pinned maps mean from now on.
    pub fn note(&self, directory: &Path, maps: &[Expected]) -> Result<(), DatapathError> {
        for map in maps {
            // The acceleration's are there only where it was loaded.
            let Ok(pinned) = sys::obj_get(&map.path(directory)) else {
                continue;
            };
            let info = sys::map_info(pinned.as_fd()).map_err(DatapathError::Probe)?;
            let record = MapRecord {
                layout: map.layout,
                id: info.id,
                pad: 0,
            };
            self.note_fields(map)?;
            lock(&self.records)
                .insert(key(map.place()), record, 0)
                .map_err(error(NAME, "writing to"))?;
        }
        Ok(())
    }

    fn note_fields(&self, map: &Expected) -> Result<(), DatapathError> {
        for part in [OF_KEY, OF_VALUE] {
            for (name, span) in map.spans(part) {
                let field = FieldKey {
                    map: key(map.place()),
                    name,
                    part,
                    pad: 0,
                };
                lock(&self.fields)
                    .insert(field, span, 0)
                    .map_err(error(FIELDS, "writing to"))?;
            }
        }
        Ok(())
    }
}

/// What was written down.
#[derive(Default)]
pub struct Recorded {
    records: BTreeMap<u64, MapRecord>,
    fields: BTreeMap<FieldKey, FieldSpan>,
}

impl Recorded {
    /// Reads the pinned maps; one that is not there, or is something else, says nothing.
    pub fn read(directory: &Path) -> Self {
        fn all<K: aya::Pod + Ord, V: aya::Pod>(path: &Path) -> Option<BTreeMap<K, V>> {
            let data = MapData::from_pin(path).ok()?;
            let map = HashMap::<MapData, K, V>::try_from(Map::HashMap(data)).ok()?;
            map.iter().collect::<Result<_, _>>().ok()
        }
        Self {
            records: all(&directory.join(NAME)).unwrap_or_default(),
            fields: all(&directory.join(FIELDS)).unwrap_or_default(),
        }
    }

    /// How the entries of a map in a later layout become a present map's; none if nobody wrote that down.
    pub fn moves(&self, later: Place<'_>, id: u32, present: &Expected) -> Option<Moves> {
        let record = self.records.get(&key(later))?;
        let fields = |part| {
            let of_part = self.fields.iter();
            let of_part =
                of_part.filter(|(field, _)| (field.map, field.part) == (key(later), part));
            of_part.map(|(field, span)| (field.name, *span)).collect()
        };
        (record.id == id).then(|| Moves::new([fields(OF_KEY), fields(OF_VALUE)], present))?
    }

    /// Why a pinned map of the right shape does not fit, if so. Of a map that nobody wrote down, the
    /// bytes mean what they meant at first.
    pub fn misfit(&self, map: &Expected, id: u32) -> Option<String> {
        let record = self.records.get(&key(map.place()));
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
        let map = *all
            .iter()
            .find(|map| map.shape.name == "ENDPOINTS")
            .unwrap();
        let changed = Expected {
            layout: map.layout + 1,
            number: 2,
            ..map
        };
        let record = |layout, id| {
            let record = MapRecord { layout, id, pad: 0 };
            let places = [map, changed].map(|map| (key(map.place()), record));
            Recorded {
                records: BTreeMap::from(places),
                ..Recorded::default()
            }
        };
        let none = Recorded::default();
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
