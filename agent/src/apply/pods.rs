//! Host routes and neighbours of this node's pods, and their links' host side.
//!
//! The CNI plugin makes them with the pod; what is missing or wrong is put back here. Nothing
//! is ever removed: a pod's link takes its entries along.

use super::{
    links::lacks_forwarding,
    routes::{default_metric, ours},
};
use ipnet::IpNet;
use sinabro_common::{
    api::Mac,
    names::{HOST_MAC, ROUTE_PROTOCOL},
};
use sinabro_netlink::{
    Conn, Error, Request, ResultExt,
    distrust::forward_ipv4,
    link::{set_mac, set_mtu},
    neigh::Neigh,
    route::{Route, TABLE_MAIN},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// What the host must hold for one active endpoint: a host route and a permanent neighbour per
/// address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRoute {
    pub addresses: Vec<IpAddr>,
    /// Host-side link.
    pub ifindex: u32,
    /// The pod's MAC address.
    pub mac: Mac,
    /// The link's.
    pub mtu: u32,
}

/// Which pods to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    All,
    /// Those with these links.
    Links(BTreeSet<u32>),
}

impl Which {
    pub fn none() -> Self {
        Self::Links(BTreeSet::new())
    }

    pub fn is_none(&self) -> bool {
        matches!(self, Self::Links(links) if links.is_empty())
    }

    fn holds(&self, pod: &PodRoute) -> bool {
        match self {
            Self::All => true,
            Self::Links(links) => links.contains(&pod.ifindex),
        }
    }
}

/// Puts back what is missing; how much that was, and what failed.
///
/// Where only some pods are to be looked at, their entries are looked up one by one: nearly always
/// all is there, and what a pod costs does not depend on how many nodes the cluster has. The tables
/// are listed for all pods, and where an entry is not as it should be.
pub fn restore(conn: &mut Conn, pods: &[PodRoute], which: &Which) -> (usize, Vec<Error>) {
    let mut errors = Vec::new();
    let mut wrong = Vec::new();
    let mut requests = Vec::new();
    for pod in pods.iter().filter(|pod| which.holds(pod)) {
        // No link: the pod is on its way out, and its record with it.
        match conn.link_by_index(pod.ifindex).ignore_not_found() {
            Ok(Some(link)) if link.up => {
                let has_v4 = pod.addresses.iter().any(IpAddr::is_ipv4);
                if has_v4 && lacks_forwarding(&link) {
                    requests.push(forward_ipv4(link.index));
                }
                // Pods send to this address. systemd gives new links another one (MACAddressPolicy=persistent).
                if link.mac != Some(HOST_MAC) {
                    requests.push(set_mac(link.index, HOST_MAC));
                }
                if link.mtu != pod.mtu {
                    requests.push(set_mtu(link.index, pod.mtu));
                }
            }
            Ok(_) => continue,
            Err(error) => {
                errors.push(error);
                continue;
            }
        }
        if *which == Which::All || !is_right(conn, pod) {
            wrong.push(pod);
        }
    }
    let routes = match wrong.is_empty() {
        true => Vec::new(),
        false => ours(conn).unwrap_or_else(|error| {
            errors.push(error);
            wrong.clear();
            Vec::new()
        }),
    };
    let mut by_host: BTreeMap<IpAddr, Vec<&Route>> = BTreeMap::new();
    for route in routes
        .iter()
        .filter(|r| r.dst.prefix_len() == r.dst.max_prefix_len())
    {
        by_host.entry(route.dst.addr()).or_default().push(route);
    }
    for pod in wrong {
        let missing = pod.addresses.iter().filter_map(|address| {
            let there = by_host.get(address).map_or(&[][..], Vec::as_slice);
            missing_route(pod, *address, there)
        });
        requests.extend(missing);
        match conn.neighs(pod.ifindex) {
            Ok(there) => requests.extend(missing_neighbours(pod, &there)),
            Err(error) => errors.push(error),
        }
    }
    let count = requests.len();
    let outcomes = conn.execute_each(requests);
    // The link may have gone in between.
    let failed = outcomes
        .into_iter()
        .filter_map(|o| o.ignore_not_found().err());
    errors.extend(failed);
    (count, errors)
}

/// Whether all entries of a pod are certainly as they should be. Not if packets to it are routed by
/// another table or protocol: that is for [`restore`] to judge, which lists its own.
fn is_right(conn: &mut Conn, pod: &PodRoute) -> bool {
    pod.addresses.iter().all(|address| {
        let route = conn.route_entry(*address);
        let routed = route.is_ok_and(|route| {
            route.dst == IpNet::from(*address)
                && (route.table, route.protocol) == (TABLE_MAIN, ROUTE_PROTOCOL)
                && leads_to(pod, &route)
        });
        let neigh = conn.neigh(pod.ifindex, *address);
        routed && matches!(neigh, Ok(Some(neigh)) if names(pod, &neigh, *address))
    })
}

fn leads_to(pod: &PodRoute, route: &Route) -> bool {
    route.oif == Some(pod.ifindex)
        && route.gateway.is_none()
        && route.metric == default_metric(route)
}

fn names(pod: &PodRoute, neigh: &Neigh, address: IpAddr) -> bool {
    neigh.address == address && neigh.is_permanent() && neigh.mac == Some(pod.mac.0)
}

fn missing_route(pod: &PodRoute, address: IpAddr, there: &[&Route]) -> Option<Request> {
    if there.iter().any(|route| leads_to(pod, route)) {
        return None;
    }
    let route = Route::to_host(address)
        .dev(pod.ifindex)
        .scope_link()
        .protocol(ROUTE_PROTOCOL);
    // Ours on another link is a leftover of the address's last pod.
    Some(if there.is_empty() {
        route.add()
    } else {
        route.replace()
    })
}

fn missing_neighbours(pod: &PodRoute, there: &[Neigh]) -> Vec<Request> {
    let right = |address: &IpAddr| there.iter().any(|neigh| names(pod, neigh, *address));
    let missing = pod.addresses.iter().filter(|address| !right(address));
    missing
        .map(|address| Neigh::new(pod.ifindex, *address, pod.mac.0).replace())
        .collect()
}
