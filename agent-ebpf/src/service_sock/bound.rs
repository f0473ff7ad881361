//! Sockets that are bound to a loopback address: what they send keeps that source, to which no other machine can send an
//! answer, and no pod. So such a socket is refused: else it would wait for one, or hear EINVAL (TCP of IPv4), which tells nobody
//! anything. The kernel gives a bound socket no other address (`bpf_bind` is for those that have no port yet).

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    maps::lpm_trie::Key,
    programs::SockAddrContext,
};
use sinabro_common::abi::Addr;
use sinabro_ebpf::{
    family::{AF_INET, AF_INET6},
    field, long_field,
    maps::{ENDPOINTS, NODES, OVERLAY, POD_RANGES},
};

/// First byte of 127.0.0.0/8.
const LOOPBACK: u8 = 127;

/// Whether it is certain that an endpoint cannot answer the socket.
#[inline(always)]
pub fn is_out_of_reach(ctx: &SockAddrContext, endpoint: &Addr) -> bool {
    is_at_loopback(ctx) && is_elsewhere(endpoint)
}

#[inline(always)]
fn is_at_loopback(ctx: &SockAddrContext) -> bool {
    let socket = long_field!(ctx.sock_addr, bpf_sock_addr, __bindgen_anon_1) as *const bpf_sock;
    if socket.is_null() {
        return false;
    }
    let is_v4 = |word: u32| word.to_ne_bytes()[0] == LOOPBACK;
    // The family of the socket, as its IPv4 address says nothing where that is IPv6.
    match field!(ctx.sock_addr, bpf_sock_addr, family) {
        AF_INET => is_v4(field!(socket, bpf_sock, src_ip4)),
        AF_INET6 => {
            let high = field!(socket, bpf_sock, src_ip6, 0) | field!(socket, bpf_sock, src_ip6, 1);
            let third = u32::from_be(field!(socket, bpf_sock, src_ip6, 2));
            let last = field!(socket, bpf_sock, src_ip6, 3);
            match (high, third) {
                (0, 0) => u32::from_be(last) == 1,
                (0, 0xffff) => is_v4(last),
                _ => false,
            }
        }
        _ => false,
    }
}

/// Whether a pod has the address, or another node.
#[inline(never)]
fn is_elsewhere(addr: &Addr) -> bool {
    if ENDPOINTS.get_ptr(addr).is_some() || POD_RANGES.get(Key::new(128, *addr)).is_some() {
        return true;
    }
    let (Some(node), Some(overlay)) = (NODES.get_ptr(addr), OVERLAY.get_ptr(0)) else {
        return false;
    };
    // SAFETY: values that the maps just gave.
    unsafe { Addr::at(&raw const (*node).tunnel) != Addr::at(&raw const (*overlay).local) }
}
