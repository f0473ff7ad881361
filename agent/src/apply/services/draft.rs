//! What a Service's plan takes. All of it is taken before anything is written (`staged`), so that a plan without room changes
//! nothing.

use super::{
    Applied, AppliedPort, Family, Publisher, REFUSES, ServiceError,
    backends::{Endpoint, ServicePort},
    consistent,
    keys::{family_of, flags, key, keys, used_roles},
    packed::Packed,
    roles::{self, ROLES},
    sources,
    staged::Staged,
    tables::Tables,
};
use crate::{
    datapath::ClientPrefix,
    plan::services::{PortPlan, ServiceName, ServicePlan, SetPlan},
};
use sinabro_common::abi::service::{Frontend, FrontendKey, Kind, Set, Slot};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Instant,
};

/// What was taken for a plan.
#[derive(Default)]
pub struct Draft {
    /// Once for each time that a set leads there.
    pub members: Vec<u32>,
    pub introduced: Vec<(u32, Endpoint)>,
    pub drained: Vec<u32>,
    /// Base and endpoints.
    pub ranges: Vec<(u32, Vec<u32>)>,
    pub fresh: Vec<(u32, Set)>,
    pub changed: Vec<(u32, Set)>,
    pub numbers: Vec<u32>,
    /// By number, who may use guarded frontends.
    pub sources: Vec<(u32, BTreeSet<ClientPrefix>)>,
}

/// Which map has no room.
struct Full(&'static str);

/// Frontends as they are to be.
pub type Wanted = BTreeMap<FrontendKey, Frontend>;

/// One family of one port.
struct Wants<'a> {
    port: &'a PortPlan,
    of: ServicePort,
    /// The family.
    at: usize,
    /// Sets that are not to be changed.
    left: &'a BTreeSet<u32>,
}

impl<T: Tables> Publisher<T> {
    /// Takes what a plan needs and publishes it as far as to its frontends; none if there is nothing to do.
    pub(super) fn stage(
        &mut self,
        now: Instant,
        name: &ServiceName,
        plan: &ServicePlan,
    ) -> Result<Option<Staged>, ServiceError> {
        let keys = keys(plan);
        let others = keys.iter().find_map(|(key, at)| {
            let holder = self.owners.get(key)?;
            (holder != name).then(|| ServiceError::Taken {
                service: name.clone(),
                at: *at,
                holder: holder.clone(),
            })
        });
        if let Some(error) = others {
            return Err(error);
        }
        let known = self.services.remove_entry(name);
        let known = known.map(|(name, packed)| (name, packed.open()));
        let (name, mut before) = known.unwrap_or_else(|| (name.clone(), Applied::default()));
        self.adopt(&name, &mut before, plan, &keys);
        let had = |key: &FrontendKey| before.frontends.iter().any(|(other, _)| other == key);
        let more = keys.keys().filter(|key| !had(key)).count();
        let drawn = match self.frontends() + more > self.room.frontends as usize {
            true => Err(Full("FRONTENDS")),
            false => match self.drawn(now, &before, plan) {
                Err(_) if self.end_rest() => self.drawn(now, &before, plan),
                drawn => drawn,
            }
            .or_else(|full| self.drawn_by_chance(now, &name, &before, plan, full)),
        };
        let (ports, wanted, draft) = match drawn {
            Ok(drawn) => drawn,
            Err(Full(map)) => {
                let service = name.clone();
                if !before.ports.is_empty() || !before.frontends.is_empty() {
                    self.services.insert(name, Packed::from(&before));
                }
                let room = self.room_of(map);
                return Err(ServiceError::Full { service, map, room });
            }
        };
        Ok(self.write(name, before, ports, wanted, draft))
    }

    /// What a plan takes without tables, for which there is no room; if it has any. They need sets of their own, too.
    fn drawn_by_chance(
        &mut self,
        now: Instant,
        name: &ServiceName,
        before: &Applied,
        plan: &ServicePlan,
        Full(map): Full,
    ) -> Result<(Vec<AppliedPort>, Wanted, Draft), Full> {
        let without = plan.by_chance().ok_or(Full(map))?;
        let drawn = self.drawn(now, before, &without)?;
        let (service, room) = (name.clone(), self.room_of(map));
        self.wait(name, ServiceError::NoTable { service, map, room });
        Ok(drawn)
    }

    fn room_of(&self, map: &str) -> u32 {
        let usage = self.usage();
        let of = usage.maps.iter().find(|of| of.0 == map);
        of.map_or(0, |of| of.3)
    }

