//! `NETNS`: whose sockets are translated.

use super::{error, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{HashMap, Map, MapData};
use sinabro_common::abi::service;
use std::sync::Mutex;

const NETNS: &str = "NETNS";

pub struct NetNs(Mutex<HashMap<MapData, u64, service::NetNs>>);

impl NetNs {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NETNS, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Of the namespace with this cookie.
    pub fn put(&self, cookie: u64, owner: service::NetNs) -> Result<(), DatapathError> {
        let put = lock(&self.0).insert(cookie, owner, 0);
        put.map_err(error(NETNS, "writing to"))
    }

    pub fn remove(&self, cookie: u64) -> Result<(), DatapathError> {
        removed(lock(&self.0).remove(&cookie)).map_err(error(NETNS, "removing from"))
    }

    pub fn cookies(&self) -> Result<Vec<u64>, DatapathError> {
        let cookies: Result<_, _> = lock(&self.0).keys().collect();
        cookies.map_err(error(NETNS, "reading from"))
    }
}
