//! `POD_COUNTERS` and `POD_PLACES`.

use super::{error, found, lock, per_cpu::put_zeros, places::Places, removed};
use crate::datapath::DatapathError;
use aya::maps::{Map, MapData, PerCpuHashMap};
use sinabro_common::abi::counters::PodCounters;
use std::sync::Mutex;

const NAME: &str = "POD_COUNTERS";
const PLACES: &str = "POD_PLACES";

pub struct Counters(Mutex<Inner>);

struct Inner {
    /// Of each pod, with what is not counted in its place.
    map: PerCpuHashMap<MapData, u32, PodCounters>,
    places: Places<u64, PodCounters>,
}

impl Counters {
    pub fn new(map: Map, places: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        let keys = keys(&map)?;
        let places = Places::new(PLACES, places, |&owner| {
            u32::try_from(owner).is_ok_and(|ifindex| keys.contains(&ifindex))
        })?;
        Ok(Self(Mutex::new(Inner { map, places })))
    }

    /// Begins to count for an interface, or goes on.
    pub fn start(&self, ifindex: u32) -> Result<(), DatapathError> {
        let is_counted = self.get(ifindex)?.is_some();
        let mut inner = lock(&self.0);
        if !is_counted {
            put_zeros(&mut inner.map, ifindex).map_err(error(NAME, "writing to"))?;
        }
        inner.places.take(ifindex.into())
    }

    pub fn get(&self, ifindex: u32) -> Result<Option<PodCounters>, DatapathError> {
        let inner = lock(&self.0);
        let values = found(inner.map.get(&ifindex, 0)).map_err(error(NAME, "reading from"))?;
        let Some(values) = values else {
            return Ok(None);
        };
        let mut sum = inner.places.get(ifindex.into())?;
        values.iter().for_each(|value| sum += *value);
        Ok(Some(sum))
    }

    pub fn remove(&self, ifindex: u32) -> Result<(), DatapathError> {
        let mut inner = lock(&self.0);
        inner.places.free(ifindex.into())?;
        removed(inner.map.remove(&ifindex)).map_err(error(NAME, "removing from"))
    }

    pub fn keys(&self) -> Result<Vec<u32>, DatapathError> {
        keys(&lock(&self.0).map)
    }
}

fn keys(map: &PerCpuHashMap<MapData, u32, PodCounters>) -> Result<Vec<u32>, DatapathError> {
    map.keys()
        .collect::<Result<_, _>>()
        .map_err(error(NAME, "reading from"))
}
