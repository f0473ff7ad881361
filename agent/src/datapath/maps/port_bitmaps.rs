//! `PORT_BITMAPS` and `RESERVED_PORTS`.

use super::{HostPorts, error, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{Array, HashMap, Map, MapData, MapError};
use sinabro_common::abi::{
    config::NodeConfig,
    connection::{PORT_TABLES, TakenPorts, Tuple},
};
use std::sync::Mutex;

const BITMAPS: &str = "PORT_BITMAPS";
const RESERVED: &str = "RESERVED_PORTS";

pub struct PortBitmaps {
    ends: Mutex<HashMap<MapData, Tuple, TakenPorts>>,
    reserved: Mutex<Array<MapData, TakenPorts>>,
}

impl PortBitmaps {
    pub fn new(ends: Map, reserved: Map) -> Result<Self, DatapathError> {
        Ok(Self {
            ends: Mutex::new(ends.try_into().map_err(error(BITMAPS, "opening"))?),
            reserved: Mutex::new(reserved.try_into().map_err(error(RESERVED, "opening"))?),
        })
    }

    /// Makes the ports that no connection gets what these say.
    pub fn set_reserved(&self, config: &NodeConfig, host: &HostPorts) -> Result<(), DatapathError> {
        let mut map = lock(&self.reserved);
        let mut outside = TakenPorts::NONE;
        (0..config.nat_port_min).for_each(|port| outside.take(port));
        (config.nat_port_max..=u16::MAX)
            .skip(1)
            .for_each(|port| outside.take(port));
        for table in 0..PORT_TABLES {
            let mut ports = outside;
            for (word, mut bits) in host.words(table)?.into_iter().enumerate() {
                while bits != 0 {
                    ports.take(word as u16 * 64 + bits.trailing_zeros() as u16);
                    bits &= bits - 1;
                }
            }
            map.set(table, ports, 0)
                .map_err(error(RESERVED, "writing to"))?;
        }
        Ok(())
    }

    /// What an end's ports begin with, by `port_table`.
    pub fn reserved(&self, table: u32) -> Result<TakenPorts, DatapathError> {
        lock(&self.reserved)
            .get(&table, 0)
            .map_err(error(RESERVED, "reading from"))
    }

    pub fn ends(&self) -> Result<Vec<Tuple>, DatapathError> {
        let all: Result<_, MapError> = lock(&self.ends).keys().collect();
        all.map_err(error(BITMAPS, "reading from"))
    }

    pub fn set(&self, end: &Tuple, ports: &TakenPorts) -> Result<(), DatapathError> {
        lock(&self.ends)
            .insert(end, ports, 0)
            .map_err(error(BITMAPS, "writing to"))
    }

    pub fn remove(&self, end: &Tuple) -> Result<(), DatapathError> {
        removed(lock(&self.ends).remove(end)).map_err(error(BITMAPS, "removing from"))
    }
}
