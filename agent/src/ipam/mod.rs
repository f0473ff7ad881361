//! Addresses of this node's pods.
//!
//! [`Allocator`] gives each owner one address of every family the node has a range for: all or
//! none, and the same ones when asked again. The files ([`file::Store`]) are the truth; an index
//! in memory, rebuilt from them at start, finds free addresses.
//!
//! Order: addresses never used, upwards, then the one released longest ago. So a new pod gets an
//! address that something may still talk to as late as possible.
//!
//! One lock is held for the few file operations of a call (microseconds on a tmpfs), never
//! during anything else.

pub mod file;
pub mod range;

use crate::{chain::Chain, state_file::FileError};
use file::{Claim, Found, Lease, Store};
use ipnet::IpNet;
use range::{Range, RangeError};
use sinabro_common::api::{IpamReport, LeaseReport, Mac, Owner, PodRef, RangeReport};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Files of released addresses that are kept, the newest: on a tmpfs each takes a page. What is
/// forgotten counts as never used for the next agent, so it still comes before these.
const RELEASED_FILES: usize = 1000;

#[derive(Debug, thiserror::Error)]
pub enum IpamError {
    #[error("this node has no pod range yet")]
    NoRange,
    #[error("pod range {} is full", join(.0))]
    Full(Vec<IpNet>),
    #[error("requested address {address} {reason}")]
    Unavailable { address: IpAddr, reason: String },
    #[error("requested addresses {0} and {1} are of one family, at most one of each can be given")]
    OneFamily(IpAddr, IpAddr),
    #[error(transparent)]
    File(#[from] FileError),
}

/// Who wants addresses, and which.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    pub owner: Owner,
    pub network: String,
    pub netns: String,
    pub pod: PodRef,
    pub mac: Option<Mac>,
    /// At most one of each family.
    pub addresses: Vec<IpAddr>,
}

/// Leases addresses; see the module.
#[derive(Debug)]
pub struct Allocator {
    store: Store,
    index: Mutex<Index>,
}

/// What the directories hold, for look-ups.
#[derive(Debug, Default)]
struct Index {
    ranges: Vec<Pool>,
    leases: BTreeMap<IpAddr, Lease>,
    by_owner: HashMap<Owner, BTreeSet<IpAddr>>,
    /// Addresses whose file is not a lease, and why: given to nobody.
    unreadable: BTreeMap<IpAddr, String>,
    strays: Vec<String>,
    /// Released addresses, the longest released first.
    released: BTreeSet<(SystemTime, IpAddr)>,
    released_at: HashMap<IpAddr, SystemTime>,
    /// Those of them that have a file, no more than [`RELEASED_FILES`].
    on_disk: BTreeSet<(SystemTime, IpAddr)>,
}

/// A range and how much of it was ever used.
#[derive(Clone, Debug)]
struct Pool {
    range: Range,
    /// Every address before this offset is reserved, leased, released or unreadable.
    next: u128,
}

