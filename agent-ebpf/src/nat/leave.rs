//! What leaves by an uplink.

use super::{
    drop, error, find_source, host, is_carried, is_error, is_from_before, is_left_alone,
    keeps_source, masquerading, translate,
};
use crate::{
    PASS,
    connection::{self, Noted, fragment},
    maps::ENDPOINTS,
    nat::claim,
    parse::{
        Fragment, icmp,
        l4::{TCP_RST, TCP_SYN},
        proto,
    },
    rewrite::{self, End},
    scratch::Scratch,
    stage::origin::comes_from,
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::{
    abi::{
        Addr,
        config::NodeConfig,
        connection::{
            Connection, FLAG_INBOUND, FLAG_MASQUERADED, FLAG_SERVICE, HOST_SHARE, is_outside,
        },
        drop::DropReason,
    },
    algo::{ct_state, ct_state::SEEN},
};

/// Gives a pod's packet that leaves the cluster the uplink's address.
///
/// One function after another: what the first leaves behind is in the scratch, so that the verifier walks the
/// second, which has a loop, once.
#[inline(always)]
pub fn leave(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let action = match prepare(skb, scratch) {
        PASS if scratch.ip.fragment == Fragment::First => keeps_address(skb, scratch),
        action => action,
    };
    finish(skb, scratch, action)
}

/// Has what follows a pod's first fragment that keeps its address, an answer to who knows the pod by that, keep it, too.
#[inline(never)]
fn keeps_address(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if masquerading().is_some() && of_pod(scratch) && !keeps_source(scratch.ip.dst) {
        let own = scratch.ip.src;
        fragment::note(&TcContext::new(skb), scratch, End::Source, &own);
    }
    PASS
}

/// Does what `action` says is left to do for the packet's source.
#[inline(always)]
pub fn finish(skb: *mut __sk_buff, scratch: &mut Scratch, action: i32) -> i32 {
    let action = match action {
        CLAIM => claim::claim(skb, scratch),
        action => action,
    };
    match action {
        KNOWN => translated(skb, scratch),
        action => action,
    }
}

/// Looks up, or decides, what the packet is to have.
#[inline(never)]
fn prepare(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(config) = masquerading() else {
        return PASS;
    };
    let some_uplinks = match scratch.ip.v6 {
        false => &config.masquerade_v4,
        true => &config.masquerade_v6,
    };
    if *some_uplinks == Addr::UNSPECIFIED {
        return PASS;
    }
    if !scratch.well_formed {
        return match of_pod(scratch) {
            true => drop(DropReason::Malformed),
            false => PASS,
        };
    }
    if is_error(scratch) {
        return error::leave(skb, scratch);
    }
    if is_left_alone(config, scratch.ip.proto) {
        return portless(skb, scratch);
    }
    scratch.has_record = false;
    let is_of_host = comes_from(skb) == 0;
    match scratch.ip.fragment {
        Fragment::Later if is_of_host => PASS,
        Fragment::Later => later(skb, scratch),
        _ if is_of_host => host::leave(scratch),
        _ if is_unrelated(scratch) => unrelated(scratch),
        _ => match known(skb, scratch) {
            NEW => begin(skb, config, scratch),
            // Its endpoint, which is on another machine, is to answer this node.
            CLAIM if find_source(skb, scratch) => CLAIM,
            CLAIM => PASS,
            action => action,
        },
    }
}

/// Gives the packet what the scratch says.
#[inline(never)]
pub fn translated(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    if scratch.ip.fragment == Fragment::First {
        let nat = scratch.connection.nat;
        fragment::note(&ctx, scratch, End::Source, &nat);
    }
    let Connection { nat, nat_port, .. } = &scratch.connection;
    translate(&ctx, scratch, End::Source, (nat, *nat_port))
}

/// The packet is translated as `scratch.connection` says.
pub const KNOWN: i32 = 65;
/// It has no record.
const NEW: i32 = 66;
/// It needs a translation, of `scratch.tuple` to `scratch.nat`, for `scratch.payer`.
pub const CLAIM: i32 = 67;

/// Looks the packet's connection up.
#[inline(never)]
fn known(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    scratch.identify();
    let Some(found) = connection::find(&scratch.key) else {
        return NEW;
    };
    let flags = scratch.l4.tcp_flags;
    // SAFETY: a value that the map just gave.
    if unsafe { (*found).has(FLAG_SERVICE) } {
        // SAFETY: as above.
        return unsafe { of_service(found, scratch) };
    }
    // SAFETY: as above.
    unsafe {
        let (is_from_client, kind) = (
            (*found).client_is_high() == scratch.from_high,
            (*found).flags & (FLAG_MASQUERADED | FLAG_INBOUND),
        );
        match kind {
            FLAG_MASQUERADED if is_from_client => {
                let payer = (*found).payer;
                if payer != HOST_SHARE && payer != comes_from(skb) {
                    return drop(DropReason::PodSource);
                }
            }
            // An outside packet of before must not decide about what the pod begins by itself.
            FLAG_INBOUND if is_unanswered(found, scratch.from_high) && begins(scratch) => {
                claim::forget(scratch);
                return NEW;
            }
            _ => {}
        }
        // Closed before this packet: who goes on sending takes back the other end's reset.
        let again = kind == FLAG_MASQUERADED
            && is_from_client
            && connection::begins_again(found, scratch.key.proto, flags);
        let noted = match again {
            true => Noted::Over,
            false => connection::note(found, scratch),
        };
        if noted == Noted::Over {
            return renew(skb, scratch, kind);
        }
        if noted == Noted::Changed {
            connection::changed(scratch);
        }
        if kind != FLAG_MASQUERADED || !is_from_client {
            return PASS;
        }
        scratch.connection.nat = Addr::at(&raw const (*found).nat);
        scratch.connection.nat_port = (*found).nat_port;
    }
    KNOWN
}

/// What a client sends to a Service, whose endpoint is the destination by now. It was noted where it came from. [`CLAIM`]
/// if the client is outside of the cluster and has no translation yet.
///
/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
pub unsafe fn of_service(connection: *const Connection, scratch: &mut Scratch) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        if (*connection).client_is_high() != scratch.from_high {
            return PASS;
        }
        if !(*connection).has(FLAG_MASQUERADED) {
            scratch.has_record = true;
            scratch.may_pass = false;
            scratch.payer = (*connection).payer;
            return match scratch.payer {
                payer if is_outside(payer) => CLAIM,
                _ => NEW,
            };
        }
        scratch.connection.nat = Addr::at(&raw const (*connection).nat);
        scratch.connection.nat_port = (*connection).nat_port;
    }
    KNOWN
}

