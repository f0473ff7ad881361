//! Between nodes without a tunnel (`routing: native`): what a pod sends is on the wire as it is, from node to node on one link.
//!
//! What goes past the stack is sent by [`leave`](super::leave), all else where the stack gives it to the VXLAN device
//! ([`instead_of_the_device`]). So the kernel's routes and its check of paths back (`rp_filter`) are those of the tunnel on both sides,
//! and what the receiver does not deliver past its stack comes out of its VXLAN device, as if it had come in a tunnel. By the stack
//! nothing is larger than the device's MTU: it may have to be in a tunnel after all.

use super::{arriving::Arriving, is_of_stack, leave, route, takes, way, way_of_requests};
use crate::{
    DROP, PASS,
    maps::{CONFIG, ENDPOINTS, NATIVE, NATIVE_V6},
    nat::{DROPPED, drop},
    parse::{
        eth,
        skb::{self, PACKET_HOST},
    },
    rewrite,
    scratch::{self, Scratch, verified_once},
    stage::{
        deliver, mss, mtu,
        report::{self, Peer},
        tunnel,
    },
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_INGRESS},
    helpers::bpf_redirect,
    programs::TcContext,
};
use sinabro_common::abi::{
    Addr,
    config::FLAG_INGRESS_MTU,
    drop::DropReason,
    next_hop::{self, NextHop},
    node::{self, Node, Overlay},
};

/// Sends a packet that [`leave`] has looked at to a node, by its tunnel address, and to a gateway by an uplink.
#[inline(always)]
pub fn send(skb: *mut __sk_buff, scratch: &Scratch, tunnel: &Addr, by: (u32, &Addr)) -> i32 {
    let ctx = TcContext::new(skb);
    if deliver::has_segments_of_any_length(&ctx, scratch) {
        return PASS;
    }
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return PASS;
    };
    if rewrite::decrement_ttl(&ctx, &scratch.ip).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    report::native(tunnel, |peer| &mut peer.tx);
    leave::to(skb, overlay, by)
}

/// Whether anything may come or be sent without a tunnel: no node sends such that takes none.
#[inline(always)]
pub fn may_lead() -> bool {
    device().is_some()
}

verified_once! {
    /// Sends what the stack has given to the VXLAN device to its node as it is. [`PASS`] if the node is sent tunnels, if its
    /// neighbour is not known, and of what is neither this node's nor its pods': the other would not take it for that. What the agent
    /// has marked, to see whether it gets there so, is in no tunnel in any case.
    pub fn instead_of_the_device = instead_of_the_device_global(sent_instead);
}

#[inline(always)]
fn sent_instead(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(config) = CONFIG.get(0) else {
        return PASS;
    };
    let Some(overlay) = tunnel::overlay(config) else {
        return PASS;
    };
    // SAFETY: the context is valid for as long as the program runs.
    let is_tried = unsafe { (*skb).mark } == overlay.mark_of_requests();
    let otherwise = if is_tried { DROP } else { PASS };
    let Some((src, dst)) = ends(&TcContext::new(skb)) else {
        return otherwise;
    };
    let Some(node) = tunnel::pods_elsewhere(config, &dst) else {
        return otherwise;
    };
    let is_ours = tunnel::pods_of(&src).is_some_and(|own| own.tunnel == overlay.local);
    let Some(next) = way_of_requests(&node.tunnel) else {
        return otherwise;
    };
    // Only a node that is its own next hop is on the link.
    let is_sent_so = next.remote_mac == next_hop::NATIVE || is_tried && next.gateway == node.tunnel;
    if !is_ours || !is_sent_so {
        return otherwise;
    }
    let Some(gateway) = gateway(dst.as_v4().is_none(), node, next) else {
        return otherwise;
    };
    if !route::leads_still(skb, scratch, &node.tunnel) {
        return otherwise;
    }
    // A packet that has a route from the stack and waits for a neighbour is given the MAC address of that route's (`neigh_update`),
    // and the request for it has the packet's source, which who is asked may take for a forged one (`rp_filter`).
    if !scratch.way.knows_neighbour(skb, next.ifindex, gateway) {
        return otherwise;
    }
    report::native(&node.tunnel, |peer| &mut peer.tx);
    leave::to(skb, overlay, (next.ifindex, gateway))
}

/// A packet's source and destination as they are now, which may have been written since its header was read.
#[inline(always)]
pub fn ends(ctx: &TcContext) -> Option<(Addr, Addr)> {
    match skb::kind(ctx) {
        eth::IP4 => {
            let [src, dst] = ctx.load::<[[u8; 4]; 2]>(eth::LEN as usize + 12).ok()?;
            Some((Addr::v4(src), Addr::v4(dst)))
        }
        eth::IP6 => {
            let [src, dst] = ctx.load::<[[u8; 16]; 2]>(eth::LEN as usize + 8).ok()?;
            Some((Addr::v6(src), Addr::v6(dst)))
        }
        _ => None,
    }
}

