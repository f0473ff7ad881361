//! Finds an endpoint's id. What the endpoint is stands in the map already, so an entry is the id alone: a quarter of a million
//! take three megabytes instead of thirteen.

use super::backends::Endpoint;
use hashbrown::HashTable;
use std::hash::{BuildHasher as _, RandomState};

/// Ids by endpoint. Whoever asks says what an id stands for, the same as long as it is here.
#[derive(Debug, Default)]
pub struct Index {
    ids: HashTable<u32>,
    /// Endpoints are pods' to choose: nobody is to foresee which of them are in one place.
    hasher: RandomState,
}

impl Index {
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn get(&self, endpoint: Endpoint, of: impl Fn(u32) -> Option<Endpoint>) -> Option<u32> {
        let is = |id: &u32| of(*id) == Some(endpoint);
        self.ids.find(self.hasher.hash_one(endpoint), is).copied()
    }

    /// Puts in an id that is not there, of an endpoint that is not there.
    pub fn put(&mut self, id: u32, endpoint: Endpoint, of: impl Fn(u32) -> Option<Endpoint>) {
        let Self { ids, hasher } = self;
        let hash = |id: &u32| of(*id).map_or(0, |endpoint| hasher.hash_one(endpoint));
        ids.insert_unique(hasher.hash_one(endpoint), id, hash);
    }

    /// Takes out that id of that endpoint, if it is there.
    pub fn remove(&mut self, id: u32, endpoint: Endpoint) {
        let hash = self.hasher.hash_one(endpoint);
        if let Ok(found) = self.ids.find_entry(hash, |other| *other == id) {
            found.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::backends::ServicePort, *};
    use crate::plan::services::Protocol;
    use proptest::{collection::vec, prelude::*};
    use std::{collections::HashMap, net::Ipv4Addr};

    fn endpoint(id: u32) -> Endpoint {
        let at = (Ipv4Addr::from_bits(id), 80);
        let port = ServicePort {
            number: 1,
            protocol: Protocol::Tcp,
        };
        port.endpoint(at.into())
    }

    fn of(id: u32) -> Option<Endpoint> {
        Some(endpoint(id))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Against a map.
        #[test]
        fn what_is_put_in_is_found_until_it_is_taken_out(steps in vec((any::<bool>(), 0..120u32), 1..800)) {
            let (mut index, mut model) = (Index::default(), HashMap::new());
            for (put, id) in steps {
                match put {
                    true if !model.contains_key(&endpoint(id)) => {
                        index.put(id, endpoint(id), of);
                        model.insert(endpoint(id), id);
                    }
                    true => {}
                    false => {
                        index.remove(id, endpoint(id));
                        model.remove(&endpoint(id));
                    }
                }
                prop_assert_eq!(index.len(), model.len());
                for id in 0..120 {
                    let found = index.get(endpoint(id), of);
                    prop_assert_eq!(found, model.get(&endpoint(id)).copied());
                }
            }
        }
    }

    #[test]
    fn very_many_are_found() {
        let mut index = Index::default();
        for id in 0..100_000 {
            index.put(id, endpoint(id), of);
        }
        for id in (0..100_000).step_by(3) {
            index.remove(id, endpoint(id));
        }
        let found = (0..100_000).filter(|&id| index.get(endpoint(id), of) == Some(id));
        assert_eq!(found.count(), index.len());
        assert_eq!(index.len(), 66_666);
        // One that is there as another id.
        index.remove(5, endpoint(7));
        assert_eq!(index.len(), 66_666);
    }
}
