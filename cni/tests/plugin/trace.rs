//! A plugin that is killed before a chosen system call, whatever the machine's speed.

use nix::{
    errno::Errno,
    libc::{self, c_long},
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use std::process::Child;

/// System calls that change nothing outside of the process: killed before one of these, it leaves
/// what it leaves before the next call that is not.
const WITHOUT_TRACE: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_ppoll,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setsockopt,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// To be run in the child, before it becomes the plugin.
pub fn by_parent() -> nix::Result<()> {
    ptrace::traceme()
}

/// Ends the child before its call number `before`, of those that leave a trace, in all its threads.
/// Returns whether it came to that call: otherwise it ended by itself.
pub fn kill_before(child: &Child, before: usize) -> bool {
    let process = Pid::from_raw(child.id().cast_signed());
    // Of this thread's children, threads of theirs included, and of no other test's.
    let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
    let (mut calls, mut killed) = (0, false);
    loop {
        let thread = match waitpid(None, Some(flags)).unwrap() {
            WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..) if pid == process => {
                return killed;
            }
            WaitStatus::PtraceSyscall(thread) => {
                if !killed && ptrace::syscall_info(thread).is_ok_and(|info| leaves_trace(&info)) {
                    killed = calls == before;
                    calls += 1;
                }
                if killed {
                    kill(process, Signal::SIGKILL).unwrap();
                }
                thread
            }
            WaitStatus::Stopped(thread, signal) => {
                if thread == process && signal == Signal::SIGTRAP {
                    let options = Options::PTRACE_O_EXITKILL
                        | Options::PTRACE_O_TRACECLONE
                        | Options::PTRACE_O_TRACESYSGOOD;
                    ptrace::setoptions(thread, options).unwrap();
                }
                thread
            }
            WaitStatus::PtraceEvent(thread, ..) => thread,
            _ => continue,
        };
        match ptrace::syscall(thread, None) {
            // Killed meanwhile.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn leaves_trace(info: &libc::ptrace_syscall_info) -> bool {
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return false;
    }
    // SAFETY: the kernel says that it is a call's entry, which has this variant.
    let number = unsafe { info.u.entry.nr };
    !WITHOUT_TRACE.contains(&number.cast_signed())
}