/// The way to a node that is sent no tunnels, and whose MAC address a packet to it gets.
#[inline(always)]
pub fn next_hop(v6: bool, node: &Node) -> Option<(&'static NextHop, &'static Addr)> {
    let next = way(&node.tunnel).filter(|next| next.remote_mac == next_hop::NATIVE)?;
    Some((next, gateway(v6, node, next)?))
}

/// Whose MAC address the packet gets. IPv6 packets are given to IPv6 addresses alone (`bpf_redirect_neigh`), IPv4 packets to
/// those of both families.
#[inline(always)]
pub fn gateway(v6: bool, node: &Node, next: &'static NextHop) -> Option<&'static Addr> {
    if !v6 || next.gateway.as_v4().is_none() {
        return Some(&next.gateway);
    }
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    unsafe { NATIVE_V6.get(node.tunnel) }
}

/// Whether a packet from a pod's address that came without a tunnel may be one of another node's: it is for this node's pods,
/// or for itself inside of the overlay. Whose it is, is in the scratch then.
#[inline(always)]
pub fn is_taken(
    skb: *mut __sk_buff,
    scratch: &mut Scratch,
    sender: &Node,
    overlay: &Overlay,
) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    let to_host = unsafe { (*skb).pkt_type } == PACKET_HOST;
    scratch.sender = sender.tunnel;
    to_host
        && scratch.ip.l3 == eth::LEN
        && device().is_some()
        && sender.tunnel != overlay.local
        && tunnel::pods_of(&scratch.ip.dst).is_some_and(|own| own.tunnel == overlay.local)
}

/// Delivers such a packet, which is read, if it is for a pod; [`PASS`] if it is left to others.
#[inline(never)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let Some(receiver) = (unsafe { ENDPOINTS.get(scratch.ip.dst) }) else {
        return PASS;
    };
    // Without a way of its own to the sender (`dataPath: kernel`) this node's stack is to see what comes, too.
    if !CONFIG.get(0).is_some_and(takes)
        || is_of_stack(scratch) != 0
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || deliver::is_too_large(&TcContext::new(skb), scratch, 0, receiver)
    {
        return PASS;
    }
    match way(&scratch.sender) {
        // The way back may be a tunnel.
        Some(back) => deliver::from_outside(skb, scratch, receiver, leave::carried(back), true),
        None => PASS,
    }
}

/// Delivers a packet of another node's pod, which came without a tunnel and is read, as one before it of the same flow; [`PASS`] if it is not
/// for that.
#[inline(always)]
pub fn again(skb: *mut __sk_buff, scratch: &Scratch, way: &Arriving) -> i32 {
    let ctx = TcContext::new(skb);
    if scratch.ip.l3 != eth::LEN
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || deliver::is_too_large(&ctx, scratch, 0, &way.receiver)
    {
        return PASS;
    }
    let action = deliver::into(&ctx, scratch, &way.receiver);
    count(&way.sender, action);
    action
}

/// Counts a packet that was not left to the stack, by the tunnel address of the node that it is from.
#[inline(always)]
pub fn count(sender: &Addr, action: i32) {
    if action < DROPPED {
        report::native(sender, |peer| &mut peer.rx);
    }
}

/// Has the VXLAN device receive the packet, with the stamp of what was checked.
#[inline(never)]
pub fn into_device(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    Peer::find(&scratch.sender).count(|peer| &mut peer.kernel_rx);
    let (Some(native), Some(config)) = (device(), CONFIG.get(0)) else {
        return drop(DropReason::PodSource);
    };
    let Some(overlay) = tunnel::overlay(config) else {
        return drop(DropReason::PodSource);
    };
    // SAFETY: the context is valid for as long as the program runs.
    let (len, segments) = unsafe { ((*skb).len, (*skb).gso_size) };
    if config.flags & FLAG_INGRESS_MTU != 0 && len > mtu::of_tunnels() + eth::LEN && segments == 0 {
        // The stack takes it by the uplink if it does not mind that the way back is another (`rp_filter` 0 or 2).
        return PASS;
    }
    // The other end may be beyond a tunnel: a client that this node has led to the sender.
    if mss::begins(&scratch.ip, &scratch.l4)
        && let Err(reason) = mss::lower(&ctx, &scratch.ip, mtu::of_tunnels())
    {
        return drop(reason);
    }
    if rewrite::macs(&ctx, native.mac, overlay.stamp).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    // SAFETY: no pointers involved; an interface that is gone makes the kernel drop the packet.
    unsafe { bpf_redirect(native.device, BPF_F_INGRESS.into()) as i32 }
}

/// Where what was not delivered past the stack goes, if packets are taken without a tunnel.
#[inline(always)]
fn device() -> Option<&'static node::Native> {
    NATIVE.get(0).filter(|native| native.device != 0)
}
