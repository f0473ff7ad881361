//! Tunnels between nodes without the stack: a packet gets its outer headers at the sender's pod link ([`leave`]) and loses
//! them at the receiver's uplink ([`arrive`]). Routes, netfilter and the VXLAN device see neither.
//!
//! What is sent is what the VXLAN device sends, but for a checksum over IPv6 ([`outer`]), so each end may do either. To the device is left, unchanged: what it
//! takes a router to handle (options, fragments, a TTL that ends here, what is too large), ICMP but echo, what the kernel
//! refuses to wrap up, and all packets while others than ours translate Services: netfilter has to see both directions of
//! a connection that it translates.
//!
//! Nodes that say so of themselves do the same to each other without a tunnel ([`native`]).

pub mod arrive;
pub mod arriving;
pub mod leave;
pub mod native;
pub mod outer;
pub mod route;

use crate::{
    maps::NEXT_HOPS,
    parse::{Ip, Packet as _, skb::Head},
    stage::deliver,
};
use sinabro_common::abi::{
    Addr,
    config::{FLAG_DRAINING, FLAG_HANDOVER, FLAG_SERVICES, NodeConfig},
    next_hop::{self, NextHop},
};

/// RFC 3168 §5: of a sender that takes marks, in either way to say so; and congestion experienced.
const ECT1: u8 = 1;
const ECT0: u8 = 2;
const CE: u8 = 3;
const ECN: u8 = 3;

/// A packet's type of service or traffic class: DSCP, and the two bits of ECN.
#[inline(always)]
fn traffic_class(head: &Head, ip: &Ip) -> Option<u8> {
    let [high, low] = head.load::<[u8; 2]>(ip.l3)?;
    Some(match ip.v6 {
        false => low,
        // Bits 4 to 11 of the header (RFC 8200 §3).
        true => high << 4 | low >> 4,
    })
}

/// Whether packets may go past the stack here.
#[inline(always)]
pub fn takes(config: &NodeConfig) -> bool {
    const OF_SERVICES: u32 = FLAG_SERVICES | FLAG_HANDOVER | FLAG_DRAINING;
    config.flags & OF_SERVICES == FLAG_SERVICES && deliver::redirects(config)
}

/// The way to a node by its tunnel address, unless it is this one or the kernel's way leads there.
#[inline(always)]
fn way(tunnel: &Addr) -> Option<&'static NextHop> {
    way_of_requests(tunnel).filter(|next| next.remote_mac != next_hop::TRIED)
}

/// The same, also if nothing but the agent's requests without a tunnel may take it.
#[inline(always)]
fn way_of_requests(tunnel: &Addr) -> Option<&'static NextHop> {
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    unsafe { NEXT_HOPS.get(tunnel) }
}
