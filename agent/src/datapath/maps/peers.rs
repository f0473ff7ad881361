//! `PEER_COUNTERS` and `NATIVE_COUNTERS`, `PEER_PLACES` and `NATIVE_PLACES`.

use super::{
    error, lock,
    per_cpu::{is_no_memory, patiently},
    places::Places,
    raw,
};
use crate::datapath::{
    DatapathError,
    raw_map::{Put, RawMap},
};
use aya::maps::{Map, MapError};
use sinabro_common::abi::{
    Addr,
    counters::{NativeCounters, PeerCounters, Place},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::AddAssign,
    sync::Mutex,
};

const IN_TUNNELS: &str = "PEER_COUNTERS";
const NATIVE: &str = "NATIVE_COUNTERS";
const IN_TUNNELS_PLACES: &str = "PEER_PLACES";
const NATIVE_PLACES: &str = "NATIVE_PLACES";

/// What went between this node and another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerPackets {
    pub tunnels: PeerCounters,
    pub native: NativeCounters,
}

impl AddAssign for PeerPackets {
    fn add_assign(&mut self, other: Self) {
        self.tunnels += other.tunnels;
        self.native += other.native;
    }
}

pub struct Peers(Mutex<Inner>);

struct Inner {
    in_tunnels: Counted<PeerCounters>,
    native: Counted<NativeCounters>,
    /// Whether any packets come without a tunnel: to count others takes memory for nothing.
    is_native: bool,
}

impl Peers {
    /// Who is counted goes on being counted.
    pub fn new(
        mut take: impl FnMut(&'static str) -> Result<Map, DatapathError>,
    ) -> Result<Self, DatapathError> {
        let native = Counted::new((NATIVE, NATIVE_PLACES), &mut take)?;
        Ok(Self(Mutex::new(Inner {
            in_tunnels: Counted::new((IN_TUNNELS, IN_TUNNELS_PLACES), &mut take)?,
            is_native: !native.present.is_empty(),
            native,
        })))
    }

    /// Has exactly these counted from now on. Whom the kernel has no memory for is not, until the next time.
    pub fn set(&self, wanted: &BTreeSet<Addr>) -> Result<(), DatapathError> {
        let mut inner = lock(&self.0);
        inner.in_tunnels.set(wanted)?;
        inner.follow()
    }

    /// Whether packets may come and go without a tunnel.
    pub fn set_native(&self, is_native: bool) -> Result<(), DatapathError> {
        let mut inner = lock(&self.0);
        inner.is_native = is_native;
        inner.follow()
    }

    /// Of each, summed over CPUs; by [`Addr::UNSPECIFIED`] of those that are gone.
    pub fn all(&self) -> Result<BTreeMap<Addr, PeerPackets>, DatapathError> {
        let mut all: BTreeMap<Addr, PeerPackets> = BTreeMap::new();
        let inner = lock(&self.0);
        inner.in_tunnels.each(|addr, counters| {
            all.entry(addr).or_default().tunnels = counters;
        })?;
        inner.native.each(|addr, counters| {
            all.entry(addr).or_default().native = counters;
        })?;
        Ok(all)
    }
}

impl Inner {
    /// Of the same nodes it is counted what goes without a tunnel, or of none.
    fn follow(&mut self) -> Result<(), DatapathError> {
        match self.is_native {
            true => self.native.set(&self.in_tunnels.present),
            false => self.native.set(&BTreeSet::new()),
        }
    }
}

/// Counters: a hash, and places for some of them.
struct Counted<V> {
    name: &'static str,
    map: RawMap,
    places: Places<Addr, V>,
    /// Who is counted.
    present: BTreeSet<Addr>,
}

impl<V> Counted<V>
where
    V: aya::Pod + Default + AddAssign,
    Place<Addr, V>: aya::Pod,
{
    fn new(
        (name, places): (&'static str, &'static str),
        mut take: impl FnMut(&'static str) -> Result<Map, DatapathError>,
    ) -> Result<Self, DatapathError> {
        let Map::PerCpuHashMap(data) = &take(name)? else {
            let what = "per-CPU hash map";
            return Err(DatapathError::Missing { what, name });
        };
        let map = raw(data, name)?;
        let mut present = BTreeSet::new();
        map.for_each_sum(|addr: Addr, _: V| {
            present.insert(addr);
        })
        .map_err(|source| error(name, "reading from")(source.into()))?;
        present.remove(&Addr::UNSPECIFIED);
        let mut places = Places::new(places, take(places)?, |addr| present.contains(addr))?;
        // Of an agent that knew nothing of places, or was killed before it gave one.
        for &addr in &present {
            places.take(addr)?;
        }
        Ok(Self {
            name,
            map,
            places,
            present,
        })
    }

    fn set(&mut self, wanted: &BTreeSet<Addr>) -> Result<(), DatapathError> {
        let gone: Vec<Addr> = self.present.difference(wanted).copied().collect();
        self.end(&gone)?;
        let new: Vec<Addr> = wanted.difference(&self.present).copied().collect();
        for addr in new {
            if !self.start(addr)? {
                tracing::debug!(map = self.name, "no memory for the counters of peers");
                break;
            }
            self.places.take(addr)?;
            self.present.insert(addr);
        }
        Ok(())
    }

    /// False if there is no memory.
    fn start(&self, addr: Addr) -> Result<bool, DatapathError> {
        let zeros = self.map.zeros();
        match patiently(is_no_memory, || self.map.put(&addr.0, &zeros, Put::New)) {
            Ok(_) => Ok(true),
            Err(error) if is_no_memory(&error) => Ok(false),
            Err(error) => Err(self.failed("writing to", error)),
        }
    }

    fn end(&mut self, gone: &[Addr]) -> Result<(), DatapathError> {
        if gone.is_empty() {
            return Ok(());
        }
        let mut sum = self.get(Addr::UNSPECIFIED)?;
        for &addr in gone {
            sum += self.get(addr)?;
        }
        // What all have together must not go down, so this comes first. The kernel writes in place what is there.
        if self.start(Addr::UNSPECIFIED)? {
            let put = self.map.put_sum(&Addr::UNSPECIFIED.0, sum);
            put.map_err(|error| self.failed("writing to", error))?;
        }
        for addr in gone {
            self.places.free(*addr)?;
            let removed = self.map.remove(&addr.0);
            removed.map_err(|error| self.failed("removing from", error))?;
            self.present.remove(addr);
        }
        Ok(())
    }

    fn get(&self, addr: Addr) -> Result<V, DatapathError> {
        let sum = self.map.sum_of::<V>(&addr.0);
        let sum = sum.map_err(|error| self.failed("reading from", error))?;
        let mut all = self.places.get(addr)?;
        all += sum.unwrap_or_default();
        Ok(all)
    }

    fn each(&self, mut each: impl FnMut(Addr, V)) -> Result<(), DatapathError> {
        let mut in_places = Ok(());
        let read = self.map.for_each_sum(|addr, mut counters: V| {
            match self.places.get(addr) {
                Ok(more) => counters += more,
                Err(error) => in_places = Err(error),
            }
            each(addr, counters);
        });
        read.map_err(|error| self.failed("reading from", error))?;
        in_places
    }

    fn failed(&self, what: &'static str, source: io::Error) -> DatapathError {
        error(self.name, what)(MapError::from(source))
    }
}
