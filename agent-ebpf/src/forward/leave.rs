//! What a pod sends out of the cluster.

use super::Way;
use crate::{
    PASS,
    connection::{self, Noted},
    maps::{CONFIG, ENDPOINTS, UPLINKS},
    nat::{drop, keeps_source, leave::translated},
    parse::{
        Fragment, Packet as _, eth, icmp, proto,
        skb::{Frame as _, Head, PACKET_HOST},
    },
    rewrite,
    scratch::Scratch,
    stage::{deliver, mss, mtu, neighbour::send_to, tunnel},
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::{
    abi::{
        Addr,
        config::FLAG_MASQUERADE,
        connection::{Connection, FLAG_MASQUERADED, FLAG_SERVICE},
        drop::DropReason,
        endpoint::NO_HOST_PORTS,
    },
    algo::{checksum, ct_state},
};

/// Somebody else may have a part in the packet's connection,
const NOT_OURS: u32 = 0;
/// it is translated here, at the uplink if at all,
const OURS: u32 = 1;
/// or its source is to be what `scratch.connection` says.
const KNOWN: u32 = 2;
/// Or it has no record,
pub const NONE: u32 = 3;
/// or was not asked for it yet.
pub const UNKNOWN: u32 = 4;

/// Whether a pod's packet goes on a connection of TCP that is masqueraded. Such a one is no pod's and no Service's, whatever its
/// destination has become since it began; asked first, for most of what leaves the cluster is that.
#[inline(never)]
pub fn goes_on(scratch: &mut Scratch) -> bool {
    if !may_go_on(scratch) {
        return false;
    }
    scratch.whose = by_record(scratch);
    scratch.whose == KNOWN
}

#[inline(always)]
fn may_go_on(scratch: &Scratch) -> bool {
    scratch.ip.proto == proto::TCP
        && scratch.ip.fragment == Fragment::No
        && !ct_state::begins(proto::TCP, scratch.l4.tcp_flags)
        && CONFIG
            .get(0)
            .is_some_and(|config| config.flags & FLAG_MASQUERADE != 0)
}

/// Sends a packet, which is read, by its uplink; [`PASS`] if that is left to the stack, and the packet as it was.
#[inline(never)]
pub fn leave(skb: *mut __sk_buff, scratch: &mut Scratch, was_translated: bool) -> i32 {
    let ctx = TcContext::new(skb);
    // SAFETY: the context is valid for as long as the program runs.
    let to_gateway = unsafe { (*skb).pkt_type } == PACKET_HOST;
    if !to_gateway
        || deliver::has_segments_of_any_length(&ctx, scratch)
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || !deliver::fits(&ctx, scratch, mtu::of_uplinks(), 0)
    {
        return PASS;
    }
    let whose = whose(scratch, was_translated);
    if whose == NOT_OURS || find_way(skb, scratch) == 0 {
        return PASS;
    }
    if mss::begins(&scratch.ip, &scratch.l4)
        && let Err(reason) = mss::lower(&ctx, &scratch.ip, mtu::of_uplinks())
    {
        return drop(reason);
    }
    if whose == KNOWN {
        match masquerade(skb, scratch) {
            PASS => {}
            dropped => return dropped,
        }
    }
    if rewrite::decrement_ttl(&ctx, &scratch.ip).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    send(&scratch.way)
}

/// Gives the packet the source that its record says, and a mark by which the uplink knows that: it need not read the packet once
/// more. Without a mark to give it is left to the uplink.
#[inline(always)]
fn masquerade(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return PASS;
    };
    match with_source(skb, scratch) {
        PASS => {}
        dropped => return dropped,
    }
    tunnel::make_here(skb, overlay);
    PASS
}

/// Gives the packet the source in `scratch.connection`; what was read of it else is what it is now.
#[inline(always)]
pub fn with_source(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match translated(skb, scratch) {
        PASS => {}
        dropped => return dropped,
    }
    let Scratch { ip, connection, .. } = scratch;
    if !ip.v6 {
        let (from, to) = (rewrite::word(&ip.src), rewrite::word(&connection.nat));
        ip.checksum = checksum::replaced(ip.checksum, from, to);
    }
    PASS
}

/// Sends the packet which way the scratch says.
#[inline(always)]
pub fn send(way: &Way) -> i32 {
    // An IPv4 address is the first of the four.
    // SAFETY: an address is four words, and is behind whole ones.
    let words = unsafe { way.dst.as_ptr().cast::<[u32; 4]>().read() };
    send_to(way.ifindex, way.family.into(), words)
}

