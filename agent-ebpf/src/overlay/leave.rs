//! What a pod sends to a pod of another node.

use super::{
    CE, ECN, native,
    outer::{Outer, Outside, room},
    route, traffic_class, way, words,
};
use crate::{
    PASS,
    family::{AF_INET, AF_INET6},
    forward::leave::{find_route, send as hand_on},
    maps::CONFIG,
    nat::drop,
    parse::{
        eth, ip4, ip6, proto,
        skb::{Frame as _, Head, PACKET_HOST},
    },
    rewrite,
    scratch::Scratch,
    stage::{deliver, mss, mtu, neighbour::send_to, report::Peer, tunnel},
};
use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_ADJ_ROOM_ENCAP_L2_SHIFT, BPF_F_ADJ_ROOM_ENCAP_L2_ETH,
        BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_ADJ_ROOM_FIXED_GSO, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::{bpf_get_hash_recalc, bpf_skb_adjust_room},
    programs::TcContext,
};
use sinabro_common::abi::{
    Addr,
    config::FLAG_INGRESS_MTU,
    drop::DropReason,
    next_hop::{NATIVE, NextHop},
    node::{Node, Overlay},
};

const WRAP: u64 =
    (BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2_ETH) as u64
        | (eth::LEN as u64) << BPF_ADJ_ROOM_ENCAP_L2_SHIFT;

/// Sends a packet, which is read, to the node of the pod that it is for; [`PASS`] if that is left to the stack, and the
/// packet as it was, but for what a SYN announces.
#[inline(never)]
pub fn leave(skb: *mut __sk_buff, scratch: &mut Scratch, node: &Node) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(next) = way(&node.tunnel) else {
        return PASS;
    };
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return PASS;
    };
    // SAFETY: the context is valid for as long as the program runs.
    let to_gateway = unsafe { (*skb).pkt_type } == PACKET_HOST;
    let is_outer_v6 = node.tunnel.as_v4().is_none();
    if !to_gateway
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || !deliver::fits(&ctx, scratch, carried(next), room(is_outer_v6))
    {
        return PASS;
    }
    if !route::leads_still(skb, scratch, &node.tunnel) {
        return PASS;
    }
    if mss::begins(&scratch.ip, &scratch.l4)
        && let Err(reason) = mss::lower(&ctx, &scratch.ip, carried(next))
    {
        return drop(reason);
    }
    match next.remote_mac {
        NATIVE => native::send(skb, scratch, node, next, overlay),
        _ if is_outer_v6 => send6(skb, scratch, node, next, overlay),
        _ => send::<ip4::Header>(skb, scratch, node, next, overlay),
    }
}

/// A function of its own: nodes of one cluster know each other by one family.
#[inline(never)]
fn send6(
    skb: *mut __sk_buff,
    scratch: &mut Scratch,
    node: &Node,
    next: &NextHop,
    overlay: &Overlay,
) -> i32 {
    send::<ip6::Header>(skb, scratch, node, next, overlay)
}

/// What goes to a node without a tunnel may be as large as its link.
#[inline(always)]
pub fn carried(next: &NextHop) -> u32 {
    match next.remote_mac {
        NATIVE => mtu::of_uplinks(),
        _ => mtu::of_tunnels(),
    }
}

#[inline(always)]
fn send<I: Outside>(
    skb: *mut __sk_buff,
    scratch: &mut Scratch,
    node: &Node,
    next: &NextHop,
    overlay: &Overlay,
) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(service) = traffic_class(&Head::new(skb), &scratch.ip) else {
        return PASS;
    };
    // RFC 6040 §4.1 in its normal mode as the kernel has it, which makes ECT(0) of CE.
    let service = match service & ECN {
        CE => 2,
        ecn => ecn,
    };
    // SAFETY: the context is valid for as long as the program runs.
    let hash = unsafe { bpf_get_hash_recalc(skb) };
    if !wrap::<I>(skb) {
        return by_device(skb, scratch);
    }
    scratch.ip.l3 += Outer::<I>::LEN;
    // SAFETY: as above.
    let len = unsafe { (*skb).len } - eth::LEN;
    let is_inner_v6 = scratch.ip.v6;
    let outer = I::outer(scratch);
    outer.fill(
        overlay,
        (&node.tunnel, next),
        is_inner_v6,
        (service, hash, len as u16),
    );
    if ctx.store(eth::LEN as usize, I::outer(scratch), 0).is_err()
        || rewrite::decrement_ttl(&ctx, &scratch.ip).is_err()
    {
        return drop(DropReason::RewriteFailed);
    }
    Peer::find(&node.tunnel).count(|peer| &mut peer.direct_tx);
    to(skb, overlay, (next.ifindex, &next.gateway))
}

/// Gives the VXLAN device what the kernel does not wrap up: super-packets that have been in a tunnel and that the pod hands on.
/// By its route, but past netfilter, which sees no other packet of their connection and may drop what it has not seen begin.
/// Of TCP alone, of which it is known that the segments fit.
#[inline(never)]
fn by_device(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let wraps = CONFIG
        .get(0)
        .is_some_and(|config| config.flags & FLAG_INGRESS_MTU == 0);
    if !wraps || scratch.ip.proto != proto::TCP || !find_route(skb, scratch) {
        return PASS;
    }
    match rewrite::decrement_ttl(&TcContext::new(skb), &scratch.ip) {
        Ok(()) => hand_on(&scratch.way),
        Err(_) => drop(DropReason::RewriteFailed),
    }
}

/// Makes room for the outer headers. The kernel refuses that for what is in a tunnel already and for super-packets of other
/// kinds than TCP's and UDP's, and before Linux 5.13, which has the flag for an Ethernet header inside, for all: nothing has
/// changed then.
#[inline(always)]
pub fn wrap<I: Outside>(skb: *mut __sk_buff) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe {
        bpf_skb_adjust_room(
            skb,
            Outer::<I>::LEN as i32,
            BPF_ADJ_ROOM_MAC,
            WRAP | I::ENCAP as u64,
        ) == 0
    }
}

/// Gives a packet to the uplink that is as it is to be on the wire, but for its Ethernet header.
#[inline(always)]
pub fn to(skb: *mut __sk_buff, overlay: &Overlay, (ifindex, gateway): (u32, &Addr)) -> i32 {
    tunnel::make_here(skb, overlay);
    let words = words(gateway);
    match gateway.as_v4() {
        Some(_) => send_to(ifindex, AF_INET, [words[3], 0, 0, 0]),
        None => send_to(ifindex, AF_INET6, words),
    }
}
