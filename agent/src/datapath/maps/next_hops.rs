//! `NEXT_HOPS`.

use super::{error, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{HashMap, Map, MapData};
use sinabro_common::abi::{Addr, next_hop::NextHop};
use std::{collections::BTreeMap, sync::Mutex};

const NAME: &str = "NEXT_HOPS";

pub struct NextHops(Mutex<Inner>);

struct Inner {
    map: HashMap<MapData, Addr, NextHop>,
    /// What is in it.
    present: BTreeMap<Addr, NextHop>,
}

impl NextHops {
    /// Empties it: which ways lead where is not known to an agent that begins.
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let mut map: HashMap<_, Addr, NextHop> = map.try_into().map_err(error(NAME, "opening"))?;
        let present: Vec<Addr> = map
            .keys()
            .collect::<Result<_, _>>()
            .map_err(error(NAME, "reading from"))?;
        present
            .iter()
            .try_for_each(|addr| removed(map.remove(addr)))
            .map_err(error(NAME, "removing from"))?;
        Ok(Self(Mutex::new(Inner {
            map,
            present: BTreeMap::new(),
        })))
    }

    /// What is known of a node's tunnel address.
    pub fn get(&self, tunnel: Addr) -> Option<NextHop> {
        lock(&self.0).present.get(&tunnel).copied()
    }

    /// Makes it hold exactly this.
    pub fn set(&self, wanted: BTreeMap<Addr, NextHop>) -> Result<(), DatapathError> {
        let mut inner = lock(&self.0);
        let Inner { map, present } = &mut *inner;
        // Ways that are not to be taken any more go first.
        for addr in present.keys().filter(|addr| !wanted.contains_key(addr)) {
            removed(map.remove(addr)).map_err(error(NAME, "removing from"))?;
        }
        for (addr, next) in &wanted {
            if present.get(addr) != Some(next) {
                map.insert(addr, next, 0)
                    .map_err(error(NAME, "writing to"))?;
            }
        }
        *present = wanted;
        Ok(())
    }
}
