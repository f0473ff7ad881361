//! What comes in by an uplink.

use super::{
    early, error, find_source, is_carried, is_error, keeps_source, leave::KNOWN, socket, translate,
    translating,
};
use crate::{
    PASS,
    connection::{self, Noted, fragment, newcomer},
    maps::{ALIASES, ENDPOINTS},
    nat::{claim, drop},
    parse::{
        Fragment, icmp,
        l4::{TCP_FIN, TCP_RST, TCP_SYN},
        proto,
    },
    rewrite::{self, End},
    scratch::Scratch,
    service::{self, outside},
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::abi::{
    Addr,
    config::{FLAG_MASQUERADE, NodeConfig},
    connection::{FLAG_INBOUND, FLAG_MASQUERADED, FLAG_SERVICE},
    drop::DropReason,
};

/// Segments of TCP with one of these say how far a connection is.
const SYN_FIN_RST: u8 = TCP_SYN | TCP_FIN | TCP_RST;

/// The packet has another destination now, which is in `scratch.alias`.
pub const TRANSLATED: i32 = 71;
/// Nobody's alias is the packet's destination.
const NONE: i32 = 66;
/// A fragment has its pod's address now.
const GIVEN: i32 = 68;
/// The alias is that of a client of a Service, and is to be noted.
const OF_SERVICE: i32 = 69;
/// The alias leads to no record: a claim that is being made, or one that was left behind.
const ORPHAN: i32 = 70;

/// What comes in, and what waits behind it if it is a fragment: [`TRANSLATED`], or what becomes of it.
///
/// One function after another, as in [`super::leave::leave`].
#[inline(always)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match translated(skb, scratch) {
        GIVEN => early::follow(skb, scratch),
        PASS if scratch.ip.fragment == Fragment::First => early::stays(skb, scratch),
        action => action,
    }
}

/// Gives an answer back to whom it is for, and remembers connections that come in to a pod's own address.
#[inline(always)]
fn translated(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(config) = translating() else {
        return PASS;
    };
    if !scratch.well_formed {
        return PASS;
    }
    if scratch.ip.fragment == Fragment::Later {
        return later(skb, scratch);
    }
    if is_error(scratch) {
        return error::arrive(skb, scratch);
    }
    match known(config, scratch) {
        KNOWN => {}
        NONE if is_carried(config, scratch) && is_translated(skb, scratch) => {
            return drop(DropReason::NatCarried);
        }
        found @ (NONE | OF_SERVICE | ORPHAN) => match entered(skb, config, scratch, found) {
            KNOWN => {}
            PASS if found == NONE => return inbound(config, scratch),
            action => return action,
        },
        action => return action,
    }
    if scratch.ip.fragment == Fragment::First {
        let addr = scratch.alias.addr;
        fragment::note(&ctx, scratch, End::Destination, &addr);
    }
    let to = (&scratch.alias.addr, scratch.alias.port);
    match translate(&ctx, scratch, End::Destination, to) {
        PASS if scratch.ip.fragment == Fragment::First => GIVEN,
        PASS => TRANSLATED,
        action => action,
    }
}

/// Whether a packet is for a Service; [`KNOWN`] if its endpoint is in `scratch.alias`.
#[inline(always)]
fn entered(skb: *mut __sk_buff, config: &NodeConfig, scratch: &mut Scratch, found: i32) -> i32 {
    if !service::are_ours(config) || !service::has_ports(&scratch.ip) {
        return PASS;
    }
    let state = match found {
        OF_SERVICE => outside::SERVICE,
        ORPHAN => outside::ORPHAN,
        _ => outside::NEW,
    };
    outside::enter(skb, scratch, state)
}

/// Whether a segment may be for a translated port: none that leads elsewhere, and none of a connection of the node's own.
#[inline(always)]
fn is_translated(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    claim::may_have(proto::TCP, u16::from_be_bytes(scratch.l4.dst_port))
        && find_source(skb, scratch)
        && scratch.ip.dst == scratch.nat
        && socket::has_segment(skb, scratch) == 0
}

