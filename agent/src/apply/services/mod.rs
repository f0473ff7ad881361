//! Writes what Services lead to into the maps that the programs read (`sinabro_common::abi::service`).
//!
//! - [`Publisher`]: one Service's plan at a time, or many; what has no room waits for it;
//! - `draft`, `keys`: what a plan takes, before anything is written; `staged`: how it is written;
//! - [`room`], [`backends`], `index`: which entries are free, and whose the others are;
//! - `consistent`: tables by which all nodes say the same of a client;
//! - `packed`, `owners`: what is kept of each Service, which may be tens of thousands;
//! - [`sources`]: who may use frontends that not everybody may;
//! - `restore`: what an earlier agent left;
//! - `report`: what is published, for people.
//!
//! The maps are the state: what is applied is read from them, and nothing beside the numbers of entries is kept. So it
//! makes no difference whether this agent wrote it or the one before.
//!
//! No packet meets half a Service. What a set leads to is written before the set, a set before the frontend that names
//! it, and removed after it; a set that changes gets slots that no program reads, and is changed by one store. Where
//! frontends that had one set between them are to have two, both are new ones, for no set may be seen by clients that
//! it is not for. Who may use frontends changes once those that go are gone, and before those that come are there.

pub mod backends;
#[cfg(test)]
mod busy;
mod consistent;
mod draft;
mod index;
mod keys;
mod owners;
mod packed;
mod report;
mod restore;
mod roles;
pub mod room;
#[cfg(test)]
mod scale;
pub mod sources;
mod staged;
pub mod tables;
#[cfg(test)]
mod tests;

use crate::{
    datapath::{ClientPrefix, DatapathError, ServiceRoom},
    plan::services::{Protocol, ServiceName, ServicePlan},
};
use backends::Backends;
use owners::Owners;
use packed::Packed;
use restore::Found;
use roles::ROLES;
use room::{Ids, Ranges};
use sinabro_common::abi::service::{Frontend, FrontendKey, Kind, Set};
use sources::Sources;
use staged::Staged;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    hash::{BuildHasher as _, RandomState},
    net::SocketAddr,
    sync::Arc,
    time::Instant,
};
use tables::Tables;

/// A set that always refuses: of addresses by themselves.
const REFUSES: u32 = 0;
/// Services that are published together, for one system call's worth of frontends.
const TOGETHER: usize = 256;

/// Why a Service is not as it should be. What it was before stays, but for [`ServiceError::NoTable`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum ServiceError {
    #[error(
        "service {service} does not fit into the map {map}, which has room for {room}: it is published once others are gone, or by an agent that starts with more serviceEndpoints"
    )]
    Full {
        service: ServiceName,
        map: &'static str,
        room: u32,
    },
    #[error(
        "service {service} wants {at}, which service {holder} has: it is published once that lets go of it"
    )]
    Taken {
        service: ServiceName,
        at: SocketAddr,
        holder: ServiceName,
    },
    /// But it is published.
    #[error(
        "service {service} is balanced by chance: its table of clients does not fit into the map {map}, which has room for {room}, and needs it twice while endpoints change; it gets one once others are gone"
    )]
    NoTable {
        service: ServiceName,
        map: &'static str,
        room: u32,
    },
    #[error("service {service} cannot be published")]
    Maps {
        service: ServiceName,
        source: Arc<DatapathError>,
    },
}

/// What is published of a Service, kept as [`Packed`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Applied {
    ports: Vec<AppliedPort>,
    /// Sorted.
    frontends: Vec<(FrontendKey, Frontend)>,
}

