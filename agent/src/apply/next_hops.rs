//! By which way each peer is reached, for packets that go there past the stack.
//!
//! The kernel is asked, as its routes lead. A peer that several ways lead to, or another than the uplink, is left to the
//! stack: it alone knows how a flow is spread over them, and policies of routing. So are all where IPsec has policies: what
//! is to be encrypted passes them in the stack alone. And all where pods may have limits, which are queues of the stack's.

use super::ways::{Ways, Why};
use crate::{
    chain::Chain,
    datapath::{Datapath, DatapathError, DirectUplink, Way},
    install::others,
    plan::{Native, OverlayPlan},
};
use sinabro_common::{
    abi::{
        Addr,
        next_hop::{NATIVE, NextHop, TRIED},
    },
    api::Mac,
};
use sinabro_netlink::{Conn, neigh::Neigh, xfrm};
use std::{collections::BTreeMap, net::IpAddr, path::Path};

/// The type of the plugin that limits pods by queues on their links, in configurations.
const BANDWIDTH: &str = "bandwidth";

/// Looks up the ways to all peers, or to those alone that `before` did not have.
///
/// # Errors
/// If the data path cannot be told.
pub fn follow(
    conn: &mut Conn,
    datapath: &Datapath,
    cni_conf_dir: &Path,
    before: Option<&OverlayPlan>,
    plan: &OverlayPlan,
) -> Result<Ways, DatapathError> {
    let mut next_hops = BTreeMap::new();
    let mut found = Vec::new();
    let mut ways = Ways {
        none: None,
        ..Ways::default()
    };
    let uplink = datapath.direct_uplink()?;
    match only_uplink(uplink).and_then(|uplink| without_limits(cni_conf_dir, uplink)) {
        Err(why) => ways = Ways::none(why),
        Ok(uplink) => {
            for (mac, &remote) in &plan.fdb {
                let tunnel = Addr::from(remote);
                let is_known = before.is_some_and(|before| is_alike(before, plan, (*mac, remote)));
                let next = match datapath.next_hop(tunnel).filter(|_| is_known) {
                    Some(way) => Ok(way),
                    None => {
                        let way = way(conn, plan, (*mac, remote), uplink)
                            .and_then(|way| known_to_programs(datapath, tunnel, way));
                        found.extend(way.as_ref().ok());
                        way
                    }
                };
                match next {
                    Ok(way) => {
                        if let Some(why) = why_not(datapath, plan, (*mac, remote), way) {
                            ways.not.insert(remote, why);
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

/// The same, unless pods may have limits.
pub(super) fn without_limits(cni_conf_dir: &Path, uplink: u32) -> Result<u32, Why> {
    match others::is_chained(cni_conf_dir, BANDWIDTH) {
        true => Err(Why::Bandwidth),
        false => Ok(uplink),
    }
}

/// The way to a peer, by the MAC address of its device and its tunnel address.
fn way(
    conn: &mut Conn,
    plan: &OverlayPlan,
    (mac, remote): (Mac, IpAddr),
    uplink: u32,
) -> Result<Way, Why> {
    let mut gateway = |from, to| gateway(conn, from, to, uplink);
    let next_hop = gateway(plan.device.local, remote)?;
    // A router between them knows no pods, and rules may send pods' packets another way than the node's.
    let mut takes_pods = |to: IpAddr| {
        let mut own = plan.addresses.iter().copied();
        let from = own.find(|own| own.is_ipv4() == to.is_ipv4());
        let from = from.unwrap_or(plan.device.local);
        gateway(from, to).is_ok_and(|gateway| gateway == to)
    };
    let native = plan.native.get(&remote).filter(|_| takes_pods(remote));
    let next = NextHop {
        gateway: next_hop.into(),
        ifindex: uplink,
        remote_mac: remote_mac(plan, (mac, remote), native)?,
        own_mac: plan.device.mac.0,
    };
    let v6 = native.and_then(|native| native.v6);
    let v6 = v6.filter(|_| remote.is_ipv4());
    let native_v6 = v6.filter(|v6| takes_pods(*v6)).map(Addr::from);
    Ok(Way { next, native_v6 })
}

/// The same, unless the programs that run would take it for another.
fn known_to_programs(datapath: &Datapath, tunnel: Addr, way: Way) -> Result<Way, Why> {
    match way.is_native() || tunnel.as_v4().is_some() || datapath.wraps_in_ipv6() {
        true => Ok(way),
        false => Err(Why::EarlierPrograms),
    }
}

/// What is sent to a peer: packets as they are, or tunnels' to its device, if it takes them as they are past the stack; or nothing but
/// requests whether it gets packets as they are.
fn remote_mac(
    plan: &OverlayPlan,
    peer: (Mac, IpAddr),
    native: Option<&Native>,
) -> Result<[u8; 6], Why> {
    match (native, in_tunnels(plan, peer)) {
        (Some(native), _) if !native.is_tried => Ok(NATIVE),
        (_, Ok(mac)) => Ok(mac.0),
        (Some(_), Err(_)) => Ok(TRIED),
        (None, Err(why)) => Err(why),
    }
}

/// Whose tunnels they are, if the peer takes them as they are past the stack.
fn in_tunnels(plan: &OverlayPlan, (mac, remote): (Mac, IpAddr)) -> Result<Mac, Why> {
    match plan.zero_checksum.get(&remote) {
        _ if remote.is_ipv4() => Ok(mac),
        Some(true) => Ok(mac),
        Some(false) => Err(Why::ZeroChecksumLost),
        None => Err(Why::ZeroChecksum),
    }
}

/// Why pods' packets to a peer do not take a way that was found.
fn why_not(datapath: &Datapath, plan: &OverlayPlan, peer: (Mac, IpAddr), way: Way) -> Option<Why> {
    match way.is_tried_alone() {
        true => in_tunnels(plan, peer).err(),
        false if way.is_native() || datapath.wraps() => None,
        // What it sends is taken past the stack all the same.
        false => Some(Why::Kernel),
    }
}

/// Whether two plans ask for the same way to a peer.
fn is_alike(before: &OverlayPlan, plan: &OverlayPlan, (mac, remote): (Mac, IpAddr)) -> bool {
    let takes = |plan: &OverlayPlan| plan.zero_checksum.get(&remote).copied();
    before.fdb.get(&mac) == Some(&remote)
        && before.native.get(&remote) == plan.native.get(&remote)
        && takes(before) == takes(plan)
}

/// Whom a packet from one of this node's addresses is given to on the uplink, if it leaves by it alone.
fn gateway(conn: &mut Conn, from: IpAddr, to: IpAddr, uplink: u32) -> Result<IpAddr, Why> {
    let route = conn.route_entry_from(from, to);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Facts, Node, OverlaySettings, Reached, Routing};
    use sinabro_common::names;

    /// The plan of a node with a peer, which has this address and says whether its tunnels do without checksums.
    fn plan(own: &str, peer: &str, zero_checksum: bool) -> OverlayPlan {
        let node = |name: &str, address: &str, zero_checksum| Node {
            name: name.into(),
            addresses: vec![address.parse().unwrap()],
            zero_checksum,
            ..Node::default()
        };
        let facts = Facts::new([node("own", own, true), node("peer", peer, zero_checksum)]);
        let settings = OverlaySettings {
            node: "own".into(),
            device: "vx".into(),
            vni: 1,
            port: 8472,
            uplink_mtu: 1500,
            mtu: None,
            routing: Routing::Tunnel,
            reached: Reached::default(),
        };
        OverlayPlan::new(&facts, &settings).unwrap()
    }

    fn peer(address: &str) -> (Mac, IpAddr) {
        let address = address.parse().unwrap();
        (Mac(names::vxlan_mac(address)), address)
    }

    #[test]
    fn over_ipv6_a_tunnel_leads_past_the_stack_to_who_takes_it_without_a_checksum() {
        let natively = |is_tried| Native { v6: None, is_tried };
        let (v4, v6) = (peer("192.168.0.2"), peer("fd00::2"));
        for says in [false, true] {
            let over_v4 = plan("192.168.0.1", "192.168.0.2", says);
            assert_eq!(remote_mac(&over_v4, v4, None), Ok(v4.0.0));
            assert_eq!(remote_mac(&over_v4, v4, Some(&natively(true))), Ok(v4.0.0));
            assert_eq!(remote_mac(&over_v4, v4, Some(&natively(false))), Ok(NATIVE));

            let over_v6 = plan("fd00::1", "fd00::2", says);
            let (in_tunnel, tried) = match says {
                true => (Ok(v6.0.0), Ok(v6.0.0)),
                false => (Err(Why::ZeroChecksum), Ok(TRIED)),
            };
            assert_eq!(remote_mac(&over_v6, v6, None), in_tunnel);
            assert_eq!(remote_mac(&over_v6, v6, Some(&natively(true))), tried);
            assert_eq!(remote_mac(&over_v6, v6, Some(&natively(false))), Ok(NATIVE));
        }
        assert_eq!(
            Why::ZeroChecksum.to_string(),
            "its tunnels take no UDP over IPv6 without a checksum"
        );
    }

    #[test]
    fn a_way_is_looked_up_again_where_what_a_peer_takes_has_changed() {
        let remote = peer("fd00::2");
        let [says, does_not] = [true, false].map(|says| plan("fd00::1", "fd00::2", says));
        assert!(is_alike(&says, &says, remote) && is_alike(&does_not, &does_not, remote));
        assert!(!is_alike(&says, &does_not, remote) && !is_alike(&does_not, &says, remote));

        let mut native = says.clone();
        let natively = Native {
            v6: None,
            is_tried: false,
        };
        native.native.insert(remote.1, natively);
        assert!(!is_alike(&says, &native, remote));
        assert!(!is_alike(&plan("fd00::1", "fd00::3", true), &says, remote));
    }
}
