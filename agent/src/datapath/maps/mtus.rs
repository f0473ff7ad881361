//! `PATH_MTU` and `UPLINK_MTU`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use std::sync::Mutex;

const OF_TUNNELS: &str = "PATH_MTU";
const OF_UPLINKS: &str = "UPLINK_MTU";

/// How large the packets are that the ways out of the node carry, in bytes from their IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtus {
    /// Inside of tunnels.
    pub tunnels: u32,
    /// By an uplink as they are; no less.
    pub uplinks: u32,
}

pub struct MtuMaps {
    tunnels: Mutex<Array<MapData, u32>>,
    uplinks: Mutex<Array<MapData, u32>>,
}

impl MtuMaps {
    pub fn new(tunnels: Map, uplinks: Map) -> Result<Self, DatapathError> {
        let open = |map: Map, name| Ok(Mutex::new(map.try_into().map_err(error(name, "opening"))?));
        Ok(Self {
            tunnels: open(tunnels, OF_TUNNELS)?,
            uplinks: open(uplinks, OF_UPLINKS)?,
        })
    }

    pub fn set(&self, mtus: Mtus) -> Result<(), DatapathError> {
        for (map, name, mtu) in [
            (&self.tunnels, OF_TUNNELS, mtus.tunnels),
            (&self.uplinks, OF_UPLINKS, mtus.uplinks),
        ] {
            let set = lock(map).set(0, mtu, 0);
            set.map_err(error(name, "writing to"))?;
        }
        Ok(())
    }
}
