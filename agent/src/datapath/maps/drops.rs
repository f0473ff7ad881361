//! `DROPS`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Map, MapData, PerCpuArray};
use sinabro_common::abi::drop::DropReason;
use std::sync::Mutex;

const NAME: &str = "DROPS";

pub struct Drops(Mutex<PerCpuArray<MapData, u64>>);

impl Drops {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// The count of every reason, summed over CPUs.
    pub fn get(&self) -> Result<Vec<(DropReason, u64)>, DatapathError> {
        let map = lock(&self.0);
        DropReason::ALL
            .iter()
            .map(|&reason| {
                let values = map
                    .get(&(reason as u32), 0)
                    .map_err(error(NAME, "reading from"))?;
                Ok((reason, values.iter().sum()))
            })
            .collect()
    }
}
