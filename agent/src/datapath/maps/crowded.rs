//! `CROWDED` and `UNUSABLE_PORTS`.

use super::{HostPorts, error, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{Array, HashMap, Map, MapData, MapError};
use sinabro_common::abi::{
    config::NodeConfig,
    connection::{PORT_TABLES, TakenPorts, Tuple},
};
use std::sync::Mutex;

const CROWDED: &str = "CROWDED";
const UNUSABLE: &str = "UNUSABLE_PORTS";

pub struct Crowded {
    ends: Mutex<HashMap<MapData, Tuple, TakenPorts>>,
    unusable: Mutex<Array<MapData, TakenPorts>>,
}

impl Crowded {
    pub fn new(ends: Map, unusable: Map) -> Result<Self, DatapathError> {
        Ok(Self {
            ends: Mutex::new(ends.try_into().map_err(error(CROWDED, "opening"))?),
            unusable: Mutex::new(unusable.try_into().map_err(error(UNUSABLE, "opening"))?),
        })
    }

    /// Makes the ports that no connection gets what these say.
    pub fn set_unusable(&self, config: &NodeConfig, host: &HostPorts) -> Result<(), DatapathError> {
        let mut map = lock(&self.unusable);
        for table in 0..PORT_TABLES {
            let mut ports = TakenPorts::NONE;
            let host = host.words(table)?;
            for (at, host) in host.into_iter().enumerate() {
                let below = ports_below(at, config.nat_port_min.into());
                let within = ports_below(at, u32::from(config.nat_port_max) + 1);
                ports.take(at, host | below | !within);
            }
            map.set(table, ports, 0)
                .map_err(error(UNUSABLE, "writing to"))?;
        }
        Ok(())
    }

    /// What an end's ports begin with, by `port_table`.
    pub fn unusable(&self, table: u32) -> Result<TakenPorts, DatapathError> {
        lock(&self.unusable)
            .get(&table, 0)
            .map_err(error(UNUSABLE, "reading from"))
    }

    pub fn ends(&self) -> Result<Vec<Tuple>, DatapathError> {
        let all: Result<_, MapError> = lock(&self.ends).keys().collect();
        all.map_err(error(CROWDED, "reading from"))
    }

    pub fn set(&self, end: &Tuple, ports: &TakenPorts) -> Result<(), DatapathError> {
        lock(&self.ends)
            .insert(end, ports, 0)
            .map_err(error(CROWDED, "writing to"))
    }

    pub fn remove(&self, end: &Tuple) -> Result<(), DatapathError> {
        removed(lock(&self.ends).remove(end)).map_err(error(CROWDED, "removing from"))
    }
}

/// Those of the 64 ports of a word that are below `end`, as bits.
fn ports_below(word: usize, end: u32) -> u64 {
    let count = end.saturating_sub(word as u32 * 64);
    1_u64.checked_shl(count).map_or(u64::MAX, |next| next - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_each_port() {
        for end in [0, 1, 63, 64, 65, 1024, 32_768, 61_001, 65_535, 65_536] {
            for word in 0..1024 {
                let ports = (0..64).filter(|bit| word * 64 + bit < end);
                let expected = ports.fold(0, |bits, bit| bits | 1_u64 << bit);
                assert_eq!(ports_below(word as usize, end), expected, "{end}, {word}");
            }
        }
    }
}
