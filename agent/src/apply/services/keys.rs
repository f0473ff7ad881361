//! What a plan's frontends are in the map.

use super::{
    roles::{self, ROLES},
    sources,
};
use crate::plan::services::{FrontendKind, FrontendPlan, PortPlan, Protocol, ServicePlan, SetPlan};
use sinabro_common::abi::{
    Addr,
    service::{
        FRONTEND_CONSISTENT, FRONTEND_EXTERNAL, FRONTEND_GUARDED, FRONTEND_NODE_PORT,
        FRONTEND_OF_NODE, FrontendKey,
    },
};
use std::{collections::BTreeMap, net::SocketAddr};

/// All of them, and what each is for people.
pub fn keys(plan: &ServicePlan) -> BTreeMap<FrontendKey, SocketAddr> {
    let addresses = plan.addresses.iter().map(|address| {
        let at = SocketAddr::new(*address, 0);
        (FrontendKey::address((*address).into()), at)
    });
    let ports = plan.ports.values().flat_map(|port| {
        let at = |frontend: &FrontendPlan| (key(port.protocol, frontend.at), frontend.at);
        port.frontends.iter().map(at)
    });
    ports.chain(addresses).collect()
}

pub fn key(protocol: Protocol, at: SocketAddr) -> FrontendKey {
    FrontendKey {
        addr: Addr::from(at.ip()),
        port: at.port().to_be_bytes(),
        proto: protocol.number(),
        pad: 0,
    }
}

/// How programs take a frontend.
pub fn flags(plan: &ServicePlan, port: &PortPlan, frontend: &FrontendPlan) -> u32 {
    let [_, outside] = port.sets[family_of(&frontend.at)].of(frontend.kind);
    let how = match outside {
        SetPlan::Consistent(_) if !frontend.is_of_node() => FRONTEND_CONSISTENT,
        _ => 0,
    };
    let who = match frontend.kind {
        FrontendKind::NodePort if frontend.is_of_node() => FRONTEND_OF_NODE,
        FrontendKind::NodePort => FRONTEND_NODE_PORT,
        FrontendKind::LoadBalancer if sources::is_guarded(plan, frontend.at.is_ipv4()) => {
            FRONTEND_EXTERNAL | FRONTEND_GUARDED
        }
        FrontendKind::ExternalIp | FrontendKind::LoadBalancer => FRONTEND_EXTERNAL,
        FrontendKind::ClusterIp => 0,
    };
    who | how
}

/// Which sets the frontends of a family have.
pub fn used_roles(port: &PortPlan, family: usize) -> [bool; ROLES] {
    let mut used = [false; ROLES];
    let of_family = |frontend: &&FrontendPlan| family_of(&frontend.at) == family;
    for frontend in port.frontends.iter().filter(of_family) {
        for role in roles::of_kind(frontend.kind) {
            used[role] = true;
        }
    }
    used
}

/// Index in [`PortPlan::sets`].
pub fn family_of(at: &SocketAddr) -> usize {
    usize::from(at.is_ipv6())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::services::Sets;

    #[test]
    fn addresses_that_a_services_author_names_are_external() {
        let refusing = || Sets {
            internal: SetPlan::Refuse,
            cluster: SetPlan::Refuse,
            external: SetPlan::Refuse,
            draining: [].into(),
        };
        let port = PortPlan {
            protocol: Protocol::Tcp,
            frontends: [].into(),
            sets: [refusing(), refusing()],
            affinity_seconds: 0,
        };
        let of = |kind| {
            let at = "192.0.2.7:80".parse().unwrap();
            flags(&ServicePlan::default(), &port, &FrontendPlan { kind, at })
        };
        assert_eq!(of(FrontendKind::ExternalIp), FRONTEND_EXTERNAL);
        assert_eq!(of(FrontendKind::LoadBalancer), FRONTEND_EXTERNAL);
        assert_eq!(of(FrontendKind::ClusterIp), 0);
        assert_eq!(of(FrontendKind::NodePort), FRONTEND_NODE_PORT);
    }
}
