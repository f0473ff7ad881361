//! What is published, for people: read from the maps.

use super::{
    AppliedPort, Publisher, Usage, backends::at, consistent, packed::Packed, tables::Tables,
};
use crate::{datapath::net_of_prefix, plan::services::ServiceName};
use ipnet::IpNet;
use sinabro_common::{
    abi::service::{
        BACKEND_DRAINING, FRONTEND_CONSISTENT, FRONTEND_GUARDED, Frontend, FrontendKey, Kind,
    },
    api::{
        SERVICE_ENDPOINTS_OF_A_PAGE, SERVICE_ENDPOINTS_OF_A_SET, SERVICES_OF_A_PAGE,
        ServiceBalancing, ServiceClients, ServiceMapUsage, ServiceOutcome, ServicePortReport,
        ServiceReport, ServiceSetReport, ServiceUsage, ServicesPage, protocol_name,
    },
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    ops::Bound,
};

impl<T: Tables> Publisher<T> {
    /// Services after this one, by name, as many as fit into a reply; of only this one if it is named.
    pub fn page(&self, after: Option<&ServiceName>, only: Option<&ServiceName>) -> ServicesPage {
        let mut page = ServicesPage::default();
        let mut endpoints = 0;
        let from = match (only, after) {
            (Some(only), _) => Bound::Included(only),
            (None, Some(after)) => Bound::Excluded(after),
            (None, None) => Bound::Unbounded,
        };
        let names = |name: &ServiceName| only.is_none_or(|only| only == name);
        let published = self
            .services
            .range::<ServiceName, _>((from, Bound::Unbounded));
        let waiting = self
            .waiting
            .range::<ServiceName, _>((from, Bound::Unbounded));
        let mut all: BTreeMap<&ServiceName, Option<&Packed>> = BTreeMap::new();
        all.extend(
            waiting
                .take(SERVICES_OF_A_PAGE + 1)
                .map(|(name, _)| (name, None)),
        );
        let published = published.take(SERVICES_OF_A_PAGE + 1);
        all.extend(published.map(|(name, packed)| (name, Some(packed))));
        for (name, packed) in all {
            if !names(name) {
                break;
            }
            if page.services.len() == SERVICES_OF_A_PAGE || endpoints >= SERVICE_ENDPOINTS_OF_A_PAGE
            {
                page.more = true;
                break;
            }
            let report = self.report(name, packed);
            let sets = report.ports.iter().flat_map(|port| &port.sets);
            endpoints += sets
                .map(|set| set.endpoints.len() + set.frontends.len() + set.source_ranges.len())
                .sum::<usize>();
            page.services.push(report);
        }
        page
    }

    pub fn usage_report(&self) -> ServiceUsage {
        let Usage {
            services,
            waiting,
            endpoints,
            maps,
        } = self.usage();
        let map = |(map, taken, resting, room): (&str, u32, u32, u32)| ServiceMapUsage {
            map: map.into(),
            taken: taken.into(),
            resting: resting.into(),
            capacity: room.into(),
        };
        ServiceUsage {
            services: services as u64,
            waiting: waiting as u64,
            endpoints: endpoints as u64,
            maps: maps.map(map).into(),
        }
    }

    fn report(&self, name: &ServiceName, packed: Option<&Packed>) -> ServiceReport {
        let applied = packed.map(Packed::open).unwrap_or_default();
        let own = applied.frontends.iter().filter(|(key, _)| key.proto == 0);
        let ports = applied.ports.iter();
        ServiceReport {
            namespace: name.namespace().into(),
            name: name.name().into(),
            addresses: own.map(|(key, _)| address(key)).collect(),
            ports: ports
                .map(|port| self.port(port, &applied.frontends))
                .collect(),
            unused: Vec::new(),
            problem: self
                .waiting
                .get(name)
                .map(|error| crate::chain::Chain(error).to_string()),
        }
    }

