//! No pod announces larger segments than the way to the other end carries, nor is it told of larger ones.
//!
//! A pod's link may be larger than any way out of the node, for what stays on it, and the way out by an uplink larger than a
//! tunnel ([`mtu`]). The pod's routes say so, and the kernel's TCP goes by them. But a stack of the application's own, or of a virtual
//! machine, goes by the link; and a connection to an address of this node, which is announced as to
//! the node itself, may be translated to somewhere else afterwards. So what leaves with a SYN is
//! lowered to what the ways out carry (RFC 9293 §3.7.1), and what comes in with one likewise: the other
//! end knows its own link, which may be larger than this node's.

use super::{Action, mtu, tunnel};
use crate::{
    PASS,
    maps::{CONFIG, ENDPOINTS, NATIVE, NODES, OVERLAY},
    parse::{
        Fragment, Ip, ip4, ip6,
        l4::{L4, TCP_SYN},
        proto, tcp_options,
    },
    rewrite,
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, BPF_F_CURRENT_NETNS},
    helpers::{bpf_sk_release, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use core::hint::black_box;
use sinabro_common::abi::drop::DropReason;

/// Where a TCP header has its flags.
const TCP_FLAGS: u32 = 13;

/// Lowers what a pod's SYN announces to what its way out of the node carries by the stack, unless it stays here.
#[inline(always)]
pub fn leaving(ctx: &TcContext, ip: &Ip, l4: &L4) -> Action {
    if ENDPOINTS.get_ptr(ip.dst).is_some() || is_for_the_node(ctx, ip, l4) {
        return Ok(PASS);
    }
    let elsewhere = CONFIG
        .get(0)
        .and_then(|c| tunnel::pods_elsewhere(c, &ip.dst));
    let carried = match elsewhere {
        Some(_) => mtu::of_tunnels(),
        None => mtu::of_uplinks(),
    };
    lower(ctx, ip, carried)
}

/// Lowers what the SYN of another machine announces to what the way back carries: it came out of the VXLAN device or by an uplink.
#[inline(always)]
pub fn entering(ctx: &TcContext, ip: &Ip) -> Action {
    // SAFETY: the context is valid for as long as the program runs.
    let from = unsafe { (*ctx.skb.skb).ingress_ifindex };
    // Where nothing goes without a tunnel the two are the same.
    let carried = match NATIVE.get(0) {
        Some(native) if native.device != from => mtu::of_uplinks(),
        _ => mtu::of_tunnels(),
    };
    lower(ctx, ip, carried)
}

/// Lowers what a SYN announces to what a way carries.
#[inline(always)]
pub fn lower(ctx: &TcContext, ip: &Ip, carried: u32) -> Action {
    let headers = if ip.v6 {
        ip6::HEADER_LEN
    } else {
        ip4::HEADER_LEN
    } + tcp_options::TCP_HEADER_LEN;
    match carried.saturating_sub(headers) {
        // Not known yet.
        0 => Ok(PASS),
        most => match black_box(lower_global(ctx.skb.skb, ip.l4, most)) {
            PASS => Ok(PASS),
            _ => Err(DropReason::RewriteFailed),
        },
    }
}

/// Of a TCP header at an offset. Gives [`PASS`], or zero if the packet could not be written to.
#[inline(never)]
fn lower_global(skb: *mut __sk_buff, tcp: u32, most: u32) -> i32 {
    let (ctx, tcp, most) = (TcContext::new(skb), black_box(tcp), black_box(most) as u16);
    let lowered = match tcp_options::mss(&ctx, tcp) {
        Some(mss) if u16::from_be_bytes(mss.value) > most => {
            rewrite::in_tcp_header(&ctx, tcp, mss.offset, mss.value, most.to_be_bytes())
        }
        _ => Ok(()),
    };
    black_box(lowered.map_or(0, |()| PASS))
}

/// Whether a packet begins a connection.
#[inline(always)]
pub fn begins(ip: &Ip, l4: &L4) -> bool {
    ip.proto == proto::TCP && l4.tcp_flags & TCP_SYN != 0 && ip.fragment == Fragment::No
}

/// Whether a packet that the stack delivers to a pod begins a connection with another machine: it came
/// by an interface, which is no pod's.
#[inline(always)]
pub fn begins_elsewhere(ctx: &TcContext, ip: &Ip) -> bool {
    ip.proto == proto::TCP
        && ip.fragment == Fragment::No
        && matches!(ctx.load::<u8>((ip.l4 + TCP_FLAGS) as usize), Ok(flags) if flags & TCP_SYN != 0)
        // SAFETY: the context is valid for as long as the program runs.
        && unsafe { (*ctx.skb.skb).ingress_ifindex } != 0
        && ENDPOINTS.get_ptr(ip.src).is_none()
}

/// Whether it is for a socket of the node itself. What is for an address of the node but for no
/// socket will be translated.
#[inline(always)]
fn is_for_the_node(ctx: &TcContext, ip: &Ip, l4: &L4) -> bool {
    let Some(overlay) = OVERLAY.get(0) else {
        return false;
    };
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let node = unsafe { NODES.get(ip.dst) };
    let own = node.is_some_and(|node| node.tunnel == overlay.local);
    if !own && !overlay.gateways.contains(&ip.dst) {
        return false;
    }
    if ip.v6 {
        return is_socket(
            ctx,
            &mut Tuple {
                src: ip.src.0,
                dst: ip.dst.0,
                src_port: l4.src_port,
                dst_port: l4.dst_port,
            },
        );
    }
    is_socket(
        ctx,
        &mut Tuple {
            src: rewrite::word(&ip.src),
            dst: rewrite::word(&ip.dst),
            src_port: l4.src_port,
            dst_port: l4.dst_port,
        },
    )
}

/// `struct bpf_sock_tuple` of one family, whose addresses are `A`.
#[repr(C)]
struct Tuple<A> {
    src: A,
    dst: A,
    src_port: [u8; 2],
    dst_port: [u8; 2],
}

/// Whether this node has a socket of this connection, or one that waits for it.
#[inline(always)]
fn is_socket<A>(ctx: &TcContext, tuple: &mut Tuple<A>) -> bool {
    let len = size_of::<Tuple<A>>() as u32;
    let netns = BPF_F_CURRENT_NETNS as i64 as u64;
    // SAFETY: the context is valid for as long as the program runs, the tuple for the call, and by its
    // length the kernel knows its family; what is found is given back.
    unsafe {
        let socket = bpf_skc_lookup_tcp(
            ctx.as_ptr(),
            core::ptr::from_mut(tuple).cast(),
            len,
            netns,
            0,
        );
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
    }
    true
}
