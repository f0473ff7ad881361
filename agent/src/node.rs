//! This node: what the facts and the kernel together say about it.
//!
//! [`NodeState::find`] joins the node's own entry in the facts with its links: which device leads
//! out, which MTU pods get, which address masqueraded packets get. It is asked again on every
//! change of the facts and now and then, so a new address or MTU is followed.

use crate::{
    config::Settings,
    plan::{
        Facts, Node, OverlayPlan, OverlaySettings, PlanError, facts::NodeProblem, non_masquerade,
    },
};
use ipnet::IpNet;
use sinabro_common::abi::{
    Addr,
    config::{FLAG_MASQUERADE, FLAG_REDIRECT_PEER, FLAG_TUNNELS, NodeConfig},
};
use sinabro_netlink::{Conn, Family, Link, ResultExt, addr::Addr as LinkAddr, sysctl};
use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

/// Destinations that never get a translated source: link-local, multicast, broadcast.
const NEVER_MASQUERADED: [&str; 5] = [
    "169.254.0.0/16",
    "224.0.0.0/4",
    "255.255.255.255/32",
    "fe80::/10",
    "ff00::/8",
];
/// Fewer translated ports than this would fail under ordinary load.
const MIN_PORTS: u32 = 1024;

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
        "uplink {0} has no IPv4 address to masquerade with, set --masquerade=false or give it one"
    )]
    NoSource(String),
    #[error(
        "net.ipv4.ip_local_port_range ends at {0} and leaves too few ports above for masquerade, lower it or set --masquerade-ports"
    )]
    NoPorts(u32),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Netlink(#[from] sinabro_netlink::Error),
}

/// What the kernel has to be given and what pods are given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<IpNet>,
    /// The first is the overlay's.
    pub uplinks: Vec<Uplink>,
    /// MTU of the pods' interfaces.
    pub mtu: u32,
    pub masquerade_v4: Option<Ipv4Addr>,
    pub non_masquerade: Vec<IpNet>,
    /// What will not work although nothing stands in the way of the rest.
    pub warnings: Vec<String>,
}

/// What this node is, once known, and what stands in the way.
#[derive(Clone, Debug, Default)]
pub struct NodeStatus {
    /// The last state that was applied.
    pub state: Option<Arc<NodeState>>,
    /// Why the latest facts could not be applied.
    pub problem: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    pub name: String,
    pub index: u32,
}

