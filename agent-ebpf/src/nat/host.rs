//! The host's own packets. They keep their ports as long as no other connection has those towards the same
//! remote end, and so cost a lookup at most.
//!
//! What the kernel cannot be asked for when a pod wants a port gets a record: echo requests, protocols without
//! sockets, and what others forward with the node's address (containers of another runtime).

use super::{
    claim, keeps_source,
    leave::{CLAIM, KNOWN},
};
use crate::{
    PASS,
    connection::{self, Noted, share},
    maps::ALIASES,
    parse::{icmp, proto},
    scratch::Scratch,
};
use sinabro_common::{
    abi::{
        Addr,
        connection::{FLAG_MASQUERADED, HOST_SHARE},
    },
    algo::ct_state,
};

/// A packet of a socket of the host.
#[inline(always)]
pub fn leave(scratch: &mut Scratch) -> i32 {
    let proto = scratch.ip.proto;
    match proto {
        // Only its first packet can meet another connection's alias.
        proto::TCP if !ct_state::begins(proto, scratch.l4.tcp_flags) && !has_translated() => {
            return PASS;
        }
        proto::TCP | proto::UDP => {}
        proto::ICMP | proto::ICMPV6 if !icmp::is_echo_request(scratch.ip.v6, scratch.l4.icmp) => {
            return PASS;
        }
        _ => {}
    }
    let is_noted = !matches!(proto, proto::TCP | proto::UDP);
    claimed(scratch, is_noted)
}

/// Whether any of the host's connections has another port than its own.
#[inline(always)]
fn has_translated() -> bool {
    share::is_used(HOST_SHARE)
}

/// Looks for a record of the packet's connection, and for another one that has its port: it needs another port
/// then. Those that are to be noted need a record anyway.
#[inline(never)]
pub fn claimed(scratch: &mut Scratch, is_noted: bool) -> i32 {
    scratch.identify();
    scratch.nat = scratch.ip.src;
    if (is_noted || has_translated())
        && let Some(found) = connection::find(&scratch.key)
    {
        // SAFETY: a value that the map just gave.
        unsafe {
            if (*found).flags & FLAG_MASQUERADED == 0
                || (*found).client_is_high() != scratch.from_high
            {
                return PASS;
            }
            let (proto, flags) = (scratch.key.proto, scratch.l4.tcp_flags);
            match connection::note(found, proto, scratch.from_high, flags) {
                Noted::Over => {
                    claim::forget(scratch);
                }
                noted => {
                    if noted == Noted::Changed {
                        connection::changed(scratch);
                    }
                    scratch.connection.nat = Addr::at(&raw const (*found).nat);
                    scratch.connection.nat_port = (*found).nat_port;
                    return KNOWN;
                }
            }
        }
    }
    // A connection without a record goes on by its own port. What has that at the moment is a pod's claim, which
    // ends when the socket is found.
    let flags = scratch.l4.tcp_flags;
    if !is_noted && scratch.ip.proto == proto::TCP && !ct_state::begins(proto::TCP, flags) {
        return PASS;
    }
    scratch.tuple.write_reversed(&mut scratch.alias_key);
    let is_taken = match ALIASES.get_ptr(&scratch.alias_key) {
        // Also by another port of the host, which was given this one.
        // SAFETY: a value that the map just gave.
        Some(alias) => unsafe {
            (*alias).addr != scratch.ip.src || (*alias).port != scratch.tuple.src_port
        },
        None => false,
    };
    if !is_taken && (!is_noted || keeps_source(scratch.ip.dst)) {
        return PASS;
    }
    scratch.payer = HOST_SHARE;
    // Its port may be nobody else's, and there is no room to say so.
    scratch.may_pass = !is_taken;
    CLAIM
}
