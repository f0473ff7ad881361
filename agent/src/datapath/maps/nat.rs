//! `NAT`.

use super::{error, found, lock, raw, removed};
use crate::datapath::{DatapathError, raw_map::RawMap};
use aya::maps::{HashMap, Map, MapData, MapError};
use sinabro_common::abi::nat::{NatEntry, NatKey};
use std::sync::Mutex;

const NAME: &str = "NAT";

pub struct Nat {
    map: Mutex<HashMap<MapData, NatKey, NatEntry>>,
    raw: RawMap,
}

impl Nat {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let Map::HashMap(data) = &map else {
            return Err(DatapathError::Missing {
                what: "hash map",
                name: NAME,
            });
        };
        Ok(Self {
            raw: raw(data, NAME)?,
            map: Mutex::new(map.try_into().map_err(error(NAME, "opening"))?),
        })
    }

    pub fn max_entries(&self) -> u32 {
        self.raw.info().max_entries
    }

    pub fn get(&self, key: &NatKey) -> Result<Option<NatEntry>, DatapathError> {
        found(lock(&self.map).get(key, 0)).map_err(error(NAME, "reading from"))
    }

    pub fn remove(&self, key: &NatKey) -> Result<(), DatapathError> {
        removed(lock(&self.map).remove(key)).map_err(error(NAME, "removing from"))
    }

    /// Calls `each` with every entry; the map may be changed meanwhile, also by `each`.
    pub fn for_each(&self, each: impl FnMut(NatKey, NatEntry)) -> Result<(), DatapathError> {
        self.raw
            .for_each_of(each)
            .map_err(|source| error(NAME, "reading from")(MapError::from(source)))
    }
}
