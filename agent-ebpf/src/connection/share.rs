//! What each pod's connections take, so that one pod's leave room for the others'.
//!
//! A pod may have as many connections as there is room left for, and an eighth of that of those that nobody
//! answered: so the greediest is refused first, the table is never full, and no connection that both ends
//! want makes way for a new one. (Choudhury and Hahne: Dynamic queue length thresholds for shared-memory
//! packet switches, 1998.)
//!
//! Counts are changed by atomic additions and may drift, for a record may be removed by two at once; the agent
//! sets them right at each of its sweeps.

use crate::maps::{LIMITS, SHARES};
use sinabro_common::abi::connection::{ALL_SHARES, Share};

/// One of so many that there is room for.
const EMBRYONIC_PART: u64 = 8;

macro_rules! add {
    ($share:expr, $field:ident, $count:expr) => {{
        let share: *mut Share = $share;
        let count: u64 = $count;
        // SAFETY: a value that the map gave, aligned to eight bytes, and changed by such additions only. (The
        // target has no `AtomicU64::fetch_add`; the instruction is older than Linux 5.10.)
        unsafe {
            core::arch::asm!(
                "lock *(u64 *)({share} + {offset}) += {count}",
                share = in(reg) share,
                count = in(reg) count,
                offset = const core::mem::offset_of!(Share, $field),
                options(nostack),
            );
        }
    }};
}

/// What is really counted: nothing, where more was given back than taken. The agent sets a count to what it
/// found a moment ago, and what began since is not in it when it ends.
#[inline(always)]
fn counted(count: u64) -> u64 {
    match count >> 63 {
        0 => count,
        _ => 0,
    }
}

/// Counts one more connection of the pod, or refuses it.
#[inline(always)]
pub fn take(payer: u32) -> bool {
    let (Some(limits), Some(all)) = (LIMITS.get(0), SHARES.get_ptr_mut(ALL_SHARES)) else {
        return false;
    };
    let Some(share) = SHARES.get_ptr_mut(payer) else {
        return false;
    };
    // SAFETY: values that the map gave.
    let (taken, connections, embryonic) = unsafe {
        (
            counted((*all).connections),
            counted((*share).connections),
            counted((*share).embryonic),
        )
    };
    let room = u64::from(limits.capacity).saturating_sub(taken);
    if connections >= room
        || connections >= u64::from(limits.per_pod)
        || embryonic * EMBRYONIC_PART >= room
        || embryonic >= u64::from(limits.embryonic_per_pod)
    {
        add!(share, refused, 1);
        return false;
    }
    for share in [share, all] {
        add!(share, connections, 1);
        add!(share, embryonic, 1);
    }
    true
}

/// One of the pod's connections is over.
#[inline(always)]
pub fn give(payer: u32, embryonic: bool) {
    for key in [payer, ALL_SHARES] {
        // A pod that is gone has no share any more.
        if let Some(share) = SHARES.get_ptr_mut(key) {
            add!(share, connections, 1u64.wrapping_neg());
            if embryonic {
                add!(share, embryonic, 1u64.wrapping_neg());
            }
        }
    }
}

/// One of the pod's connections was answered.
#[inline(always)]
pub fn answered(payer: u32) {
    for key in [payer, ALL_SHARES] {
        if let Some(share) = SHARES.get_ptr_mut(key) {
            add!(share, embryonic, 1u64.wrapping_neg());
        }
    }
}

/// One of the pod's connections begins again.
#[inline(always)]
pub fn unanswered(payer: u32) {
    for key in [payer, ALL_SHARES] {
        if let Some(share) = SHARES.get_ptr_mut(key) {
            add!(share, embryonic, 1);
        }
    }
}
