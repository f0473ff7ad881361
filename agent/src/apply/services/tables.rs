//! The maps, as the publisher writes them.

use crate::{
    datapath::{ClientPrefix, Datapath, DatapathError, ServiceRoom, Services, grace},
    plan::services::maglev,
};
use sinabro_common::abi::service::{Backend, Frontend, FrontendKey, Set, Slot};
use std::sync::Arc;

/// Where Services are published. Ids and indexes are within the room: the arrays take them all.
pub trait Tables {
    fn maps(&self) -> &Services;

    fn room(&self) -> ServiceRoom {
        self.maps().room()
    }

    /// Of a table for so many endpoints; none if they are too many for any.
    fn table_length(&self, endpoints: usize) -> Option<u32> {
        maglev::length(endpoints)
    }

    /// Waits until no program runs that has read what is not there any more; false if that cannot be known.
    fn wait_for_programs(&self) -> bool {
        grace::wait_for_programs()
    }

    fn frontends(&self) -> Result<Vec<(FrontendKey, Frontend)>, DatapathError> {
        self.maps().frontends()
    }

    fn put_frontends(
        &self,
        keys: &[FrontendKey],
        frontends: &[Frontend],
    ) -> (usize, Result<(), DatapathError>) {
        self.maps().put_frontends(keys, frontends)
    }

    fn remove_frontend(&self, key: &FrontendKey) -> Result<(), DatapathError> {
        self.maps().remove_frontend(key)
    }

    /// Of ranges of clients.
    fn source_room(&self) -> u32 {
        self.maps().source_room()
    }

    fn sources(&self) -> Result<Vec<(u32, ClientPrefix)>, DatapathError> {
        self.maps().sources()
    }

    fn put_source(&self, number: u32, clients: &ClientPrefix) -> Result<(), DatapathError> {
        self.maps().put_source(number, clients)
    }

    fn remove_source(&self, number: u32, clients: &ClientPrefix) -> Result<(), DatapathError> {
        self.maps().remove_source(number, clients)
    }

    fn set(&self, index: u32) -> Set {
        self.maps().set(index).unwrap_or(Set(0))
    }

    fn put_set(&self, index: u32, set: Set) {
        written(self.maps().put_set(index, set));
    }

    fn slot(&self, index: u32) -> Slot {
        let none = Slot {
            backend: u32::MAX,
            generation: 0,
        };
        self.maps().slot(index).unwrap_or(none)
    }

    fn put_slots(&self, base: u32, slots: &[Slot]) {
        written(self.maps().put_slots(base, slots));
    }

    fn backend(&self, id: u32) -> Option<Backend> {
        self.maps().backend(id).ok()
    }

    fn for_each_backend(&self, each: impl FnMut(u32, Backend)) -> Result<(), DatapathError> {
        self.maps().for_each_backend(each)
    }

    fn put_backend(&self, id: u32, backend: Backend) {
        written(self.maps().put_backend(id, backend));
    }
}

impl Tables for Arc<Datapath> {
    fn maps(&self) -> &Services {
        self.services()
    }
}

fn written(result: Result<(), DatapathError>) {
    debug_assert!(result.is_ok(), "{result:?}");
}