    /// What a plan takes. A set that a frontend leaves, for another one or for good, is not changed in its place: who has
    /// read the frontend would find what was never said of it.
    fn drawn(
        &mut self,
        now: Instant,
        before: &Applied,
        plan: &ServicePlan,
    ) -> Result<(Vec<AppliedPort>, Wanted, Draft), Full> {
        let mut left = BTreeSet::new();
        loop {
            let mut draft = Draft::default();
            let (ports, wanted) = match self.draft(now, before, plan, &left, &mut draft) {
                Ok(drawn) => drawn,
                Err(full) => {
                    self.undo(draft);
                    return Err(full);
                }
            };
            let leaves = |side: fn(&Frontend) -> u32| {
                let wanted = &wanted;
                before.frontends.iter().filter_map(move |(key, frontend)| {
                    let now = wanted.get(key).map(side);
                    (now != Some(side(frontend))).then(|| side(frontend))
                })
            };
            let leaving: BTreeSet<u32> = leaves(|of| of.inside)
                .chain(leaves(|of| of.outside))
                .collect();
            let changed = draft.changed.iter().map(|(index, _)| *index);
            let both: Vec<u32> = changed.filter(|index| leaving.contains(index)).collect();
            if both.is_empty() {
                return Ok((ports, wanted, draft));
            }
            self.undo(draft);
            left.extend(both);
        }
    }

    fn draft(
        &mut self,
        now: Instant,
        before: &Applied,
        plan: &ServicePlan,
        left: &BTreeSet<u32>,
        draft: &mut Draft,
    ) -> Result<(Vec<AppliedPort>, Wanted), Full> {
        let mut ports = Vec::with_capacity(plan.ports.len());
        let mut wanted = Wanted::new();
        for (name, port) in &plan.ports {
            let old = before.ports.iter().find(|old| old.is(name, port));
            let number = old.map(|old| old.number).unwrap_or_else(|| {
                let number = self.number();
                draft.numbers.push(number);
                number
            });
            draft.sources.push((number, sources::wanted(plan, port)));
            let of = ServicePort {
                number,
                protocol: port.protocol,
            };
            let mut families = [None, None];
            for (at, family) in families.iter_mut().enumerate() {
                if used_roles(port, at).contains(&true) {
                    let old = old.and_then(|old| old.families[at].as_ref());
                    let wanted = Wants { port, of, at, left };
                    *family = Some(self.family(now, old, &wanted, draft)?);
                }
            }
            for frontend in &port.frontends {
                if let Some(family) = &families[family_of(&frontend.at)] {
                    let [inside, outside] =
                        roles::of_kind(frontend.kind).map(|role| family.roles[role]);
                    let value = Frontend {
                        inside,
                        outside,
                        service: number,
                        affinity_seconds: port.affinity_seconds,
                        flags: flags(plan, port, frontend),
                    };
                    wanted.insert(key(port.protocol, frontend.at), value);
                }
            }
            ports.push(AppliedPort {
                name: name.as_str().into(),
                protocol: port.protocol,
                number,
                families,
            });
        }
        if !self.sources.fit(&draft.sources) {
            return Err(Full("SOURCE_RANGES"));
        }
        for address in &plan.addresses {
            let refuses = Frontend {
                inside: REFUSES,
                outside: REFUSES,
                service: 0,
                affinity_seconds: 0,
                flags: 0,
            };
            wanted.insert(FrontendKey::address((*address).into()), refuses);
        }
        Ok((ports, wanted))
    }

    fn family(
        &mut self,
        now: Instant,
        old: Option<&Family>,
        wanted: &Wants<'_>,
        draft: &mut Draft,
    ) -> Result<Family, Full> {
        let Wants { port, of, at, left } = *wanted;
        let (plan, is_used) = (&port.sets[at], used_roles(port, at));
        let plans = roles::of(plan);
        let alike = |one: usize, other: usize| plans[one] == plans[other];
        let pattern = roles::pattern(is_used, alike);
        let same = |old: &&Family| {
            let is_used = old.roles.map(|set| set != REFUSES);
            let alike = |one: usize, other: usize| old.roles[one] == old.roles[other];
            roles::pattern(is_used, alike) == pattern
        };
        let old = old.filter(same);
        let mut family = Family {
            roles: [REFUSES; ROLES],
            draining: Box::default(),
        };
        for role in 0..ROLES {
            family.roles[role] = match pattern[role] {
                None => REFUSES,
                Some(first) if first < role => family.roles[first],
                Some(_) => {
                    let old = old.map(|old| old.roles[role]);
                    self.set(now, old, plans[role], of, left, draft)?
                }
            };
        }
        // What is in no set that is used takes no new connections, either.
        let sets = |wanted: bool| {
            let roles = (0..ROLES).filter(move |&role| is_used[role] == wanted);
            roles.filter_map(|role| plans[role].endpoints())
        };
        let is_in_none = |at: &&SocketAddr| !sets(true).any(|set| set.contains(*at));
        let unused = sets(false).flatten().filter(is_in_none);
        let draining: BTreeSet<_> = unused.chain(&plan.draining).collect();
        // Of what is not known there are no connections.
        let draining = draining.into_iter();
        family.draining = draining
            .filter_map(|at| self.backends.drain(&self.tables, of.endpoint(*at)))
            .collect();
        draft.drained.extend_from_slice(&family.draining);
        Ok(family)
    }

