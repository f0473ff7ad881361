//! Who may use guarded frontends, by the number of a Service's port. It is all here once more, beside the map: few Services
//! have any.

use super::tables::Tables;
use crate::{
    datapath::{ClientPrefix, DatapathError, client_prefixes},
    plan::services::{FrontendKind, PortPlan, ServicePlan},
};
use ipnet::IpNet;
use sinabro_common::abi::Addr;
use std::collections::{BTreeSet, HashMap};

pub struct Sources {
    by_number: HashMap<u32, BTreeSet<ClientPrefix>>,
    /// Of all numbers.
    count: usize,
    /// Entries that the map takes.
    room: usize,
}

impl Sources {
    /// Those of the map.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn restore(tables: &impl Tables) -> Result<Self, DatapathError> {
        let mut sources = Self {
            by_number: HashMap::new(),
            count: 0,
            room: tables.source_room() as usize,
        };
        for (number, prefix) in tables.sources()? {
            sources.note(number, prefix);
        }
        Ok(sources)
    }

    fn note(&mut self, number: u32, prefix: ClientPrefix) {
        if self.by_number.entry(number).or_default().insert(prefix) {
            self.count += 1;
        }
    }

    /// Entries, and room for them.
    pub fn usage(&self) -> (u32, u32) {
        (self.count as u32, self.room as u32)
    }

    /// Of a number.
    pub fn of(&self, number: u32) -> impl Iterator<Item = &ClientPrefix> {
        self.by_number.get(&number).into_iter().flatten()
    }

    /// Numbers that have some.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.by_number.keys().copied()
    }

    /// Whether there is room for those of these that are not there.
    pub fn fit(&self, wanted: &[(u32, BTreeSet<ClientPrefix>)]) -> bool {
        let missing = |(number, wanted): &(u32, BTreeSet<ClientPrefix>)| {
            let present = self.by_number.get(number);
            let is_new =
                |prefix: &&ClientPrefix| present.is_none_or(|present| !present.contains(*prefix));
            wanted.iter().filter(is_new).count()
        };
        self.count + wanted.iter().map(missing).sum::<usize>() <= self.room
    }

    /// Has frontends that are guarded let in these and nobody else. Of a family that has none of these nobody is kept
    /// out yet: its frontends are about to be for everybody, or gone.
    ///
    /// # Errors
    /// If one could not be written or removed; those before it were.
    pub fn change(
        &mut self,
        tables: &impl Tables,
        number: u32,
        wanted: &BTreeSet<ClientPrefix>,
    ) -> Result<(), DatapathError> {
        for prefix in wanted {
            let present = self.by_number.get(&number);
            if !present.is_some_and(|present| present.contains(prefix)) {
                tables.put_source(number, prefix)?;
                self.note(number, *prefix);
            }
        }
        let families = [true, false].map(|v4| wanted.iter().any(|prefix| is_ipv4(prefix) == v4));
        self.keep(tables, number, |prefix| {
            wanted.contains(prefix) || !families[usize::from(!is_ipv4(prefix))]
        })
    }

    /// Keeps out all others.
    ///
    /// # Errors
    /// If one could not be removed; those before it were.
    pub fn keep(
        &mut self,
        tables: &impl Tables,
        number: u32,
        is_kept: impl Fn(&ClientPrefix) -> bool,
    ) -> Result<(), DatapathError> {
        let Some(present) = self.by_number.get_mut(&number) else {
            return Ok(());
        };
        let others = present.iter().filter(|prefix| !is_kept(prefix));
        for prefix in others.copied().collect::<Vec<_>>() {
            tables.remove_source(number, &prefix)?;
            present.remove(&prefix);
            self.count -= 1;
        }
        if present.is_empty() {
            self.by_number.remove(&number);
        }
        Ok(())
    }

    /// Forgets numbers that nobody has.
    ///
    /// # Errors
    /// If something could not be removed; it can be called again.
    pub fn sweep(
        &mut self,
        tables: &impl Tables,
        is_somebodys: impl Fn(u32) -> bool,
    ) -> Result<(), DatapathError> {
        let left: Vec<_> = self
            .numbers()
            .filter(|number| !is_somebodys(*number))
            .collect();
        let mut left = left.into_iter();
        left.try_for_each(|number| self.keep(tables, number, |_| false))
    }
}

/// By where it is in the map; no entry is of both.
fn is_ipv4((len, addr): &ClientPrefix) -> bool {
    *len >= 96 && Addr(*addr).as_v4().is_some()
}

/// Whether not everybody may use a Service's load balancers of that family. Ranges of the other one have no say, as with
/// kube-proxy.
pub fn is_guarded(plan: &ServicePlan, is_ipv4: bool) -> bool {
    let mut ranges = of_family(plan, is_ipv4).peekable();
    ranges.peek().is_some() && ranges.all(|range| range.prefix_len() > 0)
}

/// Who may use a port's guarded frontends, of both families.
pub fn wanted(plan: &ServicePlan, port: &PortPlan) -> BTreeSet<ClientPrefix> {
    let has_any = |is_ipv4: &bool| {
        port.frontends.iter().any(|frontend| {
            frontend.kind == FrontendKind::LoadBalancer && frontend.at.is_ipv4() == *is_ipv4
        })
    };
    let families = [true, false].into_iter().filter(has_any);
    let guarded = families.filter(|is_ipv4| is_guarded(plan, *is_ipv4));
    let ranges = guarded.flat_map(|is_ipv4| of_family(plan, is_ipv4));
    ranges.flat_map(client_prefixes).collect()
}

fn of_family(plan: &ServicePlan, is_ipv4: bool) -> impl Iterator<Item = &IpNet> {
    let ranges = plan.source_ranges.iter();
    ranges.filter(move |range| range.addr().is_ipv4() == is_ipv4)
}
