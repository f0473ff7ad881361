//! What a pod sends to a pod of another node.

use super::{
    CE, ECN, ECT0, is_beside_proxy, native,
    outer::{Outer, Outside, room},
    route, traffic_class, way,
};
use crate::{
    PASS,
    family::{AF_INET, AF_INET6},
    flow::Flow,
    forward::leave::{find_route, send as hand_on},
    maps::CONFIG,
    nat::{drop, is_error},
    parse::{
        eth, ip4, ip6, proto,
        skb::{Frame as _, Head, PACKET_HOST},
    },
    rewrite,
    scratch::Scratch,
    stage::{deliver, mss, mtu, neighbour::send_to, report::Peer, track, tunnel},
};
use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_ADJ_ROOM_ENCAP_L2_SHIFT, BPF_F_ADJ_ROOM_ENCAP_L2_ETH,
        BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_ADJ_ROOM_FIXED_GSO, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::{bpf_get_hash_recalc, bpf_skb_adjust_room},
    programs::TcContext,
};
use sinabro_common::{
    abi::{
        Addr,
        config::FLAG_INGRESS_MTU,
        drop::DropReason,
        endpoint::Endpoint,
        next_hop::{NATIVE, NextHop},
        node::{Node, Overlay},
    },
    algo::ct_state,
};

const WRAP: u64 =
    (BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2_ETH) as u64
        | (eth::LEN as u64) << BPF_ADJ_ROOM_ENCAP_L2_SHIFT;

/// How a pod's flow gets to another one.
#[repr(C)]
pub struct Leaving {
    /// One of this node; whose link is zero if it is another node's.
    pub receiver: Endpoint,
    /// That node's tunnel address,
    tunnel: Addr,
    /// the way there,
    next: NextHop,
    /// and whom the frame is for: of IPv6 packets without a tunnel it may be another address of the same machine.
    gateway: Addr,
}

/// Sends a packet, which is read, to the node of the pod that it is for; [`PASS`] if that is left to the stack, and the
/// packet as it was, but for what a SYN announces. How it gets there is remembered. [`deliver::TELLS`]: it is an ICMP error.
#[inline(never)]
pub fn leave(
    skb: *mut __sk_buff,
    scratch: &mut Scratch,
    node: &Node,
    flow: &mut Flow<Leaving>,
) -> i32 {
    match directly(skb, scratch, node, flow) {
        PASS => by_device_instead(skb, scratch),
        action => action,
    }
}

#[inline(always)]
fn directly(
    skb: *mut __sk_buff,
    scratch: &mut Scratch,
    node: &Node,
    flow: &mut Flow<Leaving>,
) -> i32 {
    let Some(next) = way(&node.tunnel) else {
        return PASS;
    };
    let way = flow.renew();
    way.gateway = next.gateway.by_words();
    if next.remote_mac == NATIVE {
        let Some(gateway) = native::gateway(scratch.ip.v6, node, next) else {
            return PASS;
        };
        way.gateway = gateway.by_words();
    }
    way.receiver.ifindex = 0;
    way.tunnel = node.tunnel.by_words();
    way.next = *next;
    if !may_go(skb, scratch, flow.way()) || !route::leads_still(skb, scratch, &node.tunnel) {
        return PASS;
    }
    flow.keep(scratch);
    if mss::begins(&scratch.ip, &scratch.l4)
        && let Err(reason) = mss::lower(&TcContext::new(skb), &scratch.ip, carried(next))
    {
        return drop(reason);
    }
    send_by(skb, scratch, flow.way())
}

/// Sends a packet, which is read, as one before it of the same flow; [`PASS`] if it is not for that way.
#[inline(always)]
pub fn again(skb: *mut __sk_buff, scratch: &mut Scratch, way: &Leaving) -> i32 {
    match may_go(skb, scratch, way) {
        true => send_by(skb, scratch, way),
        false => PASS,
    }
}

/// Whether nobody has to look at the packet but who receives it, and it is not too large for the way.
#[inline(always)]
fn may_go(skb: *mut __sk_buff, scratch: &Scratch, way: &Leaving) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    let to_gateway = unsafe { (*skb).pkt_type } == PACKET_HOST;
    let room = room(way.tunnel.as_v4().is_none());
    to_gateway
        && deliver::is_plain(&scratch.ip, &scratch.l4)
        && deliver::fits(&TcContext::new(skb), scratch, carried(&way.next), room)
}

