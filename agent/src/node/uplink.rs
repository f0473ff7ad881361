//! The devices that lead out, and the address that masqueraded packets leave with.

use super::NodeError;
use crate::{config::Settings, plan::Node, troubles::trouble};
use sinabro_common::{
    abi::{Addr, uplink as abi},
    api::Trouble,
};
use sinabro_netlink::{Conn, Family, Link, ResultExt, addr::Addr as LinkAddr};
use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// A device that leads out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    pub name: String,
    pub index: u32,
    /// Source of what is masqueraded there.
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
    /// Length of what its packets have in front of the IP header.
    pub header_len: u32,
}

impl Uplink {
    /// What the programs are told of it.
    pub fn record(&self) -> abi::Uplink {
        let addr = |address: Option<IpAddr>| address.map_or(Addr::UNSPECIFIED, Addr::from);
        abi::Uplink {
            v4: addr(self.v4.map(IpAddr::V4)),
            v6: addr(self.v6.map(IpAddr::V6)),
            header_len: self.header_len,
            pad: 0,
        }
    }
}

/// Length of the header that programs on a link find in front of that of IP: none where the link has no
/// addresses of its own (tun, WireGuard, ppp, tunnels of IP in IP).
pub(super) fn header_len(link: &Link) -> u32 {
    const ETHERNET: u32 = 14;
    match link.hardware {
        libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK => ETHERNET,
        _ => 0,
    }
}

/// The devices that lead out: as set, else the one with the node's address, else that of the
/// default route.
pub(super) fn find(
    settings: &Settings,
    node: &Node,
    conn: &mut Conn,
) -> Result<Vec<Link>, NodeError> {
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
pub(super) fn unmasqueraded_ways_out(
    uplinks: &[Link],
    conn: &mut Conn,
) -> Result<Vec<Trouble>, NodeError> {
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
pub(super) fn source_v4(
    node: &Node,
    uplink: &Link,
    here: &[LinkAddr],
) -> Result<Ipv4Addr, NodeError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{node::NodeState, plan::Facts};
    use sinabro_netlink::{link, netns::in_fresh, route::Route, veth::Veth};

    /// Two links that are up, each with its address.
    fn two_links(conn: &mut Conn, addresses: [&str; 2]) -> [Link; 2] {
        conn.create_veth(&Veth {
            name: "u0",
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            peer_name: "u1",
            peer_mac: [2, 0, 0, 0, 0, 2],
            peer_netns: None,
        })
        .unwrap();
        let links = ["u0", "u1"].map(|name| conn.link_by_name(name).unwrap());
        for (link, net) in links.iter().zip(addresses) {
            let address = LinkAddr::new(link.index, net.parse().unwrap());
            conn.execute_all([link::set_up(link.index), address.add()])
                .unwrap();
        }
        links
    }

    /// What is found with two links and a list of nodes that has this one.
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
            let links = two_links(&mut conn, links);
            if let Some(n) = default {
                let route = Route::default_of(Family::V4).dev(links[n].index);
                let route = route.scope_link();
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
    fn every_next_hop_of_the_default_route_is_looked_at() {
        let uplinks = in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let [u0, _] = two_links(&mut conn, LINKS);
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
