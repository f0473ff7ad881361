//! Connections between two pods of this node that the host's stack translates, and so keep to it.
//!
//! A packet that reaches a pod of this node through the stack, not by redirection, was translated there
//! (kube-proxy turned a Service's address into the pod's). Its answers must pass the same translation backwards. Such
//! a connection has a record; others between pods of the node have none.
//!
//! So it is with what a pod of another node sends outside of a tunnel, as to a port of this node that leads to the pod,
//! where its answers would not go by the stack ([`crate::overlay`]). Beside kube-proxy, with all that the stack forwards between
//! pods of two nodes ([`sent`], [`delivered`]).

use super::tunnel;
use crate::{
    PASS,
    connection::{self, Noted},
    maps::{CONFIG, ENDPOINTS, POD_LINKS, UPLINKS},
    nat::{drop, error, is_error, socket},
    overlay,
    parse::{Fragment, Ip, proto},
    scratch::Scratch,
    service::{
        arrive::{is_answer, show_frontend},
        leave::make_way,
    },
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::{
    abi::{
        config::{FLAG_MIXED, NodeConfig},
        connection::{FLAG_SERVICE, FLAG_STACK, FLAG_TRACKED, outside_share},
        drop::DropReason,
        endpoint::PodLink,
    },
    algo::ct_state,
};

/// Index of the link of the pod of this node that sent a packet which the stack delivers to another, if one did and
/// the packet says which connection it is of: of protocols without ports nothing is ever translated there. Of a packet in
/// parts, the first names the connection.
/// Of a pod of another node: the share of who is outside.
#[inline(always)]
pub fn sender(ctx: &TcContext, config: &NodeConfig, ip: &Ip) -> Option<u32> {
    if ip.fragment == Fragment::Later || !matches!(ip.proto, proto::TCP | proto::UDP | proto::SCTP)
    {
        return None;
    }
    if let Some(endpoint) = ENDPOINTS.get_ptr(&ip.src) {
        // SAFETY: a value that the map just gave.
        return Some(unsafe { (*endpoint).ifindex });
    }
    // SAFETY: the context is valid for as long as the program runs.
    let came_by = unsafe { (*ctx.skb.skb).ingress_ifindex };
    let is_outside_of_a_tunnel = overlay::takes(config)
        && UPLINKS.get_ptr(came_by).is_some()
        && tunnel::pods_of(&ip.src).is_some();
    let may_be_translated = is_outside_of_a_tunnel
        || overlay::records_stack(config) && tunnel::pods_elsewhere(config, &ip.src).is_some();
    may_be_translated.then_some(outside_share(ip.proto))
}

/// One if a packet is an ICMP error about a connection between two pods of which the stack has seen nothing: it has no record, or that
/// of a Service that is translated here.
#[inline(never)]
pub fn is_of_unrecorded(skb: *mut __sk_buff, scratch: &mut Scratch) -> u32 {
    if !is_error(scratch) || !error::read(skb, scratch) {
        return 0;
    }
    if !tunnel::is_a_pods(&scratch.quoted.src) || !tunnel::is_a_pods(&scratch.quoted.dst) {
        return 0;
    }
    scratch.seen.forget();
    scratch.identify_quoted();
    let is_seen = match connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        Some(found) => unsafe { (*found).flags & (FLAG_SERVICE | FLAG_TRACKED) != FLAG_SERVICE },
        None => without_record() != DIRECT,
    };
    u32::from(!is_seen)
}

/// Records the connection of a packet, which is read, that the stack sends to a pod of another node; as [`delivered`].
#[inline(never)]
pub fn sent(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(config) = CONFIG
        .get(0)
        .filter(|config| overlay::records_stack(config))
    else {
        return PASS;
    };
    let ip = &scratch.ip;
    if !scratch.well_formed
        || ip.fragment == Fragment::Later
        || !matches!(ip.proto, proto::TCP | proto::UDP | proto::SCTP)
    {
        return PASS;
    }
    let Some(endpoint) = ENDPOINTS.get_ptr(&ip.src) else {
        return PASS;
    };
    if tunnel::pods_elsewhere(config, &ip.dst).is_none() {
        return PASS;
    }
    // SAFETY: a value that the map just gave.
    let sender = unsafe { (*endpoint).ifindex };
    delivered(skb, scratch, sender)
}

