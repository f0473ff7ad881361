//! The overlay this node should have: one VXLAN device, and for every peer a route and a
//! neighbour per pod range and one FDB entry.
//!
//! All of it is derived from the facts (see [`crate::plan::facts`]); nothing is learnt and no
//! peer is asked, but for who is sent packets without a tunnel ([`Routing::Auto`]). A peer's device
//! MAC follows from its address ([`names::vxlan_mac`]), its gateway address is the first host address
//! of each of its pod ranges. Ranges of a family that
//! this node has no range of get no route: there would be no source address to send from.

use super::{
    conflicts::{Usable, usable},
    facts::{Facts, Node, NodeProblem, first_host},
};
use ipnet::IpNet;
use sinabro_common::{
    api::{Mac, NodeReport},
    names,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
};

/// Outer Ethernet (14), IPv4 (20), UDP (8) and VXLAN (8) headers, RFC 7348 section 5.
pub const OVERHEAD_V4: u32 = 50;
/// The same with an IPv6 header (40).
pub const OVERHEAD_V6: u32 = 70;
/// Least MTU of a link that carries IPv6, RFC 8200 section 5.
const MIN_MTU_V6: u32 = 1280;
/// Least MTU that every IPv4 host must take whole, RFC 791 section 3.1.
const MIN_MTU_V4: u32 = 576;

/// Which way packets between nodes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverlayMode {
    /// Past the kernel's routes and its VXLAN device, where that is possible.
    #[default]
    Auto,
    /// By these alone.
    Kernel,
}

/// What packets between pods of two nodes are in on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// VXLAN, from node to node.
    #[default]
    Tunnel,
    /// Nothing, to nodes on the same link that take that, too,
    Native,
    /// or VXLAN to those from which no answer to such packets comes.
    Auto,
}

impl Routing {
    pub const EVERY: [Self; 3] = [Self::Tunnel, Self::Native, Self::Auto];

    /// Whether packets of other nodes' pods are taken without a tunnel.
    pub fn takes_native(self) -> bool {
        self != Self::Tunnel
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tunnel => "tunnel",
            Self::Native => "native",
            Self::Auto => "auto",
        })
    }
}

/// What the plan needs beside the facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlaySettings {
    /// This node's name.
    pub node: String,
    /// Name of the VXLAN device.
    pub device: String,
    pub vni: u32,
    pub port: u16,
    /// MTU of the link that tunnel packets leave by.
    pub uplink_mtu: u32,
    /// MTU inside the tunnel where it is set by hand.
    pub mtu: Option<u32>,
    pub routing: Routing,
    pub reached: Reached,
}

/// Nodes to which packets of a kind are known to get, as they have answered such; by their tunnel addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Without a tunnel ([`Routing::Auto`]).
    pub natively: BTreeSet<IpAddr>,
    /// In tunnels over IPv6 that have no checksum. None if nobody is asked: then nodes are believed that say they take it.
    pub without_checksum: Option<BTreeSet<IpAddr>>,
}

/// Shared, as there may be thousands.
pub type Reached = Arc<Reach>;

/// A node that takes packets without a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Native {
    /// Its IPv6 address, if it has one.
    pub v6: Option<IpAddr>,
    /// Whether all that is not to find out whether it is reached so is in tunnels.
    pub is_tried: bool,
}

/// The VXLAN device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    pub name: String,
    pub vni: u32,
    pub port: u16,
    /// Outer source address.
    pub local: IpAddr,
    pub mac: Mac,
    pub mtu: u32,
}

/// A route to a peer's pod range: via `gateway` on the device, onlink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteSpec {
    pub gateway: IpAddr,
    /// Preferred source of what this node itself sends.
    pub source: IpAddr,
}

/// How a peer is reached, and what is wrong with its entry; without a tunnel there is something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    pub tunnel: Option<IpAddr>,
    /// Its own address inside the overlay, of the first family that both nodes have pods of.
    pub gateway: Option<IpAddr>,
    pub problems: Vec<NodeProblem>,
}

impl Peer {
    /// What is wrong, in words.
    pub fn problem(&self) -> Option<String> {
        let texts: Vec<_> = self.problems.iter().map(ToString::to_string).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }
}

/// Everything the kernel should hold for the overlay, keyed as the kernel keys it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayPlan {
    pub device: DeviceSpec,
    /// The device's own addresses, each a host prefix.
    pub addresses: BTreeSet<IpAddr>,
    pub routes: BTreeMap<IpNet, RouteSpec>,
    pub neighbours: BTreeMap<IpAddr, Mac>,
    /// Device MAC of a peer → the peer's tunnel address.
    pub fdb: BTreeMap<Mac, IpAddr>,
    /// Every address of this node and of each peer → the tunnel address that stands for it.
    pub nodes: BTreeMap<IpAddr, IpAddr>,
    /// Pod ranges of the same → the tunnel address of their node.
    pub ranges: BTreeMap<IpNet, IpAddr>,
    /// Every other node by name.
    pub peers: BTreeMap<String, Peer>,
    /// Whether packets of other nodes' pods are taken without a tunnel,
    pub takes_native: bool,
    /// and nodes that are sent such, or may be, if they are on the same link, by their tunnel addresses.
    pub native: BTreeMap<IpAddr, Native>,
    /// IPv6 tunnel addresses of peers whose tunnels take UDP without a checksum, and whether it gets there.
    pub zero_checksum: BTreeMap<IpAddr, bool>,
}

