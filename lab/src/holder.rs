//! The process that keeps a network and a mount namespace alive.
//!
//! It is cloned without exec: it needs no program on the machine, and does nothing but sleep. It
//! gives the namespaces an address in /proc, so `nsenter -t PID -n -m` looks into a node.
//!
//! It shares the memory of its parent (CLONE_VM). A copy of that would make every page of the parent's
//! fault when it is next written to, and each fault interrupts all processors of a process with threads:
//! 15 % of the processors' time in tests that each have two namespaces.
//!
//! Its mounts are private: a tmpfs on /run and a bpffs of its own, so that the agent's default
//! paths are free in every node and vanish, pins included, with the process.

use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::Pid,
};
use sinabro_netlink::NetNs;
use std::{
    collections::BTreeSet,
    ffi::{CStr, c_int, c_void},
    fs::File,
    io::Read as _,
    mem::ManuallyDrop,
    os::fd::{AsRawFd as _, OwnedFd, RawFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Name of the process in `ps` and /proc/PID/comm; [`crate::residue`] looks for it.
pub const COMM: &CStr = c"sinabro-lab";

/// How long a lab lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// As long as the process that made it, even if that is killed.
    Process,
    /// Until somebody ends its processes.
    Kept,
}

/// What the child was doing when a system call failed, in the order of [`prepare`].
const STAGES: [&str; 7] = [
    "be tied to its parent",
    "make its namespaces",
    "make its mounts private",
    "mount a tmpfs on /run",
    "make /run/netns",
    "mount a bpffs on /sys/fs/bpf",
    "leave the terminal",
];

/// Processes of all labs of this process, holders and programs; none once all were ended.
static PROCESSES: Mutex<Option<BTreeSet<i32>>> = Mutex::new(Some(BTreeSet::new()));

/// Starts a process and notes its id. Both under one lock: a process that starts while
/// [`end_all`] runs is either ended by it or not started at all.
pub(crate) fn remembered<T>(
    start: impl FnOnce() -> Result<T>,
    pid: impl FnOnce(&T) -> i32,
) -> Result<T> {
    let mut processes = processes();
    let Some(processes) = &mut *processes else {
        bail!("every lab of this process has been ended");
    };
    let started = start()?;
    processes.insert(pid(&started));
    Ok(started)
}

pub(crate) fn forget(pid: i32) {
    if let Some(processes) = &mut *processes() {
        processes.remove(&pid);
    }
}

fn processes() -> MutexGuard<'static, Option<BTreeSet<i32>>> {
    PROCESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills every process of every lab, kept ones included, and starts no more: for a process that
/// is about to end.
pub fn end_all() {
    for pid in processes().take().into_iter().flatten() {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// The process, which goes on if this is dropped.
pub struct Holder {
    pub pid: Pid,
    /// What it runs on, which has to stay until it has been waited for. Aligned as a function's frame has to be.
    stack: ManuallyDrop<Box<[u128]>>,
}

impl Holder {
    /// Kills it, and gives its stack back.
    pub fn end(self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        if waitpid(self.pid, None).is_ok() {
            drop(ManuallyDrop::into_inner(self.stack));
        }
    }
}

/// Starts the holder; the calling thread is its parent, and with [`Lifetime::Process`] the
/// kernel kills the holder when that *thread* ends (PR_SET_PDEATHSIG).
///
/// Its namespaces live as long as the files that are opened here.
pub fn start(lifetime: Lifetime) -> Result<(Holder, NetNs, OwnedFd)> {
    // The namespaces are opened before [`end_all`] can end the process that gives them a path.
    let begin = || {
        let holder = clone_and_wait(lifetime)?;
        match open(holder.pid) {
            Ok((net, mnt)) => Ok((holder, net, mnt)),
            Err(error) => {
                holder.end();
                Err(error)
            }
        }
    };
    remembered(begin, |(holder, ..)| holder.pid.as_raw())
}

fn open(pid: Pid) -> Result<(NetNs, OwnedFd)> {
    let mnt =
        File::open(format!("/proc/{pid}/ns/mnt")).context("cannot open the mount namespace")?;
    Ok((NetNs::open(format!("/proc/{pid}/ns/net"))?, mnt.into()))
}

/// Returns once the namespaces are there.
fn clone_and_wait(lifetime: Lifetime) -> Result<Holder> {
    /// A few system calls deep.
    const STACK: usize = 64 << 10;
    let (reader, writer) = nix::unistd::pipe().context("cannot make a pipe")?;
    let mut orders = Orders {
        lifetime,
        parent: nix::unistd::getpid(),
        report: writer.as_raw_fd(),
    };
    let stack = vec![0; STACK / size_of::<u128>()].into_boxed_slice();
    let mut stack = ManuallyDrop::new(stack);
    let top = stack.as_mut_ptr_range().end;
    // SAFETY: the child only makes system calls and never returns. It uses its orders until it has reported, which
    // is waited for below, and the stack until it has ended.
    let pid = unsafe {
        libc::clone(
            child,
            top.cast(),
            libc::CLONE_VM | libc::SIGCHLD,
            (&raw mut orders).cast(),
        )
    };
    let pid = Pid::from_raw(Errno::result(pid).context("cannot clone")?);
    drop(writer);
    let mut report = Vec::new();
    File::from(reader).read_to_end(&mut report)?;
    match report[..] {
        [0xff] => Ok(Holder { pid, stack }),
        [stage, errno] => {
            let _ = waitpid(pid, None);
            let stage = STAGES.get(usize::from(stage)).copied().unwrap_or("start");
            Err(Errno::from_raw(errno.into()))
                .with_context(|| format!("a namespace's process cannot {stage}"))
        }
        _ => {
            let _ = waitpid(pid, None);
            bail!("a namespace's process ended before it was ready")
        }
    }
}

/// What the child is to know.
struct Orders {
    lifetime: Lifetime,
    parent: Pid,
    /// Its own copy of the descriptor.
    report: RawFd,
}

extern "C" fn child(orders: *mut c_void) -> c_int {
    // SAFETY: the parent keeps them until it has read the report.
    let Orders {
        lifetime,
        parent,
        report,
    } = unsafe { orders.cast::<Orders>().read() };
    let bytes = match prepare(lifetime, parent) {
        Ok(()) => [0xff, 0],
        Err((stage, errno)) => [stage, errno as u8],
    };
    let ready = bytes[0] == 0xff;
    let len = if ready { 1 } else { 2 };
    // SAFETY: the buffer outlives the call; then every descriptor of the parent's is given up,
    // so that none of its pipes and sockets stays open here, and nothing uses one afterwards.
    unsafe {
        libc::write(report, bytes.as_ptr().cast(), len);
        libc::close_range(0, libc::c_uint::MAX, 0);
        if !ready {
            libc::_exit(1);
        }
        loop {
            libc::pause();
        }
    }
}

/// Only system calls: this runs in the memory of a process that goes on meanwhile.
fn prepare(lifetime: Lifetime, parent: Pid) -> Result<(), (u8, i32)> {
    let check = |stage: u8, result: libc::c_int| match result {
        -1 => Err((stage, Errno::last_raw())),
        _ => Ok(()),
    };
    // SAFETY: plain system calls on constant, zero-terminated strings.
    unsafe {
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            libc::signal(signal as libc::c_int, libc::SIG_DFL);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        if lifetime == Lifetime::Process {
            check(0, libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // The parent may have died before the line above.
            if libc::getppid() != parent.as_raw() {
                libc::_exit(1);
            }
        }
        check(1, libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS))?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        check(2, mount(c"none", c"/", c"none", private))?;
        check(3, mount(c"tmpfs", c"/run", c"tmpfs", 0))?;
        check(4, libc::mkdir(c"/run/netns".as_ptr(), 0o755))?;
        check(5, mount(c"bpffs", c"/sys/fs/bpf", c"bpf", 0))?;
        // Ctrl-C on the terminal is for the parent, which takes everything down in order.
        check(6, libc::setsid())?;
        libc::prctl(libc::PR_SET_NAME, COMM.as_ptr());
    }
    Ok(())
}

/// # Safety
/// As mount(2); the strings are zero-terminated by type.
unsafe fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong) -> libc::c_int {
    // SAFETY: all pointers are valid strings, `data` may be null.
    unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            std::ptr::null(),
        )
    }
}
