//! Services at sockets.
//!
//! - [`connect`], [`datagram`], [`peer`]: the hooks;
//! - [`choose`]: a frontend's endpoint;
//! - [`bound`]: sockets that no endpoint can answer;
//! - [`address`]: the address that a system call has;
//! - [`state`]: what is kept with a socket;
//! - [`tell`]: which network namespace a socket is in, before Linux 5.14.
//!
//! Whose socket it is says the cookie of its network namespace, which no process can change: a namespace that the
//! agent does not know, such as one that a pod made within its own, is left to the programs on packets.
//! So is what these programs do not change.
//!
//! The maps are here, so that only this object needs a kernel that has them. Helpers used are those of Linux 5.10,
//! and one of 5.18 where there is it.

pub mod address;
pub mod bound;
pub mod choose;
pub mod connect;
pub mod datagram;
pub mod peer;
pub mod state;
pub mod tell;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_F_NO_PREALLOC, bpf_sock_addr},
    btf_maps::SkStorage,
    helpers::{bpf_get_netns_cookie, bpf_set_retval},
    macros::{btf_map, map},
    maps::{HashMap, LruHashMap},
    programs::SockAddrContext,
};
use sinabro_common::abi::{
    config::{FLAG_DRAINING, FLAG_HANDOVER, FLAG_SERVICES},
    service::{
        MAX_NETNS, MAX_SOCKET_FRONTENDS, MAX_STREAM_FRONTENDS, NetNs, ServiceSocket,
        SocketFrontend, SocketKey,
    },
};
use sinabro_ebpf::{field, maps::CONFIG};

#[map]
pub static NETNS: HashMap<u64, NetNs> = HashMap::pinned(MAX_NETNS, BPF_F_NO_PREALLOC);

#[map]
pub static SOCKET_FRONTENDS: LruHashMap<SocketKey, SocketFrontend> =
    LruHashMap::pinned(MAX_SOCKET_FRONTENDS, 0);

#[map]
pub static STREAM_FRONTENDS: LruHashMap<u64, ServiceSocket> =
    LruHashMap::pinned(MAX_STREAM_FRONTENDS, 0);

#[btf_map]
pub static SERVICE_SOCKETS: SkStorage<ServiceSocket> = SkStorage::new();

/// Set by the agent before it loads the programs, if the kernel lets them say what a system call returns (Linux 5.18).
/// The verifier leaves out what it rules out.
#[unsafe(no_mangle)]
static HAS_SET_RETVAL: u8 = 0;

/// Lets a system call go on, with the address that the context has by then.
pub const PROCEED: i32 = 1;
/// Has it fail.
const FAIL: i32 = 0;

const ECONNREFUSED: i32 = 111;

/// IP protocols, as sockets have them.
pub const TCP: u32 = 6;
pub const UDP: u32 = 17;

/// Whether Services are translated at all.
#[inline(always)]
pub fn is_on() -> bool {
    has(FLAG_SERVICES)
}

/// Whether only what is there goes on.
#[inline(always)]
pub fn is_draining() -> bool {
    has(FLAG_DRAINING)
}

/// Whether somebody else has what began before.
#[inline(always)]
pub fn is_handover() -> bool {
    has(FLAG_HANDOVER)
}

#[inline(always)]
fn has(flag: u32) -> bool {
    CONFIG.get(0).is_some_and(|config| config.flags & flag != 0)
}

/// Whose socket it is, if it is translated here.
#[inline(always)]
pub fn owner(ctx: &SockAddrContext) -> Option<&'static NetNs> {
    // SAFETY: the context is valid for as long as the program runs; entries are replaced, not changed.
    unsafe { NETNS.get(bpf_get_netns_cookie(ctx.as_ptr())) }
}

#[inline(always)]
pub fn protocol(ctx: &SockAddrContext) -> u32 {
    field!(ctx.sock_addr, bpf_sock_addr, protocol)
}

/// Has the system call fail as if a host had refused. Where the kernel cannot say that, the packets are refused.
#[inline(always)]
pub fn refuse() -> i32 {
    // SAFETY: a variable of this program; volatile, for its value here is not the one at run time.
    let can = unsafe { core::ptr::read_volatile(&raw const HAS_SET_RETVAL) } != 0;
    if !can {
        return PROCEED;
    }
    // SAFETY: no pointers.
    unsafe { bpf_set_retval(-ECONNREFUSED) };
    FAIL
}
