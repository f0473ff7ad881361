//! Clients outside of the cluster with pods of other nodes ([`crate::nat::across`]): in by an uplink and out by one. Only to nodes that are
//! sent no tunnels: what came out of one is the stack's to hand on (ADR 26).
//!
//! What begins a connection goes by the stack, where it gets its translation. What follows has the same, whichever way it goes.

use super::{
    arrive::may_go_on,
    leave::{find_way, send, with_source},
};
use crate::{
    PASS, connection,
    maps::CONFIG,
    nat::{
        DROPPED, arrive, drop,
        leave::{KNOWN, of_service},
    },
    overlay::{native, route},
    rewrite::{self, End},
    scratch::Scratch,
    service::{self, arrive::is_answer},
    stage::{deliver, mss, mtu, report, tunnel},
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use core::mem;
use sinabro_common::abi::{connection::FLAG_SERVICE, drop::DropReason};

/// Sends a client's packet, whose destination is its endpoint's by now, to that pod's node; [`PASS`] if that is left to the stack.
///
/// One function after the other, as everywhere: none has the others on its stack.
#[inline(never)]
pub fn enter(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !may_be_sent(skb, scratch) || !leads_to_node(skb, scratch) || !is_translated(scratch) {
        return PASS;
    }
    match with_source(skb, scratch) {
        PASS => {}
        dropped => return dropped,
    }
    report::native(&scratch.sender, |peer| &mut peer.tx);
    sent(skb, scratch)
}

/// Whether the destination is a pod of a node that is sent no tunnels, and whose neighbour is known ([`native`]). The node, and the way
/// there, are in the scratch then.
#[inline(never)]
fn leads_to_node(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    let Some(config) = CONFIG.get(0) else {
        return false;
    };
    let Some(node) = tunnel::pods_elsewhere(config, &scratch.ip.dst) else {
        return false;
    };
    let Some((next, gateway)) = native::next_hop(scratch.ip.v6, node) else {
        return false;
    };
    if !route::leads_still(skb, scratch, &node.tunnel) {
        return false;
    }
    scratch.sender = node.tunnel;
    scratch.way.knows_neighbour(skb, next.ifindex, gateway)
}

/// Whether the packet's connection has its translation, which is in `scratch.connection` then.
#[inline(never)]
fn is_translated(scratch: &mut Scratch) -> bool {
    scratch.identify();
    let Some(found) = connection::find(&scratch.key) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    unsafe { (*found).has(FLAG_SERVICE) && of_service(found, scratch) == KNOWN }
}

/// Sends what a pod of another node answers such a client, and came without a tunnel, by its uplink; [`PASS`] if that is left to the
/// stack, and the packet as it was.
#[inline(never)]
pub fn answer(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !may_be_sent(skb, scratch) {
        return PASS;
    }
    let Some(config) = CONFIG.get(0) else {
        return PASS;
    };
    match arrive::known(config, scratch) {
        KNOWN => {}
        action if action >= DROPPED => return action,
        _ => return PASS,
    }
    if !is_of_client(scratch) || !leads_to_client(skb, scratch) {
        return PASS;
    }
    match to_client(skb, scratch) {
        service::TRANSLATED => {}
        dropped => return dropped,
    }
    match service::arrive::answer(skb, scratch) {
        service::TRANSLATED => sent(skb, scratch),
        // Its record is over, or has just gone.
        PASS => drop(DropReason::ServiceNoPort),
        dropped => dropped,
    }
}

/// Whether the alias in the scratch is a client's of a Service, whose endpoint the packet is from.
#[inline(never)]
fn is_of_client(scratch: &mut Scratch) -> bool {
    scratch.resolve();
    match connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        Some(found) => unsafe { is_answer(found, scratch.from_high) },
        None => false,
    }
}

/// Whether the kernel's routes lead to the alias in the scratch, by the way that is there then.
#[inline(never)]
fn leads_to_client(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    swap_destination(scratch);
    let way = find_way(skb, scratch);
    swap_destination(scratch);
    way != 0
}

#[inline(always)]
fn swap_destination(scratch: &mut Scratch) {
    let Scratch { ip, l4, alias, .. } = scratch;
    mem::swap(&mut ip.dst, &mut alias.addr);
    mem::swap(&mut l4.dst_port, &mut alias.port);
}

#[inline(never)]
fn to_client(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    service::translate(skb, scratch, End::Destination)
}

/// Whether the stack is needed for no packet like this one, which may be sent as it is.
#[inline(never)]
fn may_be_sent(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    let ctx = TcContext::new(skb);
    service::has_ports(&scratch.ip)
        && may_go_on(skb, scratch)
        && !mss::begins(&scratch.ip, &scratch.l4)
        && !deliver::has_segments_of_any_length(&ctx, scratch)
        && deliver::fits(&ctx, scratch, mtu::of_uplinks(), 0)
}

/// Sends a packet that is as it is to be on the wire, but for its hops, which way the scratch says.
#[inline(never)]
fn sent(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return drop(DropReason::RewriteFailed);
    };
    if rewrite::decrement_ttl(&TcContext::new(skb), &scratch.ip).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    tunnel::make_here(skb, overlay);
    send(&scratch.way)
}
