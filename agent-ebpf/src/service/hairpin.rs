//! A pod that is its own endpoint.
//!
//! No stack takes a packet from its own address, so it comes from one that is nobody's and is behind the gateway, to which
//! the pod answers. For the record that is a masquerade like any other: that address and the client's port are those that the
//! client has where the endpoint sees it, and an alias leads from there to the client. Nothing of it passes the node's stack.
//!
//! Limits: of an answer in parts all but the first are lost.

use super::{NONE, TRANSLATED, arrive, translate};
use crate::{
    connection::{self, Noted},
    maps::ALIASES,
    nat::drop,
    parse::Fragment,
    rewrite::{self, End},
    scratch::{self, Scratch, verified_once},
};
use aya_ebpf::{bindings::__sk_buff, helpers::bpf_redirect, programs::TcContext};
use sinabro_common::{
    abi::{
        Addr,
        connection::{FLAG_MASQUERADED, FLAG_SERVICE},
        drop::DropReason,
    },
    names::{ITSELF_V4, ITSELF_V6},
};

/// As whom a pod asks itself, of the packet's family.
#[inline(always)]
fn itself(v6: bool) -> Addr {
    match v6 {
        false => Addr::v4(ITSELF_V4),
        true => Addr::v6(ITSELF_V6),
    }
}

/// Whether the packet may be what a pod answers itself.
#[inline(always)]
pub fn is_answer(scratch: &Scratch) -> bool {
    scratch.ip.dst == itself(scratch.ip.v6)
}

/// Flags of a connection from the packet's client to `scratch.alias`; where that is the client itself its answers are led
/// back, and what is to be written says so.
#[inline(always)]
pub fn claim(scratch: &mut Scratch) -> u16 {
    let Scratch {
        connection,
        tuple,
        alias,
        alias_key,
        ip,
        is_outside,
        ..
    } = &mut *scratch;
    // Outside it is another machine that comes back to itself, by the way of any other.
    if *is_outside || alias.addr != tuple.src {
        connection.nat = Addr::UNSPECIFIED;
        connection.nat_port = [0; 2];
        return FLAG_SERVICE;
    }
    connection.nat = itself(ip.v6);
    connection.nat_port = tuple.src_port;
    alias_key.src = tuple.src;
    alias_key.src_port = alias.port;
    alias_key.dst = connection.nat;
    alias_key.dst_port = tuple.src_port;
    alias_key.proto = tuple.proto;
    // Only a connection of these very ends has this alias, and of those there is one.
    let port = alias.port;
    alias.port = tuple.src_port;
    alias.pad[0] = 0;
    let _ = ALIASES.insert(&scratch.alias_key, &scratch.alias, 0);
    scratch.alias.port = port;
    FLAG_SERVICE | FLAG_MASQUERADED
}

/// Gives a packet whose destination has become its own pod a source that the pod answers to, and sends it back.
#[inline(never)]
pub fn turn(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    scratch.alias.addr = itself(scratch.ip.v6);
    scratch.alias.port = scratch.l4.src_port;
    give_back(skb, scratch)
}

/// Gives the packet the source in `scratch.alias`, and to the pod that it came from.
#[inline(always)]
fn give_back(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let translated = translate(skb, scratch, End::Source);
    if translated != TRANSLATED {
        return translated;
    }
    let ctx = TcContext::new(skb);
    let swapped = match ctx.load::<[[u8; 6]; 2]>(0) {
        Ok([dst, src]) => rewrite::macs(&ctx, src, dst).is_ok(),
        Err(_) => false,
    };
    if !swapped {
        return drop(DropReason::RewriteFailed);
    }
    // SAFETY: the context is valid for as long as the program runs; no other pointers involved.
    unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
}

verified_once! {
    /// What a pod answers itself.
    pub fn leave = leave_global(left);
}

#[inline(always)]
fn left(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match scratch.ip.fragment == Fragment::No && known(scratch) {
        true => answered(skb, scratch),
        false => NONE,
    }
}

#[inline(never)]
fn answered(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let frontend = (scratch.alias.addr, scratch.alias.port);
    // The client is where it comes from.
    scratch.alias.addr = scratch.ip.src;
    scratch.alias.port = scratch.tuple.dst_port;
    match translate(skb, scratch, End::Destination) {
        TRANSLATED => {
            (scratch.alias.addr, scratch.alias.port) = frontend;
            give_back(skb, scratch)
        }
        dropped => dropped,
    }
}

/// Whether the packet is an answer of a connection that a pod has with itself; what it sent to is in `scratch.alias` then.
#[inline(never)]
fn known(scratch: &mut Scratch) -> bool {
    scratch.identify();
    let Some(alias) = ALIASES.get_ptr(&scratch.tuple) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        scratch.alias.addr = Addr::at(&raw const (*alias).addr);
        scratch.alias.port = (*alias).port;
    }
    scratch.resolve();
    let Some(found) = connection::find(&scratch.key) else {
        return false;
    };
    // SAFETY: as above.
    let noted = unsafe {
        if !arrive::is_answer(found, scratch.from_high) {
            return false;
        }
        arrive::show_frontend(found, scratch);
        connection::note(found, scratch)
    };
    match noted {
        Noted::Same => true,
        Noted::Changed => {
            connection::changed(scratch);
            true
        }
        Noted::Over => false,
    }
}