    /// A set that is as planned: the present one or another.
    fn set(
        &mut self,
        now: Instant,
        old: Option<u32>,
        plan: &SetPlan,
        of: ServicePort,
        left: &BTreeSet<u32>,
        draft: &mut Draft,
    ) -> Result<u32, Full> {
        if let Some(old) = old
            && self.holds(old, plan, of)
        {
            return Ok(old);
        }
        let set = match plan {
            SetPlan::Refuse => Set::new(Kind::Refuse, 0, 0),
            SetPlan::Drop => Set::new(Kind::Drop, 0, 0),
            SetPlan::Balance(endpoints) => {
                let ids = self.members(now, endpoints, of, draft)?;
                self.balance(now, ids.len() as u32, |_| ids, draft)?
            }
            SetPlan::Consistent(endpoints) => {
                let ids = self.members(now, endpoints, of, draft)?;
                let length = self.tables.table_length(ids.len());
                let length = length.ok_or(Full("SLOTS"))?;
                self.balance(
                    now,
                    length,
                    |length| consistent::ids(endpoints, &ids, length),
                    draft,
                )?
            }
        };
        if let Some(old) = old
            && !left.contains(&old)
        {
            draft.changed.push((old, set));
            return Ok(old);
        }
        let index = self.sets.take(now).ok_or(Full("SETS"))?;
        draft.fresh.push((index, set));
        Ok(index)
    }

    /// Ids of a set's endpoints, in their order.
    fn members(
        &mut self,
        now: Instant,
        endpoints: &BTreeSet<SocketAddr>,
        of: ServicePort,
        draft: &mut Draft,
    ) -> Result<Vec<u32>, Full> {
        let mut ids = Vec::with_capacity(endpoints.len());
        for at in endpoints {
            let endpoint = of.endpoint(*at);
            let taken = self.backends.into_set(&self.tables, now, endpoint);
            let (id, is_new) = taken.ok_or(Full("BACKENDS"))?;
            if is_new {
                draft.introduced.push((id, endpoint));
            }
            draft.members.push(id);
            ids.push(id);
        }
        Ok(ids)
    }

    /// A set of so many slots, in which are these once there is room for them.
    fn balance(
        &mut self,
        now: Instant,
        count: u32,
        ids: impl FnOnce(u32) -> Vec<u32>,
        draft: &mut Draft,
    ) -> Result<Set, Full> {
        let base = self.slots.take(now, count).ok_or(Full("SLOTS"))?;
        draft.ranges.push((base, ids(count)));
        Ok(Set::new(Kind::Balance, base, count))
    }

    /// Whether a set is as planned already.
    fn holds(&self, index: u32, plan: &SetPlan, of: ServicePort) -> bool {
        let set = self.tables.set(index);
        let endpoints = match (set.kind(), plan) {
            (Kind::Refuse, SetPlan::Refuse) | (Kind::Drop, SetPlan::Drop) => return true,
            (Kind::Balance, SetPlan::Balance(endpoints) | SetPlan::Consistent(endpoints)) => {
                endpoints
            }
            _ => return false,
        };
        if self.broken.contains(&index) {
            return false;
        }
        let slot = |at: &SocketAddr| {
            let id = self.backends.get(&self.tables, of.endpoint(*at))?;
            Some(self.backends.slot(&self.tables, id))
        };
        match plan {
            SetPlan::Consistent(_) => {
                let wanted: Option<Vec<Slot>> = endpoints.iter().map(slot).collect();
                wanted.is_some_and(|wanted| {
                    consistent::is_table(&self.tables, set, endpoints, &wanted)
                })
            }
            _ => {
                let is = |(index, at)| slot(at) == Some(self.tables.slot(index));
                set.count() as usize == endpoints.len() && (set.base()..).zip(endpoints).all(is)
            }
        }
    }

    fn undo(&mut self, draft: Draft) {
        for id in draft.members {
            self.backends.out_of_set(id);
        }
        for id in draft.drained {
            self.backends.drained(id);
        }
        for (id, endpoint) in draft.introduced {
            self.backends.forget(endpoint, id);
        }
        for (base, ids) in draft.ranges {
            self.slots.give_back(base, ids.len() as u32);
        }
        for (index, _) in draft.fresh {
            self.sets.give_back(index);
        }
        for number in draft.numbers {
            self.numbers.remove(&number);
        }
    }
}

impl AppliedPort {
    pub(super) fn is(&self, name: &str, port: &PortPlan) -> bool {
        *self.name == *name && self.protocol == port.protocol
    }

    pub(super) fn sets(&self) -> impl Iterator<Item = u32> + '_ {
        self.families.iter().flatten().flat_map(Family::sets)
    }
}
