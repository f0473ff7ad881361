//! Clients outside of the cluster and the node's own sockets with pods of other nodes, through the tunnels.
//!
//! A pod of another node would answer a client outside by its own node, which knows nothing of the Service, and a socket
//! that is bound to one of this node's addresses past the tunnel. So it sees this node's address inside of the overlay,
//! with a port that nobody else has towards it, as a host outside sees a pod: the same claims, the same table; of a client
//! outside by the record that the uplink made.
//!
//! Limits. What comes out of a tunnel in parts is followed only if the first part comes first. Of ports that netfilter
//! gives to what it masquerades nothing is known here.

use super::{
    DROPPED, arrive, error, host, is_error,
    leave::{KNOWN, finish, of_service},
    translate, translating,
};
use crate::{
    PASS,
    connection::{self, fragment},
    maps::{CONFIG, OVERLAY, UPLINKS},
    nat::drop,
    parse::Fragment,
    rewrite::{self, End},
    scratch::Scratch,
    service,
    stage::origin::comes_from,
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::abi::{Addr, connection::FLAG_SERVICE, drop::DropReason};

/// Whether a packet on its way into a tunnel came in by an uplink, and may be a client's of a Service, or is of a socket
/// of the node.
#[inline(always)]
pub fn may_be_masqueraded(from: u32) -> bool {
    match from {
        0 => translating().is_some(),
        from => CONFIG.get(0).is_some_and(service::are_ours) && UPLINKS.get_ptr(from).is_some(),
    }
}

/// Whether anything comes out of tunnels to this node's address that is for another one.
#[inline(always)]
pub fn has_answers() -> bool {
    CONFIG.get(0).is_some_and(service::are_ours)
        || (translating().is_some() && host::has_translated())
}

/// Gives what goes to a pod of another node this node's address: of a client outside, or from another address of this
/// node.
#[inline(always)]
pub fn leave(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let action = prepare(skb, scratch);
    finish(skb, scratch, action)
}

#[inline(never)]
fn prepare(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !scratch.well_formed || !find_gateway(scratch) {
        return PASS;
    }
    if is_error(scratch) {
        return error::cross(skb, scratch);
    }
    if scratch.ip.fragment == Fragment::Later {
        return later(skb, scratch, End::Source);
    }
    if comes_from(skb) == 0 {
        return CONFIG
            .get(0)
            .map_or(PASS, |config| host::cross(config, scratch));
    }
    if !service::has_ports(&scratch.ip) {
        return PASS;
    }
    scratch.identify();
    let Some(found) = connection::find(&scratch.key) else {
        return PASS;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        match (*found).has(FLAG_SERVICE) {
            true => of_service(found, scratch),
            false => PASS,
        }
    }
}

/// Finds this node's address inside of the overlay, of the packet's family.
#[inline(always)]
fn find_gateway(scratch: &mut Scratch) -> bool {
    let Some(overlay) = OVERLAY.get_ptr(0) else {
        return false;
    };
    for at in 0..2 {
        // SAFETY: a value that the map just gave.
        let gateway = unsafe { Addr::at(&raw const (*overlay).gateways[at]) };
        let is_v6 = gateway.as_v4().is_none();
        if gateway != Addr::UNSPECIFIED && is_v6 == scratch.ip.v6 {
            scratch.nat = gateway;
            return true;
        }
    }
    false
}

/// Gives what comes out of a tunnel for this node's address back to the client that it is for, or to the node's other
/// address.
#[inline(never)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(config) = CONFIG.get(0) else {
        return PASS;
    };
    if !scratch.well_formed {
        return PASS;
    }
    if is_error(scratch) {
        return error::arrive(skb, scratch);
    }
    if scratch.ip.fragment == Fragment::Later {
        return later(skb, scratch, End::Destination);
    }
    match arrive::known(config, scratch) {
        KNOWN => {}
        action if action >= DROPPED => return action,
        // Nothing says whose it is if entries are on their way here: the stack knows its own connections and netfilter's,
        // and its reset of another is kept back ([`host::cross`]).
        _ => return PASS,
    }
    let ctx = TcContext::new(skb);
    if scratch.ip.fragment == Fragment::First {
        let addr = scratch.alias.addr;
        fragment::note(&ctx, scratch, End::Destination, &addr);
    }
    let to = (&scratch.alias.addr, scratch.alias.port);
    translate(&ctx, scratch, End::Destination, to)
}

/// A fragment that names no ports: the first said where all go.
#[inline(never)]
fn later(skb: *mut __sk_buff, scratch: &mut Scratch, end: End) -> i32 {
    let ctx = &TcContext::new(skb);
    if !fragment::find(ctx, scratch, end) {
        return PASS;
    }
    let (ip, to) = (&scratch.ip, &scratch.fragment.addr);
    let from = match end {
        End::Source => &ip.src,
        End::Destination => &ip.dst,
    };
    match rewrite::address(ctx, ip, end, from, to) {
        Ok(()) => PASS,
        Err(rewrite::Failed) => drop(DropReason::RewriteFailed),
    }
}
