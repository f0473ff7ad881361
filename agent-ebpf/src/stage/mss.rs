//! No pod announces larger segments than the way to the other end carries.
//!
//! A pod's link may be larger than any way out of the node, for what stays on it. The pod's routes
//! say so, and the kernel's TCP goes by them. But a stack of the application's own, or of a virtual
//! machine, goes by the link; and a connection to an address of this node, which is announced as to
//! the node itself, may be translated to somewhere else afterwards. So what leaves with a SYN is
//! lowered to what the ways out carry (RFC 9293 §3.7.1): of either end, for each end's SYN passes here
//! or came from a kernel that went by its route.

use super::Action;
use crate::{
    PASS,
    maps::{ENDPOINTS, NODES, OVERLAY, PATH_MTU},
    parse::{Fragment, Ip, ip4, ip6, l4::L4, proto},
    rewrite,
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::BPF_F_CURRENT_NETNS,
    helpers::{bpf_sk_release, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use sinabro_common::abi::drop::DropReason;

const TCP_SYN: u8 = 0x02;
/// Of a TCP header without options.
const TCP_HEADER: u32 = 20;
/// Where a TCP header says its length, in the upper four bits, in words.
const DATA_OFFSET: u32 = 12;

/// Options of a TCP header (RFC 9293 §3.1).
mod option {
    pub const END: u8 = 0;
    pub const NOP: u8 = 1;
    pub const MSS: u8 = 2;
    pub const MSS_LEN: u8 = 4;
    /// Options that are looked at: a SYN has room for forty bytes, and stacks have MSS first.
    pub const LOOKED_AT: u32 = 8;
}

/// Lowers what a pod's SYN announces to what the ways out of the node carry, unless it stays here.
#[inline(always)]
pub fn leaving(ctx: &TcContext, ip: &Ip, l4: &L4) -> Action {
    if ENDPOINTS.get_ptr(ip.dst).is_some() || is_for_the_node(ctx, ip, l4) {
        return Ok(PASS);
    }
    let headers = if ip.v6 {
        ip6::HEADER_LEN
    } else {
        ip4::HEADER_LEN
    } + TCP_HEADER;
    match PATH_MTU.get(0).map(|mtu| mtu.saturating_sub(headers)) {
        // Not known yet.
        None | Some(0) => Ok(PASS),
        Some(most) => match lower(ctx, ip, most as u16) {
            Ok(()) => Ok(PASS),
            Err(rewrite::Failed) => Err(DropReason::RewriteFailed),
        },
    }
}

/// Whether a packet begins a connection.
#[inline(always)]
pub fn begins(ip: &Ip, l4: &L4) -> bool {
    ip.proto == proto::TCP && l4.tcp_flags & TCP_SYN != 0 && ip.fragment == Fragment::No
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

/// Lowers the maximum segment size of a SYN that has one.
#[inline(always)]
fn lower(ctx: &TcContext, ip: &Ip, most: u16) -> Result<(), rewrite::Failed> {
    let Ok(offset) = ctx.load::<u8>((ip.l4 + DATA_OFFSET) as usize) else {
        return Ok(());
    };
    let end = ip.l4 + (offset >> 4) as u32 * 4;
    let mut at = ip.l4 + TCP_HEADER;
    for _ in 0..option::LOOKED_AT {
        if at + option::MSS_LEN as u32 > end {
            return Ok(());
        }
        let Ok([kind, len, high, low]) = ctx.load::<[u8; 4]>(at as usize) else {
            return Ok(());
        };
        match (kind, len) {
            (option::END, _) => return Ok(()),
            (option::NOP, _) => at += 1,
            (option::MSS, option::MSS_LEN) => {
                let announced = u16::from_be_bytes([high, low]);
                return match announced > most {
                    true => {
                        let (from, to) = ([high, low], most.to_be_bytes());
                        rewrite::in_tcp_header(ctx, ip, at + 2 - ip.l4, from, to)
                    }
                    false => Ok(()),
                };
            }
            (_, 0 | 1) => return Ok(()),
            (_, len) => at += len as u32,
        }
    }
    Ok(())
}
