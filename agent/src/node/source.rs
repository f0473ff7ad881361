//! The addresses that masqueraded packets leave with.
//!
//! What the route would choose for the node's own packets: the kernel is asked (RTM_GETROUTE with the
//! link), so a route's preferred source and the choice among IPv6 addresses (RFC 6724) count. Where it has no
//! answer, the link's first address that is good for everywhere; then the node's own, as the list of nodes
//! has it.

use super::{NodeError, uplink::outside};
use crate::plan::Node;
use sinabro_netlink::{Conn, Family, Link, addr::Addr};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The index of `lo` in every network namespace (`LOOPBACK_IFINDEX` in linux/net/net_namespace.h).
const LOOPBACK: u32 = 1;

pub(super) struct Sources<'a> {
    conn: &'a mut Conn,
    node: &'a Node,
    here: &'a [Addr],
}

impl<'a> Sources<'a> {
    pub fn new(conn: &'a mut Conn, node: &'a Node, here: &'a [Addr]) -> Self {
        Self { conn, node, here }
    }

    pub fn v4(&mut self, link: &Link) -> Result<Option<Ipv4Addr>, NodeError> {
        Ok(match self.of(Family::V4, link) {
            Some(IpAddr::V4(address)) => Some(address),
            _ => None,
        })
    }

    pub fn v6(&mut self, link: &Link) -> Result<Option<Ipv6Addr>, NodeError> {
        Ok(match self.of(Family::V6, link) {
            Some(IpAddr::V6(address)) => Some(address),
            _ => None,
        })
    }

    fn of(&mut self, family: Family, link: &Link) -> Option<IpAddr> {
        // An error says that no route leads there by this link.
        let route = self.conn.route_get_by(outside(family), link.index);
        let chosen = route.ok().and_then(|route| route.src);
        let chosen = chosen
            .and_then(|address| self.here(address))
            .filter(|addr| {
                // Where the link has none, the kernel takes any link's.
                let own = addr.link == link.index || addr.link == LOOPBACK;
                serves(addr) && (own || self.node.addresses.contains(&addr.net.addr()))
            });
        let of_link = || {
            let mut all = self.here.iter().filter(|addr| addr.link == link.index);
            all.find(|addr| Family::of(addr.net.addr()) == family && serves(addr) && lasts(addr))
        };
        let of_node = || {
            let of_family = |address: &&IpAddr| Family::of(**address) == family;
            let mut all = self.node.addresses.iter().filter(of_family);
            all.find_map(|address| self.here(*address))
        };
        // An address that the kernel changes by itself (RFC 8981) would end connections with it.
        let lasting = chosen.filter(|addr| lasts(addr));
        let found = lasting.or_else(of_link).or(chosen).or_else(of_node)?;
        Some(found.net.addr())
    }

    fn here(&self, address: IpAddr) -> Option<&'a Addr> {
        self.here.iter().find(|addr| addr.net.addr() == address)
    }
}

/// Whether others than those on the link can answer to it, and it is certain to be ours.
fn serves(addr: &Addr) -> bool {
    let unusable = libc::IFA_F_TENTATIVE | libc::IFA_F_DADFAILED;
    addr.scope < libc::RT_SCOPE_LINK && addr.flags & unusable == 0
}

/// Whether new connections may rely on it.
fn lasts(addr: &Addr) -> bool {
    // Of IPv4 the second flag says that the address is not the first of its network.
    let unreliable = match addr.net.addr() {
        IpAddr::V4(_) => libc::IFA_F_DEPRECATED,
        IpAddr::V6(_) => libc::IFA_F_DEPRECATED | libc::IFA_F_TEMPORARY,
    };
    addr.flags & unreliable == 0
}
