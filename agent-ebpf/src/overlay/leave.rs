//! What a pod sends to a pod of another node.

use super::{CE, ECN, Outer, ROOM, native, traffic_class, way};
use crate::{
    PASS,
    maps::CONFIG,
    nat::drop,
    parse::{
        eth, ip4, proto,
        skb::{Frame as _, Head, PACKET_HOST},
    },
    rewrite,
    scratch::Scratch,
    stage::{
        deliver, mss, mtu,
        neighbour::{AF_INET, AF_INET6, send_to},
        report::Peer,
        tunnel,
    },
};
use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_ADJ_ROOM_ENCAP_L2_SHIFT, BPF_F_ADJ_ROOM_ENCAP_L2_ETH,
        BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_ADJ_ROOM_FIXED_GSO,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::{bpf_get_hash_recalc, bpf_get_prandom_u32, bpf_skb_adjust_room},
    programs::TcContext,
};
use sinabro_common::abi::{
    Addr,
    drop::DropReason,
    next_hop::{NATIVE, NextHop},
    node::{Node, Overlay},
};

/// Source ports are of the range that the kernel's are by default (net.ipv4.ip_local_port_range).
const FIRST_PORT: u32 = 32_768;
const PORTS: u64 = 60_999 - 32_768 + 1;
/// As the VXLAN device sets it, which has none of its own (net.ipv4.ip_default_ttl).
const TTL: u8 = 64;

const WRAP: u64 = (BPF_F_ADJ_ROOM_FIXED_GSO
    | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4
    | BPF_F_ADJ_ROOM_ENCAP_L4_UDP
    | BPF_F_ADJ_ROOM_ENCAP_L2_ETH) as u64
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
    if !to_gateway
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || !deliver::fits(&ctx, scratch, carried(next), ROOM)
    {
        return PASS;
    }
    if mss::begins(&scratch.ip, &scratch.l4)
        && let Err(reason) = mss::lower(&ctx, &scratch.ip, carried(next))
    {
        return drop(reason);
    }
    match next.remote_mac {
        NATIVE => native::send(skb, scratch, node, next, overlay),
        _ => send(skb, scratch, node, next, overlay),
    }
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
fn send(
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
    // SAFETY: the context is valid for as long as the program runs.
    let hash = unsafe { bpf_get_hash_recalc(skb) };
    if !wrap(skb) {
        return PASS;
    }
    scratch.ip.l3 += ROOM;
    // SAFETY: as above.
    let len = unsafe { (*skb).len } - eth::LEN;
    let Scratch { ip, outer, .. } = scratch;
    outer.total_len = (len as u16).to_be_bytes();
    outer.udp_len = (len as u16 - ip4::HEADER_LEN as u16).to_be_bytes();
    // RFC 6040 §4.1 in its normal mode as the kernel has it, which makes ECT(0) of CE.
    outer.service = match service & ECN {
        CE => 2,
        ecn => ecn,
    };
    outer.dst = rewrite::word(&node.tunnel).to_ne_bytes();
    let port = FIRST_PORT + ((u64::from(hash ^ hash << 16) * PORTS) >> 32) as u32;
    outer.udp_src = (port as u16).to_be_bytes();
    outer.inner_dst = next.remote_mac;
    outer.inner_src = next.own_mac;
    outer.inner_kind = match ip.v6 {
        true => eth::IP6,
        false => eth::IP4,
    };
    fill(outer, overlay);
    if rewrite::decrement_ttl(&ctx, &scratch.ip).is_err()
        || ctx.store(eth::LEN as usize, &scratch.outer, 0).is_err()
    {
        return drop(DropReason::RewriteFailed);
    }
    Peer::find(&node.tunnel).count(|peer| &mut peer.direct_tx);
    to(skb, overlay, (next.ifindex, &next.gateway))
}

/// Makes room for the outer headers. The kernel refuses that for what is in a tunnel already and for super-packets of other
/// kinds than TCP's and UDP's, and before Linux 5.13, which has the flag for an Ethernet header inside, for all: nothing has
/// changed then.
#[inline(always)]
pub fn wrap(skb: *mut __sk_buff) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { bpf_skb_adjust_room(skb, ROOM as i32, BPF_ADJ_ROOM_MAC, WRAP) == 0 }
}

/// Gives a packet to the uplink that is as it is to be on the wire, but for its Ethernet header.
#[inline(always)]
pub fn to(skb: *mut __sk_buff, overlay: &Overlay, (ifindex, gateway): (u32, &Addr)) -> i32 {
    tunnel::make_here(skb, overlay);
    // SAFETY: an address is four words.
    let words = unsafe { core::ptr::from_ref(gateway).cast::<[u32; 4]>().read() };
    match gateway.as_v4() {
        Some(_) => send_to(ifindex, AF_INET, [words[3], 0, 0, 0]),
        None => send_to(ifindex, AF_INET6, words),
    }
}

/// What is the same for all packets, and the sum.
#[inline(always)]
fn fill(outer: &mut Outer, overlay: &Overlay) {
    outer.version_length = 0x45;
    // SAFETY: takes nothing.
    outer.id = (unsafe { bpf_get_prandom_u32() } as u16).to_ne_bytes();
    // As the device does it: a router that has to cut it may.
    outer.fragment = [0; 2];
    outer.ttl = TTL;
    outer.proto = proto::UDP;
    outer.src = rewrite::word(&overlay.local).to_ne_bytes();
    outer.udp_dst = overlay.port;
    // None: the inner packet has its own (RFC 7348 §5).
    outer.udp_checksum = [0; 2];
    outer.vxlan = overlay.vxlan;
    let words = [
        [outer.version_length, outer.service],
        outer.total_len,
        outer.id,
        [outer.ttl, outer.proto],
        [outer.src[0], outer.src[1]],
        [outer.src[2], outer.src[3]],
        [outer.dst[0], outer.dst[1]],
    ];
    let last = u16::from_ne_bytes([outer.dst[2], outer.dst[3]]);
    let sum = words.iter().fold(u32::from(last), |sum, word| {
        sum + u32::from(u16::from_ne_bytes(*word))
    });
    // Eight pairs: the first fold leaves 17 bits at most.
    let sum = (sum & 0xffff) + (sum >> 16);
    outer.checksum = (!((sum + (sum >> 16)) as u16)).to_ne_bytes();
}
