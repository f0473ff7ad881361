//! Addresses that only Services have, and of which no Service has this one (KEP-1880). By the default route such a packet
//! would go to a router, which may have learnt that these addresses are at the nodes, and be back at once.
//!
//! Limits. Asked of what begins a connection, and of what has no ports from a pod. The node's own sockets are not asked.

use super::{NONE, is_draining, is_handover};
use crate::{
    maps::{NODES, POD_RANGES, SERVICE_RANGES},
    nat::drop,
};
use aya_ebpf::maps::lpm_trie::Key;
use sinabro_common::abi::{Addr, drop::DropReason, service::RangeOf};

/// A drop, if nobody can be at the address; else nothing to do with Services.
#[inline(never)]
pub fn check(dst: &Addr) -> i32 {
    match SERVICE_RANGES.get(Key::new(128, *dst)) {
        Some(&RangeOf::SERVICES) if !is_somebodys(dst) => drop(DropReason::ServiceUnallocated),
        _ => NONE,
    }
}

/// Whether somebody else may know the address: who has translated before, or a machine that has it, although it is
/// in such a range.
#[inline(always)]
fn is_somebodys(dst: &Addr) -> bool {
    is_draining()
        || is_handover()
        || NODES.get_ptr(dst).is_some()
        || POD_RANGES.get(Key::new(128, *dst)).is_some()
}
