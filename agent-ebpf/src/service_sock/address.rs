//! The address that a system call has: where to, or where from.

use aya_ebpf::{bindings::bpf_sock_addr, programs::SockAddrContext};
use sinabro_common::abi::Addr;
use sinabro_ebpf::{field, set_field};

/// Of the address, which for a mapped one is not the packets'.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

/// What the context has.
#[inline(always)]
pub fn read(ctx: &SockAddrContext, family: Family) -> (Addr, [u8; 2]) {
    let ctx = ctx.sock_addr;
    let addr = match family {
        Family::V4 => Addr::v4(field!(ctx, bpf_sock_addr, user_ip4).to_ne_bytes()),
        Family::V6 => {
            let words = [
                field!(ctx, bpf_sock_addr, user_ip6, 0),
                field!(ctx, bpf_sock_addr, user_ip6, 1),
                field!(ctx, bpf_sock_addr, user_ip6, 2),
                field!(ctx, bpf_sock_addr, user_ip6, 3),
            ];
            // SAFETY: an array on the stack; an address is four words.
            unsafe { Addr::at((&raw const words).cast()) }
        }
    };
    // Network order in the first two bytes, zeros after them.
    let [a, b, _, _] = field!(ctx, bpf_sock_addr, user_port).to_ne_bytes();
    (addr, [a, b])
}

/// Puts another address and port there, of the family that it has.
#[inline(always)]
pub fn write(ctx: &SockAddrContext, family: Family, addr: &Addr, port: [u8; 2]) {
    let ctx = ctx.sock_addr;
    let words = addr.words();
    match family {
        Family::V4 => set_field!(ctx, bpf_sock_addr, user_ip4 = words[3]),
        Family::V6 => {
            set_field!(ctx, bpf_sock_addr, user_ip6, 0 = words[0]);
            set_field!(ctx, bpf_sock_addr, user_ip6, 1 = words[1]);
            set_field!(ctx, bpf_sock_addr, user_ip6, 2 = words[2]);
            set_field!(ctx, bpf_sock_addr, user_ip6, 3 = words[3]);
        }
    }
    let port = u32::from_ne_bytes([port[0], port[1], 0, 0]);
    set_field!(ctx, bpf_sock_addr, user_port = port);
}