impl Allocator {
    /// Reads the leases below the state directory.
    ///
    /// # Errors
    /// If the directories cannot be made or listed.
    pub fn open(state_dir: &Path) -> Result<Self, IpamError> {
        let store = Store::open(state_dir)?;
        let mut index = Index::default();
        for found in store.leases()? {
            match found {
                Found::Lease(lease) => index.insert(lease),
                Found::Unreadable(address, reason) => {
                    index.unreadable.insert(address, reason);
                }
                Found::Stray(reason) => index.strays.push(reason),
            }
        }
        for (time, address) in store.released()? {
            if index.is_taken(address) {
                // Killed between leasing it again and forgetting that it was released.
                store.forget_released(address)?;
            } else {
                index.push_released(time, address);
                index.on_disk.insert((time, address));
            }
        }
        for problem in index.problems() {
            tracing::warn!("{problem}");
        }
        let allocator = Self {
            store,
            index: Mutex::new(index),
        };
        allocator.forget_oldest(&mut allocator.index());
        Ok(allocator)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        // Nothing panics between two steps of a change; were it so, the files still hold.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the node's pod ranges. Leases outside them stay valid until they are released; their
    /// addresses are returned.
    ///
    /// # Errors
    /// If a range is too small or two overlap; then the ranges stay as they were.
    pub fn set_ranges(&self, cidrs: &[IpNet]) -> Result<Vec<IpAddr>, RangeError> {
        let ranges = Range::all(cidrs)?;
        let mut index = self.index();
        let kept = |range: &Range| index.ranges.iter().find(|p| p.range == *range).cloned();
        let pools = ranges.into_iter().map(|range| {
            kept(&range).unwrap_or(Pool {
                range,
                next: range.first_offset(),
            })
        });
        index.ranges = pools.collect();
        let outside = |a: &&IpAddr| !cidrs.iter().any(|net| net.contains(*a));
        Ok(index.leases.keys().filter(outside).copied().collect())
    }

    /// Leases one address of each family, the ones asked for where some are. The owner's present
    /// leases count: asking again gives the same.
    ///
    /// # Errors
    /// If a family has no address left or one asked for cannot be had; then nothing is leased.
    pub fn allocate(&self, request: &LeaseRequest) -> Result<Vec<IpAddr>, IpamError> {
        if let [a, .., b] = request.addresses[..]
            && (request.addresses.len() > 2 || a.is_ipv4() == b.is_ipv4())
        {
            return Err(IpamError::OneFamily(a, b));
        }
        let mut index = self.index();
        if index.ranges.is_empty() {
            return Err(IpamError::NoRange);
        }
        let mut granted = self.present(&mut index, &request.owner);
        let mut claimed = Vec::new();
        for v4 in [true, false] {
            let wanted = request
                .addresses
                .iter()
                .find(|a| a.is_ipv4() == v4)
                .copied();
            let present = granted.iter().find(|a| a.is_ipv4() == v4).copied();
            let served = index.ranges.iter().any(|p| p.range.is_ipv4() == v4);
            let outcome = match (present, wanted) {
                (Some(has), Some(wants)) if has != wants => Err(IpamError::Unavailable {
                    address: wants,
                    reason: format!("cannot be given, {} has {has} already", request.owner),
                }),
                (Some(_), _) => continue,
                (None, Some(wants)) => self.claim_wanted(&mut index, request, wants),
                (None, None) if served => self.claim_next(&mut index, request, v4),
                (None, None) => continue,
            };
            match outcome {
                Ok(lease) => claimed.push(lease),
                Err(error) => {
                    for lease in claimed {
                        if let Err(error) = self.store.unclaim(lease.address) {
                            // Still leased on disk, so it must be known here to be freed.
                            tracing::warn!("{}", Chain(&error));
                            index.insert(lease);
                        }
                    }
                    return Err(error);
                }
            }
        }
        for lease in claimed {
            granted.push(lease.address);
            self.commit(&mut index, lease);
        }
        granted.sort_unstable();
        Ok(granted)
    }

    /// Takes a claimed address into the index and out of the released ones.
    fn commit(&self, index: &mut Index, lease: Lease) {
        if index.pop_released(lease.address)
            && let Err(error) = self.store.forget_released(lease.address)
        {
            // The next start repairs it: a lease wins over its release.
            tracing::warn!("{}", Chain(&error));
        }
        index.insert(lease);
    }

    /// Addresses the owner has, by the files: another process may have changed them.
    fn present(&self, index: &mut Index, owner: &Owner) -> Vec<IpAddr> {
        let known = index.by_owner.get(owner).cloned().unwrap_or_default();
        let mut present = Vec::new();
        for address in known {
            match self.store.read(address) {
                Ok(Some(lease)) if lease.owner == *owner => present.push(address),
                other => {
                    index.remove(address);
                    index.note(address, other);
                }
            }
        }
        present
    }

    fn claim_wanted(
        &self,
        index: &mut Index,
        request: &LeaseRequest,
        address: IpAddr,
    ) -> Result<Lease, IpamError> {
        let unavailable = |reason: String| IpamError::Unavailable { address, reason };
        let pool = index
            .ranges
            .iter()
            .find(|p| p.range.cidr().contains(&address));
        match pool.map(|pool| pool.range.fault(address)) {
            None => {
                let nets: Vec<_> = index.ranges.iter().map(|p| p.range.cidr()).collect();
                return Err(unavailable(format!(
                    "is outside the node's ranges {}",
                    join(&nets)
                )));
            }
            Some(Some(fault)) => return Err(unavailable(fault.into())),
            Some(None) => {}
        }
        let lease = request.lease(address);
        match self.store.claim(&lease)? {
            Claim::Made => {
                index.unreadable.remove(&address);
                Ok(lease)
            }
            Claim::Taken => {
                let reason = match self.store.read(address) {
                    Ok(Some(other)) => format!("is taken by {}", other.owner),
                    Ok(None) => "was released this moment, try again".into(),
                    Err(reason) => format!("is kept back: {reason}"),
                };
                Err(unavailable(reason))
            }
        }
    }

    fn claim_next(
        &self,
        index: &mut Index,
        request: &LeaseRequest,
        v4: bool,
    ) -> Result<Lease, IpamError> {
        while let Some(address) = index.next_free(v4) {
            let lease = request.lease(address);
            match self.store.claim(&lease)? {
                Claim::Made => return Ok(lease),
                // Another process took it.
                Claim::Taken => {
                    index.pop_released(address);
                    let found = self.store.read(address);
                    index.note(address, found);
                }
            }
        }
        let of_family = index.ranges.iter().filter(|p| p.range.is_ipv4() == v4);
        Err(IpamError::Full(of_family.map(|p| p.range.cidr()).collect()))
    }

    /// Takes back a lease that is missing although a live pod has its address.
    ///
    /// # Errors
    /// If somebody else has the address.
    pub fn reclaim(&self, request: &LeaseRequest, address: IpAddr) -> Result<(), IpamError> {
        let mut index = self.index();
        let lease = request.lease(address);
        if self.store.claim(&lease)? == Claim::Taken {
            let found = self.store.read(address);
            let reason = match &found {
                Ok(Some(lease)) if lease.owner == request.owner => return Ok(()),
                Ok(Some(lease)) => format!("is taken by {}", lease.owner),
                Ok(None) => "was released this moment".into(),
                Err(reason) => format!("is kept back: {reason}"),
            };
            return Err(IpamError::Unavailable { address, reason });
        }
        self.commit(&mut index, lease);
        Ok(())
    }

    /// Frees every address of an owner and returns them; none is no error.
    ///
    /// # Errors
    /// If a file cannot be moved; then its address stays leased.
    pub fn release(&self, owner: &Owner) -> Result<Vec<IpAddr>, IpamError> {
        let mut index = self.index();
        let present = self.present(&mut index, owner);
        for &address in &present {
            let time = index.release_time();
            self.store.release(address, time)?;
            index.remove(address);
            index.push_released(time, address);
            index.on_disk.insert((time, address));
        }
        self.forget_oldest(&mut index);
        Ok(present)
    }

    /// Removes files of addresses that were released long ago.
    fn forget_oldest(&self, index: &mut Index) {
        while index.on_disk.len() > RELEASED_FILES
            && let Some((_, address)) = index.on_disk.pop_first()
        {
            if let Err(error) = self.store.forget_released(address) {
                tracing::warn!("{}", Chain(&error));
            }
        }
    }

    /// Looks again at the files that were not leases: a person may have removed or mended one.
    pub fn recheck(&self) {
        let mut index = self.index();
        for (address, _) in std::mem::take(&mut index.unreadable) {
            match self.store.read(address) {
                Ok(None) => {
                    tracing::info!("{address} can be leased again, its lease file was removed");
                    index.forget(address);
                }
                found => index.note(address, found),
            }
        }
    }

    /// Every lease, in the order of addresses.
    pub fn leases(&self) -> Vec<Lease> {
        self.index().leases.values().cloned().collect()
    }

    /// Whether the owner has a lease.
    pub fn has(&self, owner: &Owner) -> bool {
        self.index().by_owner.contains_key(owner)
    }

    /// How full the ranges are.
    pub fn usage(&self) -> Vec<RangeReport> {
        self.index().usage()
    }

    /// What is wrong with files, each named.
    pub fn problems(&self) -> Vec<String> {
        self.index().problems().cloned().collect()
    }

    /// Why no pod can get addresses now: a family of which all ranges are full.
    pub fn full(&self) -> Option<String> {
        let index = self.index();
        let leased = |pool: &&Pool| {
            let cidr = pool.range.cidr();
            index.leases.keys().filter(|a| cidr.contains(*a)).count() as u64
        };
        [true, false].into_iter().find_map(|v4| {
            let pools = index.ranges.iter().filter(|p| p.range.is_ipv4() == v4);
            let pools: Vec<_> = pools.collect();
            let full = |pool: &&Pool| leased(pool) >= pool.range.capacity();
            let cidrs: Vec<_> = pools.iter().map(|p| p.range.cidr().to_string()).collect();
            let all = !pools.is_empty() && pools.iter().all(full);
            all.then(|| format!("pod range {} is full", cidrs.join(", ")))
        })
    }

    /// For people; `active` says whether an endpoint uses a lease.
    pub fn report(&self, active: impl Fn(&Owner) -> bool) -> IpamReport {
        let index = self.index();
        let lease = |lease: &Lease| LeaseReport {
            address: lease.address,
            owner: lease.owner.clone(),
            pod: lease.pod.clone(),
            leased_at: lease.leased_at,
            active: active(&lease.owner),
        };
        IpamReport {
            ranges: index.usage(),
            leases: index.leases.values().map(lease).collect(),
            problems: index.problems().cloned().collect(),
        }
    }
}

impl LeaseRequest {
    fn lease(&self, address: IpAddr) -> Lease {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Lease {
            address,
            owner: self.owner.clone(),
            network: self.network.clone(),
            netns: self.netns.clone(),
            pod: self.pod.clone(),
            mac: self.mac,
            leased_at: now.unwrap_or_default().as_secs(),
        }
    }
}

impl Index {
    fn insert(&mut self, lease: Lease) {
        self.remove(lease.address);
        let addresses = self.by_owner.entry(lease.owner.clone()).or_default();
        addresses.insert(lease.address);
        self.leases.insert(lease.address, lease);
    }

