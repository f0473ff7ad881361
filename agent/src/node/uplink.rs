//! The devices that lead out.

use super::{Masquerade, NodeError, source::Sources};
use crate::{config::Settings, plan::Node, troubles::trouble};
use sinabro_common::{
    abi::{Addr, uplink as abi},
    api::Trouble,
    names,
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
    /// Length of what its packets have in front of the IP header; none if that is nothing that the programs
    /// can read.
    pub header_len: Option<u32>,
}

impl Uplink {
    pub(super) fn new(
        link: &Link,
        masquerade: Masquerade,
        sources: &mut Sources<'_>,
    ) -> Result<Self, NodeError> {
        Ok(Self {
            name: link.name.clone(),
            index: link.index,
            v4: match masquerade.v4 {
                true => sources.v4(link)?,
                false => None,
            },
            v6: match masquerade.v6 {
                true => sources.v6(link)?,
                false => None,
            },
            header_len: header_len(link.hardware),
        })
    }

    /// Addresses that masqueraded packets have there.
    pub fn sources(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let (v4, v6) = (self.v4.map(IpAddr::V4), self.v6.map(IpAddr::V6));
        v4.into_iter().chain(v6)
    }

    /// What the programs are told of it; none if there can be none.
    pub fn record(&self) -> Option<abi::Uplink> {
        let addr = |address: Option<IpAddr>| address.map_or(Addr::UNSPECIFIED, Addr::from);
        Some(abi::Uplink {
            v4: addr(self.v4.map(IpAddr::V4)),
            v6: addr(self.v6.map(IpAddr::V6)),
            header_len: self.header_len?,
            pad: 0,
        })
    }
}

/// Length of the header that programs on a link find in front of that of IP. Links without addresses of
/// their own have none; a tunnel's own header is put in front of the packet after the programs.
fn header_len(hardware: u16) -> Option<u32> {
    const ETHERNET: u32 = 14;
    // linux/if_arp.h; the libc crate has no name for it.
    const ARPHRD_RAWIP: u16 = 519;
    const ARPHRD_IP6GRE: u16 = 823;
    match hardware {
        libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK => Some(ETHERNET),
        libc::ARPHRD_NONE
        | libc::ARPHRD_PPP
        | libc::ARPHRD_TUNNEL
        | libc::ARPHRD_TUNNEL6
        | libc::ARPHRD_SIT
        | libc::ARPHRD_IPGRE
        | ARPHRD_RAWIP
        | ARPHRD_IP6GRE => Some(0),
        _ => None,
    }
}

/// The devices that lead out, the overlay's first: as set, else those with the node's addresses, and those
/// of the default routes.
pub(super) fn find(
    settings: &Settings,
    node: &Node,
    conn: &mut Conn,
    here: &[LinkAddr],
) -> Result<Vec<Link>, NodeError> {
    if !settings.uplinks.is_empty() {
        let find = |name: &String| {
            let link = conn.link_by_name(name).ignore_not_found()?;
            link.ok_or_else(|| NodeError::NoSuchLink(name.clone()))
        };
        return settings.uplinks.iter().map(find).collect();
    }
    let first = overlays(node, conn, here)?;
    let mut indexes = BTreeSet::new();
    let holders = node.addresses.iter().filter_map(|a| holder(here, *a));
    indexes.extend(holders);
    for family in [Family::V4, Family::V6] {
        if node
            .pod_cidrs
            .iter()
            .any(|cidr| Family::of(cidr.addr()) == family)
        {
            indexes.extend(ways_out(family, conn)?);
        }
    }
    indexes.remove(&first.index);
    let mut found = vec![first];
    for index in indexes {
        let link = conn.link_by_index(index).ignore_not_found()?;
        found.extend(link.filter(leads_out));
    }
    Ok(found)
}

/// The device with the node's address, else that of the default route.
fn overlays(node: &Node, conn: &mut Conn, here: &[LinkAddr]) -> Result<Link, NodeError> {
    let holder = node.addresses.iter().find_map(|a| holder(here, *a));
    if let Some(index) = holder {
        let link = conn.link_by_index(index)?;
        // On loopback in setups that route to the node: the way out is another.
        if !link.loopback {
            return Ok(link);
        }
    }
    let first = node.addresses[0];
    for family in [Family::of(first), Family::V4, Family::V6] {
        if let Some(oif) = conn.default_route(family)?.and_then(|route| route.oif) {
            return Ok(conn.link_by_index(oif)?);
        }
    }
    Err(NodeError::NoUplink(first))
}

fn holder(here: &[LinkAddr], address: IpAddr) -> Option<u32> {
    let held = here.iter().find(|a| a.net.addr() == address)?;
    Some(held.link)
}

/// Whether it is neither the loopback device nor one of ours.
fn leads_out(link: &Link) -> bool {
    let ours = link.name.starts_with(names::POD_LINK_PREFIX) || link.name == names::VXLAN_LINK;
    !link.loopback && !ours
}

/// Somewhere that no route but the general ones leads to: 192.0.0.8 (RFC 7600) and an address of a block
/// that IANA has not given to anybody.
pub(super) fn outside(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(192, 0, 0, 8).into(),
        Family::V6 => Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 1).into(),
    }
}

/// The links by which packets leave for somewhere outside: of the default routes and all their next hops, and
/// of what comes before those (`ip rule`, two routes of half the addresses each).
fn ways_out(family: Family, conn: &mut Conn) -> Result<BTreeSet<u32>, NodeError> {
    let mut ways = BTreeSet::new();
    for route in conn.default_routes(family)? {
        ways.extend(route.oif);
        ways.extend(route.more_hops.iter().map(|hop| hop.oif));
    }
    // An error says that there is none.
    let route = conn.route_get(outside(family));
    ways.extend(route.ok().and_then(|route| route.oif));
    Ok(ways)
}

/// Ways out on which nothing is masqueraded, although it should.
pub(super) fn unmasqueraded(
    uplinks: &[Uplink],
    masquerade: Masquerade,
    conn: &mut Conn,
) -> Result<Vec<Trouble>, NodeError> {
    let mut found = Vec::new();
    for (family, name) in [(Family::V4, "IPv4"), (Family::V6, "IPv6")] {
        let wanted = match family {
            Family::V4 => masquerade.v4,
            Family::V6 => masquerade.v6,
        };
        if !wanted {
            continue;
        }
        for way in ways_out(family, conn)? {
            let Some(link) = conn.link_by_index(way).ignore_not_found()? else {
                continue;
            };
            let why = match uplinks.iter().find(|uplink| uplink.index == way) {
                _ if !leads_out(&link) => continue,
                None => "which is not an uplink: name it by --uplinks".to_owned(),
                Some(uplink) if uplink.header_len.is_none() => format!(
                    "whose packets begin with a header of another kind than Ethernet's (hardware type {}): let it leave by another",
                    link.hardware
                ),
                Some(uplink) if uplink.sources().all(|a| Family::of(a) != family) => {
                    format!("which has no {name} address to masquerade with: give it one")
                }
                Some(_) => continue,
            };
            let text = format!(
                "the {name} default route leaves by {}, {why}; what pods send there is not masqueraded",
                link.name
            );
            found.push(trouble("NotMasqueraded", text));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
