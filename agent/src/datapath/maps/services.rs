//! `FRONTENDS`, `SETS`, `SLOTS` and `BACKENDS`: entries, in whatever order the caller writes them. The order that no
//! packet falls into is in `sinabro_common::abi::service`.

use super::{error, lock, removed};
use crate::datapath::DatapathError;
use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData},
};
use sinabro_common::abi::service::{Backend, Frontend, FrontendKey, Set, Slot};
use std::sync::Mutex;

const FRONTENDS: &str = "FRONTENDS";
const SETS: &str = "SETS";
const SLOTS: &str = "SLOTS";
const BACKENDS: &str = "BACKENDS";

/// What Services lead to.
pub struct Services {
    frontends: Mutex<HashMap<MapData, FrontendKey, Frontend>>,
    sets: Mutex<Array<MapData, Set>>,
    slots: Mutex<Array<MapData, Slot>>,
    backends: Mutex<Array<MapData, Backend>>,
}

impl Services {
    pub(super) fn new(
        mut take: impl FnMut(&'static str) -> Result<Map, DatapathError>,
    ) -> Result<Self, DatapathError> {
        let frontends = take(FRONTENDS)?.try_into();
        Ok(Self {
            frontends: Mutex::new(frontends.map_err(error(FRONTENDS, "opening"))?),
            sets: array(take(SETS)?, SETS)?,
            slots: array(take(SLOTS)?, SLOTS)?,
            backends: array(take(BACKENDS)?, BACKENDS)?,
        })
    }

    /// # Errors
    /// If there is no room for another, or the kernel refuses.
    pub fn put_frontend(&self, key: FrontendKey, frontend: Frontend) -> Result<(), DatapathError> {
        let put = lock(&self.frontends).insert(key, frontend, 0);
        put.map_err(error(FRONTENDS, "writing to"))
    }

    pub fn remove_frontend(&self, key: &FrontendKey) -> Result<(), DatapathError> {
        removed(lock(&self.frontends).remove(key)).map_err(error(FRONTENDS, "removing from"))
    }

    pub fn frontends(&self) -> Result<Vec<(FrontendKey, Frontend)>, DatapathError> {
        let frontends = lock(&self.frontends);
        let all: Result<_, _> = frontends.iter().collect();
        all.map_err(error(FRONTENDS, "reading from"))
    }

    pub fn put_set(&self, index: u32, set: Set) -> Result<(), DatapathError> {
        put(&self.sets, SETS, index, set)
    }

    pub fn set(&self, index: u32) -> Result<Set, DatapathError> {
        get(&self.sets, SETS, index)
    }

    pub fn put_slots(&self, base: u32, slots: &[Slot]) -> Result<(), DatapathError> {
        (base..)
            .zip(slots)
            .try_for_each(|(index, slot)| put(&self.slots, SLOTS, index, *slot))
    }

    pub fn slot(&self, index: u32) -> Result<Slot, DatapathError> {
        get(&self.slots, SLOTS, index)
    }

    pub fn put_backend(&self, id: u32, backend: Backend) -> Result<(), DatapathError> {
        put(&self.backends, BACKENDS, id, backend)
    }

    pub fn backend(&self, id: u32) -> Result<Backend, DatapathError> {
        get(&self.backends, BACKENDS, id)
    }
}

fn array<T: Pod>(map: Map, name: &'static str) -> Result<Mutex<Array<MapData, T>>, DatapathError> {
    let array = map.try_into().map_err(error(name, "opening"))?;
    Ok(Mutex::new(array))
}

fn put<T: Pod>(
    array: &Mutex<Array<MapData, T>>,
    name: &'static str,
    index: u32,
    value: T,
) -> Result<(), DatapathError> {
    let put = lock(array).set(index, value, 0);
    put.map_err(error(name, "writing to"))
}

fn get<T: Pod>(
    array: &Mutex<Array<MapData, T>>,
    name: &'static str,
    index: u32,
) -> Result<T, DatapathError> {
    lock(array)
        .get(&index, 0)
        .map_err(error(name, "reading from"))
}