/// Whether the packet's connection is translated here, whichever way it goes, or will be.
#[inline(always)]
fn whose(scratch: &mut Scratch, was_translated: bool) -> u32 {
    // A Service's endpoint outside of the cluster.
    if was_translated {
        return u32::from(!keeps_source(scratch.ip.dst));
    }
    let whose = match scratch.whose {
        UNKNOWN => by_record(scratch),
        whose => whose,
    };
    match whose {
        NONE => u32::from(begins_masqueraded(scratch)),
        whose => whose,
    }
}

#[inline(never)]
fn by_record(scratch: &mut Scratch) -> u32 {
    scratch.identify();
    match connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        Some(found) => unsafe { noted(found, scratch) },
        None => NONE,
    }
}

/// What the client of a masqueraded connection sends is [`KNOWN`], unless it begins or the record is over: what becomes of that
/// the uplink decides. What the endpoint of a Service sends to a client outside is [`OURS`].
///
/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn noted(connection: *mut Connection, scratch: &mut Scratch) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        let is_from_client = (*connection).client_is_high() == scratch.from_high;
        let is_of_service = (*connection).has(FLAG_SERVICE);
        if !is_from_client || is_of_service {
            return u32::from(is_of_service != is_from_client);
        }
        if !(*connection).has(FLAG_MASQUERADED) {
            return NOT_OURS;
        }
        let (proto, flags) = (scratch.key.proto, scratch.l4.tcp_flags);
        if proto == proto::TCP && ct_state::begins(proto, flags) {
            return OURS;
        }
        match connection::note(connection, scratch) {
            Noted::Over => return OURS,
            Noted::Changed => connection::changed(scratch),
            Noted::Same => {}
        }
        scratch.connection.nat = Addr::at(&raw const (*connection).nat);
        scratch.connection.nat_port = (*connection).nat_port;
    }
    KNOWN
}

/// Whether a packet that has no record begins a connection that gets one at the uplink.
#[inline(always)]
fn begins_masqueraded(scratch: &Scratch) -> bool {
    let Some(config) = CONFIG.get(0) else {
        return false;
    };
    let source = match scratch.ip.v6 {
        false => &config.masquerade_v4,
        true => &config.masquerade_v6,
    };
    begins(scratch)
        && config.flags & FLAG_MASQUERADE != 0
        && *source != Addr::UNSPECIFIED
        && !keeps_source(scratch.ip.dst)
}

/// Whether a packet that has no record is a connection's first. A datagram is, unless it may answer what the stack has translated: of a
/// client that came by a port of the node.
#[inline(always)]
fn begins(scratch: &Scratch) -> bool {
    match scratch.ip.proto {
        proto::TCP => ct_state::begins(proto::TCP, scratch.l4.tcp_flags),
        proto::ICMP | proto::ICMPV6 => icmp::is_echo_request(scratch.ip.v6, scratch.l4.icmp),
        _ => ENDPOINTS
            .get_ptr(scratch.ip.src)
            // SAFETY: a value that the map just gave.
            .is_some_and(|pod| unsafe { (*pod).flags } & NO_HOST_PORTS != 0),
    }
}

/// Whether an IPv4 packet to this address is not handed on by any router: "this network", multicast, reserved and
/// broadcast addresses (RFC 6890 §2.2.2). The stack sees to that before it asks its routes, which know nothing of it.
#[inline(always)]
fn is_nobody(dst: u32) -> bool {
    let [first, ..] = dst.to_ne_bytes();
    matches!(first, 0 | 224..)
}

/// Asks the kernel's routes for the way in `scratch.way`. Zero unless it leads out by an uplink that is Ethernet: what ends here, is
/// refused, goes through another tunnel or needs a neighbour to be looked for is the stack's.
#[inline(never)]
pub fn find_way(skb: *mut __sk_buff, scratch: &mut Scratch) -> u32 {
    if !find_route(skb, scratch) {
        return 0;
    }
    let Some(uplink) = UPLINKS.get_ptr(scratch.way.ifindex) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    u32::from(unsafe { (*uplink).header_len } == eth::LEN)
}

/// Whether the kernel's routes, asked as the stack would, lead on to a neighbour that is known. The way is in `scratch.way` then.
#[inline(always)]
pub fn find_route(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    let Scratch { ip, l4, way, .. } = scratch;
    if !ip.v6 && is_nobody(rewrite::word(&ip.dst)) {
        return false;
    }
    way.proto = ip.proto;
    way.src_port = l4.src_port;
    way.dst_port = l4.dst_port;
    way.service = [0; 4];
    way.between(ip.v6, &ip.src, &ip.dst);
    if !ip.v6
        && let Some([_, service]) = Head::new(skb).load::<[u8; 2]>(ip.l3)
    {
        way.service[0] = service;
    }
    // SAFETY: the context is valid for as long as the program runs.
    let ifindex = unsafe { (*skb).ifindex };
    way.leads_on(skb, ifindex, 0)
}
