//! Finds an endpoint's id. What the endpoint is stands in the map already, so an entry is the id alone: a quarter of a million
//! take two megabytes instead of thirteen.
//!
//! A hash table with open addresses and linear probing, in which what is removed leaves no mark (Knuth, The Art of Computer
//! Programming, volume 3, 6.4, algorithm R).

use super::backends::Endpoint;
use std::hash::{BuildHasher as _, RandomState};

const EMPTY: u32 = u32::MAX;

/// Ids by endpoint. Whoever asks says what an id stands for, the same as long as it is here.
#[derive(Debug, Default)]
pub struct Index {
    /// As many as a power of two, at least a quarter of them [`EMPTY`]; or none.
    places: Vec<u32>,
    len: usize,
    /// Endpoints are pods' to choose: nobody is to foresee which of them are in one place.
    hasher: RandomState,
}

impl Index {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn get(&self, endpoint: Endpoint, of: impl Fn(u32) -> Option<Endpoint>) -> Option<u32> {
        let found = self.from(endpoint).map(|at| self.places[at]);
        let mut found = found.take_while(|id| *id != EMPTY);
        found.find(|id| of(*id) == Some(endpoint))
    }

    /// Puts in an id that is not there, of an endpoint that is not there.
    pub fn put(&mut self, id: u32, endpoint: Endpoint, of: impl Fn(u32) -> Option<Endpoint>) {
        if (self.len + 1) * 4 > self.places.len() * 3 {
            let places = vec![EMPTY; (self.places.len() * 2).max(64)];
            let before = std::mem::replace(&mut self.places, places);
            for id in before.into_iter().filter(|id| *id != EMPTY) {
                if let Some(endpoint) = of(id) {
                    self.place(id, endpoint);
                }
            }
        }
        self.place(id, endpoint);
        self.len += 1;
    }

    /// Takes out that id of that endpoint, if it is there.
    pub fn remove(&mut self, id: u32, endpoint: Endpoint, of: impl Fn(u32) -> Option<Endpoint>) {
        let found = self.from(endpoint);
        let mut found = found.take_while(|&at| self.places[at] != EMPTY);
        let Some(mut gap) = found.find(|&at| self.places[at] == id) else {
            return;
        };
        self.len -= 1;
        let mask = self.places.len() - 1;
        let mut at = gap;
        loop {
            self.places[gap] = EMPTY;
            // The next that may not stay behind a gap: one that would have been put there, or before.
            loop {
                at = (at + 1) & mask;
                let next = self.places[at];
                if next == EMPTY {
                    return;
                }
                let home = of(next).map_or(at, |endpoint| self.home(endpoint));
                if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                    self.places[gap] = next;
                    gap = at;
                    break;
                }
            }
        }
    }

    fn place(&mut self, id: u32, endpoint: Endpoint) {
        let free = self.from(endpoint).find(|&at| self.places[at] == EMPTY);
        if let Some(at) = free {
            self.places[at] = id;
        }
    }

    fn home(&self, endpoint: Endpoint) -> usize {
        self.hasher.hash_one(endpoint) as usize & (self.places.len() - 1)
    }

    /// Where an endpoint may be, in order.
    fn from(&self, endpoint: Endpoint) -> impl Iterator<Item = usize> + use<> {
        let count = self.places.len();
        let home = match count {
            0 => 0,
            _ => self.home(endpoint),
        };
        (0..count).map(move |step| (home + step) & (count - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::services::Protocol;
    use proptest::{collection::vec, prelude::*};
    use std::{collections::HashMap, net::Ipv4Addr};

    fn endpoint(id: u32) -> Endpoint {
        let at = (Ipv4Addr::from_bits(id), 80);
        Endpoint::new(Protocol::Tcp, at.into())
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
                        index.remove(id, endpoint(id), of);
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
            index.remove(id, endpoint(id), of);
        }
        let found = (0..100_000).filter(|&id| index.get(endpoint(id), of) == Some(id));
        assert_eq!(found.count(), index.len());
        assert_eq!(index.len(), 66_666);
        // One that is there as another id.
        index.remove(5, endpoint(7), of);
        assert_eq!(index.len(), 66_666);
    }
}
