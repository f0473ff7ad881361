//! `CONFIG` and `NON_MASQUERADE`.

use super::{error, lock, prefix, removed};
use crate::datapath::DatapathError;
use aya::maps::{Array, LpmTrie, Map, MapData, lpm_trie::Key};
use ipnet::IpNet;
use sinabro_common::abi::{Addr, config::NodeConfig};
use std::{collections::HashSet, sync::Mutex};

const CONFIG: &str = "CONFIG";
const NON_MASQUERADE: &str = "NON_MASQUERADE";

pub struct Config(Mutex<Array<MapData, NodeConfig>>);

impl Config {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(CONFIG, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    pub fn set(&self, config: NodeConfig) -> Result<(), DatapathError> {
        lock(&self.0)
            .set(0, config, 0)
            .map_err(error(CONFIG, "writing to"))
    }

    pub fn get(&self) -> Result<NodeConfig, DatapathError> {
        lock(&self.0)
            .get(&0, 0)
            .map_err(error(CONFIG, "reading from"))
    }
}

pub struct NonMasquerade(Mutex<LpmTrie<MapData, Addr, u8>>);

impl NonMasquerade {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NON_MASQUERADE, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Makes the map hold exactly these. New ones go in before old ones go out: a destination in
    /// both is found all the time.
    pub fn set(&self, prefixes: &[IpNet]) -> Result<(), DatapathError> {
        let wanted: HashSet<(u32, [u8; 16])> = prefixes.iter().map(prefix).collect();
        let mut map = lock(&self.0);
        let mut present = HashSet::new();
        for key in map.keys() {
            let key = key.map_err(error(NON_MASQUERADE, "reading from"))?;
            present.insert((key.prefix_len(), key.data().0));
        }
        for (len, addr) in wanted.difference(&present) {
            map.insert(&Key::new(*len, Addr(*addr)), 1, 0)
                .map_err(error(NON_MASQUERADE, "writing to"))?;
        }
        for (len, addr) in present.difference(&wanted) {
            removed(map.remove(&Key::new(*len, Addr(*addr))))
                .map_err(error(NON_MASQUERADE, "removing from"))?;
        }
        Ok(())
    }
}
