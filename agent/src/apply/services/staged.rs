//! What was taken for a plan is written: everything that no program can see yet, then sets that are in use. Frontends come
//! after that, of many Services together.

use super::{
    Applied, AppliedPort, Publisher,
    draft::{Draft, Wanted},
    tables::Tables,
};
use crate::{
    datapath::{ClientPrefix, DatapathError},
    plan::services::ServiceName,
};
use sinabro_common::abi::service::{Frontend, FrontendKey, Set, Slot};
use std::collections::BTreeSet;

/// A Service whose endpoints are published, and whose frontends are still those of before.
pub struct Staged {
    pub name: ServiceName,
    /// As it will be; the frontends, as they are.
    pub after: Applied,
    pub puts: Vec<(FrontendKey, Frontend)>,
    /// By number, who may use guarded frontends.
    pub sources: Vec<(u32, BTreeSet<ClientPrefix>)>,
    /// Why a frontend could not be removed, or its clients not be let in.
    pub failed: Option<DatapathError>,
    /// Frontends that are gone, or that others came in the place of.
    pub replaced: Vec<Frontend>,
    /// What sets led to that lead elsewhere now.
    pub contents: Vec<Set>,
    /// Ports as they were.
    pub before: Vec<AppliedPort>,
    /// Of ports that are gone.
    pub numbers: Vec<u32>,
    /// Whether frontends had numbers of no port, which others may have, too.
    pub are_strays: bool,
}

impl Staged {
    pub fn had(&self, wanted: &FrontendKey) -> bool {
        self.after.frontends.iter().any(|(key, _)| key == wanted)
    }

    /// Notes that a frontend is in the map.
    pub fn put(&mut self, key: FrontendKey, frontend: Frontend) {
        let frontends = &mut self.after.frontends;
        match frontends.iter_mut().find(|(other, _)| *other == key) {
            Some((_, before)) => {
                self.replaced.push(*before);
                *before = frontend;
            }
            None => frontends.push((key, frontend)),
        }
    }
}

impl<T: Tables> Publisher<T> {
    /// Writes all but frontends; none if there is nothing to write.
    pub(super) fn write(
        &mut self,
        name: ServiceName,
        mut before: Applied,
        ports: Vec<AppliedPort>,
        wanted: Wanted,
        draft: Draft,
    ) -> Option<Staged> {
        for (id, endpoint) in draft.introduced {
            self.backends.introduce(&self.tables, id, endpoint);
        }
        // Those that only finished their connections.
        for id in draft.members.into_iter().chain(draft.drained) {
            self.backends.serves(&self.tables, id);
        }
        for (base, ids) in draft.ranges {
            let slot = |id: &u32| self.backends.slot(&self.tables, *id);
            let slots: Vec<Slot> = ids.iter().map(slot).collect();
            self.tables.put_slots(base, &slots);
        }
        for (index, set) in draft.fresh {
            self.tables.put_set(index, set);
        }
        let is_stray = |number| before.ports.iter().all(|port| port.number != number);
        let are_strays = before.numbers().filter(|number| *number != 0).any(is_stray);
        let mut failed = None;
        let (mut kept, mut removes): (Vec<_>, Vec<_>) = before
            .frontends
            .drain(..)
            .partition(|(key, _)| wanted.contains_key(key));
        // Addresses by themselves go first, and come last. All go before sets change, which are not for them any more.
        removes.sort_by_key(|(key, _)| key.proto != 0);
        let mut replaced = Vec::new();
        for (key, frontend) in removes {
            match self.tables.remove_frontend(&key) {
                Ok(()) => {
                    self.owners.remove(&key);
                    replaced.push(frontend);
                }
                Err(error) => {
                    kept.push((key, frontend));
                    failed = Some(error);
                }
            }
        }
        // Frontends that are gone are nothing to those who are let in from now on, nor are those to come to who was.
        for (number, wanted) in &draft.sources {
            // Without them the frontend lets in fewer than it should, until it is tried again.
            let changed = self.sources.change(&self.tables, *number, wanted);
            failed = failed.or(changed.err());
        }
        let mut contents = Vec::with_capacity(draft.changed.len());
        for (index, set) in draft.changed {
            if !self.broken.remove(&index) {
                contents.push(self.tables.set(index));
            }
            self.tables.put_set(index, set);
        }
        for set in ports.iter().flat_map(AppliedPort::sets) {
            if let Some(refs) = self.set_refs.get_mut(set as usize) {
                *refs += 1;
            }
        }
        let is_new = |(key, frontend): &(FrontendKey, Frontend)| {
            let found = kept.iter().find(|(other, _)| other == key);
            found.is_none_or(|(_, before)| before != frontend)
        };
        let puts: Vec<_> = wanted.into_iter().filter(is_new).collect();
        for (key, _) in &puts {
            self.owners.put(key, &name);
        }
        let gone = |old: &&AppliedPort| ports.iter().all(|port| port.number != old.number);
        let numbers = before
            .ports
            .iter()
            .filter(gone)
            .map(|old| old.number)
            .collect();
        let is_something = !before.ports.is_empty()
            || !ports.is_empty()
            || !puts.is_empty()
            || !kept.is_empty()
            || !replaced.is_empty();
        is_something.then(|| Staged {
            name,
            after: Applied {
                ports,
                frontends: kept,
            },
            puts,
            sources: draft.sources,
            failed,
            replaced,
            contents,
            before: before.ports,
            numbers,
            are_strays,
        })
    }
}
