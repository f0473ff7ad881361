//! What is known of Services and their endpoints: no more than the plan looks at.
//!
//! A cluster may have 50,000 Services and 250,000 endpoints, and each node's agent knows them all. So what many have
//! in common (names of ports, where an endpoint is) is there once ([`Shared`]), what few have is apart, and what decides
//! nothing is left out: trafficDistribution, of which hints are what comes to the nodes (KEP-4444), and
//! publishNotReadyAddresses, by which endpoints arrive as ready.

use super::Protocol;
use ipnet::IpNet;
use std::{
    borrow::Borrow,
    collections::HashSet,
    hash::Hash,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

/// A Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Why it is not this proxy's to implement, if it is not. Then nothing else is known of it, but for the cluster
    /// addresses of what another proxy implements.
    pub excluded: Option<Exclusion>,
    pub cluster_v4: Option<Ipv4Addr>,
    pub cluster_v6: Option<Ipv6Addr>,
    /// No two have one name. Most Services have ports as others do.
    pub ports: Arc<[ServicePort]>,
    /// Seconds that a client keeps its endpoint; zero without sessionAffinity.
    pub affinity_seconds: u32,
    /// internalTrafficPolicy: whether cluster addresses lead to this node's endpoints alone.
    pub internal_local: bool,
    /// externalTrafficPolicy: whether what comes from outside goes to this node's endpoints alone.
    pub external_local: bool,
    /// Whether clients outside have their endpoints by who they are, the same by all nodes.
    pub external_consistent: bool,
    /// None if it has nothing of that.
    pub external: Option<Box<External>>,
}

/// Why a Service is not implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exclusion {
    /// It has no address of its own: clusterIP `None`, or none yet.
    Headless,
    /// It is a name for another name.
    ExternalName,
    /// The label `service.kubernetes.io/service-proxy-name` names somebody else.
    OtherProxy,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServicePort {
    /// Empty where there is one port alone.
    pub name: Arc<str>,
    pub protocol: Protocol,
    pub port: u16,
    /// Zero if there is none.
    pub node_port: u16,
}

/// By what addresses besides its own and the nodes' a Service is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct External {
    pub ips: Box<[IpAddr]>,
    /// Those of status.loadBalancer that arrive at the nodes as destination (ipMode VIP, KEP-1860).
    pub load_balancer: Box<[IpAddr]>,
    /// Who may use the latter: anybody, if it is empty.
    pub source_ranges: Box<[IpNet]>,
    /// Where load balancers ask whether this node has endpoints; zero if they do not.
    pub health_check_node_port: u16,
}

/// A part of a Service's endpoints, an EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// As those of many others.
    pub ports: Arc<[SlicePort]>,
    pub endpoints: Box<[Endpoint]>,
}

/// Each of a slice's endpoints has each of its ports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SlicePort {
    /// Of the Service's port, which may have another number.
    pub name: Arc<str>,
    pub protocol: Protocol,
    /// Never zero.
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: IpAddr,
    pub condition: Condition,
    pub place: Arc<Place>,
}

/// What an endpoint can do: `READY`, `SERVING` and `TERMINATING`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Condition(u8);

impl Condition {
    /// Takes new connections.
    pub const READY: Self = Self(1);
    /// Answers, terminating or not.
    pub const SERVING: Self = Self(2);
    /// Is about to end.
    pub const TERMINATING: Self = Self(4);

    /// `self`, and `other` if `is`.
    #[must_use]
    pub const fn with(self, other: Self, is: bool) -> Self {
        match is {
            true => Self(self.0 | other.0),
            false => self,
        }
    }

    pub const fn is(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Finishes what it has, and takes more only where nobody else can (KEP-1669).
    pub const fn is_last_resort(self) -> bool {
        self.is(Self::SERVING) && self.is(Self::TERMINATING)
    }
}

/// Where an endpoint is, and whom it is meant for.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The node's name; empty if that is not known.
    pub node: Box<str>,
    /// Zones whose clients should use it (`hints.forZones`).
    pub for_zones: Box<[Box<str>]>,
    /// Nodes whose clients should use it (`hints.forNodes`).
    pub for_nodes: Box<[Box<str>]>,
}

/// What is equal in many facts, once for all of them.
#[derive(Debug)]
pub struct Shared<T: ?Sized> {
    all: HashSet<Arc<T>>,
    /// At how many those that nobody has any more are looked for.
    sweep_at: usize,
}

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self {
            all: HashSet::new(),
            sweep_at: 64,
        }
    }
}

impl<T: ?Sized + Hash + Eq> Shared<T> {
    /// How many different ones there are, at most twice as many as somebody has.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The one that is there already, if there is one.
    pub fn get<V: Borrow<T> + Into<Arc<T>>>(&mut self, value: V) -> Arc<T> {
        if let Some(known) = self.all.get(value.borrow()) {
            return known.clone();
        }
        if self.all.len() >= self.sweep_at {
            self.all.retain(|known| Arc::strong_count(known) > 1);
            // So each costs a constant part of a sweep.
            self.sweep_at = self.all.len() * 2 + 64;
        }
        let new: Arc<T> = value.into();
        self.all.insert(new.clone());
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_equal_is_there_once_and_as_long_as_somebody_has_it() {
        let mut names = Shared::<str>::default();
        let first = names.get("http");
        assert!(Arc::ptr_eq(&first, &names.get("http")));
        for n in 0..10_000 {
            names.get(n.to_string().as_str());
        }
        assert!(names.all.len() <= 200, "{}", names.all.len());
        assert!(Arc::ptr_eq(&first, &names.get("http")));
    }

    #[test]
    fn an_endpoint_is_small() {
        assert!(size_of::<Endpoint>() <= 32);
        assert!(size_of::<Service>() <= 72);
    }
}
