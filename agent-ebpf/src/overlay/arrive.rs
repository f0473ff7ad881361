//! What comes in a tunnel for a pod of this node.

use super::{
    CE, ECN, ECT0, ECT1, arriving::Arriving, is_of_stack, outer::room, takes, traffic_class, way,
};
use crate::{
    PASS,
    maps::{CONFIG, ENDPOINTS},
    nat::{DROPPED, drop, is_error},
    parse::{
        Fragment, Packet as _, eth,
        skb::{Frame as _, Head, PACKET_HOST},
    },
    rewrite,
    scratch::{self, Scratch, verified_once},
    stage::{deliver, mtu, report::Peer, track, tunnel},
};
use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_CSUM_LEVEL_DEC, BPF_CSUM_LEVEL_QUERY, BPF_F_ADJ_ROOM_DECAP_L3_IPV4,
        BPF_F_ADJ_ROOM_DECAP_L3_IPV6, BPF_F_ADJ_ROOM_FIXED_GSO, BPF_F_ADJ_ROOM_NO_CSUM_RESET,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::{bpf_csum_level, bpf_skb_adjust_room},
    programs::TcContext,
};
use sinabro_common::abi::{drop::DropReason, endpoint::Endpoint, node::Overlay};

/// Takes a packet out of its tunnel and puts it into its pod, if that is for this node to do and the packet was read
/// and admitted. [`PASS`] if it is left to the VXLAN device, and the packet as it was; what is in the scratch is not.
#[inline(never)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    let is_outer_v6 = scratch.ip.v6;
    let room = room(is_outer_v6);
    if !is_of_this_kind(&ctx, scratch, room) || !read(skb, scratch, room) || !may_say(skb, scratch)
    {
        return PASS;
    }
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let Some(receiver) = (unsafe { ENDPOINTS.get(scratch.ip.dst) }) else {
        return PASS;
    };
    if is_of_stack(scratch) != 0 {
        return PASS;
    }
    match take_out(&ctx, scratch, receiver, is_outer_v6) {
        OUT => deliver::from_outside(skb, scratch, receiver, mtu::of_tunnels(), true),
        other => other,
    }
}

verified_once! {
    /// Beside kube-proxy: delivers a packet that the VXLAN device has decapsulated, past netfilter. [`PASS`] if it is the stack's: its connection has a
    /// record, or it takes a router.
    pub fn from_device = from_device_global(decapsulated);
}

#[inline(always)]
fn decapsulated(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let Some(receiver) = (unsafe { ENDPOINTS.get(scratch.ip.dst) }) else {
        return PASS;
    };
    if is_error(scratch) {
        return match track::is_of_unrecorded(skb, scratch) {
            0 => PASS,
            _ => deliver::from_outside(skb, scratch, receiver, mtu::of_tunnels(), true),
        };
    }
    if !scratch.well_formed
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || deliver::is_too_large(&ctx, scratch, 0, receiver)
        || is_of_stack(scratch) != 0
    {
        return PASS;
    }
    deliver::from_outside(skb, scratch, receiver, mtu::of_tunnels(), true)
}

/// Reads what is inside of a packet, which is read, if it is of a tunnel and its outer headers are as [`arrive`] takes them. The length of
/// these; zero if it is not, and what was read is as it was.
#[inline(always)]
pub fn look_inside(skb: *mut __sk_buff, scratch: &mut Scratch, overlay: &Overlay) -> u32 {
    let ip = &scratch.ip;
    let head = Head::new(skb);
    if !scratch.well_formed
        || !tunnel::is_tunnel(overlay, ip, &scratch.l4)
        || ip.fragment != Fragment::No
        || ip.options
        || ip.l3 != eth::LEN
        || ip.dst != overlay.local
        || !tunnel::is_of(&head, overlay, ip)
    {
        return 0;
    }
    let Some(outer) = traffic_class(&head, ip) else {
        return 0;
    };
    let room = room(ip.v6);
    scratch.outer_class = outer;
    scratch.sender = ip.src.by_words();
    if !read(skb, scratch, room) {
        scratch.well_formed = false;
    }
    room
}

/// Takes a packet, which is read, out of its tunnel and delivers it as one before it of the same flow; [`PASS`] if it is not for that, and the
/// packet as it was. `room`: as [`look_inside`] says.
#[inline(always)]
pub fn again(skb: *mut __sk_buff, scratch: &mut Scratch, way: &Arriving, room: u32) -> i32 {
    let ctx = TcContext::new(skb);
    if scratch.sender != way.sender
        || Head::new(skb).load::<[u8; 6]>(room) != Some(way.own_mac)
        || !may_say(skb, scratch)
    {
        return PASS;
    }
    let is_outer_v6 = room != super::outer::room(false);
    let action = match take_out(&ctx, scratch, &way.receiver, is_outer_v6) {
        OUT => deliver::into(&ctx, scratch, &way.receiver),
        other => return other,
    };
    if action < DROPPED {
        Peer::find(&way.sender).count(|peer| &mut peer.direct_rx);
    }
    action
}

