//! What is reported about Services.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// Endpoints in one reply, less than twice as many: sixty bytes each fit into a frame.
pub const SERVICE_ENDPOINTS_OF_A_PAGE: usize = 4000;
/// Of those, how many of one set are named.
pub const SERVICE_ENDPOINTS_OF_A_SET: usize = 1000;
/// Services in one reply.
pub const SERVICES_OF_A_PAGE: usize = 200;

/// Some of the Services, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicesPage {
    pub services: Vec<ServiceReport>,
    /// Whether others come after the last of them.
    pub more: bool,
}

/// A Service, as connections to it are translated on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceReport {
    pub namespace: String,
    pub name: String,
    /// Addresses that are its own: what is sent to other ports of them is refused.
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<ServicePortReport>,
    /// Endpoints that some clients, or all, are not led to, and addresses that it does not have here; only if this Service was asked for by name, and the first
    /// [`SERVICE_ENDPOINTS_OF_A_SET`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unused: Vec<UnusedEndpoint>,
    /// Why it is not as it should be; what it was before stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Why an endpoint gets no new connections, or an address none to pass on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnusedEndpoint {
    /// Name of the Service's port.
    pub port: String,
    pub endpoint: SocketAddr,
    /// For people.
    pub why: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePortReport {
    /// Empty where there is one port alone.
    pub name: String,
    /// `tcp`, `udp`, `sctp`.
    pub protocol: String,
    /// Seconds that a client keeps its endpoint; zero: not at all.
    pub affinity_seconds: u32,
    /// What clients send to, by what it leads to.
    pub sets: Vec<ServiceSetReport>,
    /// Endpoints that finish the connections they have.
    pub draining: Vec<SocketAddr>,
}

/// What new connections to some frontends lead to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSetReport {
    pub frontends: Vec<SocketAddr>,
    pub clients: ServiceClients,
    pub outcome: ServiceOutcome,
    /// How an endpoint is chosen; by chance, if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balancing: Option<ServiceBalancing>,
    /// The first ones, [`SERVICE_ENDPOINTS_OF_A_SET`] at most.
    pub endpoints: Vec<SocketAddr>,
    /// How many there are.
    pub count: u32,
    /// Who alone may use these frontends, the first [`SERVICE_ENDPOINTS_OF_A_SET`] ranges; empty: everybody.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub source_ranges: Vec<IpNet>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ServiceClients {
    All,
    /// Pods, and nodes themselves.
    Inside,
    Outside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ServiceOutcome {
    /// To one of the endpoints.
    Balance,
    /// Nobody is there, and the client is told.
    Refuse,
    /// Nobody that this client may have.
    Drop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ServiceBalancing {
    /// By who the client is, the same on all nodes.
    Maglev,
}

/// How much there is of Services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceUsage {
    pub services: u64,
    /// That are not as they should be, for want of room or because another has what they want.
    pub waiting: u64,
    pub endpoints: u64,
    pub maps: Vec<ServiceMapUsage>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceMapUsage {
    pub map: String,
    /// Entries that nobody else can have now.
    pub taken: u64,
    /// Of those, the ones that have been let go a moment ago.
    pub resting: u64,
    pub capacity: u64,
}
