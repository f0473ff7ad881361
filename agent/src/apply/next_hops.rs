//! By which way each peer is reached, for packets that go there past the stack.
//!
//! The kernel is asked, as its routes lead. A peer that several ways lead to, or another than the uplink, is left to the
//! stack: it alone knows how a flow is spread over them, and policies of routing. So are all where IPsec has policies: what
//! is to be encrypted passes them in the stack alone.

use super::ways::{Ways, Why};
use crate::{
    chain::Chain,
    datapath::{Datapath, DatapathError, DirectUplink, Way},
    plan::OverlayPlan,
};
use sinabro_common::{
    abi::{
        Addr,
        next_hop::{NATIVE, NextHop},
    },
    api::Mac,
};
use sinabro_netlink::{Conn, neigh::Neigh, xfrm};
use std::{collections::BTreeMap, net::IpAddr};

/// Looks up the ways to all peers, or to those alone that `before` did not have.
///
/// # Errors
/// If the data path cannot be told.
pub fn follow(
    conn: &mut Conn,
    datapath: &Datapath,
    before: Option<&OverlayPlan>,
    plan: &OverlayPlan,
) -> Result<Ways, DatapathError> {
    let mut next_hops = BTreeMap::new();
    let mut found = Vec::new();
    let mut ways = Ways {
        none: None,
        ..Ways::default()
    };
    match uplink(datapath.direct_uplink()?, plan) {
        Err(why) => ways = Ways::none(why),
        Ok(uplink) => {
            for (mac, &remote) in &plan.fdb {
                let tunnel = Addr::from(remote);
                let is_known = before.is_some_and(|before| {
                    before.fdb.get(mac) == Some(&remote)
                        && before.native.get(&remote) == plan.native.get(&remote)
                });
                let next = match datapath.next_hop(tunnel).filter(|_| is_known) {
                    Some(way) => Ok(way),
                    None => {
                        let way = way(conn, plan, (*mac, remote), uplink);
                        found.extend(way.as_ref().ok());
                        way
                    }
                };
                match next {
                    Ok(way) => {
                        // What it sends is taken past the stack all the same.
                        if !datapath.wraps() && !way.is_native() {
                            ways.not.insert(remote, Why::Kernel);
                        }
                        if plan.native.get(&remote).is_some_and(|peer| peer.is_tried) {
                            ways.tried.insert(remote);
                        }
                        next_hops.insert(tunnel, way);
                    }
                    Err(why) => {
                        ways.not.insert(remote, why);
                    }
                }
            }
        }
    }
    datapath.set_next_hops(&next_hops)?;
    ask_for_neighbours(conn, &found);
    if !datapath.wraps() && plan.native.is_empty() {
        ways.none.get_or_insert(Why::Kernel);
    }
    Ok(ways)
}

/// Has the kernel know the IPv6 neighbours that pods' packets are given to without a tunnel: what the stack sends to one that is not
/// known is in a tunnel, and that is over IPv4, so nothing else would ask for them.
fn ask_for_neighbours(conn: &mut Conn, ways: &[Way]) {
    for way in ways {
        let Some(address) = way.native_v6.map(IpAddr::from) else {
            continue;
        };
        let link = way.next.ifindex;
        let asked = match conn.neigh(link, address) {
            Ok(Some(neighbour)) if neighbour.is_valid() => Ok(()),
            Ok(_) => conn.execute(Neigh::ask(link, address)),
            Err(error) => Err(error),
        };
        if let Err(error) = asked {
            tracing::warn!("cannot ask for {address}: {}", Chain(&error));
        }
    }
}

/// The uplink by which packets to peers may leave past the stack.
fn uplink(uplink: DirectUplink, plan: &OverlayPlan) -> Result<u32, Why> {
    // Tunnels over IPv6 are the kernel's.
    if plan.device.local.is_ipv6() && plan.native.is_empty() {
        return Err(Why::Ipv6);
    }
    only_uplink(uplink)
}

/// The uplink by which packets may leave past the stack, if none of them may have to be encrypted.
pub(super) fn only_uplink(uplink: DirectUplink) -> Result<u32, Why> {
    let uplink = match uplink {
        DirectUplink::At(index) => index,
        DirectUplink::Missing => return Err(Why::NoUplink),
        DirectUplink::Several => return Err(Why::SeveralUplinks),
        DirectUplink::OtherHeader => return Err(Why::OtherHeader),
    };
    match xfrm::policies_out() {
        Ok(0) => Ok(uplink),
        Ok(_) => Err(Why::Ipsec),
        Err(error) => Err(Why::IpsecUnknown(Chain(&error).to_string())),
    }
}

/// The way to a peer, by the MAC address of its device and its tunnel address.
fn way(
    conn: &mut Conn,
    plan: &OverlayPlan,
    (mac, remote): (Mac, IpAddr),
    uplink: u32,
) -> Result<Way, Why> {
    let next_hop = gateway(conn, remote, uplink)?;
    // A router between them knows no pods.
    let native = plan.native.get(&remote).filter(|_| next_hop == remote);
    if native.is_none() && remote.is_ipv6() {
        return Err(Why::Ipv6);
    }
    let next = NextHop {
        gateway: next_hop.into(),
        ifindex: uplink,
        remote_mac: match native {
            Some(native) if !native.is_tried => NATIVE,
            _ => mac.0,
        },
        own_mac: plan.device.mac.0,
    };
    let v6 = native.and_then(|native| native.v6);
    let v6 = v6.filter(|_| remote.is_ipv4());
    let on_link = |v6: &IpAddr| gateway(conn, *v6, uplink).is_ok_and(|gateway| gateway == *v6);
    let native_v6 = v6.filter(on_link).map(Addr::from);
    Ok(Way { next, native_v6 })
}

/// Whom a packet to an address is given to on the uplink, if it leaves by it alone.
fn gateway(conn: &mut Conn, to: IpAddr, uplink: u32) -> Result<IpAddr, Why> {
    let route = conn.route_entry(to);
    let route = route.map_err(|error| Why::NoRoute(Chain(&error).to_string()))?;
    if route.kind != libc::RTN_UNICAST {
        return Err(Why::OtherRoute);
    }
    if !route.more_hops.is_empty() {
        return Err(Why::SeveralNextHops);
    }
    if route.oif != Some(uplink) {
        return Err(Why::OtherDevice);
    }
    match route.gateway {
        None => Ok(to),
        // Another family's is the stack's to find.
        Some(gateway) if gateway.is_ipv4() != to.is_ipv4() => Err(Why::OtherFamily),
        Some(gateway) => Ok(gateway),
    }
}
