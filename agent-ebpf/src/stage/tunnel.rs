//! Tunnels are made by nodes only, and a node speaks in them for its own pods only.
//!
//! Invariants:
//! - no packet but the node's own leaves for another node's tunnel port ([`from_pod`],
//!   [`leaves`]);
//! - a tunnel packet is taken if it came by an uplink, whole, from a known node, and its inner
//!   source is that node's ([`admit`]). What is not delivered there and then ([`crate::overlay`]) is
//!   stamped ([`stamp`], `sinabro_common::abi::node`);
//! - the VXLAN device takes what has the stamp, and only for this node's pods and itself
//!   ([`arrives`]). So it does not matter by which other way a packet reaches the device's
//!   socket: another interface, a translated port, reassembled fragments;
//! - a pod's address is no source outside of a tunnel ([`outside`]), unless nodes send each other what is their pods' without
//!   one ([`native`]).
//!
//! Limits: who can send from a node's own address on the underlay, or natively from a pod's, can speak for that node's
//! pods. While pods' IPv6 is not masqueraded, a pod reaches other nodes and hosts under its own
//! address: such a packet may come in to the node itself, and the answer of an address that is
//! nobody's in the cluster may come through a tunnel.

use super::{Action, report::Peer};
use crate::{
    PASS,
    maps::{CONFIG, ENDPOINTS, NODES, NON_MASQUERADE, OVERLAY, POD_RANGES},
    overlay::native,
    parse::{
        Fragment, Header, Ip, Packet as _, eth,
        l4::{L4, UDP_LEN},
        proto,
        skb::{Frame as _, Head},
    },
    rewrite,
    scratch::Scratch,
};
use aya_ebpf::{bindings::__sk_buff, maps::lpm_trie::Key, programs::TcContext};
use sinabro_common::abi::{
    Addr,
    config::{FLAG_MASQUERADE, FLAG_TUNNELS, NodeConfig},
    drop::DropReason,
    node::{Node, Overlay},
};

const VXLAN_LEN: u32 = 8;

/// No action of the kernel's: a packet between this node and another, which nothing but tunnels is about.
pub const OURS: i32 = 64;

/// Another one: a packet of another node's pod, which came without a tunnel.
pub const NATIVE: i32 = 65;

/// This node's end of the tunnels, once it is known.
#[inline(always)]
pub fn overlay(config: &NodeConfig) -> Option<&'static Overlay> {
    if config.flags & FLAG_TUNNELS == 0 {
        return None;
    }
    let overlay = OVERLAY.get(0)?;
    (overlay.local != Addr::UNSPECIFIED).then_some(overlay)
}

/// Whether a packet, or a packet's first fragment, is for the tunnel port.
#[inline(always)]
pub fn is_tunnel(overlay: &Overlay, ip: &Ip, l4: &L4) -> bool {
    ip.proto == proto::UDP && ip.fragment != Fragment::Later && l4.dst_port == overlay.port
}

/// A pod sends no tunnel packets to nodes. To others it may: their tunnels are not ours.
#[inline(always)]
pub fn from_pod(config: &NodeConfig, ip: &Ip, l4: &L4) -> Result<(), DropReason> {
    if ip.proto != proto::UDP {
        return Ok(());
    }
    match overlay(config) {
        Some(overlay) if is_tunnel(overlay, ip, l4) && node(&ip.dst).is_some() => {
            Err(DropReason::EncapProhibited)
        }
        _ => Ok(()),
    }
}

