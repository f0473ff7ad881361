//! Clients outside of the cluster, whose packets come in by an uplink.
//!
//! - [`enter`]: what such a client sends to a frontend goes to an endpoint, and keeps its source: behind the uplink the
//!   stack routes a packet between the two;
//! - [`exit`]: what the endpoint answers leaves by an uplink as the frontend's.
//!
//! An endpoint on another machine would answer the client directly, and so gets this node's address as the source
//! ([`crate::nat::leave`] by an uplink, [`crate::nat::across`] through a tunnel), by the same record.

use super::{
    NONE,
    arrive::answer,
    choose,
    leave::{KNOWN, STALE, left, noted},
};
use crate::{
    connection::share,
    maps::{CONFIG, FRONTENDS},
    parse::skb::PACKET_HOST,
    scratch::Scratch,
    service,
};
use aya_ebpf::bindings::__sk_buff;

/// What is known of where a packet goes that came in by an uplink: nothing;
pub const NEW: u32 = 0;
/// an alias of a Service's client leads to a record;
pub const SERVICE: u32 = 1;
/// an alias leads to no record.
pub const ORPHAN: u32 = 2;

/// Finds the endpoint of a packet to a frontend: [`KNOWN`] if it is in `scratch.alias`, what becomes of the packet, or
/// nothing to do with Services. Its tuple is in the scratch.
#[inline(never)]
pub fn enter(skb: *mut __sk_buff, scratch: &mut Scratch, state: u32) -> i32 {
    let found = match state {
        SERVICE => noted(scratch),
        _ => NONE,
    };
    // What is on the link for other machines is none of this node's to answer.
    // SAFETY: the context is valid for as long as the program runs.
    if found == KNOWN || unsafe { (*skb).pkt_type } != PACKET_HOST {
        return found_or_none(found);
    }
    scratch.is_outside = true;
    if state == ORPHAN && !forget_orphan(scratch) {
        return NONE;
    }
    choose::led(skb, scratch, found == STALE)
}

#[inline(always)]
fn found_or_none(found: i32) -> i32 {
    match found {
        KNOWN | STALE => KNOWN,
        _ => NONE,
    }
}

/// Removes an alias that leads to no record, if it is a frontend's and no claim of a masqueraded connection that is being
/// made.
#[inline(always)]
fn forget_orphan(scratch: &mut Scratch) -> bool {
    let Scratch {
        tuple,
        frontend_key: key,
        ..
    } = scratch;
    key.addr = tuple.dst;
    key.port = tuple.dst_port;
    key.proto = tuple.proto;
    let is_frontend = FRONTENDS.get_ptr(&scratch.frontend_key).is_some();
    if is_frontend {
        left(scratch);
    }
    is_frontend
}

/// Gives what an endpoint answers to a client outside the frontend as its source: [`service::TRANSLATED`], a drop, or none
/// of that. Asks nothing of packets while there is no such client.
#[inline(never)]
pub fn exit(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let is_on = CONFIG.get(0).is_some_and(service::are_ours);
    match is_on && scratch.well_formed && share::has_outside() {
        true => answer(skb, scratch),
        false => NONE,
    }
}
