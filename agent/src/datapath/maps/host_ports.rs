//! `HOST_PORTS`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::abi::connection::{HOST_PORT_WORDS, host_port_word};
use std::{fmt, ops::RangeInclusive, sync::Mutex};

const NAME: &str = "HOST_PORTS";

/// Ports of TCP, UDP and SCTP.
#[derive(Clone, PartialEq, Eq)]
pub struct PortSet(Vec<u64>);

impl Default for PortSet {
    fn default() -> Self {
        Self(vec![0; HOST_PORT_WORDS as usize])
    }
}

impl fmt::Debug for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count: u32 = self.0.iter().map(|word| word.count_ones()).sum();
        write!(f, "{count} ports")
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

/// Who has ports that connections are kept off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortsOf {
    /// By its settings.
    Node,
    /// Other plugins lead them there.
    Pods,
}

pub struct HostPorts(Mutex<Inner>);

struct Inner {
    map: Array<MapData, u64>,
    node: Option<PortSet>,
    pods: Option<PortSet>,
}

impl HostPorts {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        Ok(Self(Mutex::new(Inner {
            map: map.try_into().map_err(error(NAME, "opening"))?,
            node: None,
            pods: None,
        })))
    }

    /// The words of one protocol, as they are in the map; zeros beyond the last.
    pub fn words(&self, table: u32) -> Result<Vec<u64>, DatapathError> {
        let inner = lock(&self.0);
        let word = |at: u32| match at < HOST_PORT_WORDS {
            true => inner.map.get(&at, 0).map_err(error(NAME, "reading from")),
            false => Ok(0),
        };
        (table * 1024..(table + 1) * 1024).map(word).collect()
    }

    /// Makes these the ports of one. A port that was there and still is, is there all the time. What an
    /// earlier agent wrote stays until it is known of both.
    pub fn set(&self, of: PortsOf, ports: PortSet) -> Result<(), DatapathError> {
        let mut inner = lock(&self.0);
        let Inner { map, node, pods } = &mut *inner;
        let part = match of {
            PortsOf::Node => &mut *node,
            PortsOf::Pods => &mut *pods,
        };
        if part.as_ref() == Some(&ports) {
            return Ok(());
        }
        // Forgotten unless all of it succeeds.
        *part = None;
        let other = match of {
            PortsOf::Node => &*pods,
            PortsOf::Pods => &*node,
        };
        for (at, word) in (0..).zip(&ports.0) {
            let before = map.get(&at, 0).map_err(error(NAME, "reading from"))?;
            let others = other.as_ref().map_or(before, |other| other.0[at as usize]);
            if before != word | others {
                map.set(at, word | others, 0)
                    .map_err(error(NAME, "writing to"))?;
            }
        }
        match of {
            PortsOf::Node => *node = Some(ports),
            PortsOf::Pods => *pods = Some(ports),
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
