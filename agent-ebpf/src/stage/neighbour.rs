//! Packets leave by an interface for a machine on its link, past the stack.

use aya_ebpf::{
    bindings::{bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    helpers::bpf_redirect_neigh,
};

/// Sends the packet to a neighbour, whose MAC address the kernel knows or asks for. An IPv4 address is the first of the four
/// words, which are in network order.
#[inline(always)]
pub fn send_to(ifindex: u32, family: u32, address: [u32; 4]) -> i32 {
    let mut neighbour = bpf_redir_neigh {
        nh_family: family,
        __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: address },
    };
    // SAFETY: the neighbour is valid for the call. An interface that is gone makes the kernel drop the packet.
    unsafe {
        bpf_redirect_neigh(
            ifindex,
            &raw mut neighbour,
            size_of::<bpf_redir_neigh>() as i32,
            0,
        ) as i32
    }
}
