//! `CHECKED_LINKS`.

use super::{error, lock};
use crate::datapath::DatapathError;
use aya::maps::{Array, Map, MapData};
use sinabro_common::abi::uplink::{OVERLAY_PLACE, checked_place};
use std::sync::Mutex;

const NAME: &str = "CHECKED_LINKS";

pub struct CheckedLinks(Mutex<Array<MapData, u32>>);

impl CheckedLinks {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// A link whose programs check what comes by it. One that is in its place is looked up from now on.
    pub fn put(&self, ifindex: u32) -> Result<(), DatapathError> {
        lock(&self.0)
            .set(checked_place(ifindex), ifindex, 0)
            .map_err(error(NAME, "writing to"))
    }

    /// Nothing checks what comes by it any more. Idempotent.
    pub fn remove(&self, ifindex: u32) -> Result<(), DatapathError> {
        let (mut map, place) = (lock(&self.0), checked_place(ifindex));
        let found = map.get(&place, 0).map_err(error(NAME, "reading from"))?;
        if found != ifindex {
            return Ok(());
        }
        map.set(place, 0, 0).map_err(error(NAME, "writing to"))
    }

    /// By which interface packets come out of tunnels.
    pub fn put_overlay(&self, ifindex: u32) -> Result<(), DatapathError> {
        let mut map = lock(&self.0);
        for place in [OVERLAY_PLACE, checked_place(ifindex)] {
            map.set(place, ifindex, 0)
                .map_err(error(NAME, "writing to"))?;
        }
        Ok(())
    }
}
