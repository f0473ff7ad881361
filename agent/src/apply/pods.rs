//! Host routes and neighbours of this node's pods.
//!
//! The CNI plugin makes them with the pod; what is missing or wrong is put back here. Nothing
//! is ever removed: a pod's link takes its entries along.

use super::routes::{default_metric, ours};
use sinabro_common::{api::Mac, names::ROUTE_PROTOCOL};
use sinabro_netlink::{Conn, Error, Request, ResultExt, neigh::Neigh, route::Route};
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
pub fn restore(conn: &mut Conn, pods: &[PodRoute], which: &Which) -> (usize, Vec<Error>) {
    let pods: Vec<_> = pods.iter().filter(|pod| which.holds(pod)).collect();
    if pods.is_empty() {
        return (0, Vec::new());
    }
    let routes = match ours(conn) {
        Ok(routes) => routes,
        Err(error) => return (0, vec![error]),
    };
    let mut by_host: BTreeMap<IpAddr, Vec<&Route>> = BTreeMap::new();
    for route in routes
        .iter()
        .filter(|r| r.dst.prefix_len() == r.dst.max_prefix_len())
    {
        by_host.entry(route.dst.addr()).or_default().push(route);
    }
    let mut requests = Vec::new();
    let mut errors = Vec::new();
    for pod in pods {
        // No link: the pod is on its way out, and its record with it.
        match conn.link_by_index(pod.ifindex).ignore_not_found() {
            Ok(Some(link)) if link.up => {}
            Ok(_) => continue,
            Err(error) => {
                errors.push(error);
                continue;
            }
        }
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

fn missing_route(pod: &PodRoute, address: IpAddr, there: &[&Route]) -> Option<Request> {
    let right = |r: &&Route| {
        r.oif == Some(pod.ifindex) && r.gateway.is_none() && r.metric == default_metric(r)
    };
    if there.iter().any(right) {
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
    let right = |address: &IpAddr| {
        there
            .iter()
            .any(|n| n.address == *address && n.is_permanent() && n.mac == Some(pod.mac.0))
    };
    let missing = pod.addresses.iter().filter(|address| !right(address));
    missing
        .map(|address| Neigh::new(pod.ifindex, *address, pod.mac.0).replace())
        .collect()
}
