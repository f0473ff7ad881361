//! Facts about one Service become what the data path does for it on this node.
//!
//! Which endpoints take connections is what kube-proxy decides by the same facts (`CategorizeEndpoints`): for the
//! cluster the ready ones, by hints those that are meant for this node or its zone; for this node alone the ready ones that are
//! here; and in either case, if there are none, those that serve although they terminate. The two families know nothing
//! of each other.
//!
//! Where clients outside have their endpoints by who they are, hints are not for them: nodes of different zones would lead
//! one client to different endpoints.

use super::{
    FrontendKind, FrontendPlan, HealthCheck, PortPlan, ServicePlan, SetPlan, Sets,
    facts::{Condition, Endpoint, External, Place, Service, ServicePort, Slice},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// Where this node is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Here {
    /// The node's name; empty if it has none, and then no endpoint is here.
    pub node: String,
    /// Empty if it is in none.
    pub zone: String,
    /// Its addresses that have node ports, besides loopback.
    pub node_ports_at: BTreeSet<IpAddr>,
    /// Addresses of its links. A cluster address among them is that link's, as NodeLocal DNSCache has it.
    pub link_addresses: BTreeSet<IpAddr>,
    /// Whether Services go without their externalIPs here.
    pub without_external_ips: bool,
}

/// One Service's plan, in which neither the order of slices and endpoints shows nor what is there twice.
pub fn plan(service: &Service, slices: &[&Slice], here: &Here) -> ServicePlan {
    if service.excluded.is_some() {
        return ServicePlan::default();
    }
    let v4 = service.cluster_v4.map(IpAddr::from);
    let v6 = service.cluster_v6.map(IpAddr::from);
    let addresses: BTreeSet<IpAddr> = v4.into_iter().chain(v6).collect();
    let external = service.external.as_deref();
    let port = |port: &ServicePort| {
        let sets = |address: Option<IpAddr>| match address {
            Some(address) => sets(
                service,
                &endpoints(port, slices, address.is_ipv4(), here),
                here,
            ),
            None => Sets::refusing(),
        };
        let plan = PortPlan {
            protocol: port.protocol,
            frontends: frontends(service, port, &addresses, here),
            sets: [sets(v4), sets(v6)],
            affinity_seconds: service.affinity_seconds,
        };
        (port.name.to_string(), plan)
    };
    ServicePlan {
        ports: service.ports.iter().map(port).collect(),
        source_ranges: external.map_or_else(BTreeSet::new, |external| {
            external.source_ranges.iter().copied().collect()
        }),
        health_check: external.and_then(|external| health_check(external, slices, here)),
        addresses: addresses
            .into_iter()
            .filter(|address| !here.link_addresses.contains(address))
            .collect(),
    }
}

fn health_check(external: &External, slices: &[&Slice], here: &Here) -> Option<HealthCheck> {
    let port = external.health_check_node_port;
    let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter());
    let local = endpoints
        .filter(|endpoint| endpoint.condition.is(Condition::READY) && is_here(endpoint, here));
    let addresses: BTreeSet<IpAddr> = local.map(|endpoint| endpoint.address).collect();
    let v4 = addresses.iter().filter(|address| address.is_ipv4()).count();
    (port != 0).then_some(HealthCheck {
        port,
        local_endpoints: v4.max(addresses.len() - v4),
    })
}

/// Where a port is reached. A Service without a cluster address of a family has nothing in that family.
fn frontends(
    service: &Service,
    port: &ServicePort,
    addresses: &BTreeSet<IpAddr>,
    here: &Here,
) -> BTreeSet<FrontendPlan> {
    let mut frontends = BTreeSet::new();
    let mut add = |kind, address, port| {
        let at = SocketAddr::new(address, port);
        frontends.insert(FrontendPlan { kind, at });
    };
    for address in addresses {
        if !here.link_addresses.contains(address) {
            add(FrontendKind::ClusterIp, *address, port.port);
        }
        if port.node_port != 0 {
            let loopback: IpAddr = match address {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            };
            let of_family = |at: &&IpAddr| at.is_ipv4() == address.is_ipv4();
            let at = here.node_ports_at.iter().filter(of_family);
            for at in at.chain([&loopback]) {
                add(FrontendKind::NodePort, *at, port.node_port);
            }
        }
    }
    let Some(external) = &service.external else {
        return frontends;
    };
    let kinds = [
        (FrontendKind::ExternalIp, &external.ips),
        (FrontendKind::LoadBalancer, &external.load_balancer),
    ];
    for (kind, at) in kinds {
        if kind == FrontendKind::ExternalIp && here.without_external_ips {
            continue;
        }
        for address in at {
            let of_family = |own: &IpAddr| own.is_ipv4() == address.is_ipv4();
            if addresses.iter().any(of_family) {
                add(kind, *address, port.port);
            }
        }
    }
    frontends
}

