//! What is known about the cluster, and which of it can be used.
//!
//! A source (see [`crate::watch`]) publishes [`Facts`] as it found them. Faults that concern one
//! node cost that node alone, and what two nodes claim costs one of them what is contested:
//! [`super::conflicts`] sorts that out.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

/// One node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    pub name: String,
    /// Addresses of the node on the underlay. The first is the one it is known by.
    pub addresses: Vec<IpAddr>,
    /// Ranges its pods get their addresses from.
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<IpNet>,
    /// When it joined the cluster, in seconds of Unix time; 0 if that is not known.
    #[serde(default, skip_serializing_if = "is_default")]
    pub registered: u64,
    /// Whether its kubelet says that it is ready.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ready: bool,
    /// Whether it takes packets of other nodes' pods without a tunnel.
    #[serde(default, skip_serializing_if = "is_default")]
    pub native: bool,
    /// Whether its tunnels take UDP over IPv6 without a checksum.
    #[serde(
        rename = "udp6ZeroChecksum",
        default,
        skip_serializing_if = "is_default"
    )]
    pub zero_checksum: bool,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Everything known about the cluster, as its source gave it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub nodes: BTreeMap<String, Node>,
    /// Nodes whose entry is not even a node's, each with why.
    pub unreadable: BTreeMap<String, String>,
}

/// What is wrong with a node's entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeProblem {
    #[error("{0}")]
    Unreadable(String),
    #[error("it has no address")]
    NoAddress,
    #[error("it has no {0} address, which this node's tunnels use")]
    NoAddressOfFamily(&'static str),
    #[error("address {0} cannot be a node's: {1}")]
    BadAddress(IpAddr, &'static str),
    #[error("address {0} is also that of node {1}")]
    DuplicateAddress(IpAddr, String),
    #[error("pod CIDR {0} {1}")]
    BadCidr(IpNet, &'static str),
    #[error("pod CIDR {0} overlaps {1} of the same node")]
    OverlapsItself(IpNet, IpNet),
    #[error("pod CIDR {0} overlaps {1} of node {2}")]
    Overlaps(IpNet, IpNet, String),
    #[error("address {0} lies inside pod CIDR {1} of node {2}")]
    InsidePods(IpAddr, IpNet, String),
    #[error("pod CIDR {0} holds address {1} of node {2}, which would be sent into the tunnel")]
    HoldsNode(IpNet, IpAddr, String),
    #[error(
        "tunnel address {0} has the same derived MAC address as {1} of node {2}: give one of them another address"
    )]
    DuplicateMac(IpAddr, IpAddr, String),
}

impl Node {
    /// Who was in the cluster before whom.
    pub(super) fn seniority(&self) -> (u64, &str) {
        (self.registered, &self.name)
    }

    /// The address that peers of the given node send their tunnel packets to.
    pub fn tunnel_address(&self, family_of: IpAddr) -> Option<IpAddr> {
        let v4 = family_of.is_ipv4();
        self.addresses.iter().copied().find(|a| a.is_ipv4() == v4)
    }

    /// What is wrong with the entry by itself.
    ///
    /// # Errors
    /// The first fault.
    pub fn check(&self) -> Result<(), NodeProblem> {
        if self.addresses.is_empty() {
            return Err(NodeProblem::NoAddress);
        }
        for &address in &self.addresses {
            if let Some(why) = address_fault(address) {
                return Err(NodeProblem::BadAddress(address, why));
            }
        }
        for (i, &cidr) in self.pod_cidrs.iter().enumerate() {
            if let Some(why) = cidr_fault(cidr) {
                return Err(NodeProblem::BadCidr(cidr, why));
            }
            if let Some(&other) = self.pod_cidrs[..i].iter().find(|o| overlap(cidr, **o)) {
                return Err(NodeProblem::OverlapsItself(cidr, other));
            }
            holds(cidr, self)?;
        }
        Ok(())
    }
}

impl Facts {
    /// Facts of these nodes. A name given twice keeps its last entry.
    pub fn new(nodes: impl IntoIterator<Item = Node>) -> Self {
        let nodes = nodes.into_iter().map(|node| (node.name.clone(), node));
        Self {
            nodes: nodes.collect(),
            unreadable: BTreeMap::new(),
        }
    }
}

fn holds(cidr: IpNet, node: &Node) -> Result<(), NodeProblem> {
    match node.addresses.iter().find(|a| cidr.contains(*a)) {
        Some(&address) => Err(NodeProblem::HoldsNode(cidr, address, node.name.clone())),
        None => Ok(()),
    }
}

pub(super) fn overlap(a: IpNet, b: IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

/// First host address of a pod range: the node's own on its VXLAN device, kept out of leases.
pub fn first_host(cidr: IpNet) -> IpAddr {
    match cidr {
        IpNet::V4(net) => IpAddr::V4((net.network().to_bits().wrapping_add(1)).into()),
        IpNet::V6(net) => IpAddr::V6((net.network().to_bits().wrapping_add(1)).into()),
    }
}

/// Why an address cannot be a node's.
fn address_fault(address: IpAddr) -> Option<&'static str> {
    if address.is_unspecified() {
        return Some("it is the unspecified address");
    }
    if address.is_loopback() {
        return Some("it is a loopback address");
    }
    if address.is_multicast() {
        return Some("it is a multicast address");
    }
    match address {
        IpAddr::V4(Ipv4Addr::BROADCAST) => Some("it is the broadcast address"),
        IpAddr::V6(a) if a.is_unicast_link_local() => {
            Some("it is link-local and means nothing on another link")
        }
        IpAddr::V6(a) if a.to_ipv4_mapped().is_some() => {
            Some("it is an IPv4-mapped IPv6 address, write the IPv4 address")
        }
        _ => None,
    }
}

/// Why a prefix cannot be a pod range.
pub fn cidr_fault(cidr: IpNet) -> Option<&'static str> {
    if cidr != cidr.trunc() {
        return Some("has bits set beyond its prefix length");
    }
    let host_bits = cidr.max_prefix_len() - cidr.prefix_len();
    if host_bits < 2 {
        return Some("has no room for the node and a pod");
    }
    // Shorter than any range a node was ever given: a slip that would swallow the underlay.
    let shortest = if cidr.addr().is_ipv4() { 8 } else { 16 };
    if cidr.prefix_len() < shortest {
        return Some("is too large for one node");
    }
    let address = cidr.addr();
    if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
        return Some("is not in the unicast address space");
    }
    match address {
        IpAddr::V4(a) if a.is_link_local() || a.octets()[0] >= 240 || a.octets()[0] == 0 => {
            Some("is not in the unicast address space")
        }
        IpAddr::V6(a) if a.is_unicast_link_local() || a.segments()[..5] == [0; 5] => {
            Some("is not in the unicast address space")
        }
        _ => None,
    }
}
