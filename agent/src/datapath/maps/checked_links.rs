//! `CHECKED_LINKS`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::abi::uplink;
use std::sync::Mutex;

const NAME: &str = "CHECKED_LINKS";

pub struct CheckedLinks(Mutex<Array<MapData, uplink::CheckedLinks>>);

impl CheckedLinks {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// By which interface packets come out of tunnels.
    pub fn set_overlay(&self, ifindex: u32) -> Result<(), DatapathError> {
        self.change(|links| links.overlay = ifindex)
    }

    /// The first of these; programs look the others up.
    pub fn set_uplinks(&self, indexes: &[u32]) -> Result<(), DatapathError> {
        self.change(|links| {
            links.uplinks = Default::default();
            let places = links.uplinks.iter_mut();
            places
                .zip(indexes)
                .for_each(|(place, index)| *place = *index);
        })
    }

    fn change(&self, of: impl FnOnce(&mut uplink::CheckedLinks)) -> Result<(), DatapathError> {
        let mut map = lock(&self.0);
        let mut links = map.get(&0, 0).map_err(error(NAME, "reading from"))?;
        of(&mut links);
        map.set(0, links, 0).map_err(error(NAME, "writing to"))
    }
}