#[inline(always)]
fn send_by(skb: *mut __sk_buff, scratch: &mut Scratch, way: &Leaving) -> i32 {
    if way.next.remote_mac == NATIVE {
        return native::send(skb, scratch, &way.tunnel, (way.next.ifindex, &way.gateway));
    }
    match way.tunnel.as_v4() {
        Some(_) => send::<ip4::Header>(skb, scratch, way),
        None => send6(skb, scratch, way),
    }
}

/// A function of its own: nodes of one cluster know each other by one family.
#[inline(never)]
fn send6(skb: *mut __sk_buff, scratch: &mut Scratch, way: &Leaving) -> i32 {
    send::<ip6::Header>(skb, scratch, way)
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
fn send<I: Outside>(skb: *mut __sk_buff, scratch: &mut Scratch, way: &Leaving) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return PASS;
    };
    let Some(service) = traffic_class(&Head::new(skb), &scratch.ip) else {
        return PASS;
    };
    // As the kernel has it, with ECT(0) for CE (RFC 3168 §9.1.1), which RFC 6040 §4.1 would copy. What takes it out leaves the mark inside
    // as it is, in either case.
    let service = match service & ECN {
        CE => ECT0,
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
        (&way.tunnel, &way.next),
        is_inner_v6,
        (service, hash, len as u16),
    );
    if ctx.store(eth::LEN as usize, I::outer(scratch), 0).is_err()
        || rewrite::decrement_ttl(&ctx, &scratch.ip).is_err()
    {
        return drop(DropReason::RewriteFailed);
    }
    Peer::find(&way.tunnel).count(|peer| &mut peer.direct_tx);
    to(skb, overlay, (way.next.ifindex, &way.gateway))
}

/// Gives the VXLAN device what the kernel does not wrap up: super-packets that have been in a tunnel and that the pod hands on.
/// By its route, but past netfilter, which sees no other packet of their connection and may drop what it has not seen begin.
/// Of TCP alone, of which it is known that the segments fit.
#[inline(never)]
fn by_device(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let wraps = CONFIG
        .get(0)
        .is_some_and(|config| config.flags & FLAG_INGRESS_MTU == 0);
    if !wraps || scratch.ip.proto != proto::TCP {
        return PASS;
    }
    past_netfilter(skb, scratch)
}

/// Gives a packet, which is read, to the VXLAN device by its route, with the mark by which `overlay_out` knows that the stack has not
/// seen it. [`PASS`] if there is no route, or the neighbour is not known.
#[inline(always)]
pub fn past_netfilter(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return PASS;
    };
    if !find_route(skb, scratch) {
        return PASS;
    }
    if rewrite::decrement_ttl(&TcContext::new(skb), &scratch.ip).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    tunnel::make_here(skb, overlay);
    hand_on(&scratch.way)
}

/// Sends a packet, which is read and does not go [`directly`], past netfilter all the same, if it goes on a connection of TCP.
/// Conntrack, which has not seen that begin, takes some of its segments for invalid, and kube-proxy has those dropped. What begins one
/// is recorded, and netfilter sees all of it.
#[inline(never)]
fn by_device_instead(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !CONFIG.get(0).is_some_and(is_beside_proxy) {
        return PASS;
    }
    if is_error(scratch) {
        return deliver::TELLS;
    }
    let goes_on = scratch.ip.proto == proto::TCP
        && !ct_state::begins(proto::TCP, scratch.l4.tcp_flags)
        && deliver::is_plain(&scratch.ip, &scratch.l4)
        && deliver::fits(&TcContext::new(skb), scratch, mtu::of_tunnels(), room(true));
    match goes_on {
        true => past_netfilter(skb, scratch),
        false => PASS,
    }
}

/// The same of an ICMP error about what another node's pod sent past netfilter.
#[inline(always)]
pub fn tell(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let is_beside = CONFIG.get(0).is_some_and(is_beside_proxy);
    match is_beside && deliver::is_whole(&scratch.ip) && track::is_of_unrecorded(skb, scratch) != 0
    {
        true => past_netfilter(skb, scratch),
        false => PASS,
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
    let words = gateway.words();
    match gateway.as_v4() {
        Some(_) => send_to(ifindex, AF_INET, [words[3], 0, 0, 0]),
        None => send_to(ifindex, AF_INET6, words),
    }
}
