//! The host's own packets. They keep their ports as long as no other connection has those towards the same
//! remote end, and so cost a lookup at most.
//!
//! What the kernel cannot be asked for when a pod wants a port gets a record: echo requests, protocols without
//! sockets, and what others forward with the node's address (containers of another runtime).
//!
//! Into a tunnel ([`cross`]) the host sends by its address inside of the overlay; what a socket sends there by another
//! one is masqueraded.

use super::{
    claim, drop, is_carried, keeps_source,
    leave::{CLAIM, KNOWN},
};
use crate::{
    PASS,
    connection::{self, Noted, share},
    maps::{ALIASES, CONFIG},
    parse::{
        icmp,
        l4::{TCP_ACK, TCP_RST},
        proto,
    },
    scratch::Scratch,
};
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_CARRYING, FLAG_MASQUERADE, NodeConfig},
        connection::{Connection, FLAG_MASQUERADED, HOST_SHARE},
        drop::DropReason,
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

/// Whether any of the host's connections has another address or port than its own.
#[inline(always)]
pub fn has_translated() -> bool {
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
        match unsafe { noted(found, scratch) } {
            OVER => {
                claim::forget(scratch);
            }
            known => return known,
        }
    }
    // A connection without a record goes on by its own port. What has that at the moment is a pod's claim, which
    // ends when the socket is found.
    let is_tcp = scratch.ip.proto == proto::TCP;
    let asks = is_tcp && ct_state::begins(proto::TCP, scratch.l4.tcp_flags);
    if !is_noted && is_tcp && !asks {
        return PASS;
    }
    // A reset begins nothing. It may be one of our own, to a client of a Service without endpoints: by a record of it the client's
    // next packets would be the node's and not the Service's.
    if is_tcp && scratch.l4.tcp_flags & TCP_RST != 0 {
        return PASS;
    }
    scratch.tuple.write_reversed(&mut scratch.alias_key);
    let is_taken = match ALIASES.get_ptr(&scratch.alias_key) {
        // Also by another port of the host, which was given this one.
        // SAFETY: a value that the map just gave.
        Some(alias) => unsafe {
            let is_own = (*alias).addr == scratch.ip.src && (*alias).port == scratch.tuple.src_port;
            // Its record is on its way, and says the same.
            if is_own && !asks && are_carried() {
                return PASS;
            }
            !is_own
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

/// Whether records are being carried to another layout's table.
#[inline(always)]
fn are_carried() -> bool {
    CONFIG
        .get(0)
        .is_some_and(|config| config.flags & FLAG_CARRYING != 0)
}

/// The record is over, or of a connection that is closed and asked for again.
const OVER: i32 = 66;

/// Notes a packet of the host in its record: [`KNOWN`] if it is to have what that says, [`OVER`], or none of the host's
/// translations.
///
/// # Safety
/// `found` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn noted(found: *mut Connection, scratch: &mut Scratch) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        if (*found).flags & FLAG_MASQUERADED == 0 || (*found).client_is_high() != scratch.from_high
        {
            return PASS;
        }
        match connection::note_or_begin_again(found, scratch) {
            Noted::Over => return OVER,
            Noted::Changed => {
                connection::changed(scratch);
            }
            Noted::Same => {}
        }
        scratch.connection.nat = Addr::at(&raw const (*found).nat);
        scratch.connection.nat_port = (*found).nat_port;
    }
    KNOWN
}

/// Whether a segment is the stack's answer to one of a connection that no socket has: it acknowledges nothing, as what is
/// answered did so (RFC 9293 §3.10.7.1). What a socket resets, and what refuses a connection, does.
#[inline(always)]
fn is_of_no_socket(tcp_flags: u8) -> bool {
    tcp_flags & (TCP_RST | TCP_ACK) == TCP_RST
}

/// A packet of a socket of the host on its way into a tunnel, inside of which the host's address is `scratch.nat`.
///
/// A pod of another node would answer any other address of this node past the tunnel, where nobody may speak for a pod
/// ([`crate::stage::tunnel::outside`]). Where pods' packets reach that address untranslated their answers come so, too,
/// and are let in: nothing is to be done, and what is sent may be an answer itself.
#[inline(never)]
pub fn cross(config: &NodeConfig, scratch: &mut Scratch) -> i32 {
    scratch.has_record = false;
    if scratch.ip.src == scratch.nat {
        if is_carried(config, scratch) && is_of_no_socket(scratch.l4.tcp_flags) {
            return drop(DropReason::NatCarried);
        }
        // Its port may be one that was given to others.
        return match has_translated() || share::has_outside() {
            true => leave(scratch),
            false => PASS,
        };
    }
    let by_uplinks = match scratch.ip.v6 {
        false => &config.masquerade_v4,
        true => &config.masquerade_v6,
    };
    if config.flags & FLAG_MASQUERADE == 0 || *by_uplinks == Addr::UNSPECIFIED {
        return PASS;
    }
    let proto = scratch.ip.proto;
    match proto {
        proto::TCP | proto::UDP | proto::SCTP => {}
        proto::ICMP | proto::ICMPV6 if icmp::is_echo_request(scratch.ip.v6, scratch.l4.icmp) => {}
        _ => return PASS,
    }
    scratch.identify();
    let begins = ct_state::begins(proto, scratch.l4.tcp_flags);
    if let Some(found) = connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        match unsafe { noted(found, scratch) } {
            OVER if claim::renew(scratch) => return KNOWN,
            OVER => {
                claim::forget(scratch);
            }
            known => return known,
        }
    }
    let is_carried = is_carried(config, scratch);
    if !begins && !is_carried {
        return PASS;
    }
    if keeps_source(scratch.ip.src) {
        return PASS;
    }
    if is_carried {
        return drop(DropReason::NatCarried);
    }
    scratch.payer = HOST_SHARE;
    scratch.may_pass = false;
    CLAIM
}
