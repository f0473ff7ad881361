//! When no program runs any more that has seen what was there before.

use nix::unistd::{SysconfVar, sysconf};

/// Waits until every program that runs on a packet or a socket when this is called has ended; some milliseconds. They
/// run in read-side sections of RCU, whose end membarrier(2) waits for (kernel/sched/membarrier.c). False if the
/// kernel does not: with one processor it need not order anything for memory's sake, with `nohz_full` it may not.
pub fn wait_for_programs() -> bool {
    let has_others =
        matches!(sysconf(SysconfVar::_NPROCESSORS_ONLN), Ok(Some(online)) if online > 1);
    // SAFETY: takes three numbers and no memory.
    has_others
        && unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) } == 0
}
