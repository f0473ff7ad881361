//! How often a program may tell the agent something in words.
//!
//! What goes wrong once (a full table) goes wrong for every packet or connection from then on,
//! so a program asks [`due`] before it logs. Two CPUs may get yes at the same moment.
//!
//! Records wait in `AYA_LOGS` for the agent. Without one the buffer fills and the rest is lost:
//! no program waits for it. Neither map is pinned: they go with the programs that use them.
//! Included by the objects that log, so that the others have no such maps.

use aya_ebpf::{helpers::bpf_ktime_get_ns, macros::map, maps::Array};

const INTERVAL_NS: u64 = 10_000_000_000;

/// When this object logged last.
#[map]
static LOGGED_AT: Array<u64> = Array::with_max_entries(1, 0);

/// Whether it is time to log again; if so, not again for ten seconds.
#[inline(always)]
pub fn due() -> bool {
    let Some(last) = LOGGED_AT.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: no arguments; a value that the map gave, valid until the program ends.
    unsafe {
        let now = bpf_ktime_get_ns();
        if *last != 0 && now.wrapping_sub(*last) < INTERVAL_NS {
            return false;
        }
        *last = now;
    }
    true
}