/// A record that is over, or closed and asked for again: the translation stays if nobody else has it by now.
#[inline(always)]
fn renew(skb: *mut __sk_buff, scratch: &mut Scratch, kind: u16) -> i32 {
    if kind == FLAG_MASQUERADED && find_source(skb, scratch) && claim::renew(scratch) {
        return KNOWN;
    }
    claim::forget(scratch);
    NEW
}

/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn is_unanswered(connection: *const Connection, from_high: bool) -> bool {
    // SAFETY: the caller's promise.
    let states = unsafe { (&raw const (*connection).states).read() };
    let own = if from_high { states[1] } else { states[0] };
    own & SEEN == 0
}

/// Whether the packet is TCP's first of a connection.
#[inline(always)]
fn begins(scratch: &Scratch) -> bool {
    scratch.ip.proto == proto::TCP && ct_state::begins(proto::TCP, scratch.l4.tcp_flags)
}

/// A packet without a record: whether it is to be masqueraded, and as what.
#[inline(never)]
fn begin(skb: *mut __sk_buff, config: &NodeConfig, scratch: &mut Scratch) -> i32 {
    if !find_source(skb, scratch) {
        return PASS;
    }
    match ENDPOINTS.get_ptr(&scratch.ip.src) {
        // SAFETY: a value that the map just gave.
        Some(endpoint) => scratch.payer = unsafe { (*endpoint).ifindex },
        None if scratch.ip.src == scratch.nat => return host::claimed(scratch, true),
        None => return PASS,
    }
    if scratch.payer != comes_from(skb) {
        return drop(DropReason::PodSource);
    }
    scratch.may_pass = false;
    if keeps_source(scratch.ip.dst) {
        return PASS;
    }
    let flags = scratch.l4.tcp_flags;
    match scratch.ip.proto {
        proto::TCP if is_carried(config, scratch) => return drop(DropReason::NatCarried),
        proto::TCP if is_from_before(&scratch.ip.dst, flags) => return PASS,
        // It answers somebody who knows the pod by its own address.
        proto::TCP if flags & TCP_RST != 0 || (flags & TCP_SYN != 0 && !begins(scratch)) => {
            return PASS;
        }
        proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP => {}
        // An echo request.
        proto::ICMP | proto::ICMPV6 => {}
        proto::GRE | proto::ESP | proto::IPIP | proto::IP6 => {}
        _ => return drop(DropReason::NatProtocol),
    }
    CLAIM
}

/// A packet of a protocol that [is not masqueraded](is_left_alone): a pod's address means nothing outside.
#[inline(never)]
fn portless(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match of_pod(scratch) && !keeps_source(scratch.ip.dst) && find_source(skb, scratch) {
        true => drop(DropReason::NatProtocol),
        false => PASS,
    }
}

/// Whether a packet is an ICMP message that begins nothing, whatever its id.
#[inline(always)]
fn is_unrelated(scratch: &Scratch) -> bool {
    matches!(scratch.ip.proto, proto::ICMP | proto::ICMPV6)
        && !icmp::is_echo_request(scratch.ip.v6, scratch.l4.icmp)
}

#[inline(always)]
fn unrelated(scratch: &Scratch) -> i32 {
    // A reply answers a request that reached the pod at its own address.
    let is_reply = icmp::is_echo_reply(scratch.ip.v6, scratch.l4.icmp);
    match is_reply || !of_pod(scratch) || keeps_source(scratch.ip.dst) {
        true => PASS,
        false => drop(DropReason::NatProtocol),
    }
}

#[inline(always)]
fn of_pod(scratch: &Scratch) -> bool {
    ENDPOINTS.get_ptr(&scratch.ip.src).is_some()
}

/// A fragment that names no ports. If its first was not seen that is yet to come (or is lost, and the receiver gives
/// the packet up): what is masqueraded here has one address, so this one's is known already.
#[inline(always)]
fn later(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = &TcContext::new(skb);
    if !fragment::find(ctx, scratch, End::Source) {
        if !of_pod(scratch) || keeps_source(scratch.ip.dst) || !find_source(skb, scratch) {
            return PASS;
        }
        scratch.fragment.addr = scratch.nat;
    }
    let (from, to) = (&scratch.ip.src, &scratch.fragment.addr);
    match rewrite::address(ctx, &scratch.ip, End::Source, from, to) {
        Ok(()) => PASS,
        Err(rewrite::Failed) => drop(DropReason::RewriteFailed),
    }
}
