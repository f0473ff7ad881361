//! What the two kinds of context say of their socket.

use super::SOCKET_STATES;
use aya_ebpf::{
    bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock_ops, sk_msg_md},
    helpers::{bpf_sk_storage_delete, bpf_sk_storage_get},
    programs::{SkMsgContext, SockOpsContext},
};
use core::{ffi::c_void, ptr::NonNull};
use sinabro_common::abi::{
    Addr,
    acceleration::{ConnectionKey, SocketState},
};
use sinabro_ebpf::family::{AF_INET, AF_INET6};
pub(super) use sinabro_ebpf::{field, long_field};

/// The key of a connection's end, none if it is not of IP. An IPv4 connection of an IPv6 socket
/// has mapped addresses: the same key.
#[inline(always)]
pub fn key(ctx: &SockOpsContext) -> Option<ConnectionKey> {
    let ops = ctx.ops;
    let (local, remote) = match field!(ops, bpf_sock_ops, family) {
        AF_INET => (
            Addr::v4(field!(ops, bpf_sock_ops, local_ip4).to_ne_bytes()),
            Addr::v4(field!(ops, bpf_sock_ops, remote_ip4).to_ne_bytes()),
        ),
        AF_INET6 => (
            words([
                field!(ops, bpf_sock_ops, local_ip6, 0),
                field!(ops, bpf_sock_ops, local_ip6, 1),
                field!(ops, bpf_sock_ops, local_ip6, 2),
                field!(ops, bpf_sock_ops, local_ip6, 3),
            ]),
            words([
                field!(ops, bpf_sock_ops, remote_ip6, 0),
                field!(ops, bpf_sock_ops, remote_ip6, 1),
                field!(ops, bpf_sock_ops, remote_ip6, 2),
                field!(ops, bpf_sock_ops, remote_ip6, 3),
            ]),
        ),
        _ => return None,
    };
    Some(ConnectionKey {
        netns: 0,
        local,
        remote,
        local_port: field!(ops, bpf_sock_ops, local_port) as u16,
        // Network order in the upper half of the word.
        remote_port: u32::from_be(field!(ops, bpf_sock_ops, remote_port)) as u16,
        pad: 0,
    })
}

#[inline(always)]
fn words(words: [u32; 4]) -> Addr {
    let [a, b, c, d] = words.map(u32::to_ne_bytes);
    Addr([
        a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2],
        d[3],
    ])
}

/// The socket of an event.
#[inline(always)]
pub fn socket(ctx: &SockOpsContext) -> Option<NonNull<c_void>> {
    NonNull::new(long_field!(ctx.ops, bpf_sock_ops, __bindgen_anon_2) as *mut c_void)
}

/// The socket that sends.
#[inline(always)]
pub fn sender(ctx: &SkMsgContext) -> Option<NonNull<c_void>> {
    NonNull::new(long_field!(ctx.msg, sk_msg_md, __bindgen_anon_3) as *mut c_void)
}

/// What is kept with a socket, if it is enrolled.
#[inline(always)]
pub fn state<'a>(socket: NonNull<c_void>) -> Option<&'a mut SocketState> {
    let map = core::ptr::from_ref(&SOCKET_STATES).cast_mut().cast();
    // SAFETY: a socket from a context; what comes back is valid until the program ends, and
    // programs that get it hold the socket's lock, so nobody else writes it.
    unsafe {
        bpf_sk_storage_get(map, socket.as_ptr(), core::ptr::null_mut(), 0)
            .cast::<SocketState>()
            .as_mut()
    }
}

/// Begins to keep something with a socket: all zero, or what is there. None without memory for it.
#[inline(always)]
pub fn keep<'a>(socket: NonNull<c_void>) -> Option<&'a mut SocketState> {
    let map = core::ptr::from_ref(&SOCKET_STATES).cast_mut().cast();
    let create = BPF_SK_STORAGE_GET_F_CREATE.into();
    // SAFETY: as in [`state()`]; without an initial value it is zero.
    unsafe {
        bpf_sk_storage_get(map, socket.as_ptr(), core::ptr::null_mut(), create)
            .cast::<SocketState>()
            .as_mut()
    }
}

/// Forgets what is kept with a socket.
#[inline(always)]
pub fn drop_state(socket: NonNull<c_void>) {
    let map = core::ptr::from_ref(&SOCKET_STATES).cast_mut().cast();
    // SAFETY: a socket from a context. That there is nothing is fine.
    unsafe { bpf_sk_storage_delete(map, socket.as_ptr()) };
}