/// Why there is no plan at all: something about this node itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("this node, {0}, is not among the known nodes")]
    Unknown(String),
    #[error("this node's own entry, {name}, cannot be used: {problem}")]
    Own { name: String, problem: NodeProblem },
    #[error(
        "an MTU of {mtu} inside the tunnel is less than the {least} needed: the uplink's MTU is {uplink}, the tunnel takes {overhead}"
    )]
    Mtu {
        mtu: u32,
        least: u32,
        uplink: u32,
        overhead: u32,
    },
}

/// MTU inside the tunnel over an uplink with this MTU.
pub fn tunnel_mtu(uplink_mtu: u32, underlay: IpAddr) -> u32 {
    uplink_mtu.saturating_sub(overhead(underlay))
}

fn overhead(underlay: IpAddr) -> u32 {
    match underlay {
        IpAddr::V4(_) => OVERHEAD_V4,
        IpAddr::V6(_) => OVERHEAD_V6,
    }
}

impl OverlayPlan {
    /// The overlay that `facts` ask of this node.
    ///
    /// # Errors
    /// If this node is unknown or its own entry is unusable; what is wrong with a peer is in
    /// [`OverlayPlan::peers`].
    pub fn new(facts: &Facts, settings: &OverlaySettings) -> Result<Self, PlanError> {
        let name = &settings.node;
        let (own, usable, device) = own_end(facts, settings)?;
        let (local, mut problems) = (device.local, usable.problems);

        let mut plan = Self {
            device,
            addresses: own.pod_cidrs.iter().copied().map(first_host).collect(),
            routes: BTreeMap::new(),
            neighbours: BTreeMap::new(),
            fdb: BTreeMap::new(),
            nodes: BTreeMap::new(),
            ranges: BTreeMap::new(),
            peers: BTreeMap::new(),
            // Others send it as long as they have not heard that it ended.
            takes_native: settings.routing.takes_native() || own.native,
            native: BTreeMap::new(),
            zero_checksum: BTreeMap::new(),
        };
        plan.knows(own, local);
        let mut macs = BTreeMap::from([(plan.device.mac, (local, name.as_str()))]);
        for peer in usable.nodes.iter().filter(|node| node.name != *name) {
            let mut entry = Peer {
                tunnel: None,
                gateway: None,
                problems: problems.remove(&peer.name).unwrap_or_default(),
            };
            match tunnel(peer, local, &mut macs) {
                Ok(remote) => {
                    entry.gateway = plan.add(own, peer, remote);
                    let is_reached = match settings.routing {
                        Routing::Tunnel => None,
                        Routing::Native => Some(true),
                        Routing::Auto => Some(settings.reached.natively.contains(&remote)),
                    };
                    if let Some(is_reached) = is_reached.filter(|_| peer.native) {
                        let v6 = peer.addresses.iter().copied().find(IpAddr::is_ipv6);
                        let is_tried = !is_reached;
                        plan.native.insert(remote, Native { v6, is_tried });
                    }
                    if peer.zero_checksum && remote.is_ipv6() {
                        let reached = settings.reached.without_checksum.as_ref();
                        let gets_there = reached.is_none_or(|reached| reached.contains(&remote));
                        plan.zero_checksum.insert(remote, gets_there);
                    }
                    entry.tunnel = Some(remote);
                }
                Err(problem) => entry.problems.push(problem),
            }
            plan.peers.insert(peer.name.clone(), entry);
        }
        let others = problems.into_iter().map(|(peer, problems)| {
            let peer_alone = Peer {
                problems,
                ..Peer::default()
            };
            (peer, peer_alone)
        });
        plan.peers.extend(others);
        Ok(plan)
    }

    fn knows(&mut self, node: &Node, tunnel: IpAddr) {
        self.nodes
            .extend(node.addresses.iter().map(|&a| (a, tunnel)));
        self.ranges
            .extend(node.pod_cidrs.iter().map(|&cidr| (cidr, tunnel)));
    }

    /// Adds the way to a peer; its first gateway.
    fn add(&mut self, own: &Node, peer: &Node, remote: IpAddr) -> Option<IpAddr> {
        let mut first = None;
        let mac = Mac(names::vxlan_mac(remote));
        self.fdb.insert(mac, remote);
        self.knows(peer, remote);
        for &cidr in &peer.pod_cidrs {
            let same_family = |c: &&IpNet| c.addr().is_ipv4() == cidr.addr().is_ipv4();
            let Some(&source) = own.pod_cidrs.iter().find(same_family) else {
                continue;
            };
            let gateway = first_host(cidr);
            let source = first_host(source);
            self.neighbours.insert(gateway, mac);
            self.routes.insert(cidr, RouteSpec { gateway, source });
            first = first.or(Some(gateway));
        }
        first
    }
}

