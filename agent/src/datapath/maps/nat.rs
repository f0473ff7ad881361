//! `NAT`.

use super::{error, found, lock, removed};
use crate::datapath::{DatapathError, sys};
use aya::maps::{HashMap, Map, MapData, MapError};
use sinabro_common::abi::nat::{NatEntry, NatKey};
use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Mutex,
};

const NAME: &str = "NAT";

pub struct Nat {
    map: Mutex<HashMap<MapData, NatKey, NatEntry>>,
    /// The same map, to be read many entries at once.
    fd: OwnedFd,
    max_entries: u32,
}

impl Nat {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let open = error(NAME, "opening");
        let Map::HashMap(data) = &map else {
            return Err(DatapathError::Missing {
                what: "hash map",
                name: NAME,
            });
        };
        let fd = data
            .fd()
            .as_fd()
            .try_clone_to_owned()
            .map_err(|source| open(source.into()))?;
        let max_entries = data.info().map_err(&open)?.max_entries();
        Ok(Self {
            map: Mutex::new(map.try_into().map_err(open)?),
            fd,
            max_entries,
        })
    }

    pub fn max_entries(&self) -> u32 {
        self.max_entries
    }

    pub fn get(&self, key: &NatKey) -> Result<Option<NatEntry>, DatapathError> {
        found(lock(&self.map).get(key, 0)).map_err(error(NAME, "reading from"))
    }

    pub fn remove(&self, key: &NatKey) -> Result<(), DatapathError> {
        removed(lock(&self.map).remove(key)).map_err(error(NAME, "removing from"))
    }

    /// Calls `each` with every entry; the map may be changed meanwhile, also by `each`.
    pub fn for_each(&self, each: impl FnMut(NatKey, NatEntry)) -> Result<(), DatapathError> {
        sys::for_each(self.fd.as_fd(), each)
            .map_err(|source| error(NAME, "reading from")(MapError::from(source)))
    }
}
