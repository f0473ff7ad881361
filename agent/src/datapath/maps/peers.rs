//! `PEER_COUNTERS`.

use super::{error, lock, raw};
use crate::datapath::{
    DatapathError,
    raw_map::{Put, RawMap},
};
use aya::maps::{Map, MapError};
use sinabro_common::abi::{Addr, counters::PeerCounters};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Mutex,
    thread,
    time::Duration,
};

const NAME: &str = "PEER_COUNTERS";
/// A kernel may have few counters at hand, and makes more behind that (`pcpu_alloc`, mm/percpu.c, without waiting): who
/// wants many waits a little.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(2);

pub struct Peers(Mutex<Inner>);

struct Inner {
    map: RawMap,
    /// Who is counted.
    present: BTreeSet<Addr>,
}

impl Peers {
    /// Who is counted goes on being counted.
    pub fn new(map: Map) -> Result<Self, DatapathError> {
        let Map::PerCpuHashMap(data) = &map else {
            return Err(DatapathError::Missing {
                what: "per-CPU hash map",
                name: NAME,
            });
        };
        let map = raw(data, NAME)?;
        let mut present: BTreeSet<Addr> = all(&map)?.into_keys().collect();
        present.remove(&Addr::UNSPECIFIED);
        Ok(Self(Mutex::new(Inner { map, present })))
    }

    /// Has exactly these counted from now on. Whom the kernel has no memory for is not, until the next time.
    pub fn set(&self, wanted: &BTreeSet<Addr>) -> Result<(), DatapathError> {
        let mut inner = lock(&self.0);
        let gone: Vec<Addr> = inner.present.difference(wanted).copied().collect();
        inner.end(&gone)?;
        let new: Vec<Addr> = wanted.difference(&inner.present).copied().collect();
        for addr in new {
            if !inner.start(addr)? {
                tracing::debug!("no memory for the counters of peers");
                break;
            }
            inner.present.insert(addr);
        }
        Ok(())
    }

    /// Of each, summed over CPUs; by [`Addr::UNSPECIFIED`] of those that are gone.
    pub fn all(&self) -> Result<BTreeMap<Addr, PeerCounters>, DatapathError> {
        all(&lock(&self.0).map)
    }
}

impl Inner {
    /// False if there is no memory.
    fn start(&self, addr: Addr) -> Result<bool, DatapathError> {
        let zeros = self.map.zeros();
        for _ in 0..TRIES {
            match self.map.put(&addr.0, &zeros, Put::New) {
                Ok(_) => return Ok(true),
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => thread::sleep(PAUSE),
                Err(error) => return Err(failed("writing to", error)),
            }
        }
        Ok(false)
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
            let PeerCounters {
                direct_tx,
                direct_rx,
                kernel_tx,
                kernel_rx,
            } = sum;
            let fields = [direct_tx, direct_rx, kernel_tx, kernel_rx].map(u64::to_ne_bytes);
            // On the first CPU.
            let mut value = self.map.zeros();
            value[..size_of::<PeerCounters>()].copy_from_slice(&fields.concat());
            let put = self.map.put(&Addr::UNSPECIFIED.0, &value, Put::Any);
            put.map_err(|error| failed("writing to", error))?;
        }
        for addr in gone {
            let removed = self.map.remove(&addr.0);
            removed.map_err(|error| failed("removing from", error))?;
            self.present.remove(addr);
        }
        Ok(())
    }

    fn get(&self, addr: Addr) -> Result<PeerCounters, DatapathError> {
        let sum = self.map.sum_of(&addr.0);
        let sum = sum.map_err(|error| failed("reading from", error))?;
        Ok(sum.unwrap_or_default())
    }
}

fn all(map: &RawMap) -> Result<BTreeMap<Addr, PeerCounters>, DatapathError> {
    let mut all = BTreeMap::new();
    let each = |addr: Addr, counters: PeerCounters| {
        all.insert(addr, counters);
    };
    map.for_each_sum(each)
        .map_err(|error| failed("reading from", error))?;
    Ok(all)
}

fn failed(what: &'static str, source: io::Error) -> DatapathError {
    error(NAME, what)(MapError::from(source))
}
