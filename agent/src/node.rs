//! This node: what the facts and the kernel together say about it.
//!
//! [`NodeState::find`] joins the node's own entry in the facts with its links: which device leads
//! out, which MTU pods get, which addresses masqueraded packets get. It is asked again on every
//! change of the facts and now and then, so a new address or MTU is followed.

mod ports;
mod sockets;
mod source;
mod uplink;

pub use ports::masquerade_ports;
pub use uplink::Uplink;

use crate::{
    config::Settings,
    datapath::PortSet,
    handover::{ServiceProxy, theirs},
    plan::{
        Facts, Node, OverlayMode, OverlaySettings, PlanError, Reached, UdpMapping,
        facts::NodeProblem, non_masquerade, own_device,
    },
    troubles::trouble,
};
use ipnet::IpNet;
use sinabro_common::{
    abi::{
        Addr,
        config::{
            FLAG_ENDPOINT_INDEPENDENT, FLAG_LAYER3_UPLINKS, FLAG_MASQUERADE,
            FLAG_MASQUERADE_PORTLESS, FLAG_REDIRECT_PEER, FLAG_TUNNELS, NodeConfig,
        },
    },
    api::Trouble,
};
use sinabro_netlink::{Conn, ResultExt as _, addr::Addr as LinkAddr};
use std::{collections::BTreeSet, io, net::IpAddr, sync::Arc};

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("node {0} is not among the known nodes, add it or correct --node-name")]
    Unknown(String),
    #[error("the entry of this node, {0}, cannot be used: {1}")]
    Entry(String, NodeProblem),
    #[error(
        "the entry of this node, {0}, has no pod CIDR; in Kubernetes the controller manager gives one (--allocate-node-cidrs)"
    )]
    NoRange(String),
    #[error("uplink {0} does not exist")]
    NoSuchLink(String),
    #[error("no link has this node's address {0} and there is no default route, set --uplinks")]
    NoUplink(IpAddr),
    #[error(
        "uplink {0} has no IPv4 address to masquerade with, and no other uplink has one: set --masquerade=false or give it one"
    )]
    NoSource(String),
    #[error("cannot read which ports sockets of the node have: {path}: {source}")]
    Sockets { path: String, source: io::Error },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Netlink(#[from] sinabro_netlink::Error),
}

/// What the kernel has to be given and what pods are given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<IpNet>,
    /// The first is the overlay's.
    pub uplinks: Vec<Uplink>,
    /// MTU of all that pods send out of the node: the tunnels', or, where it need not be in one, the uplink's.
    pub mtu: u32,
    /// MTU inside of the tunnels.
    pub tunnel_mtu: u32,
    /// Whether packets get the addresses of uplinks, of each family.
    pub masquerade: Masquerade,
    pub udp_mapping: UdpMapping,
    /// Whether protocols without ports are masqueraded.
    pub masquerade_portless: bool,
    pub non_masquerade: Vec<IpNet>,
    /// Ports that masqueraded connections keep off, besides those of sockets and of pods.
    pub host_ports: PortSet,
    /// Addresses that have the node ports of Services.
    pub node_ports_at: BTreeSet<IpAddr>,
    /// Addresses of this node's links, which answer for themselves also where a Service has one for its cluster address.
    pub link_addresses: BTreeSet<IpAddr>,
    /// What will not work although nothing stands in the way of the rest.
    pub warnings: Vec<Trouble>,
}

/// What this node is, once known, and what stands in the way.
#[derive(Clone, Debug, Default)]
pub struct NodeStatus {
    /// The last state that was applied.
    pub state: Option<Arc<NodeState>>,
    /// Why the latest facts could not be applied.
    pub problem: Option<String>,
}

/// Links that have the cluster addresses of all Services: of kube-proxy with IPVS, and of kube-router's proxy.
const PROXIES_LINKS: [&str; 2] = [theirs::LINK, "kube-dummy-if"];

