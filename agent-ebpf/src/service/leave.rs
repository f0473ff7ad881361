//! What a pod sends.

use super::{
    TRANSLATED, choose, error, hairpin, has_ports, is_draining, translate, translate_later,
    unallocated,
};
use crate::{
    connection::{self, Noted, fragment},
    maps::{ALIASES, BACKENDS, FRONTENDS},
    nat::{drop, is_error},
    parse::{
        Fragment,
        l4::{TCP_FIN, TCP_RST, TCP_SYN},
        proto,
    },
    rewrite::End,
    scratch::{self, Scratch},
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::{
    abi::{
        Addr,
        connection::{Connection, FLAG_MASQUERADED, FLAG_SERVICE},
        drop::DropReason,
        service::{BACKEND_DRAINING, BACKEND_SERVING, FrontendKey},
    },
    algo::ct_state,
};

/// Segments of TCP with one of these say how far a connection is.
const SYN_FIN_RST: u8 = TCP_SYN | TCP_FIN | TCP_RST;

/// What a port sends after a question that has its answer, and this pause, goes to no endpoint that is about to end: most
/// likely it is another socket's, and of an endpoint that has ended the cluster hears later. In a handshake there is none.
const PAUSE_NS: u64 = 1_000_000_000;

/// `scratch.alias` has the packet's endpoint.
pub const KNOWN: i32 = 65;
/// Its tuple leads nowhere yet.
const NEW: i32 = 66;
/// It leads to an endpoint that does not serve any more, or that it need not have any longer, and may have another.
pub const STALE: i32 = 67;

/// Gives a packet to a Service its endpoint as the destination: [`super::TRANSLATED`], a drop, or nothing to do with
/// Services.
///
/// One function after the other, as in [`crate::nat::leave`].
#[inline(always)]
pub fn leave(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match to_endpoint(skb, scratch) {
        TRANSLATED if scratch.ip.dst == scratch.ip.src => hairpin::turn(skb, scratch),
        action => action,
    }
}

#[inline(never)]
fn to_endpoint(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !has_ports(&scratch.ip) {
        return match is_error(scratch) {
            true => error::leave(skb, scratch),
            false => unallocated::check(&scratch.ip.dst),
        };
    }
    if scratch.ip.fragment == Fragment::Later {
        return later(skb, scratch);
    }
    if hairpin::is_answer(scratch) {
        return hairpin::leave(skb, scratch);
    }
    scratch.is_outside = false;
    let action = match known(scratch) {
        KNOWN => KNOWN,
        found => choose::led(skb, scratch, found == STALE),
    };
    match action {
        KNOWN => translated(skb, scratch),
        action => action,
    }
}

#[inline(never)]
fn translated(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if scratch.ip.fragment == Fragment::First {
        let addr = scratch.alias.addr;
        fragment::note(&TcContext::new(skb), scratch, End::Destination, &addr);
    }
    translate(skb, scratch, End::Destination)
}

/// Looks up where packets with these ends go.
#[inline(never)]
fn known(scratch: &mut Scratch) -> i32 {
    scratch.identify();
    let Some(alias) = ALIASES.get_ptr_mut(&scratch.tuple) else {
        return NEW;
    };
    let flags = scratch.l4.tcp_flags;
    // SAFETY: a value that the map just gave.
    unsafe {
        scratch.alias.addr = Addr::at(&raw const (*alias).addr);
        scratch.alias.port = (*alias).port;
        let ticks = connection::ticks();
        if flags & SYN_FIN_RST == 0 && !connection::is_due(ticks, (*alias).noted_ticks) {
            return KNOWN;
        }
        // What follows a SYN says that the handshake is over.
        (*alias).noted_ticks = match flags & TCP_SYN {
            0 => ticks,
            _ => connection::due_now(),
        };
    }
    noted(scratch)
}

/// Notes the packet in the record that its alias leads to: [`KNOWN`], [`STALE`], or it leads nowhere any more.
#[inline(always)]
pub fn noted(scratch: &mut Scratch) -> i32 {
    scratch.lend(noted_global)
}

#[inline(never)]
fn noted_global() -> i32 {
    scratch::borrow(note)
}

#[inline(always)]
fn note(scratch: &mut Scratch) -> i32 {
    scratch.resolve();
    let Some(found) = connection::find(&scratch.key) else {
        return left(scratch);
    };
    let (proto, flags) = (scratch.key.proto, scratch.l4.tcp_flags);
    // SAFETY: a value that the map just gave.
    unsafe {
        // Another's by now, with which that end had to make do.
        if (*found).flags & FLAG_SERVICE == 0
            || (*found).client_is_high() != scratch.from_high
            || Addr::at(&raw const (*found).frontend) != scratch.tuple.dst
            || (*found).frontend_port != scratch.tuple.dst_port
        {
            return left(scratch);
        }
        let backend = backend_flags(found);
        let serves = backend & BACKEND_SERVING != 0;
        // Asked before this packet is noted: its port may have been drawn again.
        let moves =
            backend & BACKEND_DRAINING != 0 && connection::makes_way(found, proto, PAUSE_NS);
        let begins = proto == proto::TCP && ct_state::begins(proto, flags);
        if begins && (!serves || connection::begins_again(found, proto, flags)) {
            return forget(scratch);
        }
        match connection::note_by_alias(found, scratch) {
            Noted::Over => return forget(scratch),
            Noted::Changed => {
                connection::changed(scratch);
            }
            Noted::Same => {}
        }
        match (serves && !moves) || proto == proto::TCP {
            true => KNOWN,
            false => STALE,
        }
    }
}

/// What a connection's endpoint does by now: none of its flags if it is gone.
///
/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn backend_flags(connection: *const Connection) -> u16 {
    // SAFETY: the caller's promise, and a value that the map just gave.
    unsafe {
        match BACKENDS.get_ptr((*connection).endpoint) {
            Some(backend) if (*backend).generation == (*connection).endpoint_generation => {
                (*backend).flags
            }
            _ => 0,
        }
    }
}

/// Removes the packet's record and the alias that led to it.
#[inline(never)]
pub fn forget(scratch: &mut Scratch) -> i32 {
    connection::remove(&scratch.key);
    left(scratch)
}

/// Removes the record between `scratch.key`'s ends, and what leads to it, if the client's port may have another one: by the
/// next packet at once, so that no answer is taken for another Service's.
#[inline(never)]
pub fn make_way(scratch: &mut Scratch) -> bool {
    let Some(found) = connection::find(&scratch.key) else {
        return true;
    };
    let (dst, port) = (scratch.tuple.dst, scratch.tuple.dst_port);
    // SAFETY: a value that the map just gave.
    unsafe {
        if (*found).flags & (FLAG_SERVICE | FLAG_MASQUERADED) != FLAG_SERVICE
            || (*found).client_is_high() != scratch.from_high
            || !connection::makes_way(found, scratch.key.proto, 0)
        {
            return false;
        }
        scratch.tuple.dst = Addr::at(&raw const (*found).frontend);
        scratch.tuple.dst_port = (*found).frontend_port;
    }
    connection::remove(&scratch.key);
    // What the packet itself sends to is claimed already.
    if scratch.tuple.dst != dst || scratch.tuple.dst_port != port {
        left(scratch);
    }
    scratch.tuple.dst = dst;
    scratch.tuple.dst_port = port;
    true
}

/// Removes an alias that leads to no record of its own.
#[inline(always)]
pub fn left(scratch: &mut Scratch) -> i32 {
    let _ = ALIASES.remove(&scratch.tuple);
    NEW
}

/// A fragment that names no ports: the first said where all go.
#[inline(never)]
fn later(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if fragment::find(&TcContext::new(skb), scratch, End::Destination) {
        return translate_later(skb, scratch, End::Destination);
    }
    scratch.frontend_key = FrontendKey::address(scratch.ip.dst);
    match FRONTENDS.get_ptr(&scratch.frontend_key) {
        Some(_) if !is_draining() => drop(DropReason::ServiceFragment),
        _ => unallocated::check(&scratch.ip.dst),
    }
}
