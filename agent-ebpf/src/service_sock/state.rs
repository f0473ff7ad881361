//! What is kept with a socket, for as long as the socket is there.

use super::SERVICE_SOCKETS;
use aya_ebpf::{
    bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock_addr},
    helpers::bpf_sk_storage_get,
    programs::SockAddrContext,
};
use core::ffi::c_void;
use sinabro_common::abi::service::ServiceSocket;
use sinabro_ebpf::long_field;

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
