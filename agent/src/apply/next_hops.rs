//! By which way each peer is reached, for packets that go there past the stack.
//!
//! The kernel is asked, as its routes lead. A peer that several ways lead to, or another than the uplink, is left to the
//! stack: it alone knows how a flow is spread over them, and policies of routing. So are all where IPsec has policies: what
//! is to be encrypted passes them in the stack alone.

use crate::{
    chain::Chain,
    datapath::{Datapath, DatapathError},
    plan::OverlayPlan,
};
use sinabro_common::abi::{Addr, next_hop::NextHop};
use sinabro_netlink::{Conn, xfrm};
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
) -> Result<(), DatapathError> {
    let mut next_hops = BTreeMap::new();
    // Tunnels over IPv6 are the kernel's.
    let uplink = match plan.device.local {
        IpAddr::V4(_) => datapath.direct_uplink()?,
        IpAddr::V6(_) => None,
    };
    let uplink = uplink.filter(|_| !has_ipsec());
    if let Some(uplink) = uplink {
        for (mac, &remote) in &plan.fdb {
            let tunnel = Addr::from(remote);
            let is_known = before.is_some_and(|before| before.fdb.get(mac) == Some(&remote));
            let next = match datapath.next_hop(tunnel).filter(|_| is_known) {
                Some(next) => Some(next),
                None => gateway(conn, remote, uplink).map(|gateway| NextHop {
                    gateway: gateway.into(),
                    ifindex: uplink,
                    remote_mac: mac.0,
                    own_mac: plan.device.mac.0,
                }),
            };
            next_hops.extend(next.map(|next| (tunnel, next)));
        }
    }
    datapath.set_next_hops(next_hops)
}

/// Whether anything that leaves may have to be encrypted.
pub(super) fn has_ipsec() -> bool {
    match xfrm::policies_out() {
        Ok(policies) => policies > 0,
        Err(error) => {
            tracing::debug!(error = %Chain(&error), "nothing is sent past the stack");
            true
        }
    }
}

/// Whom a packet to an address is given to on the uplink; none if it does not leave by it alone.
fn gateway(conn: &mut Conn, to: IpAddr, uplink: u32) -> Option<IpAddr> {
    let route = conn
        .route_entry(to)
        .inspect_err(|error| tracing::debug!(%to, error = %Chain(error), "no way past the stack"))
        .ok()?;
    let is_plain = route.kind == libc::RTN_UNICAST && route.more_hops.is_empty();
    (is_plain && route.oif == Some(uplink)).then_some(())?;
    match route.gateway {
        None => Some(to),
        // Another family's is the stack's to find.
        Some(gateway) => (gateway.is_ipv4() == to.is_ipv4()).then_some(gateway),
    }
}
