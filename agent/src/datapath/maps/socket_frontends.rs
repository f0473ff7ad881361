//! `SOCKET_FRONTENDS`: which endpoint a datagram socket of the node has of a frontend.

use super::{error, lock, removed};
use crate::datapath::DatapathError;
use aya::maps::{HashMap, Map, MapData, MapError};
use sinabro_common::abi::{
    Addr,
    service::{CONNECTED, LEFT, SocketFrontend, SocketKey},
};
use std::sync::Mutex;

const NAME: &str = "SOCKET_FRONTENDS";

pub struct SocketFrontends(Mutex<HashMap<MapData, SocketKey, SocketFrontend>>);

impl SocketFrontends {
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let map = map.try_into().map_err(error(NAME, "opening"))?;
        Ok(Self(Mutex::new(map)))
    }

    /// Leaves to others what a socket sends to a frontend, if it has no endpoint of it.
    pub fn leave(&self, key: &SocketKey) -> Result<(), DatapathError> {
        const NEW: u64 = 1;
        let left = SocketFrontend {
            addr: key.addr,
            port: key.port,
            pad: [0; 2],
            backend: LEFT,
            generation: 0,
        };
        match lock(&self.0).insert(key, left, NEW) {
            Err(MapError::SyscallError(refused))
                if refused.io_error.raw_os_error() == Some(libc::EEXIST) =>
            {
                Ok(())
            }
            other => other.map_err(error(NAME, "writing to")),
        }
    }

    /// All that are left to others.
    pub fn left(&self) -> Result<Vec<SocketKey>, DatapathError> {
        let map = lock(&self.0);
        let left = map.iter().filter_map(|entry| match entry {
            Ok((key, pair)) => (pair.backend == LEFT).then_some(Ok(key)),
            Err(error) => Some(Err(error)),
        });
        left.collect::<Result<_, _>>()
            .map_err(error(NAME, "reading from"))
    }

    /// Which endpoint a socket was connected to: its number and generation.
    pub fn connected(
        &self,
        cookie: u64,
        addr: Addr,
        port: [u8; 2],
    ) -> Result<Option<(u32, u32)>, DatapathError> {
        let key = SocketKey::new(CONNECTED, cookie, addr, port);
        match lock(&self.0).get(&key, 0) {
            Ok(pair) => Ok(Some((pair.backend, pair.generation))),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(source) => Err(error(NAME, "reading from")(source)),
        }
    }

    pub fn remove(&self, key: &SocketKey) -> Result<(), DatapathError> {
        removed(lock(&self.0).remove(key)).map_err(error(NAME, "removing from"))
    }
}