/// What leaves for the tunnel port of a node comes from a socket of this node, the VXLAN device's
/// or that of a process: a packet on its way through has an interface that it came in by, also
/// if the stack has since given it another source or destination.
#[inline(always)]
pub fn leaves(ctx: &TcContext, ip: &Ip) -> Action {
    // SAFETY: the context is valid for as long as the program runs.
    let forwarded = unsafe { (*ctx.skb.skb).ingress_ifindex } != 0;
    match node(&ip.dst) {
        None => Ok(PASS),
        Some(_) if forwarded => Err(DropReason::EncapProhibited),
        Some(node) => {
            Peer::find(&node.tunnel).count(|peer| &mut peer.kernel_tx);
            Ok(OURS)
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Inner {
    vxlan: [u8; VXLAN_LEN as usize],
    dst: [u8; 6],
    src: [u8; 6],
    kind: [u8; 2],
}

// SAFETY: bytes alone.
unsafe impl Header for Inner {}

/// Whether a packet for the tunnel port has the VXLAN header of this overlay.
#[inline(always)]
pub fn is_of(head: &Head, overlay: &Overlay, ip: &Ip) -> bool {
    head.load::<[u8; VXLAN_LEN as usize]>(ip.l4 + UDP_LEN) == Some(overlay.vxlan)
}

/// Takes a tunnel packet that came by an uplink, or not. What is not certainly of this overlay
/// passes without a stamp.
#[inline(always)]
pub fn admit(ctx: &TcContext, config: &NodeConfig, overlay: &Overlay, ip: &Ip) -> Action {
    let at = ip.l4 + UDP_LEN;
    let head = Head::new(ctx.skb.skb);
    let Some(inner) = head.load::<Inner>(at) else {
        return Ok(PASS);
    };
    if inner.vxlan != overlay.vxlan || ip.dst != overlay.local {
        return Ok(PASS);
    }
    let Some(sender) = node(&ip.src).filter(|node| node.tunnel != overlay.local) else {
        return Err(DropReason::TunnelSource);
    };
    if ip.fragment != Fragment::No {
        // What is put together again has no outer header that could be checked.
        return Err(DropReason::TunnelFragment);
    }
    let header = at + size_of::<Inner>() as u32;
    let src = source(&head, inner.kind, header).ok_or(DropReason::TunnelInner)?;
    if !speaks_for(config, sender, &src) {
        return Err(DropReason::TunnelInner);
    }
    Ok(OURS)
}

/// Writes the stamp into a tunnel packet that was admitted, whose UDP header is at an offset.
#[inline(always)]
pub fn stamp(ctx: &TcContext, overlay: &Overlay, udp: u32) -> Action {
    let field = udp + UDP_LEN + VXLAN_LEN + 6;
    let Ok(src) = ctx.load::<[u8; 6]>(field as usize) else {
        return Err(DropReason::RewriteFailed);
    };
    match rewrite::udp_payload(ctx, udp, field, src, overlay.stamp) {
        Ok(()) => Ok(OURS),
        Err(rewrite::Failed) => Err(DropReason::RewriteFailed),
    }
}

/// Marks a packet that an uplink is to send as it is.
#[inline(always)]
pub fn make_here(skb: *mut __sk_buff, overlay: &Overlay) {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { (*skb).mark = overlay.mark() };
}

/// Whether a packet that leaves by an uplink has that mark ([`make_here`]). It has none any more then.
#[inline(always)]
pub fn is_made_here(skb: *mut __sk_buff) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    let has = unsafe { (*skb).mark };
    if has == 0 {
        return false;
    }
    let Some(overlay) = CONFIG.get(0).and_then(overlay) else {
        return false;
    };
    let is = has == overlay.mark();
    if is {
        // SAFETY: as above.
        unsafe { (*skb).mark = 0 };
    }
    is
}

/// The source address of the IP header of either family at an offset.
#[inline(always)]
fn source(head: &Head, kind: [u8; 2], header: u32) -> Option<Addr> {
    match kind {
        eth::IP4 => {
            let src = head.load(header + 12)?;
            Some(Addr::v4(src))
        }
        eth::IP6 => {
            let src = Addr::v6(head.load(header + 8)?);
            // In the maps a mapped address would be an IPv4 one; one of the link means nothing
            // on the other side.
            (src.as_v4().is_none() && !src.is_of_link()).then_some(src)
        }
        _ => None,
    }
}

/// Whether packets from this address may come in a node's tunnel: from its pods, from itself,
/// and from whom a pod reaches under its own address, so that the answer comes by the tunnel.
#[inline(always)]
fn speaks_for(config: &NodeConfig, sender: &Node, src: &Addr) -> bool {
    if let Some(owner) = pods_of(src) {
        return owner.tunnel == sender.tunnel;
    }
    if let Some(owner) = node(src) {
        return owner.tunnel == sender.tunnel;
    }
    is_reached_untranslated(config, src)
}

/// What comes out of a tunnel has the stamp, and ends on this node: [`OURS`] if at one of its own addresses.
#[inline(always)]
pub fn arrives(overlay: &Overlay, eth: &eth::Eth, ip: &Ip) -> Action {
    if eth.src != overlay.stamp {
        return Err(DropReason::TunnelUnchecked);
    }
    let [first, second] = &overlay.gateways;
    if ENDPOINTS.get_ptr(ip.dst).is_some() {
        return Ok(PASS);
    }
    if (ip.dst == *first || ip.dst == *second) && ip.dst != Addr::UNSPECIFIED {
        return Ok(OURS);
    }
    Err(DropReason::TunnelDestination)
}

/// Outside of a tunnel no packet comes from a pod: not to pods, unless it [comes natively](native), and to others only where
/// pods' packets to them keep their source.
#[inline(always)]
pub fn outside(
    skb: *mut __sk_buff,
    config: &NodeConfig,
    overlay: &Overlay,
    scratch: &mut Scratch,
) -> Action {
    let Some(sender) = pods_of(&scratch.ip.src) else {
        return Ok(PASS);
    };
    if native::is_taken(skb, scratch, sender, overlay) {
        return Ok(NATIVE);
    }
    if pods_of(&scratch.ip.dst).is_none() && is_reached_untranslated(config, &scratch.ip.dst) {
        return Ok(PASS);
    }
    Err(DropReason::PodSource)
}

/// Whether pods' packets to an address outside of the pod ranges keep their source.
#[inline(always)]
fn is_reached_untranslated(config: &NodeConfig, addr: &Addr) -> bool {
    let masquerades = config.flags & FLAG_MASQUERADE != 0 && addr.as_v4().is_some();
    !masquerades || NON_MASQUERADE.get(Key::new(128, *addr)).is_some()
}

#[inline(always)]
fn node(addr: &Addr) -> Option<&'static Node> {
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    unsafe { NODES.get(addr) }
}

/// The node whose pods an address is of, unless it is this one: of its own ranges are the node's addresses inside of the
/// overlay, too, which may have node ports.
#[inline(always)]
pub fn pods_elsewhere(config: &NodeConfig, addr: &Addr) -> Option<&'static Node> {
    let overlay = overlay(config)?;
    pods_of(addr).filter(|node| node.tunnel != overlay.local)
}

/// Whether an address is a pod's of this node, or of the range of another one's.
#[inline(always)]
pub fn is_a_pods(addr: &Addr) -> bool {
    ENDPOINTS.get_ptr(addr).is_some()
        || CONFIG
            .get(0)
            .is_some_and(|config| pods_elsewhere(config, addr).is_some())
}

#[inline(always)]
pub fn pods_of(addr: &Addr) -> Option<&'static Node> {
    POD_RANGES.get(Key::new(128, *addr))
}