/// Looks up who the packet is for; in `scratch.alias` if it is [`KNOWN`].
#[inline(never)]
pub fn known(config: &NodeConfig, scratch: &mut Scratch) -> i32 {
    // An echo request asks the node itself, whatever its id.
    if matches!(scratch.ip.proto, proto::ICMP | proto::ICMPV6)
        && !icmp::is_echo_reply(scratch.ip.v6, scratch.l4.icmp)
    {
        return PASS;
    }
    scratch.identify();
    let Some(alias) = ALIASES.get_ptr_mut(&scratch.tuple) else {
        return NONE;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        scratch.alias.addr = Addr::at(&raw const (*alias).addr);
        scratch.alias.port = (*alias).port;
        scratch.alias.pad[0] = (*alias).pad[0];
        let ticks = connection::ticks();
        // What comes for a closed connection of TCP may open it again.
        let is_closed = (*alias).reusable_ns != 0 && scratch.ip.proto == proto::TCP;
        let is_due = scratch.l4.tcp_flags & SYN_FIN_RST != 0
            || is_closed
            || connection::is_due(ticks, (*alias).noted_ticks);
        if is_due {
            // What follows a SYN says that the handshake is over.
            (*alias).noted_ticks = match scratch.l4.tcp_flags & TCP_SYN {
                0 => ticks,
                _ => connection::due_now(),
            };
            return noted(config, scratch);
        }
    }
    KNOWN
}

/// Notes the packet in the record that its alias leads to.
#[inline(never)]
fn noted(config: &NodeConfig, scratch: &mut Scratch) -> i32 {
    scratch.resolve();
    let Some(found) = connection::find(&scratch.key) else {
        return match is_carried(config, scratch) {
            true => drop(DropReason::NatCarried),
            false => ORPHAN,
        };
    };
    // SAFETY: a value that the map just gave.
    let noted = unsafe {
        if (*found).has(FLAG_SERVICE) && (*found).client_is_high() == scratch.from_high {
            return OF_SERVICE;
        }
        if (*found).flags & FLAG_MASQUERADED == 0 || (*found).nat_port != scratch.tuple.dst_port {
            return PASS;
        }
        connection::note_by_alias(found, scratch)
    };
    match noted {
        Noted::Over => return PASS,
        Noted::Changed => {
            connection::changed(scratch);
        }
        Noted::Same => {}
    }
    KNOWN
}

/// A packet to an address that is nobody's alias: if it is a pod's own, its answers must keep that.
#[inline(never)]
fn inbound(config: &NodeConfig, scratch: &mut Scratch) -> i32 {
    if config.flags & FLAG_MASQUERADE == 0 {
        return PASS;
    }
    if !matches!(
        scratch.ip.proto,
        proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP
    ) {
        return PASS;
    }
    let payer = match ENDPOINTS.get_ptr(&scratch.ip.dst) {
        // SAFETY: a value that the map just gave.
        Some(endpoint) => unsafe { (*endpoint).ifindex },
        None => return PASS,
    };
    let (proto, flags) = (scratch.key.proto, scratch.l4.tcp_flags);
    if let Some(found) = connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        let noted = unsafe {
            if (*found).flags & FLAG_INBOUND == 0 {
                return PASS;
            }
            connection::note_or_begin_again(found, scratch)
        };
        match noted {
            Noted::Over => {
                claim::forget(scratch);
            }
            Noted::Changed => {
                connection::changed(scratch);
                return PASS;
            }
            Noted::Same => return PASS,
        }
    }
    let ends = proto == proto::TCP && flags & TCP_RST != 0;
    if !ends && !keeps_source(scratch.ip.src) {
        // Where there is no room it comes in all the same.
        if connection::begin_untranslated(scratch, FLAG_INBOUND, payer) {
            newcomer::settle(scratch);
        }
    }
    PASS
}

/// A fragment that names no ports. One whose first was not seen waits for it, and may be the node's own: its stack
/// knows what to do with it.
#[inline(always)]
fn later(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = &TcContext::new(skb);
    if !fragment::identify(ctx, scratch, End::Destination) {
        return PASS;
    }
    if !fragment::find_identified(scratch) {
        match early::keep(skb, scratch) {
            KNOWN => {}
            action => return action,
        }
    }
    let (from, to) = (&scratch.ip.dst, &scratch.fragment.addr);
    match rewrite::address(ctx, &scratch.ip, End::Destination, from, to) {
        Ok(()) => GIVEN,
        Err(rewrite::Failed) => drop(DropReason::RewriteFailed),
    }
}
