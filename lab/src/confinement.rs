//! A program with what an unprivileged container has, and no more: chosen capabilities, no way
//! to more, a read-only root file system and a read-only /proc/sys.

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::prctl,
};
use std::{io, os::unix::process::CommandExt as _, process::Command};

/// Numbers of capabilities (linux/capability.h).
pub const CAP_NET_ADMIN: u8 = 12;
pub const CAP_PERFMON: u8 = 38;
pub const CAP_BPF: u8 = 39;

/// What deploy/sinabro.yaml gives the agent.
pub const AGENT: [u8; 3] = [CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON];

/// The highest number that Linux has room for; unknown ones are refused and skipped.
const LAST_CAP: u8 = 63;

/// Makes the program start confined. A root process has after exec what its bounding set allows
/// (capabilities(7), "Capabilities and execution of programs by root").
pub fn confine(command: &mut Command, capabilities: &[u8]) {
    let keep = capabilities.to_vec();
    // SAFETY: only system calls, which are async-signal-safe; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            let none = None::<&str>;
            let bind = |flags| mount(none, "/proc/sys", none, MsFlags::MS_BIND | flags, none);
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            mount(Some("/proc/sys"), "/proc/sys", none, MsFlags::MS_BIND, none)?;
            let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            bind(read_only)?;
            // Of this mount only: what is mounted below it stays as it is.
            let root = MsFlags::MS_BIND | read_only;
            mount(none, "/", none, root, none)?;
            for capability in (0..=LAST_CAP).filter(|number| !keep.contains(number)) {
                drop_from_bounding_set(capability)?;
            }
            Ok(prctl::set_no_new_privs()?)
        });
    }
}

fn drop_from_bounding_set(capability: u8) -> io::Result<()> {
    // SAFETY: no pointers.
    let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability)) };
    match Errno::result(result) {
        Ok(_) | Err(Errno::EINVAL) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
