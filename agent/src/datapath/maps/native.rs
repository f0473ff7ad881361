//! `NATIVE` and `OVERLAY_LINK`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::{abi::node, api::Mac};
use std::sync::Mutex;

const NAME: &str = "NATIVE";
const LINK: &str = "OVERLAY_LINK";

pub struct Native {
    native: Mutex<Array<MapData, node::Native>>,
    link: Mutex<Array<MapData, u32>>,
}

impl Native {
    pub fn new(native: Map, link: Map) -> Result<Self, DatapathError> {
        let native = native.try_into().map_err(error(NAME, "opening"))?;
        let link = link.try_into().map_err(error(LINK, "opening"))?;
        Ok(Self {
            native: Mutex::new(native),
            link: Mutex::new(link),
        })
    }

    /// By which interface packets come out of tunnels.
    pub fn set_link(&self, ifindex: u32) -> Result<(), DatapathError> {
        lock(&self.link)
            .set(0, ifindex, 0)
            .map_err(error(LINK, "writing to"))
    }

    /// The VXLAN device, if packets are taken without a tunnel.
    pub fn set(&self, device: Option<(u32, Mac)>) -> Result<(), DatapathError> {
        let (device, Mac(mac)) = device.unwrap_or((0, Mac([0; 6])));
        let wanted = node::Native {
            device,
            mac,
            pad: [0; 2],
        };
        lock(&self.native)
            .set(0, wanted, 0)
            .map_err(error(NAME, "writing to"))
    }
}
