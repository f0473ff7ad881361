//! What comes to a pod from its endpoint.

use super::{NONE, error, has_ports, translate, translate_later};
use crate::{
    connection::{self, Noted, fragment},
    nat::is_error,
    parse::{Fragment, skb::Head},
    rewrite::End,
    scratch::{self, Scratch},
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::abi::{
    Addr,
    connection::{Connection, FLAG_SERVICE},
};

/// The record is of a Service; the packet is the endpoint's, and its source is to be `scratch.alias`.
const ANSWER: i32 = 65;

/// Gives what the stack delivers from an endpoint the address that the pod sent to: [`super::TRANSLATED`], a drop, or
/// none of a Service's.
#[inline(never)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match scratch::read_l4::<Head>(skb, scratch) {
        true => answer(skb, scratch),
        false => NONE,
    }
}

/// The same of a packet that is read.
#[inline(always)]
pub fn answer(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !has_ports(&scratch.ip) {
        return match is_error(scratch) {
            true => error::arrive(skb, scratch),
            false => NONE,
        };
    }
    if scratch.ip.fragment == Fragment::Later {
        return later(skb, scratch);
    }
    match known(scratch) {
        ANSWER => translated(skb, scratch),
        other => other,
    }
}

#[inline(never)]
fn translated(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if scratch.ip.fragment == Fragment::First {
        let addr = scratch.alias.addr;
        fragment::note(&TcContext::new(skb), scratch, End::Source, &addr);
    }
    translate(skb, scratch, End::Source)
}

#[inline(never)]
fn later(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match fragment::find(&TcContext::new(skb), scratch, End::Source) {
        true => translate_later(skb, scratch, End::Source),
        false => NONE,
    }
}

#[inline(never)]
fn known(scratch: &mut Scratch) -> i32 {
    scratch.identify();
    let Some(found) = connection::find(&scratch.key) else {
        return NONE;
    };
    scratch.seen.forget();
    // SAFETY: a value that the map just gave.
    let noted = unsafe {
        if !is_answer(found, scratch.from_high) {
            return NONE;
        }
        show_frontend(found, scratch);
        connection::note(found, scratch)
    };
    match noted {
        Noted::Same => ANSWER,
        Noted::Changed => {
            connection::changed(scratch);
            ANSWER
        }
        Noted::Over => NONE,
    }
}

/// Whether what comes from that end is the endpoint's of a Service.
///
/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
pub unsafe fn is_answer(connection: *const Connection, from_high: bool) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (*connection).has(FLAG_SERVICE) && (*connection).client_is_high() != from_high }
}

/// Puts into the scratch what the client sends to.
///
/// # Safety
/// As in [`is_answer`].
#[inline(always)]
pub unsafe fn show_frontend(connection: *const Connection, scratch: &mut Scratch) {
    // SAFETY: the caller's promise.
    unsafe {
        scratch.alias.addr = Addr::at(&raw const (*connection).frontend);
        scratch.alias.port = (*connection).frontend_port;
    }
}