impl Applied {
    /// What its frontends name; not those of its ports alone, where it could not be published since a restart.
    fn numbers(&self) -> impl Iterator<Item = u32> {
        let frontends = self.frontends.iter();
        frontends.map(|(_, frontend)| frontend.service)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct AppliedPort {
    name: Box<str>,
    protocol: Protocol,
    /// [`Frontend::service`].
    number: u32,
    /// For IPv4 and for IPv6.
    families: [Option<Family>; 2],
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Family {
    /// Index by what it is for ([`roles`]); [`REFUSES`] of one that no frontend has. The same where two lead to the same.
    roles: [u32; ROLES],
    /// Ids.
    draining: Box<[u32]>,
}

impl Family {
    /// Its sets, each once.
    fn sets(&self) -> impl Iterator<Item = u32> + use<> {
        let roles = self.roles;
        let first = move |at: usize| !roles[..at].contains(&roles[at]);
        (0..ROLES)
            .filter(move |&at| roles[at] != REFUSES && first(at))
            .map(move |at| roles[at])
    }
}

pub struct Publisher<T> {
    tables: T,
    room: ServiceRoom,
    services: BTreeMap<ServiceName, Packed>,
    owners: Owners,
    /// What is not as it was planned, and why. Plans are not kept: they take many times what is published.
    waiting: BTreeMap<ServiceName, ServiceError>,
    /// Frontends went since somebody asked, which others may wait for.
    has_gone: bool,
    sets: Ids,
    /// By index: frontends that name it, each side by itself, and whose it is.
    set_refs: Vec<u32>,
    /// Sets whose slots are not what they say; somebody else wrote them. Nothing is let go with them.
    broken: HashSet<u32>,
    slots: Ranges,
    backends: Backends,
    sources: Sources,
    numbers: HashSet<u32>,
    next_number: u32,
    /// None once all of it is somebody's, or gone.
    found: Option<Found>,
}

/// How much there is of everything, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub services: usize,
    pub waiting: usize,
    pub endpoints: usize,
    /// Entries by map: taken, those of them that rest, room.
    pub maps: [(&'static str, u32, u32, u32); 5],
}

impl<T: Tables> Publisher<T> {
    /// Publishes a Service as it is planned, or takes it out.
    ///
    /// # Errors
    /// If there is no room; then it stays as it was until it is applied again.
    pub fn apply(
        &mut self,
        now: Instant,
        name: &ServiceName,
        plan: Option<&ServicePlan>,
    ) -> Result<(), ServiceError> {
        self.apply_all(now, [(name, plan)]);
        self.waiting.get(name).cloned().map_or(Ok(()), Err)
    }

    /// The same with many, each named once. What could not be done is among [`Self::waiting`].
    pub fn apply_all<'p>(
        &mut self,
        now: Instant,
        changes: impl IntoIterator<Item = (&'p ServiceName, Option<&'p ServicePlan>)>,
    ) {
        let (removals, others): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|(_, plan)| plan.is_none());
        let empty = ServicePlan::default();
        let before = self.frontends();
        // They may have what others want.
        self.pass(now, removals.into_iter().map(|(name, _)| (name, &empty)));
        let others = others.into_iter();
        self.pass(now, others.filter_map(|(name, plan)| Some((name, plan?))));
        self.has_gone |= self.frontends() < before;
    }

    /// What waits, if frontends went since this was asked last: some of it may fit now.
    pub fn waiting_for_what_went(&mut self) -> BTreeSet<ServiceName> {
        match std::mem::take(&mut self.has_gone) {
            true => self.waiting_names(),
            false => BTreeSet::new(),
        }
    }

    /// Whether an endpoint that datagrams went to was let go since this was asked last, or may have been before the start.
    pub fn take_lost_datagrams(&mut self) -> bool {
        self.backends.take_lost_datagrams()
    }

    pub fn waiting_names(&self) -> BTreeSet<ServiceName> {
        let names = self.waiting.keys();
        names.cloned().collect()
    }

    fn pass<'p>(
        &mut self,
        now: Instant,
        changes: impl Iterator<Item = (&'p ServiceName, &'p ServicePlan)>,
    ) {
        let mut staged = Vec::new();
        for (name, plan) in changes {
            self.waiting.remove(name);
            match self.stage(now, name, plan) {
                Ok(Some(one)) => staged.push(one),
                Ok(None) => {}
                Err(error) => self.wait(name, error),
            }
            if staged.len() == TOGETHER {
                self.finish(now, &mut staged);
            }
        }
        self.finish(now, &mut staged);
    }

    /// Lets what rests be taken again, if nobody can see it any more; false if that does not help.
    fn end_rest(&mut self) -> bool {
        let rests = self.usage().maps.iter().any(|of| of.2 > 0);
        if !rests || !self.tables.wait_for_programs() {
            return false;
        }
        self.sets.end_rest();
        self.slots.end_rest();
        self.backends.end_rest();
        true
    }

    /// To be called where nothing changes for a while.
    pub fn release_memory(&self) {
        self.tables.maps().release_memory();
    }

    /// What waits for room, and why.
    pub fn waiting(&self) -> impl Iterator<Item = (&ServiceName, &ServiceError)> {
        self.waiting.iter()
    }

    pub fn usage(&self) -> Usage {
        let frontends = self.frontends() as u32;
        let of = |name, (taken, resting), room| (name, taken, resting, room);
        let (sources, source_room) = self.sources.usage();
        Usage {
            services: self.services.len(),
            waiting: self.waiting.len(),
            endpoints: self.backends.count(),
            maps: [
                of("FRONTENDS", (frontends, 0), self.room.frontends),
                of("SETS", self.sets.taken(REFUSES + 1), self.room.sets),
                of("SLOTS", self.slots.taken(), self.room.slots),
                of("BACKENDS", self.backends.taken(), self.room.backends),
                of("SOURCE_RANGES", (sources, 0), source_room),
            ],
        }
    }

    fn wait(&mut self, name: &ServiceName, error: ServiceError) {
        self.waiting.insert(name.clone(), error);
    }

    /// Puts frontends in, and lets go of what nobody needs any more.
    fn finish(&mut self, now: Instant, staged: &mut Vec<Staged>) {
        let mut failed = self.put_frontends(staged);
        let mut are_strays = false;
        for (at, mut one) in staged.drain(..).enumerate() {
            if let Some(error) = one.failed.take() {
                failed.entry(at).or_insert(error);
            }
            one.after.frontends.sort_unstable_by_key(|(key, _)| *key);
            for frontend in &one.replaced {
                self.let_go(now, frontend);
            }
            for set in &one.contents {
                self.let_go_of_content(now, *set);
            }
            for port in &one.before {
                for family in port.families.iter().flatten() {
                    family.sets().for_each(|set| self.let_go_of_set(now, set));
                    for id in &family.draining {
                        self.backends.drained(*id);
                        self.backends.tell(&self.tables, now, *id);
                    }
                }
            }
            are_strays |= one.are_strays;
            let mut failed = failed.remove(&at);
            if failed.is_none() {
                failed = self.let_go_of_sources(&one).err();
            }
            if let Some(source) = failed {
                let service = one.name.clone();
                let source = Arc::new(source);
                let error = ServiceError::Maps { service, source };
                self.wait(&one.name, error);
            }
            if !one.after.ports.is_empty() || !one.after.frontends.is_empty() {
                self.services.insert(one.name, Packed::from(&one.after));
            }
        }
        if are_strays
            && self.found.is_none()
            && let Err(error) = self.sweep_sources()
        {
            tracing::warn!("{}", crate::chain::Chain(&error));
        }
    }

    /// Entries of the map.
    fn frontends(&self) -> usize {
        let found = self.found.as_ref().map_or(0, |found| found.frontends.len());
        self.owners.len() + found
    }

    /// Puts the frontends of all of them, those of addresses by themselves last; what failed, by place in the list.
    fn put_frontends(&mut self, staged: &mut [Staged]) -> HashMap<usize, DatapathError> {
        let mut puts: Vec<(usize, FrontendKey, Frontend)> = Vec::new();
        for (at, one) in staged.iter_mut().enumerate() {
            let all = std::mem::take(&mut one.puts).into_iter();
            puts.extend(all.map(|(key, frontend)| (at, key, frontend)));
        }
        puts.sort_by_key(|(_, key, _)| key.proto == 0);
        let keys: Vec<_> = puts.iter().map(|(_, key, _)| *key).collect();
        let frontends: Vec<_> = puts.iter().map(|(.., frontend)| *frontend).collect();
        let mut failed = HashMap::new();
        let mut from = 0;
        while from < puts.len() {
            let (written, result) = self.tables.put_frontends(&keys[from..], &frontends[from..]);
            for (at, key, frontend) in &puts[from..from + written] {
                self.refer(frontend);
                staged[*at].put(*key, *frontend);
            }
            from += written;
            if let Err(error) = result {
                let (at, key, _) = puts[from];
                let one = &staged[at];
                if !one.had(&key) {
                    self.owners.remove(&key);
                }
                failed.insert(at, error);
                // The others may be.
                from += 1;
            }
        }
        failed
    }

    fn refer(&mut self, frontend: &Frontend) {
        for set in [frontend.inside, frontend.outside] {
            if let Some(refs) = self.set_refs.get_mut(set as usize) {
                *refs += 1;
            }
        }
    }

    fn let_go(&mut self, now: Instant, frontend: &Frontend) {
        for set in [frontend.inside, frontend.outside] {
            self.let_go_of_set(now, set);
        }
    }

    fn let_go_of_set(&mut self, now: Instant, index: u32) {
        // A set beyond the end was somebody else's idea.
        let Some(refs) = self.set_refs.get_mut(index as usize) else {
            return;
        };
        *refs = refs.saturating_sub(1);
        if *refs == 0 && index != REFUSES {
            if !self.broken.remove(&index) {
                self.let_go_of_content(now, self.tables.set(index));
            }
            self.sets.rest(now, index);
        }
    }

    /// No frontend lets in whom it is not to let in any more.
    fn let_go_of_sources(&mut self, one: &Staged) -> Result<(), DatapathError> {
        for (number, wanted) in &one.sources {
            let is_kept = |prefix: &ClientPrefix| wanted.contains(prefix);
            self.sources.keep(&self.tables, *number, is_kept)?;
        }
        for number in &one.numbers {
            // A number that still lets somebody in is nobody else's.
            self.sources.keep(&self.tables, *number, |_| false)?;
            self.numbers.remove(number);
        }
        Ok(())
    }

    fn let_go_of_content(&mut self, now: Instant, set: Set) {
        if set.kind() != Kind::Balance {
            return;
        }
        for id in consistent::members(&self.tables, set) {
            self.backends.out_of_set(id);
            self.backends.tell(&self.tables, now, id);
        }
        self.slots.rest(now, set.base(), set.count());
        let mut waiting = self.waiting.values();
        // Which may fit now.
        self.has_gone |= waiting.any(|error| matches!(error, ServiceError::NoTable { .. }));
    }

    /// One that no affinity is of: those that were are forgotten by programs, if at all, long after.
    fn number(&mut self) -> u32 {
        loop {
            self.next_number = self.next_number.wrapping_add(1);
            if self.next_number != 0 && self.numbers.insert(self.next_number) {
                return self.next_number;
            }
        }
    }
}

/// Where numbers begin: not where those of the agent before did, which clients may have affinities of.
fn anywhere() -> u32 {
    RandomState::new().hash_one(0u8) as u32
}
