//! `NATIVE`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::{abi::node, api::Mac};
use std::sync::Mutex;

const NAME: &str = "NATIVE";

pub struct Native(Mutex<Array<MapData, node::Native>>);

impl Native {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// The VXLAN device, if packets are taken without a tunnel.
    pub fn set(&self, device: Option<(u32, Mac)>) -> Result<(), DatapathError> {
        let (device, Mac(mac)) = device.unwrap_or((0, Mac([0; 6])));
        let wanted = node::Native {
            device,
            mac,
            pad: [0; 2],
        };
        lock(&self.0)
            .set(0, wanted, 0)
            .map_err(error(NAME, "writing to"))
    }
}