/// Notes a packet that the stack sends or delivers between two pods. It is dropped if there is no room for a record, because its answers
/// would not find back, and if the sender has a connection with the same ends already: it went straight there, netfilter has not
/// seen it, and so gave this one, which it translates, the same port.
#[inline(never)]
pub fn delivered(skb: *mut __sk_buff, scratch: &mut Scratch, sender: u32) -> i32 {
    scratch.identify();
    if let Some(found) = connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        let noted = unsafe { connection::note_or_begin_again(found, scratch) };
        match noted {
            Noted::Over => connection::remove(&scratch.key),
            Noted::Changed => {
                connection::changed(scratch);
                return PASS;
            }
            Noted::Same => return PASS,
        }
    }
    let is_tcp = scratch.key.proto == proto::TCP;
    let begins = ct_state::begins(scratch.key.proto, scratch.l4.tcp_flags);
    // It may have a record elsewhere, which is on its way; of datagrams nobody can say that.
    if is_mixed() && !begins {
        return PASS;
    }
    if is_tcp && begins && has_connection(skb, scratch, sender) != 0 {
        return drop(DropReason::ServiceClash);
    }
    match begin(scratch, sender) {
        0 => drop(DropReason::ConnectionShare),
        _ => PASS,
    }
}

/// One if packets of a connection with a Service that is translated here go by the stack. The packet is read, and the server sees its
/// ends. `picked_up`: one if conntrack is to pick up the connection by it.
#[inline(never)]
pub fn is_tracked(scratch: &mut Scratch, picked_up: u32) -> u32 {
    scratch.identify();
    let Some(found) = connection::find(&scratch.key) else {
        return picked_up;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        let is_tracked = (*found).has(FLAG_TRACKED);
        // Two processors may write at once: the next packet that is picked up sets it again.
        if picked_up != 0 && !is_tracked {
            (*found).flags |= FLAG_TRACKED;
        }
        picked_up | u32::from(is_tracked)
    }
}

/// Whether the pod that sends a SYN, whose tuple is in the scratch, has a connection with these ends.
#[inline(never)]
fn has_connection(skb: *mut __sk_buff, scratch: &mut Scratch, sender: u32) -> u32 {
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let netns = unsafe { POD_LINKS.get(sender) }.and_then(PodLink::netns);
    match netns {
        Some(netns) => socket::of_sender(skb, scratch, netns),
        None => 0,
    }
}

/// Whether programs of another layout run, too, which have a table of their own.
#[inline(always)]
fn is_mixed() -> bool {
    CONFIG
        .get(0)
        .is_some_and(|config| config.flags & FLAG_MIXED != 0)
}

#[inline(never)]
fn begin(scratch: &mut Scratch, payer: u32) -> u32 {
    u32::from(connection::begin_untranslated(scratch, FLAG_STACK, payer))
}

/// Nothing is to be known of a packet that a pod sends to another;
pub const DIRECT: u32 = 0;
/// it belongs to a connection that keeps to the stack;
pub const STACK: u32 = 1;
/// it answers what the other sent to a Service, which is in `scratch.alias`;
pub const ANSWER: u32 = 2;
/// it begins a connection whose answers would be taken for those of another, with a Service.
pub const CLASH: u32 = 3;

/// What a packet belongs to whose connection has no record.
#[inline(always)]
pub fn without_record() -> u32 {
    match is_mixed() {
        true => STACK,
        false => DIRECT,
    }
}

/// What a packet that a pod sends to another, of this node or elsewhere, belongs to. Not to one that is over: what comes
/// next decides again, and the stack, which forgets its own as late, would take it for a part of what was.
#[inline(never)]
pub fn known(scratch: &mut Scratch) -> u32 {
    scratch.identify();
    let Some(found) = connection::find(&scratch.key) else {
        return without_record();
    };
    scratch.seen.forget();
    let is;
    // SAFETY: a value that the map just gave.
    let noted = unsafe {
        let kind = (*found).flags & (FLAG_STACK | FLAG_SERVICE);
        if kind == 0 {
            return DIRECT;
        }
        let (proto, flags) = (scratch.key.proto, scratch.l4.tcp_flags);
        let begins = proto == proto::TCP && ct_state::begins(proto, flags);
        let again = connection::begins_again(found, proto, flags);
        match kind {
            FLAG_SERVICE if is_answer(found, scratch.from_high) => {
                show_frontend(found, scratch);
                is = ANSWER;
            }
            // Straight to the endpoint, by the same ports.
            FLAG_SERVICE if begins && !again => return CLASH,
            FLAG_SERVICE if !begins => {
                make_way(scratch);
                return DIRECT;
            }
            _ => is = STACK,
        }
        match again {
            true => Noted::Over,
            false => connection::note(found, scratch),
        }
    };
    match noted {
        Noted::Same => is,
        Noted::Changed => {
            connection::changed(scratch);
            is
        }
        Noted::Over => {
            connection::remove(&scratch.key);
            DIRECT
        }
    }
}
