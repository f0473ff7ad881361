//! Counters: what each pod sent and received, what went between this node and each other one by which way, and why
//! packets were dropped.
//!
//! A segmentation offload packet counts once, as it does in an interface's own counters.

use crate::maps::{
    DROPS, NATIVE_COUNTERS, NATIVE_PLACES, PEER_COUNTERS, PEER_PLACES, POD_COUNTERS, POD_PLACES,
};
use aya_ebpf::{
    maps::{PerCpuArray, PerCpuHashMap},
    programs::TcContext,
};
use sinabro_common::abi::{
    Addr,
    counters::{NativeCounters, Owner, PeerCounters, Place},
};

/// This CPU's counters of a pod or a node: in its place, or by `key` if that is another one's.
#[inline(always)]
fn find<K, O: Owner, C>(
    places: &'static PerCpuArray<Place<O, C>>,
    others: &'static PerCpuHashMap<K, C>,
    owner: &O,
    key: &K,
) -> Option<*mut C> {
    let place = places.get_ptr_mut(owner.place())?;
    // SAFETY: a value that the map just gave. An agent that writes to it may have written a part; what is counted in it then is lost.
    unsafe {
        if (*place).owner == *owner {
            return Some(&raw mut (*place).counters);
        }
    }
    others.get_ptr_mut(key)
}

/// A pod sent a packet.
#[inline(always)]
pub fn sent(ctx: &TcContext, ifindex: u32) {
    if let Some(counters) = find(&POD_PLACES, &POD_COUNTERS, &ifindex.into(), &ifindex) {
        // SAFETY: this CPU's own copy, and the program is not preempted by itself.
        unsafe {
            (*counters).tx_packets += 1;
            (*counters).tx_bytes += u64::from(ctx.len());
        }
    }
}

/// A pod is given a packet.
#[inline(always)]
pub fn received(ctx: &TcContext, ifindex: u32) {
    if let Some(counters) = find(&POD_PLACES, &POD_COUNTERS, &ifindex.into(), &ifindex) {
        // SAFETY: as in `sent`.
        unsafe {
            (*counters).rx_packets += 1;
            (*counters).rx_bytes += u64::from(ctx.len());
        }
    }
}

/// This CPU's counters of the tunnels between this node and another.
#[derive(Clone, Copy)]
pub struct Peer(Option<*mut PeerCounters>);

impl Peer {
    /// By the other one's tunnel address.
    #[inline(always)]
    pub fn find(tunnel: &Addr) -> Self {
        Self(find(&PEER_PLACES, &PEER_COUNTERS, tunnel, tunnel))
    }

    /// Counts a packet.
    #[inline(always)]
    pub fn count(self, of: impl Fn(&mut PeerCounters) -> &mut u64) {
        if let Some(counters) = self.0 {
            // SAFETY: as in `sent`; found while this program runs, so it lives until that ends.
            unsafe { *of(&mut *counters) += 1 };
        }
    }
}

/// Counts a packet without a tunnel, by the tunnel address of the other node.
#[inline(always)]
pub fn native(tunnel: &Addr, of: impl Fn(&mut NativeCounters) -> &mut u64) {
    if let Some(counters) = find(&NATIVE_PLACES, &NATIVE_COUNTERS, tunnel, tunnel) {
        // SAFETY: as in `sent`.
        unsafe { *of(&mut *counters) += 1 };
    }
}

/// Counts a drop, by its reason's number.
#[inline(always)]
pub fn dropped(reason: u32) {
    if let Some(count) = DROPS.get_ptr_mut(reason) {
        // SAFETY: as in `sent`.
        unsafe { *count += 1 };
    }
}
