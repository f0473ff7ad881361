//! What a Service leads to: [`ServicePlan`], made of nothing but facts about that Service.
//!
//! - [`facts`]: what is known of Services and their endpoints, small enough for very many;
//! - [`node_ports`]: which of the node's addresses have node ports;
//! - [`plan`]: what that comes to on this node;
//! - [`maglev`]: which endpoint has which part of the clients, where all nodes are to say the same;
//! - [`why`]: why an endpoint has no part in it.

pub mod facts;
pub mod maglev;
pub mod node_ports;
pub mod plan;
pub mod why;

#[cfg(test)]
mod tests;

pub use facts::{Endpoint, Service, Slice};
pub use node_ports::NodePortAddresses;
pub use plan::{Here, plan};
pub use why::unused;

use ipnet::IpNet;
use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

/// Of a Service or any other object that has a namespace. All that were cloned of one are one in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceName(Arc<str>);

impl ServiceName {
    /// Neither has a slash: with one in the namespace it would be another name.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self(format!("{namespace}/{name}").into())
    }

    pub fn namespace(&self) -> &str {
        self.parts().0
    }

    pub fn name(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').unwrap_or(("", &self.0))
    }
}

/// By namespace first, as lists are.
impl Ord for ServiceName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parts().cmp(&other.parts())
    }
}

impl PartialOrd for ServiceName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What has ports and may be a Service's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    /// As IP numbers them.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

/// What the data path is to do for one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePlan {
    /// By the port's name, which is empty where there is one port alone.
    pub ports: BTreeMap<String, PortPlan>,
    /// Cluster addresses, whose other ports refuse.
    pub addresses: BTreeSet<IpAddr>,
    /// Who may use [`FrontendKind::LoadBalancer`] frontends, of either family: anybody, if there is no range of the
    /// frontend's family. All others are dropped, pods and nodes not excepted.
    pub source_ranges: BTreeSet<IpNet>,
    /// What load balancers are told of this node, if they ask.
    pub health_check: Option<HealthCheck>,
}

/// Whether a node has endpoints of a Service with externalTrafficPolicy Local.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// healthCheckNodePort.
    pub port: u16,
    /// Ready ones of this node, each once however many ports it has; of the family that has more of them.
    pub local_endpoints: usize,
}

impl ServicePlan {
    /// Whether there are endpoints, but none for those who send to its cluster addresses, and for those who send from
    /// outside: traffic policies Local, and nobody here.
    pub fn has_none_here(&self) -> [bool; 2] {
        let reached = |port: &PortPlan| {
            let mut frontends = port.frontends.iter();
            frontends.any(|frontend| frontend.kind != FrontendKind::ClusterIp)
        };
        let drops = |which: fn(&Sets) -> &SetPlan, is_asked: &dyn Fn(&PortPlan) -> bool| {
            let ports = self.ports.values().filter(|port| is_asked(port));
            let mut sets = ports.flat_map(|port| &port.sets);
            sets.any(|sets| *which(sets) == SetPlan::Drop)
        };
        [
            drops(|sets| &sets.internal, &|_| true),
            drops(|sets| &sets.external, &reached),
        ]
    }

    /// Every endpoint that takes new connections to the Service's cluster addresses.
    pub fn endpoints(&self) -> BTreeSet<SocketAddr> {
        let sets = self.ports.values().flat_map(|port| &port.sets);
        let balanced = sets.filter_map(|sets| sets.internal.endpoints());
        balanced.flatten().copied().collect()
    }

    /// The same with nothing that takes a table ([`SetPlan::Consistent`]); none if nothing does.
    pub fn by_chance(&self) -> Option<Self> {
        let mut plan = self.clone();
        let sets = plan.ports.values_mut().flat_map(|port| &mut port.sets);
        let mut has_any = false;
        for sets in sets {
            if let SetPlan::Consistent(endpoints) = &mut sets.external {
                sets.external = SetPlan::Balance(std::mem::take(endpoints));
                has_any = true;
            }
        }
        has_any.then_some(plan)
    }
}

/// One port of a Service. Both families have sets of their own: an endpoint is of its address's family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    pub protocol: Protocol,
    pub frontends: BTreeSet<FrontendPlan>,
    /// For IPv4 and for IPv6.
    pub sets: [Sets; 2],
    /// Seconds that a client keeps its endpoint; zero: not at all.
    pub affinity_seconds: u32,
}

/// What is chosen from, by where the client sends to and who it is: [`Sets::of`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sets {
    /// To a cluster address, whoever asks: as internalTrafficPolicy has it.
    pub internal: SetPlan,
    /// To any other frontend, by pods and the nodes themselves: no policy holds for them.
    pub cluster: SetPlan,
    /// To any other frontend, by clients outside of the cluster: as externalTrafficPolicy has it. The only one that may
    /// be [`SetPlan::Consistent`].
    pub external: SetPlan,
    /// Endpoints that serve and are in none of the sets: they take no new connections here and finish those they have.
    pub draining: BTreeSet<SocketAddr>,
}

impl Sets {
    /// What a frontend leads pods and nodes to, and what clients outside.
    pub fn of(&self, kind: FrontendKind) -> [&SetPlan; 2] {
        match kind {
            FrontendKind::ClusterIp => [&self.internal; 2],
            FrontendKind::NodePort | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
                [&self.cluster, &self.external]
            }
        }
    }
}

/// What becomes of a new connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetPlan {
    /// To one of these, by chance; never empty.
    Balance(BTreeSet<SocketAddr>),
    /// To one of these, by who the client is ([`maglev`]); never empty.
    Consistent(BTreeSet<SocketAddr>),
    /// Told that nobody is there: the Service has no endpoint anywhere.
    Refuse,
    /// Without a word: the Service has endpoints, but none that these clients may have.
    Drop,
}

impl SetPlan {
    /// Whom new connections may go to.
    pub fn endpoints(&self) -> Option<&BTreeSet<SocketAddr>> {
        match self {
            Self::Balance(endpoints) | Self::Consistent(endpoints) => Some(endpoints),
            Self::Refuse | Self::Drop => None,
        }
    }
}

/// An address and port that clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendPlan {
    pub kind: FrontendKind,
    pub at: SocketAddr,
}

impl FrontendPlan {
    /// Whether it is for the node's own processes alone: each pod has loopback addresses of its own.
    pub const fn is_of_node(&self) -> bool {
        matches!(self.kind, FrontendKind::NodePort) && self.at.ip().is_loopback()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendKind {
    ClusterIp,
    /// At one of the node's addresses, or at loopback.
    NodePort,
    ExternalIp,
    LoadBalancer,
}