/// A packet that was in a tunnel and is in none any more.
const OUT: i32 = 64;

/// Takes a packet out of its tunnel, whose inside is read: [`OUT`], [`PASS`] if it is left to the VXLAN device, or a drop.
#[inline(always)]
fn take_out(ctx: &TcContext, scratch: &mut Scratch, receiver: &Endpoint, is_outer_v6: bool) -> i32 {
    if !deliver::is_plain(&scratch.ip, &scratch.l4)
        // The receiver's socket cuts a super-packet of UDP, and loses all of one that still has the type of a tunnel.
        || deliver::has_segments_of_its_own(ctx, scratch)
        || deliver::is_too_large(ctx, scratch, room(is_outer_v6), receiver)
        || !unwrap(ctx, scratch, is_outer_v6)
    {
        return PASS;
    }
    // As the outer header announced its own.
    let kind = if scratch.ip.v6 { eth::IP6 } else { eth::IP4 };
    if scratch.ip.v6 != is_outer_v6 && ctx.store(eth::KIND as usize, &kind, 0).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    if scratch.outer_class & ECN == CE && rewrite::congestion(ctx, &mut scratch.ip, CE).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    OUT
}

/// Whether the outer headers are of the one form that is taken: IP without options or extension headers behind an Ethernet header, to
/// this machine. What they say of congestion is in the scratch then.
#[inline(always)]
fn is_of_this_kind(ctx: &TcContext, scratch: &mut Scratch, room: u32) -> bool {
    let ip = &scratch.ip;
    // SAFETY: the context is valid for as long as the program runs.
    let to_host = unsafe { (*ctx.skb.skb).pkt_type } == PACKET_HOST;
    let ours = CONFIG.get(0).is_some_and(takes);
    if !ours || !to_host || ip.options || ip.l3 != eth::LEN {
        return false;
    }
    let Some(sender) = way(&ip.src) else {
        return false;
    };
    let head = Head::new(ctx.skb.skb);
    let Some(outer) = traffic_class(&head, ip) else {
        return false;
    };
    scratch.outer_class = outer;
    head.load::<[u8; 6]>(room) == Some(sender.own_mac)
}

/// Whether the packet inside says, with what may be added here, what the outer one says of congestion (RFC 6040 §4.2). To the device are
/// left those that have to be dropped, for their sender takes no mark, and those that a router has given ECT(1) instead of ECT(0).
#[inline(always)]
fn may_say(skb: *mut __sk_buff, scratch: &Scratch) -> bool {
    let outer = scratch.outer_class & ECN;
    if !matches!(outer, CE | ECT1) {
        return true;
    }
    let inner = traffic_class(&Head::new(skb), &scratch.ip).map(|inner| inner & ECN);
    inner.is_some_and(|inner| match outer {
        CE => inner != 0,
        _ => inner != ECT0,
    })
}

/// Reads what is inside.
#[inline(always)]
fn read(skb: *mut __sk_buff, scratch: &mut Scratch, room: u32) -> bool {
    let inner = eth::LEN + room;
    let is_read = match Head::new(skb).load::<[u8; 2]>(inner - 2) {
        Some(eth::IP4) => scratch::read_ip4::<Head>(skb, scratch, inner),
        Some(eth::IP6) => scratch::read_ip6::<Head>(skb, scratch, inner),
        _ => false,
    };
    is_read && scratch::read_l4::<Head>(skb, scratch)
}

/// Takes off the outer headers.
#[inline(always)]
fn unwrap(ctx: &TcContext, scratch: &mut Scratch, is_outer_v6: bool) -> bool {
    let skb = ctx.skb.skb;
    let room = room(is_outer_v6);
    let mut flags = BPF_F_ADJ_ROOM_FIXED_GSO as u64;
    if scratch.ip.v6 != is_outer_v6 {
        flags |= match scratch.ip.v6 {
            true => BPF_F_ADJ_ROOM_DECAP_L3_IPV6 as u64,
            false => BPF_F_ADJ_ROOM_DECAP_L3_IPV4 as u64,
        };
    }
    // How many of the checksums, one in the other, the card has verified beside the first. What is not told to it the
    // pod verifies itself.
    // SAFETY: the context is valid for as long as the program runs.
    let verified = unsafe { bpf_csum_level(skb, BPF_CSUM_LEVEL_QUERY as u64) };
    if verified > 0 {
        flags |= BPF_F_ADJ_ROOM_NO_CSUM_RESET as u64;
    }
    // SAFETY: as above. The kernel refuses flags that it does not know, and changes nothing then.
    if unsafe { bpf_skb_adjust_room(skb, -(room as i32), BPF_ADJ_ROOM_MAC, flags) } != 0 {
        return false;
    }
    if verified > 0 {
        // SAFETY: as above.
        unsafe { bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC as u64) };
    }
    scratch.ip.l3 -= room;
    scratch.ip.l4 -= room;
    scratch.ip.id_at -= room;
    true
}
