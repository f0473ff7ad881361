//! `HOST_PORTS`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::abi::connection::{HOST_PORT_WORDS, host_port_word};
use std::{ops::RangeInclusive, sync::Mutex};

const NAME: &str = "HOST_PORTS";

/// Ports of TCP, UDP and SCTP.
#[derive(Clone, PartialEq, Eq)]
pub struct PortSet(Vec<u64>);

impl Default for PortSet {
    fn default() -> Self {
        Self(vec![0; HOST_PORT_WORDS as usize])
    }
}

impl PortSet {
    /// Adds ports of an IP protocol; one without ports has none.
    pub fn add(&mut self, proto: u8, ports: RangeInclusive<u16>) {
        for (word, bit) in ports.filter_map(|port| host_port_word(proto, port)) {
            self.0[word as usize] |= bit;
        }
    }

    pub fn contains(&self, proto: u8, port: u16) -> bool {
        host_port_word(proto, port).is_some_and(|(word, bit)| self.0[word as usize] & bit != 0)
    }
}

pub struct HostPorts(Mutex<Array<MapData, u64>>);

impl HostPorts {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Makes the map hold exactly these. A port in both is there all the time.
    pub fn set(&self, ports: &PortSet) -> Result<(), DatapathError> {
        let mut map = lock(&self.0);
        for (at, word) in (0..).zip(&ports.0) {
            let before = map.get(&at, 0).map_err(error(NAME, "reading from"))?;
            if before != *word {
                map.set(at, word, 0).map_err(error(NAME, "writing to"))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_of_their_protocol() {
        const UDP_LITE: u8 = 136;
        let mut ports = PortSet::default();
        ports.add(6, 30_000..=30_002);
        ports.add(17, 65_535..=65_535);
        ports.add(1, 0..=65_535);
        assert!((30_000..=30_002).all(|port| ports.contains(6, port)));
        assert!(!ports.contains(6, 29_999) && !ports.contains(6, 30_003));
        assert!(!ports.contains(17, 30_001) && !ports.contains(132, 30_001));
        assert!(ports.contains(17, 65_535) && ports.contains(UDP_LITE, 65_535));
        assert!(!ports.contains(1, 1));
    }
}
