//! `UPLINKS`.

use super::{error, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{HashMap, Map, MapData, MapError};
use sinabro_common::abi::{Addr, uplink::Uplink};
use std::{collections::HashSet, sync::Mutex};

const NAME: &str = "UPLINKS";
/// Length of such a header.
const ETHERNET: u32 = 14;

/// By which uplink packets may leave past the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectUplink {
    /// The only one, whose packets have an Ethernet header.
    At(u32),
    /// There is none,
    Missing,
    /// or more than one, among which the stack chooses,
    Several,
    /// or another header is in front of packets, or none.
    OtherHeader,
}

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

    /// The addresses that packets get which are masqueraded.
    pub fn sources(&self) -> Result<HashSet<Addr>, DatapathError> {
        let map = lock(&self.0);
        let uplinks: Result<Vec<(u32, Uplink)>, MapError> = map.iter().collect();
        let uplinks = uplinks.map_err(error(NAME, "reading from"))?;
        let addresses = uplinks
            .iter()
            .flat_map(|(_, uplink)| [uplink.v4, uplink.v6]);
        Ok(addresses
            .filter(|addr| *addr != Addr::UNSPECIFIED)
            .collect())
    }

    pub fn direct(&self) -> Result<DirectUplink, DatapathError> {
        let map = lock(&self.0);
        let uplinks: Result<Vec<(u32, Uplink)>, MapError> = map.iter().collect();
        let uplinks = uplinks.map_err(error(NAME, "reading from"))?;
        Ok(match uplinks[..] {
            [] => DirectUplink::Missing,
            [(index, uplink)] if uplink.header_len == ETHERNET => DirectUplink::At(index),
            [_] => DirectUplink::OtherHeader,
            _ => DirectUplink::Several,
        })
    }

    /// All that are known, but for these.
    pub fn others(&self, indexes: &[u32]) -> Result<Vec<u32>, DatapathError> {
        let map = lock(&self.0);
        let present: Result<Vec<u32>, MapError> = map.keys().collect();
        let mut present = present.map_err(error(NAME, "reading from"))?;
        present.retain(|index| !indexes.contains(index));
        Ok(present)
    }

    pub fn remove(&self, index: u32) -> Result<(), DatapathError> {
        removed(lock(&self.0).remove(&index)).map_err(error(NAME, "removing from"))
    }
}
