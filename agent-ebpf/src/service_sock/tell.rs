//! Which network namespace a socket is in. From Linux 5.14 on a process asks its socket (SO_NETNS_COOKIE); programs have
//! known it since 5.7.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    macros::map,
    maps::HashMap,
    programs::SockAddrContext,
};

/// Cookie of a socket that is about to connect → that of its namespace.
#[map]
static TOLD: HashMap<u64, u64> = HashMap::with_max_entries(1, 0);

/// Answers, if that is the socket.
#[inline(always)]
pub fn tell(ctx: &SockAddrContext) {
    // SAFETY: the context is valid for as long as the program runs; a value that the map gave, which nobody else writes.
    unsafe {
        if let Some(told) = TOLD.get_ptr_mut(bpf_get_socket_cookie(ctx.as_ptr())) {
            *told = bpf_get_netns_cookie(ctx.as_ptr());
        }
    }
}
