//! What an earlier agent left in the maps goes on as it is, until a Service's plan is found for it, or all plans are
//! known and none of them has it.

use super::{
    Applied, AppliedPort, Family, Publisher, REFUSES, anywhere,
    backends::{ANYBODYS, Backends, InSets},
    consistent,
    keys::{family_of, key},
    owners::Owners,
    roles::{self, ROLES},
    room::{Ids, Ranges},
    sources::Sources,
    tables::Tables,
};
use crate::{
    datapath::DatapathError,
    plan::services::{FrontendKind, PortPlan, ServiceName, ServicePlan},
};
use sinabro_common::abi::service::{Frontend, FrontendKey, Kind, Set};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    mem,
    net::SocketAddr,
    time::Instant,
};

/// What nobody has claimed yet.
#[derive(Default)]
pub(super) struct Found {
    pub frontends: HashMap<FrontendKey, Frontend>,
    /// How many frontends have each number.
    numbers: HashMap<u32, usize>,
    /// Endpoints that finish their connections, for nobody knows which Service.
    draining: Vec<u32>,
}

impl<T: Tables> Publisher<T> {
    /// A publisher of what is in the maps.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn restore(tables: T) -> Result<Self, DatapathError> {
        let room = tables.room();
        let mut found = Found::default();
        let mut set_refs = vec![0u32; room.sets as usize];
        let mut set_services = HashMap::new();
        for (key, frontend) in tables.frontends()? {
            for set in [frontend.inside, frontend.outside] {
                if let Some(refs) = set_refs.get_mut(set as usize) {
                    *refs += 1;
                    set_services.insert(set, frontend.service);
                }
            }
            if key.proto != 0 {
                *found.numbers.entry(frontend.service).or_default() += 1;
            }
            found.frontends.insert(key, frontend);
        }
        tables.put_set(REFUSES, Set(0));
        let mut slots = Ranges::new(room.slots);
        let mut in_sets = vec![InSets::default(); room.backends as usize];
        let mut broken = HashSet::new();
        let in_use = |index: u32| set_refs.get(index as usize).is_some_and(|refs| *refs > 0);
        for index in (REFUSES + 1..room.sets).filter(|&index| in_use(index)) {
            let set = tables.set(index);
            if set.kind() != Kind::Balance {
                continue;
            }
            let ids = set.base()..set.base().saturating_add(set.count());
            let is_whole = |slot: u32| {
                let slot = tables.slot(slot);
                let backend = tables.backend(slot.backend);
                backend.is_some_and(|backend| backend.generation == slot.generation)
            };
            if index == REFUSES
                || !ids.clone().all(is_whole)
                || !slots.claim(set.base(), set.count())
            {
                tracing::warn!(index, "a set leads to slots that are not its own");
                broken.insert(index);
                continue;
            }
            for id in consistent::members(&tables, set) {
                let InSets { service, sets } = &mut in_sets[id as usize];
                if *sets == 0 {
                    *service = set_services.get(&index).copied().unwrap_or(ANYBODYS);
                }
                *sets += 1;
            }
        }
        let sets = Ids::without(REFUSES + 1, room.sets, in_use);
        let (backends, draining) = Backends::restore(&tables, room.backends, &in_sets)?;
        found.draining = draining;
        let sources = Sources::restore(&tables)?;
        let numbers = found.numbers.keys().copied().chain(sources.numbers());
        let numbers = numbers.collect();
        Ok(Self {
            tables,
            room,
            services: BTreeMap::new(),
            owners: Owners::default(),
            waiting: BTreeMap::new(),
            has_gone: false,
            sets,
            set_refs,
            broken,
            slots,
            backends,
            sources,
            numbers,
            next_number: anywhere(),
            found: Some(found),
        })
    }

    /// Takes out what no plan had: all of them are known now, and have been applied.
    ///
    /// # Errors
    /// If something could not be removed; it can be called again.
    pub fn complete(&mut self, now: Instant) -> Result<(), DatapathError> {
        let Some(found) = &mut self.found else {
            return Ok(());
        };
        let mut keys: Vec<_> = found.frontends.keys().copied().collect();
        keys.sort_unstable_by_key(|key| (key.proto != 0, *key));
        for key in keys {
            self.tables.remove_frontend(&key)?;
            let found = self.found.as_mut();
            if let Some(frontend) = found.and_then(|found| found.frontends.remove(&key)) {
                self.let_go(now, &frontend);
            }
        }
        self.sweep_sources()?;
        let all = self.services.values();
        let ports = all.flat_map(|packed| packed.open().ports);
        self.numbers = ports.map(|port| port.number).collect();
        // One after the other fills a tree by half.
        self.services = mem::take(&mut self.services).into_iter().collect();
        let found = self.found.take().unwrap_or_default();
        for id in found.draining {
            self.backends.drained(id);
            self.backends.tell(&self.tables, now, id);
        }
        Ok(())
    }

    /// Takes out who may use what is not there any more.
    pub(super) fn sweep_sources(&mut self) -> Result<(), DatapathError> {
        if self.sources.usage().0 == 0 {
            return Ok(());
        }
        let mut numbers = HashSet::new();
        for packed in self.services.values() {
            numbers.extend(packed.open().numbers());
        }
        let is_somebodys = |number| numbers.contains(&number);
        self.sources.sweep(&self.tables, is_somebodys)
    }

    /// Has a Service have what an earlier agent published of it.
    pub(super) fn adopt(
        &mut self,
        name: &ServiceName,
        before: &mut Applied,
        plan: &ServicePlan,
        keys: &BTreeMap<FrontendKey, SocketAddr>,
    ) {
        let Some(found) = &mut self.found else {
            return;
        };
        let mut adopted = HashMap::new();
        for key in keys.keys() {
            if let Some(frontend) = found.frontends.remove(key) {
                adopted.insert(*key, frontend);
                before.frontends.push((*key, frontend));
                self.owners.put(key, name);
            }
        }
        let ports = plan.ports.iter();
        let unknown: Vec<_> = ports
            .filter(|(name, port)| !before.ports.iter().any(|old| old.is(name, port)))
            .collect();
        for (name, port) in unknown {
            let guards = !plan.source_ranges.is_empty();
            let port = self.adopted_port(name, port, guards, &adopted);
            before.ports.extend(port);
        }
    }

    /// Its sets are its own only if nothing else has them.
    fn adopted_port(
        &mut self,
        name: &str,
        port: &PortPlan,
        guards: bool,
        adopted: &HashMap<FrontendKey, Frontend>,
    ) -> Option<AppliedPort> {
        let mut of_family: [Vec<(FrontendKind, Frontend)>; 2] = Default::default();
        for frontend in &port.frontends {
            let found = adopted.get(&key(port.protocol, frontend.at));
            let found = found.map(|found| (frontend.kind, *found));
            of_family[family_of(&frontend.at)].extend(found);
        }
        let number = self.adopted_number(of_family.iter().flatten(), guards)?;
        let families = of_family.map(|frontends| self.adopted_family(&frontends));
        let port = AppliedPort {
            name: name.into(),
            protocol: port.protocol,
            number,
            families,
        };
        for set in port.sets() {
            self.set_refs[set as usize] += 1;
        }
        Some(port)
    }

    /// The number that its frontends have; none if there are none. The ids of its endpoints go by it, so it is kept where
    /// some came or went meanwhile: it is that of the cluster address, or of most that have it. Where it says who is let
    /// in (`guards`), only if no other frontend has it, to which that is nothing.
    fn adopted_number<'f>(
        &mut self,
        frontends: impl Iterator<Item = &'f (FrontendKind, Frontend)> + Clone,
        guards: bool,
    ) -> Option<u32> {
        let of_cluster_ip = frontends
            .clone()
            .find(|(kind, _)| *kind == FrontendKind::ClusterIp);
        let (_, first) = of_cluster_ip.or_else(|| frontends.clone().next())?;
        let number = first.service;
        let count = frontends.filter(|(_, of)| of.service == number).count();
        let guards = guards || self.sources.of(number).next().is_some();
        let is_own = |all: usize| match guards {
            true => count == all,
            false => of_cluster_ip.is_some() || 2 * count > all,
        };
        let numbers = self.found.as_mut().map(|found| &mut found.numbers);
        if let Some(numbers) = numbers
            && numbers.get(&number).copied().is_some_and(is_own)
        {
            // Nobody else's from now on.
            numbers.remove(&number);
            return Some(number);
        }
        Some(self.number())
    }

    fn adopted_family(&self, frontends: &[(FrontendKind, Frontend)]) -> Option<Family> {
        let mut found = [None; ROLES];
        let mut refs: HashMap<u32, u32> = HashMap::new();
        for (kind, frontend) in frontends {
            for (role, set) in roles::of_kind(*kind)
                .into_iter()
                .zip([frontend.inside, frontend.outside])
            {
                if *found[role].get_or_insert(set) != set {
                    return None;
                }
                *refs.entry(set).or_default() += 1;
            }
        }
        let own = |(set, refs): (&u32, &u32)| {
            *set != REFUSES && self.set_refs.get(*set as usize) == Some(refs)
        };
        (!refs.is_empty() && refs.iter().all(own)).then(|| Family {
            roles: found.map(|set| set.unwrap_or(REFUSES)),
            draining: Box::default(),
        })
    }
}
