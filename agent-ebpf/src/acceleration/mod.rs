//! TCP between two pods of this node, from socket to socket.
//!
//! - [`enrol`], on `sock_ops`: which connections, from establishment to close;
//! - [`send`], on `sk_msg`: each message that an enrolled socket sends;
//! - [`kernel`]: what the kernel's own structures say of the two sockets;
//! - [`charge`]: what enrolled sockets may cost the kernel;
//! - [`account`]: counters, and what servers' connections are like.
//!
//! A connection's way: established → both ends enrolled → at its first message each direction
//! finds the other end → every message passes the gate (`sinabro_common::algo::acceleration`) and
//! goes to the other socket, until the first that does not; from then on all go through TCP.
//!
//! The maps are here, so that only the object `sock` needs a kernel that has them. A Service
//! address that is translated when the socket connects needs nothing here: the socket then has
//! the pod's address. Translated on the way, the two ends' addresses do not mirror each other,
//! the server's address is no pod's, and the connection is not enrolled.
//!
//! Helpers used are those of Linux 5.15 (`bpf_get_netns_cookie` in `sock_ops`).

pub mod account;
pub mod charge;
pub mod context;
pub mod enrol;
pub mod kernel;
pub mod send;

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::SkStorage,
    macros::{btf_map, map},
    maps::{Array, HashMap, LruHashMap, PerCpuHashMap, SockHash},
};
use core::borrow::Borrow;
use sinabro_common::abi::{
    Addr,
    acceleration::{
        AcceleratedPod, AccelerationCounters, Account, Budget, Charge, ChargeKey, ConnectionKey,
        Enrolled, MAX_CHARGES, MAX_SERVERS, MAX_SOCKETS, ServerKey, SocketState, Traffic,
    },
    endpoint::MAX_PODS,
};

#[map]
pub static ACCELERATED_PODS: HashMap<Addr, AcceleratedPod> =
    HashMap::pinned(2 * MAX_PODS, BPF_F_NO_PREALLOC);

#[map]
pub static LOOPBACK_PODS: HashMap<u64, AcceleratedPod> =
    HashMap::pinned(MAX_PODS, BPF_F_NO_PREALLOC);

#[map]
pub static SOCKETS: SockHash<u64> = SockHash::pinned(MAX_SOCKETS, 0);

#[btf_map]
pub static SOCKET_STATES: SkStorage<SocketState> = SkStorage::new();

#[map]
pub static ENROLLED: HashMap<ConnectionKey, Enrolled> =
    HashMap::pinned(MAX_SOCKETS, BPF_F_NO_PREALLOC);

#[map]
pub static SERVER_TRAFFIC: LruHashMap<ServerKey, Traffic> = LruHashMap::pinned(MAX_SERVERS, 0);

#[map]
pub static ACCELERATION_COUNTERS: PerCpuHashMap<u32, AccelerationCounters> =
    PerCpuHashMap::pinned(MAX_PODS, BPF_F_NO_PREALLOC);

#[map]
pub static QUEUE_CHARGES: HashMap<ChargeKey, Charge> =
    HashMap::pinned(MAX_CHARGES, BPF_F_NO_PREALLOC);

/// Of every pod, and of the node.
#[map]
pub static QUEUE_ACCOUNTS: HashMap<u32, Account> = HashMap::pinned(MAX_PODS + 1, BPF_F_NO_PREALLOC);

#[map]
pub static QUEUE_BUDGETS: HashMap<u32, Budget> = HashMap::pinned(MAX_PODS + 1, BPF_F_NO_PREALLOC);

#[map]
pub static ACCELERATION_EPOCH: Array<u32> = Array::pinned(1, 0);

/// The epoch of now.
#[inline(always)]
pub fn epoch() -> u32 {
    ACCELERATION_EPOCH.get(0).map_or(0, |epoch| *epoch)
}

/// Looks an entry up. Others may replace it, but its memory stays until the program ends.
#[inline(always)]
pub fn find<K, V>(map: &'static HashMap<K, V>, key: impl Borrow<K>) -> Option<&'static V> {
    // SAFETY: entries are written before they can be found, and replaced, not changed.
    unsafe { map.get(key) }
}

/// The pods at a connection's ends: this one's and the other's.
#[inline(always)]
pub fn pods(key: &ConnectionKey) -> Option<(&'static AcceleratedPod, &'static AcceleratedPod)> {
    if key.netns != 0 {
        let pod = find(&LOOPBACK_PODS, key.netns)?;
        return Some((pod, pod));
    }
    let pod = find(&ACCELERATED_PODS, key.local)?;
    Some((pod, find(&ACCELERATED_PODS, key.remote)?))
}
