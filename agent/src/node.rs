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
    troubles::trouble,
};
use ipnet::IpNet;
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_MASQUERADE, FLAG_REDIRECT_PEER, FLAG_TUNNELS, NodeConfig},
    },
    api::Trouble,
};
use sinabro_netlink::{Conn, Family, Link, ResultExt, addr::Addr as LinkAddr, sysctl};
use std::{
    collections::BTreeSet,
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
/// Those above Linux's own default of ip_local_port_range.
const SHARED_PORTS: (u16, u16) = (61_000, u16::MAX);

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
            let text = format!(
                "no link has this node's address {address}, tunnels cannot leave from it: correct its entry in the list of nodes"
            );
            warnings.push(trouble("AddressMissing", text));
        }
        if masquerade_v4.is_some() {
            warnings.extend(unmasqueraded_ways_out(&links, &mut conn)?);
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

/// Links of the IPv4 default route that are no uplinks; it may have several next hops.
fn unmasqueraded_ways_out(uplinks: &[Link], conn: &mut Conn) -> Result<Vec<Trouble>, NodeError> {
    let Some(route) = conn.default_route(Family::V4)? else {
        return Ok(Vec::new());
    };
    let others = route.more_hops.iter().map(|hop| hop.oif);
    let ways: BTreeSet<u32> = route.oif.into_iter().chain(others).collect();
    let mut found = Vec::new();
    for way in ways {
        if uplinks.iter().any(|uplink| uplink.index == way) {
            continue;
        }
        let name = conn.link_by_index(way)?.name;
        let text = format!(
            "the IPv4 default route leaves by {name}, which is not an uplink: what pods send there is not masqueraded, see --uplinks"
        );
        found.push(trouble("NotMasqueraded", text));
    }
    Ok(found)
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
/// are given, so that the two never claim the same. Where none are left above, the last ones, and
/// that is a trouble unless the node's sockets are kept off them.
///
/// # Errors
/// If the kernel's settings cannot be read.
pub fn masquerade_ports(settings: &Settings) -> Result<((u16, u16), Option<Trouble>), NodeError> {
    if let Some(ports) = settings.masquerade_ports {
        return Ok((ports, None));
    }
    let range = sysctl::read(&["net", "ipv4", "ip_local_port_range"])?;
    // Two numbers, by the kernel's own format.
    let last: u32 = range
        .split_whitespace()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(u32::from(u16::MAX));
    let max = u32::from(u16::MAX);
    if last + MIN_PORTS <= max {
        return Ok(((last as u16 + 1, u16::MAX), None));
    }
    let reserved = sysctl::read(&["net", "ipv4", "ip_local_reserved_ports"])?;
    let shared = (!reserves(&reserved, SHARED_PORTS)).then(|| {
        let (first, last_shared) = SHARED_PORTS;
        trouble(
            "PortsShared",
            format!(
                "net.ipv4.ip_local_port_range ends at {last}, so masqueraded flows share ports {first}-{last_shared} with the node's own sockets and may take each other's answers: end it at {} or set net.ipv4.ip_local_reserved_ports={first}-{last_shared}, or choose others with --masquerade-ports; then start the agent again",
                first - 1
            ),
        )
    });
    Ok((SHARED_PORTS, shared))
}

/// Whether a list such as `8080,61000-65535` has all of a range.
fn reserves(list: &str, (first, last): (u16, u16)) -> bool {
    let mut ranges: Vec<(u16, u16)> = list
        .trim()
        .split(',')
        .filter_map(|text| {
            let (from, to) = text.split_once('-').unwrap_or((text, text));
            Some((from.parse().ok()?, to.parse().ok()?))
        })
        .collect();
    ranges.sort_unstable();
    let mut next = u32::from(first);
    for (from, to) in ranges {
        if u32::from(from) <= next {
            next = next.max(u32::from(to) + 1);
        }
    }
    next > u32::from(last)
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
            state.warnings.len() == 1 && state.warnings[0].text.contains("203.0.113.7"),
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
            state.warnings.len() == 1 && state.warnings[0].text.contains("leaves by u0"),
            "{:?}",
            state.warnings
        );
        for args in [&["--uplinks=u1,u0"][..], &["--masquerade=false"]] {
            let state = find(LINKS, &["198.51.100.1"], Some(0), args).unwrap();
            assert!(state.warnings.is_empty(), "{:?}", state.warnings);
        }
    }

    #[test]
    fn ports_that_the_node_uses_itself_are_shared_and_told() {
        let args = ["sinabro-agent", "--node-name=n1", "--nodes=/n"];
        let settings = Settings::load(args).unwrap();
        let ports = |range: &str, reserved: &str| {
            in_fresh(|| {
                sysctl::write(&["net", "ipv4", "ip_local_port_range"], range).unwrap();
                sysctl::write(&["net", "ipv4", "ip_local_reserved_ports"], reserved).unwrap();
                masquerade_ports(&settings).unwrap()
            })
        };
        assert_eq!(ports("32768 60999", ""), ((61_000, 65_535), None));
        assert_eq!(ports("1024 50000", ""), ((50_001, 65_535), None));
        let (shared, told) = ports("1024 65535", "");
        assert_eq!(shared, (61_000, 65_535));
        let told = told.unwrap();
        assert_eq!(told.reason, "PortsShared");
        assert!(told.text.contains("ip_local_reserved_ports=61000-65535"));
        assert_eq!(ports("1024 65535", "80,61000-65535"), (shared, None));
        assert_eq!(
            ports("1024 65535", "61000-62000,62001-65535"),
            (shared, None)
        );
        assert!(ports("1024 65535", "61000-65534").1.is_some());
    }

    #[test]
    fn every_next_hop_of_the_default_route_is_looked_at() {
        let uplinks = in_fresh(|| {
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
            let [u0, u1] = ["u0", "u1"].map(|name| conn.link_by_name(name).unwrap());
            for link in [&u0, &u1] {
                conn.execute(link::set_up(link.index)).unwrap();
            }
            let hops = ["nexthop", "dev", "u0", "nexthop", "dev", "u1"];
            let mut ip = std::process::Command::new("ip");
            let added = ip.args(["route", "add", "default"]).args(hops).status();
            assert!(added.unwrap().success());
            unmasqueraded_ways_out(&[u0], &mut conn).unwrap()
        });
        assert_eq!(uplinks.len(), 1, "{uplinks:?}");
        assert!(uplinks[0].text.contains("leaves by u1"), "{uplinks:?}");
    }
}
