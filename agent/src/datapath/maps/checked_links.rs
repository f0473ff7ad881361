//! `CHECKED_LINKS`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::abi::uplink::{NOT_OF_POD, OVERLAY_PLACE, checked_place};
use std::sync::Mutex;

const NAME: &str = "CHECKED_LINKS";

pub struct CheckedLinks(Mutex<Array<MapData, u32>>);

impl CheckedLinks {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// A pod's link, whose program checks what comes by it. One that is in its place is looked up from now on.
    pub fn put_pod(&self, ifindex: u32) -> Result<(), DatapathError> {
        self.set(checked_place(ifindex), ifindex)
    }

    /// The same of an uplink.
    pub fn put_uplink(&self, ifindex: u32) -> Result<(), DatapathError> {
        self.set(checked_place(ifindex), ifindex | NOT_OF_POD)
    }

    /// Nothing checks what comes by it any more. Idempotent.
    pub fn remove(&self, ifindex: u32) -> Result<(), DatapathError> {
        let (mut map, place) = (lock(&self.0), checked_place(ifindex));
        let found = map.get(&place, 0).map_err(error(NAME, "reading from"))?;
        if found & !NOT_OF_POD != ifindex {
            return Ok(());
        }
        map.set(place, 0, 0).map_err(error(NAME, "writing to"))
    }

    /// By which interface packets come out of tunnels.
    pub fn put_overlay(&self, ifindex: u32) -> Result<(), DatapathError> {
        self.set(OVERLAY_PLACE, ifindex)?;
        self.put_uplink(ifindex)
    }

    fn set(&self, place: u32, value: u32) -> Result<(), DatapathError> {
        lock(&self.0)
            .set(place, value, 0)
            .map_err(error(NAME, "writing to"))
    }
}
