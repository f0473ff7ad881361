//! Services at pods' links and uplinks: what a client sends to a Service's address goes to one of its endpoints.
//!
//! - [`leave`]: what a pod sends: its connection's endpoint becomes the destination;
//! - [`choose`]: an endpoint for a new connection; [`refuse`]: what its client hears if there is none;
//! - [`arrive`]: what comes to a pod: the address that the pod sent to becomes the source again;
//! - [`hairpin`]: a pod that is its own endpoint;
//! - [`outside`]: clients outside of the cluster, at uplinks;
//! - [`unallocated`]: addresses that only Services have, and none of them;
//! - [`error`]: ICMP errors, which quote packets, in both directions.
//!
//! Between a client's link and its endpoint the packet has their own addresses, so the stack routes and filters it like
//! any other. The record's key is between these, and the alias from the client to the frontend leads there.
//!
//! Limits. A connection from pod to pod without a Service has no record. So one between the same ports of the same two
//! pods as that of a Service is seen only where it begins second.

pub mod arrive;
pub mod choose;
pub mod error;
pub mod hairpin;
pub mod leave;
pub mod outside;
pub mod refuse;
pub mod unallocated;

use crate::{
    PASS,
    maps::CONFIG,
    nat::drop,
    parse::{Ip, proto},
    rewrite::{self, End},
    scratch::Scratch,
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::{
    abi::{
        config::{FLAG_DRAINING, FLAG_HANDOVER, FLAG_SERVICES, NodeConfig},
        drop::DropReason,
    },
    algo::checksum,
};

/// The packet has another end now: no action of the kernel's.
pub const TRANSLATED: i32 = 72;

/// Whether Services are translated here.
#[inline(always)]
pub fn are_ours(config: &NodeConfig) -> bool {
    config.flags & FLAG_SERVICES != 0
}

/// Whether connections that begin now are somebody else's.
#[inline(always)]
pub fn is_draining() -> bool {
    CONFIG
        .get(0)
        .is_some_and(|config| config.flags & FLAG_DRAINING != 0)
}

/// Whether somebody else has connections that began before.
#[inline(always)]
pub fn is_handover() -> bool {
    CONFIG
        .get(0)
        .is_some_and(|config| config.flags & FLAG_HANDOVER != 0)
}

/// Whether a Service may have ports of this packet's protocol.
#[inline(always)]
pub fn has_ports(ip: &Ip) -> bool {
    matches!(ip.proto, proto::TCP | proto::UDP | proto::SCTP)
}

/// Gives one end of the packet the address and port in `scratch.alias`: [`TRANSLATED`], or a drop. What was read of it is
/// what it is now, but for the source: what follows asks where it really comes from.
#[inline(always)]
pub fn translate(skb: *mut __sk_buff, scratch: &mut Scratch, end: End) -> i32 {
    let ctx = TcContext::new(skb);
    let Scratch { ip, l4, alias, .. } = scratch;
    let from = match end {
        End::Source => (&ip.src, l4.src_port),
        End::Destination => (&ip.dst, l4.dst_port),
    };
    if rewrite::endpoint(&ctx, ip, end, from, (&alias.addr, alias.port)).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    if !ip.v6 {
        let (from, to) = (rewrite::word(from.0), rewrite::word(&alias.addr));
        ip.checksum = checksum::replaced(ip.checksum, from, to);
    }
    match end {
        End::Source => {}
        End::Destination => {
            ip.dst = alias.addr;
            l4.dst_port = alias.port;
        }
    }
    TRANSLATED
}

/// Gives one end of a later fragment the address that the first got.
#[inline(always)]
pub fn translate_later(skb: *mut __sk_buff, scratch: &mut Scratch, end: End) -> i32 {
    scratch.alias.addr = scratch.fragment.addr;
    let (ip, to) = (&mut scratch.ip, &scratch.alias.addr);
    let from = match end {
        End::Source => &ip.src,
        End::Destination => &ip.dst,
    };
    if rewrite::address(&TcContext::new(skb), ip, end, from, to).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    if end == End::Destination {
        ip.dst = *to;
    }
    TRANSLATED
}

/// What a stage returns for a packet that is none of a Service.
const NONE: i32 = PASS;