/// The VXLAN device alone, as [`OverlayPlan::new`] has it, for who does not ask for peers.
///
/// # Errors
/// Those of [`OverlayPlan::new`].
pub fn own_device(facts: &Facts, settings: &OverlaySettings) -> Result<DeviceSpec, PlanError> {
    own_end(facts, settings).map(|(_, _, device)| device)
}

/// This node's entry, what can be used of all, and the device.
fn own_end<'a>(
    facts: &'a Facts,
    settings: &OverlaySettings,
) -> Result<(&'a Node, Usable, DeviceSpec), PlanError> {
    let name = &settings.node;
    let own = facts
        .nodes
        .get(name)
        .ok_or_else(|| PlanError::Unknown(name.clone()))?;
    let mut usable = usable(facts, name);
    // The node itself comes first, so whatever is wrong with it is wrong by itself.
    let problem = usable.problems.remove(name);
    if let Some(problem) = problem.and_then(|mut of_it| of_it.pop()) {
        let name = name.clone();
        return Err(PlanError::Own { name, problem });
    }
    let local = underlay_address(own, &usable.nodes);
    let device = device(own, local, settings)?;
    Ok((own, usable, device))
}

/// This node's end of the tunnels.
///
/// A VXLAN device has a socket of one family, so the two ends of a tunnel must choose alike: all
/// nodes choose the family that the first node of the cluster is known by. Whoever comes later
/// cannot change it for the others, and every node finds the same.
fn underlay_address(own: &Node, nodes: &[Node]) -> IpAddr {
    let first = nodes.iter().min_by_key(|node| node.seniority());
    let family = first.and_then(|node| node.addresses.first().copied());
    let ours = family.and_then(|family| own.tunnel_address(family));
    // `own` is sound, so it has an address.
    ours.unwrap_or(own.addresses[0])
}

fn device(own: &Node, local: IpAddr, settings: &OverlaySettings) -> Result<DeviceSpec, PlanError> {
    let mtu = settings
        .mtu
        .unwrap_or_else(|| tunnel_mtu(settings.uplink_mtu, local));
    let v6 = own.pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6());
    let least = if v6 { MIN_MTU_V6 } else { MIN_MTU_V4 };
    if mtu < least {
        return Err(PlanError::Mtu {
            mtu,
            least,
            uplink: settings.uplink_mtu,
            overhead: overhead(local),
        });
    }
    Ok(DeviceSpec {
        name: settings.device.clone(),
        vni: settings.vni,
        port: settings.port,
        local,
        mac: Mac(names::vxlan_mac(local)),
        mtu,
    })
}

/// The peer's tunnel address, if its derived MAC address is nobody else's.
fn tunnel<'a>(
    peer: &'a Node,
    local: IpAddr,
    macs: &mut BTreeMap<Mac, (IpAddr, &'a str)>,
) -> Result<IpAddr, NodeProblem> {
    let family = if local.is_ipv4() { "IPv4" } else { "IPv6" };
    let remote = peer
        .tunnel_address(local)
        .ok_or(NodeProblem::NoAddressOfFamily(family))?;
    let mac = Mac(names::vxlan_mac(remote));
    match macs.get(&mac) {
        Some(&(address, name)) => Err(NodeProblem::DuplicateMac(remote, address, name.to_owned())),
        None => {
            macs.insert(mac, (remote, &peer.name));
            Ok(remote)
        }
    }
}

/// Every known node for people, with what the plan says about it.
pub fn node_reports(facts: &Facts, own: &str, plan: Option<&OverlayPlan>) -> Vec<NodeReport> {
    let report = |node: &Node| {
        let peer = plan.and_then(|plan| plan.peers.get(&node.name));
        NodeReport {
            name: node.name.clone(),
            addresses: node.addresses.clone(),
            pod_cidrs: node.pod_cidrs.clone(),
            local: node.name == own,
            tunnel: peer.and_then(|peer| peer.tunnel),
            gateway: peer.and_then(|peer| peer.gateway),
            probe: None,
            path: None,
            packets: None,
            problem: peer.and_then(Peer::problem),
        }
    };
    let unreadable = |(name, why): (&String, &String)| NodeReport {
        name: name.clone(),
        addresses: Vec::new(),
        pod_cidrs: Vec::new(),
        local: name == own,
        tunnel: None,
        gateway: None,
        probe: None,
        path: None,
        packets: None,
        problem: Some(why.clone()),
    };
    let readable = facts.nodes.values().map(report);
    let mut reports: Vec<_> = readable
        .chain(facts.unreadable.iter().map(unreadable))
        .collect();
    reports.sort_by(|a, b| a.name.cmp(&b.name));
    reports
}
