//! `POD_COUNTERS`.

use super::{error, found, lock, per_cpu::put_zeros, removed};
use crate::datapath::DatapathError;
use aya::maps::{Map, MapData, PerCpuHashMap};
use sinabro_common::abi::counters::PodCounters;
use std::sync::Mutex;

const NAME: &str = "POD_COUNTERS";

pub struct Counters(Mutex<PerCpuHashMap<MapData, u32, PodCounters>>);

impl Counters {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Begins to count for an interface, or goes on.
    pub fn start(&self, ifindex: u32) -> Result<(), DatapathError> {
        if self.get(ifindex)?.is_some() {
            return Ok(());
        }
        put_zeros(&mut lock(&self.0), ifindex).map_err(error(NAME, "writing to"))
    }

    pub fn get(&self, ifindex: u32) -> Result<Option<PodCounters>, DatapathError> {
        let values = found(lock(&self.0).get(&ifindex, 0)).map_err(error(NAME, "reading from"))?;
        Ok(values.map(|values| {
            values
                .iter()
                .fold(PodCounters::default(), |mut sum, value| {
                    sum += *value;
                    sum
                })
        }))
    }

    pub fn remove(&self, ifindex: u32) -> Result<(), DatapathError> {
        removed(lock(&self.0).remove(&ifindex)).map_err(error(NAME, "removing from"))
    }

    pub fn keys(&self) -> Result<Vec<u32>, DatapathError> {
        lock(&self.0)
            .keys()
            .collect::<Result<_, _>>()
            .map_err(error(NAME, "reading from"))
    }
}
