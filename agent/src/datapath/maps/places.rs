//! `POD_PLACES`, `PEER_PLACES` and `NATIVE_PLACES`: counters of those that have a place for themselves, who are counted in a
//! hash else.

use super::{error, raw};
use crate::datapath::{DatapathError, raw_map::RawMap};
use aya::{
    Pod,
    maps::{Map, MapError},
};
use sinabro_common::abi::counters::{Owner, PLACES, Place};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    marker::PhantomData,
    ops::AddAssign,
};

pub struct Places<O, C> {
    name: &'static str,
    map: RawMap,
    /// Who has which.
    owners: BTreeMap<u32, O>,
    /// Who would have a place that another one has.
    waiting: BTreeSet<(u32, O)>,
    counters: PhantomData<C>,
}

impl<O, C> Places<O, C>
where
    O: Owner,
    C: Pod + Default + AddAssign,
    Place<O, C>: Pod,
{
    /// Who has a place keeps it, if it is one of those that are counted.
    pub fn new(
        name: &'static str,
        map: Map,
        is_counted: impl Fn(&O) -> bool,
    ) -> Result<Self, DatapathError> {
        let Map::PerCpuArray(data) = &map else {
            let what = "per-CPU array";
            return Err(DatapathError::Missing { what, name });
        };
        let map = raw(data, name)?;
        Self::of(name, map, is_counted).map_err(|source| error(name, "reading")(source.into()))
    }

    fn of(name: &'static str, map: RawMap, is_counted: impl Fn(&O) -> bool) -> io::Result<Self> {
        let mut places = Self {
            name,
            map,
            owners: BTreeMap::new(),
            waiting: BTreeSet::new(),
            counters: PhantomData,
        };
        for at in 0..PLACES {
            let owner = places.read(at)?.owner;
            if owner == O::NONE {
                continue;
            }
            // An agent that knows nothing of places does not free them.
            match is_counted(&owner) && owner.place() == at {
                true => drop(places.owners.insert(at, owner)),
                false => places.write(at, O::NONE)?,
            }
        }
        Ok(places)
    }

    /// Gives an owner its place: now if it is free, else once it is.
    pub fn take(&mut self, owner: O) -> Result<(), DatapathError> {
        let at = owner.place();
        match self.owners.get(&at) {
            Some(has) if *has == owner => Ok(()),
            Some(_) => {
                self.waiting.insert((at, owner));
                Ok(())
            }
            None => self.give(at, Some(owner)),
        }
    }

    /// Frees an owner's place, if it has one, for the next who asked for it. What was counted in it is gone.
    pub fn free(&mut self, owner: O) -> Result<(), DatapathError> {
        let at = owner.place();
        self.waiting.remove(&(at, owner));
        if !self.has(owner) {
            return Ok(());
        }
        let mut waiting = self.waiting.range((at, O::NONE)..);
        let next = waiting.next().filter(|(place, _)| *place == at);
        self.give(at, next.map(|(_, owner)| *owner))
    }

    fn give(&mut self, at: u32, owner: Option<O>) -> Result<(), DatapathError> {
        self.write(at, owner.unwrap_or(O::NONE))
            .map_err(|error| self.failed("writing to", error))?;
        match owner {
            Some(owner) => {
                self.waiting.remove(&(at, owner));
                self.owners.insert(at, owner);
            }
            None => drop(self.owners.remove(&at)),
        }
        Ok(())
    }

    /// What an owner has been counted in its place, all CPUs together.
    pub fn get(&self, owner: O) -> Result<C, DatapathError> {
        if !self.has(owner) {
            return Ok(C::default());
        }
        let read = self.read(owner.place());
        read.map(|place| place.counters)
            .map_err(|error| self.failed("reading from", error))
    }

    fn has(&self, owner: O) -> bool {
        self.owners.get(&owner.place()) == Some(&owner)
    }

    /// A place with the counters of all CPUs added up. All have one owner.
    fn read(&self, at: u32) -> io::Result<Place<O, C>> {
        let values = self.map.get(&at.to_ne_bytes())?.unwrap_or_default();
        let mut sum = Place {
            owner: O::NONE,
            counters: C::default(),
        };
        for value in values.chunks_exact(size_of::<Place<O, C>>().next_multiple_of(8)) {
            // SAFETY: as long as the type at least, which takes any bytes (`aya::Pod`).
            let place = unsafe { value.as_ptr().cast::<Place<O, C>>().read_unaligned() };
            sum.owner = place.owner;
            sum.counters += place.counters;
        }
        Ok(sum)
    }

    fn write(&self, at: u32, owner: O) -> io::Result<()> {
        let place = Place {
            owner,
            counters: C::default(),
        };
        self.map.put_on_all(&at.to_ne_bytes(), &place)
    }

    fn failed(&self, what: &'static str, source: io::Error) -> DatapathError {
        error(self.name, what)(MapError::from(source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::sys::MapInfo;
    use sinabro_common::abi::counters::PodCounters;

    /// `enum bpf_map_type`.
    const PERCPU_ARRAY: u32 = 6;

    type Pods = Places<u64, PodCounters>;

    fn map() -> RawMap {
        RawMap::create(&MapInfo {
            map_type: PERCPU_ARRAY,
            id: 0,
            key_size: 4,
            value_size: size_of::<Place<u64, PodCounters>>() as u32,
            max_entries: PLACES,
            map_flags: 0,
        })
        .unwrap()
    }

    fn counted(tx_packets: u64) -> PodCounters {
        PodCounters {
            tx_packets,
            ..PodCounters::default()
        }
    }

    /// As the programs of each CPU do.
    fn count(pods: &Pods, owner: u64, packets: u64) -> PodCounters {
        let counters = counted(packets);
        let place = Place { owner, counters };
        let at = owner.place().to_ne_bytes();
        pods.map.put_on_all(&at, &place).unwrap();
        let cpus = aya::util::nr_cpus().unwrap() as u64;
        counted(packets * cpus)
    }

    #[test]
    fn the_first_of_those_with_one_place_has_it_until_it_is_freed_and_then_the_next() {
        let mut pods = Pods::of("", map(), |_| true).unwrap();
        let [first, gone, second, third] = [0, 1, 2, 3].map(|nth| 7 + nth * u64::from(PLACES));
        let owner = |pods: &Pods| pods.read(first.place()).unwrap().owner;
        pods.take(first).unwrap();
        let sum = count(&pods, first, 5);
        // Neighbours have their own.
        pods.take(first + 1).unwrap();
        for other in [third, second, gone, first] {
            pods.take(other).unwrap();
        }
        assert_eq!(pods.get(first).unwrap(), sum);
        assert_eq!(pods.get(second).unwrap(), counted(0));
        // What is another one's is not freed.
        pods.free(gone).unwrap();
        assert_eq!(pods.get(first).unwrap(), sum);
        pods.free(first).unwrap();
        assert_eq!(pods.get(first).unwrap(), counted(0));
        assert_eq!(owner(&pods), second);
        assert_eq!(pods.get(second).unwrap(), counted(0));
        pods.free(second).unwrap();
        assert_eq!(owner(&pods), third);
        pods.free(third).unwrap();
        assert_eq!(owner(&pods), 0);
        assert_eq!(pods.owners.len(), 1);
        assert!(pods.waiting.is_empty());
    }

    #[test]
    fn who_begins_finds_who_has_places_and_frees_those_of_nobody() {
        let before = Pods::of("", map(), |_| true).unwrap();
        let again = |is_counted: fn(&u64) -> bool| {
            Pods::of("", before.map.again().unwrap(), is_counted).unwrap()
        };
        let kept = count(&before, 1, 5);
        count(&before, 2, 6);
        let mut now = again(|owner| *owner != 2);
        assert_eq!(now.get(1).unwrap(), kept);
        assert_eq!(now.get(2).unwrap(), counted(0));
        now.take(2 + u64::from(PLACES)).unwrap();
        assert_eq!(again(|_| true).get(1).unwrap(), kept);
        assert_eq!(again(|_| true).owners.len(), 2);
        // What no agent has written is nobody's either.
        let counters = counted(1);
        let wrong = Place { owner: 9, counters };
        before.map.put_on_all(&3_u32.to_ne_bytes(), &wrong).unwrap();
        assert_eq!(again(|_| true).owners.len(), 2);
        assert_eq!(before.read(3).unwrap().owner, 0);
    }
}
