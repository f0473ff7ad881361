//! Why an endpoint gets no new connections, or an address none to pass on, for people.

use super::{
    Here, Service, Slice,
    facts::{Condition, Endpoint},
    plan::{endpoints, hinted, is_here},
};
use std::net::SocketAddr;

/// An endpoint that some clients, or all, are not led to; or an address that the Service does not have here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unused {
    /// Name of the Service's port.
    pub port: String,
    pub at: SocketAddr,
    pub why: String,
}

/// All such, by port and address.
pub fn unused(service: &Service, slices: &[&Slice], here: &Here) -> Vec<Unused> {
    if service.excluded.is_some() {
        return Vec::new();
    }
    let mut unused = Vec::new();
    let external = service.external.iter();
    let without = external.filter(|_| here.without_external_ips);
    for ip in without.flat_map(|external| external.ips.iter()) {
        unused.extend(service.ports.iter().map(|port| Unused {
            port: port.name.to_string(),
            at: SocketAddr::new(*ip, port.port),
            why: "externalIPs are turned off on this node (serviceExternalIPs)".into(),
        }));
    }
    let families = [
        service.cluster_v4.map(|_| true),
        service.cluster_v6.map(|_| false),
    ];
    for port in service.ports.iter() {
        for is_ipv4 in families.into_iter().flatten() {
            let all = endpoints(port, slices, is_ipv4, here);
            let meant = hinted(&all, here);
            let is_any_ready = all
                .values()
                .any(|other| other.condition.is(Condition::READY));
            for (at, endpoint) in &all {
                let is_meant = meant.as_ref().is_none_or(|meant| meant.contains(at));
                let why = condition(endpoint, is_any_ready)
                    .map(str::to_owned)
                    .or_else(|| place(service, endpoint, is_meant, here));
                unused.extend(why.map(|why| Unused {
                    port: port.name.to_string(),
                    at: *at,
                    why,
                }));
            }
        }
    }
    unused
}

/// What it cannot do.
fn condition(endpoint: &Endpoint, is_any_ready: bool) -> Option<&'static str> {
    let condition = endpoint.condition;
    if condition.is(Condition::READY) || (condition.is_last_resort() && !is_any_ready) {
        return None;
    }
    Some(match condition.is(Condition::TERMINATING) {
        true if condition.is(Condition::SERVING) => "it terminates, and finishes what it has",
        true => "it terminates",
        false => "it is not ready",
    })
}

/// For whom it is not.
fn place(service: &Service, endpoint: &Endpoint, is_meant: bool, here: &Here) -> Option<String> {
    let place = &endpoint.place;
    let mut whys = Vec::new();
    if !is_meant {
        let hints = match here.zone.is_empty() || place.for_zones.is_empty() {
            true => format!("nodes {}", place.for_nodes.join(", ")),
            false => format!("zones {}", place.for_zones.join(", ")),
        };
        whys.push(format!("it is meant for {hints}"));
    }
    if !is_here(endpoint, here) {
        let policies = [
            (service.internal_local, "internalTrafficPolicy"),
            (service.external_local, "externalTrafficPolicy"),
        ];
        let local = policies.iter().filter(|(is_local, _)| *is_local);
        let local: Vec<&str> = local.map(|(_, policy)| *policy).collect();
        if !local.is_empty() {
            let at = match &*place.node {
                "" => "no node that is known",
                node => node,
            };
            whys.push(format!(
                "{} is Local, and it is on {at}",
                local.join(" and ")
            ));
        }
    }
    (!whys.is_empty()).then(|| whys.join("; "))
}