    fn remove(&mut self, address: IpAddr) {
        let Some(lease) = self.leases.remove(&address) else {
            return;
        };
        if let Some(addresses) = self.by_owner.get_mut(&lease.owner) {
            addresses.remove(&address);
            if addresses.is_empty() {
                self.by_owner.remove(&lease.owner);
            }
        }
    }

    /// Takes note of what a file turned out to be.
    fn note(&mut self, address: IpAddr, found: Result<Option<Lease>, String>) {
        match found {
            Ok(Some(lease)) => self.insert(lease),
            // Whoever released it has put it into the queue on disk; it joins this one's end.
            Ok(None) => self.forget(address),
            Err(reason) => {
                self.unreadable.insert(address, reason);
            }
        }
    }

    /// An address that nobody has any more, without a release seen here.
    fn forget(&mut self, address: IpAddr) {
        if !self.released_at.contains_key(&address) {
            let time = self.release_time();
            self.push_released(time, address);
        }
    }

    fn is_taken(&self, address: IpAddr) -> bool {
        self.leases.contains_key(&address) || self.unreadable.contains_key(&address)
    }

    /// Now, but after every release so far: a clock set back must not reorder the queue.
    fn release_time(&self) -> SystemTime {
        let now = SystemTime::now();
        match self.released.last() {
            Some((last, _)) if *last >= now => *last + Duration::from_nanos(1),
            _ => now,
        }
    }

