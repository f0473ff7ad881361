//! `ENDPOINTS` and `POD_LINKS`.

use super::{FlowEpoch, error, found, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{HashMap, Map, MapData};
use sinabro_common::abi::{
    Addr,
    endpoint::{Endpoint, PodLink},
};
use std::sync::Mutex;

const ENDPOINTS: &str = "ENDPOINTS";
const POD_LINKS: &str = "POD_LINKS";

pub struct Endpoints {
    map: Mutex<HashMap<MapData, Addr, Endpoint>>,
    flows: FlowEpoch,
}

impl Endpoints {
    pub fn new(map: Map, flows: FlowEpoch) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(ENDPOINTS, "opening"))?;
        let map = Mutex::new(map);
        Ok(Self { map, flows })
    }

    pub fn insert(&self, addr: Addr, endpoint: Endpoint) -> Result<(), DatapathError> {
        lock(&self.map)
            .insert(addr, endpoint, 0)
            .map_err(error(ENDPOINTS, "writing to"))?;
        self.flows.raise()
    }

    pub fn contains(&self, addr: Addr) -> Result<bool, DatapathError> {
        Ok(self.get(addr)?.is_some())
    }

    fn get(&self, addr: Addr) -> Result<Option<Endpoint>, DatapathError> {
        found(lock(&self.map).get(&addr, 0)).map_err(error(ENDPOINTS, "reading from"))
    }

    /// Removes an address that is still at this interface: by now it may be another pod's.
    pub fn remove(&self, addr: Addr, ifindex: u32) -> Result<(), DatapathError> {
        match self.get(addr)? {
            Some(endpoint) if endpoint.ifindex == ifindex => {
                removed(lock(&self.map).remove(&addr))
                    .map_err(error(ENDPOINTS, "removing from"))?;
                self.flows.raise()
            }
            _ => Ok(()),
        }
    }

    /// Every address with its interface.
    pub fn list(&self) -> Result<Vec<(Addr, u32)>, DatapathError> {
        lock(&self.map)
            .iter()
            .map(|entry| entry.map(|(addr, endpoint)| (addr, endpoint.ifindex)))
            .collect::<Result<_, _>>()
            .map_err(error(ENDPOINTS, "reading from"))
    }
}

pub struct PodLinks(Mutex<HashMap<MapData, u32, PodLink>>);

impl PodLinks {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(POD_LINKS, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    pub fn insert(&self, ifindex: u32, link: PodLink) -> Result<(), DatapathError> {
        lock(&self.0)
            .insert(ifindex, link, 0)
            .map_err(error(POD_LINKS, "writing to"))
    }

    pub fn remove(&self, ifindex: u32) -> Result<(), DatapathError> {
        removed(lock(&self.0).remove(&ifindex)).map_err(error(POD_LINKS, "removing from"))
    }

    pub fn keys(&self) -> Result<Vec<u32>, DatapathError> {
        lock(&self.0)
            .keys()
            .collect::<Result<_, _>>()
            .map_err(error(POD_LINKS, "reading from"))
    }
}