/// The endpoints of one port and family. Slices are matched by the port's name, not its number (KEP-752).
pub(super) fn endpoints<'a>(
    port: &ServicePort,
    slices: &[&'a Slice],
    v4: bool,
    here: &Here,
) -> BTreeMap<SocketAddr, &'a Endpoint> {
    let mut endpoints = BTreeMap::new();
    for slice in slices {
        let ports = slice.ports.iter();
        for slice_port in
            ports.filter(|other| other.name == port.name && other.protocol == port.protocol)
        {
            for endpoint in slice.endpoints.iter() {
                if endpoint.address.is_ipv4() != v4 {
                    continue;
                }
                let at = SocketAddr::new(endpoint.address, slice_port.port);
                match endpoints.entry(at) {
                    Entry::Vacant(free) => {
                        free.insert(endpoint);
                    }
                    Entry::Occupied(mut known) => {
                        if rank(endpoint, here) > rank(known.get(), here) {
                            known.insert(endpoint);
                        }
                    }
                }
            }
        }
    }
    endpoints
}

/// Which of two that have one address is believed: an address may be a new pod's while the old one still
/// terminates, and an endpoint is in two slices while it moves. Ends in what makes no two different ones equal.
fn rank<'a>(endpoint: &'a Endpoint, here: &Here) -> (Reverse<bool>, bool, bool, bool, &'a Place) {
    let condition = endpoint.condition;
    (
        Reverse(condition.is(Condition::TERMINATING)),
        condition.is(Condition::READY),
        condition.is(Condition::SERVING),
        is_here(endpoint, here),
        &endpoint.place,
    )
}

pub(super) fn is_here(endpoint: &Endpoint, here: &Here) -> bool {
    !here.node.is_empty() && *endpoint.place.node == *here.node
}

fn sets(service: &Service, endpoints: &BTreeMap<SocketAddr, &Endpoint>, here: &Here) -> Sets {
    let cluster = usable(endpoints, |_| true);
    if cluster.is_empty() {
        let mut sets = Sets::refusing();
        sets.draining = serving(endpoints).collect();
        return sets;
    }
    let balance = |set: BTreeSet<SocketAddr>| match set.is_empty() {
        true => SetPlan::Drop,
        false => SetPlan::Balance(set),
    };
    let local = || balance(usable(endpoints, |endpoint| is_here(endpoint, here)));
    let meant = balance(hinted(endpoints, here).unwrap_or_else(|| cluster.clone()));
    let policy = |is_local| match is_local {
        true => local(),
        false => meant.clone(),
    };
    let external = match service.external_consistent {
        false => policy(service.external_local),
        true if service.external_local => local().by_client(),
        true => SetPlan::Consistent(cluster),
    };
    let mut sets = Sets {
        internal: policy(service.internal_local),
        external,
        cluster: meant,
        draining: BTreeSet::new(),
    };
    let is_new = |at: &SocketAddr| {
        let all = [&sets.internal, &sets.cluster, &sets.external];
        let mut all = all.into_iter().filter_map(SetPlan::endpoints);
        !all.any(|set| set.contains(at))
    };
    sets.draining = serving(endpoints).filter(is_new).collect();
    sets
}

/// The ready ones of those that are asked for; if there are none, those that serve although they terminate.
fn usable(
    endpoints: &BTreeMap<SocketAddr, &Endpoint>,
    wanted: impl Fn(&Endpoint) -> bool,
) -> BTreeSet<SocketAddr> {
    let those = |which: fn(Condition) -> bool| -> BTreeSet<SocketAddr> {
        let fit = endpoints.iter().filter(|(_, endpoint)| wanted(endpoint));
        fit.filter(|(_, endpoint)| which(endpoint.condition))
            .map(|(at, _)| *at)
            .collect()
    };
    let ready = those(|condition| condition.is(Condition::READY));
    match ready.is_empty() {
        true => those(Condition::is_last_resort),
        false => ready,
    }
}

/// The ready endpoints that are meant for this node, else those for its zone; none if hints do not say so, which
/// they do only where every ready endpoint has some and one of them is meant for here (KEP-2433, KEP-4444).
pub(super) fn hinted(
    endpoints: &BTreeMap<SocketAddr, &Endpoint>,
    here: &Here,
) -> Option<BTreeSet<SocketAddr>> {
    let meant_for = |hints: fn(&Place) -> &[Box<str>], name: &str| {
        let mut meant = BTreeSet::new();
        for (at, endpoint) in endpoints {
            if !endpoint.condition.is(Condition::READY) {
                continue;
            }
            let hints = hints(&endpoint.place);
            if hints.is_empty() {
                return None;
            }
            if hints.iter().any(|hint| **hint == *name) {
                meant.insert(*at);
            }
        }
        (!meant.is_empty()).then_some(meant)
    };
    meant_for(|place| &place.for_nodes, &here.node)
        .or_else(|| meant_for(|place| &place.for_zones, &here.zone))
}

fn serving(endpoints: &BTreeMap<SocketAddr, &Endpoint>) -> impl Iterator<Item = SocketAddr> {
    let serving = endpoints
        .iter()
        .filter(|(_, endpoint)| endpoint.condition.is(Condition::SERVING));
    serving.map(|(at, _)| *at)
}

impl SetPlan {
    /// The same endpoints, but chosen by who the client is.
    fn by_client(self) -> Self {
        match self {
            Self::Balance(endpoints) => Self::Consistent(endpoints),
            other => other,
        }
    }
}

impl Sets {
    /// Of a port without endpoints.
    pub(super) fn refusing() -> Self {
        Self {
            internal: SetPlan::Refuse,
            cluster: SetPlan::Refuse,
            external: SetPlan::Refuse,
            draining: BTreeSet::new(),
        }
    }
}
