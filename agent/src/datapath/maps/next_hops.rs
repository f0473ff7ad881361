//! `NEXT_HOPS` and `NATIVE_V6`.

use super::{FlowEpoch, error, lock, removed};
use crate::datapath::DatapathError;
use aya::{
    Pod,
    maps::{HashMap, Map, MapData},
};
use sinabro_common::abi::{
    Addr,
    next_hop::{NATIVE, NextHop, TRIED},
};
use std::{collections::BTreeMap, sync::Mutex};

const NAME: &str = "NEXT_HOPS";
const OF_V6: &str = "NATIVE_V6";

/// The way to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    pub next: NextHop,
    /// Whom IPv6 packets are given to that are in no tunnel, if that is not the same.
    pub native_v6: Option<Addr>,
}

impl Way {
    pub fn is_native(&self) -> bool {
        self.next.remote_mac == NATIVE
    }

    /// Whether nothing but requests without a tunnel goes by it.
    pub fn is_tried_alone(&self) -> bool {
        self.next.remote_mac == TRIED
    }
}

pub struct NextHops(Mutex<Inner>);

struct Inner {
    next_hops: Known<NextHop>,
    of_v6: Known<Addr>,
    flows: FlowEpoch,
}

impl NextHops {
    /// Empties them: which ways lead where is not known to an agent that begins.
    pub fn new(next_hops: Map, of_v6: Map, flows: FlowEpoch) -> Result<Self, DatapathError> {
        let inner = Inner {
            next_hops: Known::new(NAME, next_hops)?,
            of_v6: Known::new(OF_V6, of_v6)?,
            flows,
        };
        inner.flows.raise()?;
        Ok(Self(Mutex::new(inner)))
    }

    /// What is known of a node's tunnel address.
    pub fn get(&self, tunnel: Addr) -> Option<Way> {
        let inner = lock(&self.0);
        let next = *inner.next_hops.present.get(&tunnel)?;
        let native_v6 = inner.of_v6.present.get(&tunnel).copied();
        Some(Way { next, native_v6 })
    }

    /// Makes them hold exactly this.
    pub fn set(&self, wanted: &BTreeMap<Addr, Way>) -> Result<(), DatapathError> {
        let next_hops = wanted.iter().map(|(tunnel, way)| (*tunnel, way.next));
        let of_v6 = wanted.iter();
        let of_v6 = of_v6.filter_map(|(tunnel, way)| Some((*tunnel, way.native_v6?)));
        let mut inner = lock(&self.0);
        let set = inner.next_hops.set(next_hops.collect());
        let set = set.and_then(|()| inner.of_v6.set(of_v6.collect()));
        set.and(inner.flows.raise())
    }
}

/// A map, and what is in it.
struct Known<V: Pod> {
    name: &'static str,
    map: HashMap<MapData, Addr, V>,
    present: BTreeMap<Addr, V>,
}

impl<V: Pod + PartialEq> Known<V> {
    fn new(name: &'static str, map: Map) -> Result<Self, DatapathError> {
        let mut map: HashMap<_, Addr, V> = map.try_into().map_err(error(name, "opening"))?;
        let present: Vec<Addr> = map
            .keys()
            .collect::<Result<_, _>>()
            .map_err(error(name, "reading from"))?;
        present
            .iter()
            .try_for_each(|addr| removed(map.remove(addr)))
            .map_err(error(name, "removing from"))?;
        Ok(Self {
            name,
            map,
            present: BTreeMap::new(),
        })
    }

    fn set(&mut self, wanted: BTreeMap<Addr, V>) -> Result<(), DatapathError> {
        let Self { name, map, present } = self;
        // Ways that are not to be taken any more go first.
        for addr in present.keys().filter(|addr| !wanted.contains_key(addr)) {
            removed(map.remove(addr)).map_err(error(name, "removing from"))?;
        }
        for (addr, value) in &wanted {
            if present.get(addr) != Some(value) {
                map.insert(addr, value, 0)
                    .map_err(error(name, "writing to"))?;
            }
        }
        *present = wanted;
        Ok(())
    }
}
