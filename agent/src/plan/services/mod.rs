//! What a Service leads to: [`ServicePlan`], made of nothing but facts about that Service.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
};

/// Of a Service or any other object that has a namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceName {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
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

/// What is chosen from, by who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sets {
    /// Pods and the nodes themselves.
    pub inside: SetPlan,
    /// Clients outside of the cluster.
    pub outside: SetPlan,
    /// Endpoints that take no new connections and finish those they have.
    pub draining: BTreeSet<SocketAddr>,
}

/// What becomes of a new connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetPlan {
    /// To one of these; never empty.
    Balance(BTreeSet<SocketAddr>),
    /// Told that nobody is there: the Service has no endpoint anywhere.
    Refuse,
    /// Without a word: the Service has endpoints, but none that these clients may have.
    Drop,
}

/// An address and port that clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendPlan {
    pub kind: FrontendKind,
    pub at: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendKind {
    ClusterIp,
}