/// All but those of a link alone (RFC 3927, RFC 4291 §2.5.6), which each pod's link has one of, and those that a proxy has
/// of every Service.
fn link_addresses(conn: &mut Conn, here: &[LinkAddr]) -> sinabro_netlink::Result<BTreeSet<IpAddr>> {
    let mut of_proxies = Vec::new();
    for name in PROXIES_LINKS {
        let link = conn.link_by_name(name).ignore_not_found()?;
        of_proxies.extend(link.map(|link| link.index));
    }
    let others = here
        .iter()
        .filter(|address| !of_proxies.contains(&address.link));
    let others = others.map(|address| address.net.addr());
    Ok(others.filter(|address| !is_of_link(address)).collect())
}

/// Whether an address means something on its link alone.
pub fn is_of_link(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

impl NodeState {
    /// # Errors
    /// If the facts do not hold a usable entry of this node, or no uplink can be found.
    pub fn find(settings: &Settings, facts: &Facts) -> Result<Self, NodeError> {
        let node = own_entry(&settings.node_name, facts)?;
        let mut conn = Conn::new()?;
        let here = conn.addrs(None)?;
        let links = uplink::find(settings, node, &mut conn, &here)?;
        // Both lists have a first entry: own_entry and uplink::find made sure.
        let first = &links[0];
        // The overlay's own plan decides the tunnels' MTU, so that pods and tunnel cannot disagree.
        let device = own_device(facts, &overlay_settings(settings, first.mtu))?;
        let masquerade = Masquerade::of(settings, node);
        let mut sources = source::Sources::new(&mut conn, node, &here);
        let mut uplinks = Vec::with_capacity(links.len());
        for link in &links {
            uplinks.push(Uplink::new(link, masquerade, &mut sources)?);
        }
        if masquerade.v4 && uplinks.iter().all(|uplink| uplink.v4.is_none()) {
            return Err(NodeError::NoSource(first.name.clone()));
        }
        let mut warnings = Vec::new();
        let address = device.local;
        if !here.iter().any(|a| a.net.addr() == address) {
            let text = format!(
                "no link has this node's address {address}, tunnels cannot leave from it: correct its entry in the list of nodes"
            );
            warnings.push(trouble("AddressMissing", text));
        }
        warnings.extend(uplink::unmasqueraded(&uplinks, masquerade, &mut conn)?);
        let host_ports = ports::host_ports(settings)?;
        if masquerade.v4 || masquerade.v6 {
            warnings.extend(ports::too_few(settings, &host_ports));
        }
        warnings.extend(ports::given_to_sockets(settings)?);
        let present: Vec<IpAddr> = here.iter().map(|address| address.net.addr()).collect();
        let node_ports_at = (settings.node_port_addresses).of(&node.addresses, &present);
        let (non_masquerade, left_out) = non_masquerade(facts, &settings.masquerading);
        if left_out > 0 && settings.masquerade {
            let text = format!(
                "{left_out} of the destinations that should see pods' own addresses are masqueraded, there is room for {}: name larger prefixes in nonMasqueradeCIDRs",
                non_masquerade.len()
            );
            warnings.push(trouble("NonMasqueradeFull", text));
        }
        Ok(Self {
            warnings,
            addresses: node.addresses.clone(),
            pod_cidrs: node.pod_cidrs.clone(),
            mtu: pod_mtu(settings, first.mtu, device.mtu),
            tunnel_mtu: device.mtu,
            masquerade,
            udp_mapping: settings.udp_mapping,
            masquerade_portless: settings.masquerade_portless,
            host_ports,
            node_ports_at,
            link_addresses: link_addresses(&mut conn, &here)?,
            non_masquerade: non_masquerade.into_iter().collect(),
            uplinks,
        })
    }

    /// Whether only what follows from the other nodes differs.
    pub fn same_but_for_peers(&self, other: &Self) -> bool {
        let other = Self {
            non_masquerade: self.non_masquerade.clone(),
            ..other.clone()
        };
        *self == other
    }

    /// What never leaves the node, or is the node: its pod ranges and the addresses by which it speaks
    /// to its pods.
    pub fn local_destinations(&self) -> Vec<IpNet> {
        let mut addresses: BTreeSet<IpAddr> = self.addresses.iter().copied().collect();
        addresses.extend(self.uplinks.iter().flat_map(Uplink::sources));
        let ranges = self.pod_cidrs.iter().copied();
        ranges
            .chain(addresses.into_iter().map(IpNet::from))
            .collect()
    }

    /// What the programs read.
    pub fn config(&self, ports: (u16, u16)) -> NodeConfig {
        let first = |address: fn(&Uplink) -> Option<IpAddr>| {
            let first = self.uplinks.iter().find_map(address);
            first.map_or(Addr::UNSPECIFIED, Addr::from)
        };
        let masquerade = match self.masquerade.v4 || self.masquerade.v6 {
            true => FLAG_MASQUERADE,
            false => 0,
        };
        let is_layer3 = |uplink: &Uplink| uplink.header_len == Some(0);
        let layer3 = match self.uplinks.iter().any(is_layer3) {
            true => FLAG_LAYER3_UPLINKS,
            false => 0,
        };
        let mapping = match self.udp_mapping {
            UdpMapping::AddressAndPortDependent => 0,
            UdpMapping::EndpointIndependent => FLAG_ENDPOINT_INDEPENDENT,
        };
        let portless = match self.masquerade_portless {
            true => FLAG_MASQUERADE_PORTLESS,
            false => 0,
        };
        NodeConfig {
            masquerade_v4: first(|uplink| uplink.v4.map(IpAddr::V4)),
            masquerade_v6: first(|uplink| uplink.v6.map(IpAddr::V6)),
            nat_port_min: ports.0,
            nat_port_max: ports.1,
            flags: FLAG_REDIRECT_PEER | FLAG_TUNNELS | masquerade | layer3 | mapping | portless,
        }
    }
}

fn overlay_settings(settings: &Settings, uplink_mtu: u32) -> OverlaySettings {
    OverlaySettings {
        node: settings.node_name.clone(),
        device: sinabro_common::names::VXLAN_LINK.into(),
        vni: settings.vxlan_vni,
        port: settings.vxlan_port,
        uplink_mtu,
        mtu: settings.mtu,
        routing: settings.routing,
        // Of no account for this node's own end.
        reached: Reached::default(),
    }
}

/// What is larger than a tunnel's packets and has to be in one all the same is cut by the stack, or its sender told.
fn pod_mtu(settings: &Settings, uplink: u32, tunnel: u32) -> u32 {
    let needs_none = settings.routing.takes_native()
        && settings.overlay == OverlayMode::Auto
        && settings.service_proxy != ServiceProxy::Off;
    match settings.mtu {
        None if needs_none => uplink,
        _ => tunnel,
    }
}

/// Whether packets to the outside get a node's address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Masquerade {
    pub v4: bool,
    pub v6: bool,
}

impl Masquerade {
    fn of(settings: &Settings, node: &Node) -> Self {
        let cidrs = &node.pod_cidrs;
        let v4 = cidrs.iter().any(|net| net.addr().is_ipv4());
        Self {
            v4: settings.masquerade && v4,
            v6: settings.masquerade && settings.masquerade_ipv6.applies(cidrs),
        }
    }
}

fn own_entry<'a>(name: &str, facts: &'a Facts) -> Result<&'a Node, NodeError> {
    let entry = |problem| NodeError::Entry(name.to_owned(), problem);
    if let Some(why) = facts.unreadable.get(name) {
        return Err(entry(NodeProblem::Unreadable(why.clone())));
    }
    let node = facts.nodes.get(name);
    let node = node.ok_or_else(|| NodeError::Unknown(name.to_owned()))?;
    // Against others it always keeps what it has.
    node.check().map_err(entry)?;
    if node.pod_cidrs.is_empty() {
        return Err(NodeError::NoRange(name.to_owned()));
    }
    Ok(node)
}
