//! `FLOW_EPOCHS`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::abi::flow::OF_AGENT;
use std::sync::{Arc, Mutex};

const NAME: &str = "FLOW_EPOCHS";

/// Has the programs forget which way they sent the packets of flows. Whoever changes a map that says so raises it afterwards.
#[derive(Clone)]
pub struct FlowEpoch(Arc<Mutex<Array<MapData, u32>>>);

impl FlowEpoch {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Arc::new(Mutex::new(map))))
    }

    pub fn raise(&self) -> Result<(), DatapathError> {
        let mut map = lock(&self.0);
        let before: u32 = map.get(&OF_AGENT, 0).map_err(error(NAME, "reading from"))?;
        map.set(OF_AGENT, before.wrapping_add(1), 0)
            .map_err(error(NAME, "writing to"))
    }
}