    fn port(&self, port: &AppliedPort, frontends: &[(FrontendKey, Frontend)]) -> ServicePortReport {
        let proto = port.protocol.number();
        let own = |(key, frontend): &&(FrontendKey, Frontend)| {
            key.proto == proto && frontend.service == port.number
        };
        let mut affinity_seconds = 0;
        let mut sets: BTreeMap<(u32, ServiceClients, bool, bool), Vec<SocketAddr>> =
            BTreeMap::new();
        for (key, frontend) in frontends.iter().filter(own) {
            affinity_seconds = frontend.affinity_seconds;
            let at = SocketAddr::new(address(key), u16::from_be_bytes(key.port));
            let is_guarded = frontend.flags & FRONTEND_GUARDED != 0;
            let clients = match frontend.inside == frontend.outside {
                true => vec![(frontend.inside, ServiceClients::All)],
                false => vec![
                    (frontend.inside, ServiceClients::Inside),
                    (frontend.outside, ServiceClients::Outside),
                ],
            };
            let is_consistent = frontend.flags & FRONTEND_CONSISTENT != 0;
            for (set, clients) in clients {
                let is_consistent = is_consistent && clients == ServiceClients::Outside;
                let of = (set, clients, is_guarded, is_consistent);
                sets.entry(of).or_default().push(at);
            }
        }
        let ranges = self.sources.of(port.number).filter_map(net_of_prefix);
        let ranges: Vec<IpNet> = ranges.take(SERVICE_ENDPOINTS_OF_A_SET).collect();
        let set = |((index, clients, is_guarded, is_consistent), frontends)| {
            let mut report = self.set_report(index, clients, is_consistent, frontends);
            if is_guarded {
                report.source_ranges.clone_from(&ranges);
            }
            report
        };
        let families = port.families.iter().flatten();
        let draining = families.flat_map(|family| &family.draining);
        // What is held for sets that no frontend names is in another that one does.
        let draining = draining.filter_map(|id| self.tables.backend(*id));
        let draining = draining.filter(|backend| backend.flags & BACKEND_DRAINING != 0);
        ServicePortReport {
            name: port.name.to_string(),
            protocol: protocol_name(proto).to_string(),
            affinity_seconds,
            sets: sets.into_iter().map(set).collect(),
            draining: draining
                .map(|backend| at(&backend))
                .take(SERVICE_ENDPOINTS_OF_A_SET)
                .collect(),
        }
    }

    fn set_report(
        &self,
        index: u32,
        clients: ServiceClients,
        is_consistent: bool,
        frontends: Vec<SocketAddr>,
    ) -> ServiceSetReport {
        let set = self.tables.set(index);
        let is_table = is_consistent && set.kind() == Kind::Balance;
        let endpoint = |id| self.tables.backend(id).map(|backend| at(&backend));
        let mut report = ServiceSetReport {
            frontends,
            clients,
            outcome: match set.kind() {
                Kind::Balance => ServiceOutcome::Balance,
                Kind::Refuse => ServiceOutcome::Refuse,
                Kind::Drop => ServiceOutcome::Drop,
            },
            balancing: is_table.then_some(ServiceBalancing::Maglev),
            endpoints: Vec::new(),
            count: 0,
            source_ranges: Vec::new(),
        };
        if is_table {
            let all = consistent::members(&self.tables, set);
            report.count = all.len() as u32;
            // In the order that they have in others.
            let all: BTreeSet<SocketAddr> = all.into_iter().filter_map(endpoint).collect();
            report.endpoints = all.into_iter().take(SERVICE_ENDPOINTS_OF_A_SET).collect();
        } else if report.outcome == ServiceOutcome::Balance {
            report.count = set.count();
            let slots = set.base()..set.base().saturating_add(set.count());
            let ids = slots.map(|slot| self.tables.slot(slot).backend);
            let ids = ids.take(SERVICE_ENDPOINTS_OF_A_SET);
            report.endpoints = ids.filter_map(endpoint).collect();
        }
        report
    }
}

fn address(key: &FrontendKey) -> IpAddr {
    IpAddr::from(key.addr).to_canonical()
}
