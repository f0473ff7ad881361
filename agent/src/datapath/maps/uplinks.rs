//! `UPLINKS`.

use super::{error, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{HashMap, Map, MapData, MapError};
use sinabro_common::abi::uplink::Uplink;
use std::sync::Mutex;

const NAME: &str = "UPLINKS";

pub struct Uplinks(Mutex<HashMap<MapData, u32, Uplink>>);

impl Uplinks {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Makes these known, beside others.
    pub fn put(&self, uplinks: &[(u32, Uplink)]) -> Result<(), DatapathError> {
        let mut map = lock(&self.0);
        uplinks
            .iter()
            .try_for_each(|(index, uplink)| map.insert(index, uplink, 0))
            .map_err(error(NAME, "writing to"))
    }

    /// Forgets all others.
    pub fn retain(&self, indexes: &[u32]) -> Result<(), DatapathError> {
        let mut map = lock(&self.0);
        let present: Result<Vec<u32>, MapError> = map.keys().collect();
        let present = present.map_err(error(NAME, "reading from"))?;
        present
            .iter()
            .filter(|index| !indexes.contains(index))
            .try_for_each(|index| removed(map.remove(index)))
            .map_err(error(NAME, "removing from"))
    }
}