impl NodeState {
    /// # Errors
    /// If the facts do not hold a usable entry of this node, or no uplink can be found.
    pub fn find(settings: &Settings, facts: &Facts) -> Result<Self, NodeError> {
        let node = own_entry(&settings.node_name, facts)?;
        let mut conn = Conn::new()?;
        let links = uplinks(settings, node, &mut conn)?;
        // Both lists have a first entry: own_entry and uplinks made sure.
        let first = &links[0];
        // The overlay's own plan decides the MTU, so that pods and tunnel cannot disagree.
        let plan = OverlayPlan::new(facts, &overlay_settings(settings, first.mtu))?;
        let here = conn.addrs(None)?;
        let masquerade_v4 = match settings.masquerade && node.pod_cidrs.iter().any(is_v4) {
            true => Some(source_v4(node, first, &here)?),
            false => None,
        };
        let mut warnings = Vec::new();
        let address = plan.device.local;
        if !here.iter().any(|a| a.net.addr() == address) {
            warnings.push(format!(
                "no link has this node's address {address}, tunnels cannot leave from it: correct its entry in the list of nodes"
            ));
        }
        if masquerade_v4.is_some() {
            warnings.extend(unmasqueraded_way_out(&links, &mut conn)?);
        }
        Ok(Self {
            warnings,
            addresses: node.addresses.clone(),
            pod_cidrs: node.pod_cidrs.clone(),
            mtu: plan.device.mtu,
            masquerade_v4,
            non_masquerade: unmasqueraded(facts, settings),
            uplinks: links
                .into_iter()
                .map(|link| Uplink {
                    name: link.name,
                    index: link.index,
                })
                .collect(),
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

    /// What the programs read.
    pub fn config(&self, ports: (u16, u16)) -> NodeConfig {
        let masquerade = match self.masquerade_v4 {
            Some(_) => FLAG_MASQUERADE,
            None => 0,
        };
        let source = self.masquerade_v4.map(IpAddr::V4);
        NodeConfig {
            masquerade_v4: source.map_or(Addr::UNSPECIFIED, Addr::from),
            masquerade_v6: Addr::UNSPECIFIED,
            nat_port_min: ports.0,
            nat_port_max: ports.1,
            flags: FLAG_REDIRECT_PEER | FLAG_TUNNELS | masquerade,
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
    }
}

fn is_v4(net: &IpNet) -> bool {
    net.addr().is_ipv4()
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

/// The devices that lead out: as set, else the one with the node's address, else that of the
/// default route.
fn uplinks(settings: &Settings, node: &Node, conn: &mut Conn) -> Result<Vec<Link>, NodeError> {
    if !settings.uplinks.is_empty() {
        let find = |name: &String| {
            let link = conn.link_by_name(name).ignore_not_found()?;
            link.ok_or_else(|| NodeError::NoSuchLink(name.clone()))
        };
        return settings.uplinks.iter().map(find).collect();
    }
    let addrs = conn.addrs(None)?;
    let holder = |address: &IpAddr| addrs.iter().find(|a| a.net.addr() == *address);
    if let Some(addr) = node.addresses.iter().find_map(holder) {
        let link = conn.link_by_index(addr.link)?;
        // On loopback in setups that route to the node: the way out is another.
        if !link.loopback {
            return Ok(vec![link]);
        }
    }
    let first = node.addresses[0];
    for family in [Family::of(first), Family::V4, Family::V6] {
        if let Some(oif) = conn.default_route(family)?.and_then(|route| route.oif) {
            return Ok(vec![conn.link_by_index(oif)?]);
        }
    }
    Err(NodeError::NoUplink(first))
}

/// The link of the IPv4 default route, if it is not an uplink.
fn unmasqueraded_way_out(uplinks: &[Link], conn: &mut Conn) -> Result<Option<String>, NodeError> {
    let route = conn.default_route(Family::V4)?;
    let Some(out) = route.and_then(|route| route.oif) else {
        return Ok(None);
    };
    if uplinks.iter().any(|uplink| uplink.index == out) {
        return Ok(None);
    }
    let name = conn.link_by_index(out)?.name;
    Ok(Some(format!(
        "the IPv4 default route leaves by {name}, which is not an uplink: what pods send there is not masqueraded, see --uplinks"
    )))
}

/// Source of masqueraded packets: the node's own IPv4 address if a link has it (replies to
/// another would not come here), else the uplink's first.
fn source_v4(node: &Node, uplink: &Link, here: &[LinkAddr]) -> Result<Ipv4Addr, NodeError> {
    let v4 = |address: IpAddr| match address {
        IpAddr::V4(a) => Some(a),
        IpAddr::V6(_) => None,
    };
    let held = |address: &IpAddr| here.iter().any(|a| a.net.addr() == *address);
    let own = node.addresses.iter().copied().filter(held).filter_map(v4);
    let global = |a: &&LinkAddr| a.link == uplink.index && a.scope == libc::RT_SCOPE_UNIVERSE;
    let of_uplink = here.iter().filter(global).map(|a| a.net.addr());
    own.chain(of_uplink.filter_map(v4))
        .next()
        .ok_or_else(|| NodeError::NoSource(uplink.name.clone()))
}

fn unmasqueraded(facts: &Facts, settings: &Settings) -> Vec<IpNet> {
    let never = NEVER_MASQUERADED
        .iter()
        .filter_map(|text| text.parse().ok());
    let configured = settings.non_masquerade_cidrs.iter().copied();
    let all: Vec<_> = configured.chain(never).collect();
    non_masquerade(facts, &all).into_iter().collect()
}

/// The ports that masqueraded flows get: as set, else those above what the node's own sockets
/// are given, so that the two never claim the same.
///
/// # Errors
/// If too few are left.
pub fn masquerade_ports(settings: &Settings) -> Result<(u16, u16), NodeError> {
    if let Some(ports) = settings.masquerade_ports {
        return Ok(ports);
    }
    let range = sysctl::read(&["net", "ipv4", "ip_local_port_range"])?;
    // Two numbers, by the kernel's own format.
    let last: u32 = range
        .split_whitespace()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(u32::from(u16::MAX));
    let max = u32::from(u16::MAX);
    if last + MIN_PORTS > max {
        return Err(NodeError::NoPorts(last));
    }
    Ok((last as u16 + 1, u16::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_netlink::{link, netns::in_fresh, route::Route, veth::Veth};

    /// Two links that are up, each with its address, and a list of nodes with this one's.
    fn find(
        links: [&str; 2],
        addresses: &[&str],
        default: Option<usize>,
        args: &[&str],
    ) -> Result<NodeState, NodeError> {
        let entry = Node {
            name: "n1".into(),
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            pod_cidrs: vec!["10.9.0.0/24".parse().unwrap()],
            ..Node::default()
        };
        let args = ["sinabro-agent", "--node-name=n1", "--nodes=/n"]
            .iter()
            .chain(args);
        let settings = Settings::load(args.copied()).unwrap();
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            conn.create_veth(&Veth {
                name: "u0",
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1500,
                peer_name: "u1",
                peer_mac: [2, 0, 0, 0, 0, 2],
                peer_netns: None,
            })
            .unwrap();
            for (name, net) in ["u0", "u1"].into_iter().zip(links) {
                let index = conn.link_by_name(name).unwrap().index;
                conn.execute(link::set_up(index)).unwrap();
                let address = LinkAddr::new(index, net.parse().unwrap());
                conn.execute(address.add()).unwrap();
            }
            if let Some(n) = default {
                let index = conn.link_by_name(["u0", "u1"][n]).unwrap().index;
                let route = Route::default_of(Family::V4).dev(index).scope_link();
                conn.execute(route.add()).unwrap();
            }
            NodeState::find(&settings, &Facts::new([entry]))
        })
    }

    const LINKS: [&str; 2] = ["192.0.2.1/24", "198.51.100.1/24"];

    fn source(state: &NodeState) -> String {
        state.masquerade_v4.unwrap().to_string()
    }

    #[test]
    fn the_link_with_the_nodes_address_is_the_uplink() {
        let state = find(LINKS, &["198.51.100.1"], Some(1), &[]).unwrap();
        assert_eq!(state.uplinks[0].name, "u1");
        assert_eq!(source(&state), "198.51.100.1");
        assert!(state.warnings.is_empty(), "{:?}", state.warnings);
        // No default route at all: the uplink is known all the same.
        let state = find(LINKS, &["198.51.100.1"], None, &[]).unwrap();
        assert_eq!(state.uplinks[0].name, "u1");
        assert!(state.warnings.is_empty(), "{:?}", state.warnings);
    }

    #[test]
    fn an_address_that_no_link_has_is_no_source_and_is_told() {
        let state = find(LINKS, &["203.0.113.7"], Some(0), &[]).unwrap();
        assert_eq!(state.uplinks[0].name, "u0");
        assert_eq!(source(&state), "192.0.2.1");
        assert!(
            state.warnings.len() == 1 && state.warnings[0].contains("203.0.113.7"),
            "{:?}",
            state.warnings
        );
        let error = find(LINKS, &["203.0.113.7"], None, &[]).unwrap_err();
        assert!(error.to_string().contains("--uplinks"), "{error}");
    }

    #[test]
    fn a_way_out_beside_the_uplinks_is_told() {
        let state = find(LINKS, &["198.51.100.1"], Some(0), &[]).unwrap();
        assert!(
            state.warnings.len() == 1 && state.warnings[0].contains("leaves by u0"),
            "{:?}",
            state.warnings
        );
        for args in [&["--uplinks=u1,u0"][..], &["--masquerade=false"]] {
            let state = find(LINKS, &["198.51.100.1"], Some(0), args).unwrap();
            assert!(state.warnings.is_empty(), "{:?}", state.warnings);
        }
    }
}
