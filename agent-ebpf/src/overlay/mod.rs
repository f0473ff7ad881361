//! Tunnels between nodes without the stack: a packet gets its outer headers at the sender's pod link ([`leave`]) and loses
//! them at the receiver's uplink ([`arrive`]). Routes, netfilter and the VXLAN device see neither.
//!
//! What is sent is what the VXLAN device sends, but for a checksum over IPv6 ([`outer`]), so each end may do either. To the device is left, unchanged: what it
//! takes a router to handle (options, fragments, a TTL that ends here, what is too large), ICMP but echo, what the kernel
//! refuses to wrap up.
//!
//! Where kube-proxy translates Services, netfilter sees both directions of a connection between two pods, or neither
//! (`FLAG_BESIDE_PROXY`). The record of the connection decides. It is written where a packet leaves the stack ([`track`]), and looked
//! up where one arrives: with a record the packet goes by the stack, without one past netfilter, by the VXLAN device if need be.
//!
//! Nodes that say so of themselves do the same to each other without a tunnel ([`native`]).

pub mod arrive;
pub mod arriving;
pub mod leave;
pub mod native;
pub mod outer;
pub mod route;

use crate::{
    maps::{CONFIG, NEXT_HOPS},
    nat::is_error,
    parse::{Ip, Packet as _, skb::Head},
    scratch::Scratch,
    stage::{deliver, track, tunnel},
};
use sinabro_common::{
    abi::{
        Addr,
        config::{
            FLAG_BESIDE_PROXY, FLAG_BESIDE_PROXY_DRAINS, FLAG_CONNTRACK_STRICT, FLAG_DRAINING,
            FLAG_HANDOVER, FLAG_RECORD_STACK, FLAG_SERVICES, NodeConfig,
        },
        next_hop::{self, NextHop},
    },
    algo::ct_state,
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

const OF_SERVICES: u32 = FLAG_SERVICES | FLAG_HANDOVER | FLAG_DRAINING;

/// Whether packets may go past the stack here.
#[inline(always)]
pub fn takes(config: &NodeConfig) -> bool {
    takes_with_services(config) || is_beside_proxy(config)
}

/// Whether they may where Services are translated here, and by nobody else.
#[inline(always)]
pub fn takes_with_services(config: &NodeConfig) -> bool {
    config.flags & OF_SERVICES == FLAG_SERVICES && deliver::redirects(config)
}

/// Whether they may while netfilter translates connections, of which each has a record.
#[inline(always)]
pub fn is_beside_proxy(config: &NodeConfig) -> bool {
    config.flags & FLAG_BESIDE_PROXY != 0 && deliver::redirects(config)
}

/// The same where no Services are translated here.
#[inline(always)]
pub fn is_beside_proxy_alone(config: &NodeConfig) -> bool {
    is_beside_proxy(config) && config.flags & FLAG_SERVICES == 0
}

/// Whether connections between pods of two nodes that the stack forwards get a record.
#[inline(always)]
pub fn records_stack(config: &NodeConfig) -> bool {
    let is_alone = config.flags & OF_SERVICES == FLAG_SERVICES;
    let which = match is_alone {
        true => FLAG_BESIDE_PROXY_DRAINS,
        false => FLAG_BESIDE_PROXY | FLAG_RECORD_STACK,
    };
    config.flags & which != 0 && deliver::redirects(config)
}

/// One if a packet from another node, which is read, is the stack's beside kube-proxy: of a connection that the stack may
/// translate, or of none between two pods.
#[inline(never)]
pub fn is_of_stack(scratch: &mut Scratch) -> u32 {
    let Some(config) = CONFIG.get(0).filter(|config| is_beside_proxy(config)) else {
        return 0;
    };
    let is = tunnel::pods_of(&scratch.ip.src).is_none() || goes_by_stack(config, scratch);
    u32::from(is)
}

/// Whether a packet between pods of two nodes, which is read, goes by the stack beside kube-proxy. While the fast path drains, so does
/// what conntrack picks up although it has no record.
#[inline(always)]
pub fn goes_by_stack(config: &NodeConfig, scratch: &mut Scratch) -> bool {
    match track::known(scratch) {
        track::STACK => true,
        track::ANSWER => is_tracked(config, scratch),
        _ => is_drained(config, scratch),
    }
}

/// One if a packet for another node's pod goes by the stack, although no record says so: the fast path drains. The packet is read.
/// `is_of_service`: one if its connection is with a Service that is translated here.
#[inline(never)]
pub fn drains(scratch: &mut Scratch, is_of_service: u32) -> u32 {
    let Some(config) = CONFIG.get(0) else {
        return 0;
    };
    let drains = match is_of_service {
        0 => is_drained(config, scratch),
        _ => is_tracked(config, scratch),
    };
    u32::from(drains)
}

/// The same of a connection with a Service that is translated here, by the ends that the server sees. Netfilter has seen nothing of one that
/// began on the fast path.
#[inline(always)]
fn is_tracked(config: &NodeConfig, scratch: &mut Scratch) -> bool {
    let is_drained = is_drained(config, scratch);
    track::is_tracked(scratch, u32::from(is_drained)) != 0
}

/// Whether the fast path drains, and conntrack picks up a packet, which is read and has no record. An ICMP error goes by what it quotes.
#[inline(always)]
fn is_drained(config: &NodeConfig, scratch: &Scratch) -> bool {
    let is_loose = config.flags & FLAG_CONNTRACK_STRICT == 0;
    config.flags & FLAG_BESIDE_PROXY_DRAINS != 0
        && ct_state::is_picked_up(scratch.ip.proto, scratch.l4.tcp_flags, is_loose)
        && !is_error(scratch)
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
