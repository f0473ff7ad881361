//! Between nodes without a tunnel (`routing: native`): what a pod sends is on the wire as it is, from node to node on one link.
//!
//! Only what goes past the stack here goes so; all else is in tunnels as ever. So the kernel's routes and its check of paths back
//! (`rp_filter`) are those of the tunnel on both sides, and what the receiver does not deliver past its stack comes out of its VXLAN
//! device, as if it had come in a tunnel. What is larger than a tunnel's packets may go so, and nothing else: who sends it otherwise is
//! told by the stack.

use super::{leave, takes, way};
use crate::{
    PASS,
    maps::{CONFIG, ENDPOINTS, NATIVE, NATIVE_V6},
    nat::{DROPPED, drop},
    parse::{eth, skb::PACKET_HOST},
    rewrite,
    scratch::Scratch,
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
    next_hop::NextHop,
    node::{self, Node, Overlay},
};

/// Sends a packet that [`leave::leave`] has looked at to its node.
#[inline(always)]
pub fn send(
    skb: *mut __sk_buff,
    scratch: &Scratch,
    node: &Node,
    next: &'static NextHop,
    overlay: &Overlay,
) -> i32 {
    let ctx = TcContext::new(skb);
    if deliver::has_segments_of_its_own(&ctx, scratch) {
        return PASS;
    }
    let Some(gateway) = gateway(scratch, node, next) else {
        return PASS;
    };
    if rewrite::decrement_ttl(&ctx, &scratch.ip).is_err() {
        return drop(DropReason::RewriteFailed);
    }
    report::native(&node.tunnel, |peer| &mut peer.tx);
    leave::to(skb, overlay, (next.ifindex, gateway))
}

/// Whose MAC address the packet gets. IPv6 packets are given to IPv6 addresses alone (`bpf_redirect_neigh`), IPv4 packets to
/// those of both families.
#[inline(always)]
fn gateway(scratch: &Scratch, node: &Node, next: &'static NextHop) -> Option<&'static Addr> {
    if !scratch.ip.v6 || next.gateway.as_v4().is_none() {
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

/// Delivers such a packet, which is read.
#[inline(never)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match into_pod(skb, scratch) {
        PASS => {
            Peer::find(&scratch.sender).count(|peer| &mut peer.kernel_rx);
            into_device(skb, scratch)
        }
        action => {
            if action < DROPPED {
                report::native(&scratch.sender, |peer| &mut peer.rx);
            }
            action
        }
    }
}

#[inline(always)]
fn into_pod(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let Some(receiver) = (unsafe { ENDPOINTS.get(scratch.ip.dst) }) else {
        return PASS;
    };
    // Without a way of its own to the sender (`overlay: kernel`) this node's stack is to see what comes, too.
    if !CONFIG.get(0).is_some_and(takes)
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || deliver::is_too_large(&TcContext::new(skb), 0, receiver)
    {
        return PASS;
    }
    match way(&scratch.sender) {
        // The way back may be a tunnel.
        Some(back) => deliver::from_outside(skb, scratch, receiver, leave::carried(back)),
        None => PASS,
    }
}

/// Has the VXLAN device receive the packet, with the stamp of what was checked.
#[inline(always)]
fn into_device(skb: *mut __sk_buff, scratch: &Scratch) -> i32 {
    let ctx = TcContext::new(skb);
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
