//! What is kept of a socket, for as long as the socket is there.
//!
//! Of datagram sockets with the socket itself. Of TCP's in a table: a socket's own storage costs it more than a microsecond,
//! most of it when the socket goes, and short connections are many. [`closed`] takes out what is there; it is not called for
//! sockets that are no process's, such as the kernel's own and the subflows of MPTCP, which stay until somebody needs their
//! place. Should there be more than the table has places, those that connected first say their endpoint's address.
//! What TCP's sockets have of their own is of an earlier release.

use super::{SERVICE_SOCKETS, SOCKET_FRONTENDS, STREAM_FRONTENDS, TCP, protocol};
use aya_ebpf::{
    EbpfContext,
    bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock, bpf_sock_addr},
    helpers::{bpf_get_socket_cookie, bpf_sk_storage_get},
    programs::{SockAddrContext, SockContext},
};
use core::ffi::c_void;
use sinabro_common::abi::service::{CONNECTED, ServiceSocket, SocketKey};
use sinabro_ebpf::{field, long_field};

#[inline(always)]
fn get<'a>(ctx: &SockAddrContext, flags: u64) -> Option<&'a mut ServiceSocket> {
    let socket = long_field!(ctx.sock_addr, bpf_sock_addr, __bindgen_anon_1) as *mut c_void;
    if socket.is_null() {
        return None;
    }
    let map = core::ptr::from_ref(&SERVICE_SOCKETS).cast_mut().cast();
    // SAFETY: a socket from a context; what comes back is valid until the program ends, and the kernel has the socket
    // locked while programs that write it run.
    unsafe {
        bpf_sk_storage_get(map, socket, core::ptr::null_mut(), flags)
            .cast::<ServiceSocket>()
            .as_mut()
    }
}

/// What is kept, if anything is.
#[inline(always)]
pub fn of<'a>(ctx: &SockAddrContext) -> Option<&'a mut ServiceSocket> {
    get(ctx, 0)
}

/// What is kept from now on: all zero, or what there is. None without memory for it.
#[inline(always)]
pub fn keep<'a>(ctx: &SockAddrContext) -> Option<&'a mut ServiceSocket> {
    get(ctx, BPF_SK_STORAGE_GET_F_CREATE.into())
}

/// `bpf_get_socket_cookie`.
#[inline(always)]
pub fn cookie(ctx: &impl EbpfContext) -> u64 {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

/// What a socket of TCP was connected to.
#[inline(always)]
pub fn of_stream(ctx: &SockAddrContext) -> Option<&'static ServiceSocket> {
    // SAFETY: entries are replaced, not changed, and live until the program ends.
    unsafe { STREAM_FRONTENDS.get(cookie(ctx)) }
}

/// A socket is about to connect: what it was connected to is nothing any more.
#[inline(never)]
pub fn disconnected(ctx: &SockAddrContext) {
    if let Some(before) = of(ctx) {
        if before.endpoint_port != [0; 2] {
            let connected = SocketKey::new(
                CONNECTED,
                cookie(ctx),
                before.endpoint,
                before.endpoint_port,
            );
            let _ = SOCKET_FRONTENDS.remove(connected);
        }
        before.endpoint_port = [0; 2];
    }
    if protocol(ctx) == TCP {
        forget(cookie(ctx));
    }
}

/// Without memory for it the socket tells its endpoint's address, and is connected all the same. Asks for the protocol
/// again, so that verifiers need not walk through all of connect(2) for each.
#[inline(never)]
pub fn connected(ctx: &SockAddrContext, state: &ServiceSocket) {
    if protocol(ctx) == TCP {
        let _ = STREAM_FRONTENDS.insert(cookie(ctx), state, 0);
    } else if let Some(kept) = keep(ctx) {
        *kept = *state;
    }
}

/// A socket goes.
#[inline(always)]
pub fn closed(ctx: &SockContext) {
    if field!(ctx.sock, bpf_sock, protocol) == TCP {
        forget(cookie(ctx));
    }
}

/// Most are not there: to look first takes no lock. A function, so that verifiers walk through what follows once.
#[inline(never)]
fn forget(cookie: u64) {
    if STREAM_FRONTENDS.get_ptr(cookie).is_some() {
        let _ = STREAM_FRONTENDS.remove(cookie);
    }
}