    fn push_released(&mut self, time: SystemTime, address: IpAddr) {
        self.released.insert((time, address));
        self.released_at.insert(address, time);
    }

    fn pop_released(&mut self, address: IpAddr) -> bool {
        match self.released_at.remove(&address) {
            Some(time) => {
                self.on_disk.remove(&(time, address));
                self.released.remove(&(time, address))
            }
            None => false,
        }
    }

    /// The address to give out next.
    fn next_free(&mut self, v4: bool) -> Option<IpAddr> {
        for i in 0..self.ranges.len() {
            while self.ranges[i].range.is_ipv4() == v4
                && let Some(address) = self.ranges[i].range.walked(self.ranges[i].next)
            {
                if !self.is_taken(address) && !self.released_at.contains_key(&address) {
                    return Some(address);
                }
                self.ranges[i].next += 1;
            }
        }
        let usable = |a: &IpAddr| self.ranges.iter().any(|p| p.range.fault(*a).is_none());
        let of_family = self
            .released
            .iter()
            .map(|(_, a)| *a)
            .filter(|a| a.is_ipv4() == v4);
        of_family.into_iter().find(usable)
    }

    fn usage(&self) -> Vec<RangeReport> {
        let range = |pool: &Pool| {
            let cidr = pool.range.cidr();
            let leased = self.leases.range(cidr.network()..=cidr.broadcast());
            RangeReport {
                cidr,
                capacity: pool.range.capacity(),
                leased: leased.count() as u64,
            }
        };
        self.ranges.iter().map(range).collect()
    }

    fn problems(&self) -> impl Iterator<Item = &String> {
        self.unreadable.values().chain(&self.strays)
    }
}

fn join(nets: &[IpNet]) -> String {
    let texts: Vec<_> = nets.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests;
