//! Counters: what each pod sent and received, and why packets were dropped.
//!
//! A segmentation offload packet counts once, as it does in an interface's own counters.

use crate::maps::{DROPS, POD_COUNTERS};
use aya_ebpf::programs::TcContext;

/// A pod sent a packet.
#[inline(always)]
pub fn sent(ctx: &TcContext, ifindex: u32) {
    if let Some(counters) = POD_COUNTERS.get_ptr_mut(ifindex) {
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
    if let Some(counters) = POD_COUNTERS.get_ptr_mut(ifindex) {
        // SAFETY: as in `sent`.
        unsafe {
            (*counters).rx_packets += 1;
            (*counters).rx_bytes += u64::from(ctx.len());
        }
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
