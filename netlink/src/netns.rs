//! Network namespaces, entered on threads of their own.
//!
//! A thread that entered a namespace is never used for anything else: it runs one closure and
//! ends. So no other code can find itself in the wrong namespace, whatever fails.

use crate::{Conn, Error, Result, link};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// The calling thread's namespace. Not /proc/self: that is the main thread's.
const CURRENT: &str = "/proc/thread-self/ns/net";

/// An open network namespace. It stays alive as long as this does.
#[derive(Clone, Debug)]
pub struct NetNs {
    fd: Arc<OwnedFd>,
}

/// Identifies a namespace: device and inode of its nsfs file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NetNsId {
    pub dev: u64,
    pub ino: u64,
}

impl NetNs {
    /// Opens a path such as /var/run/netns/NAME or /proc/PID/ns/net. NotFound if it is missing,
    /// Invalid if it is not a network namespace.
    pub fn open(path: impl AsRef<Path>) -> Result<NetNs> {
        let path = path.as_ref();
        let what = format!("open network namespace {}", path.display());
        let fd = OwnedFd::from(File::open(path).map_err(|error| Error::system(&what, &error))?);
        // SAFETY: the request takes no argument and the descriptor is open.
        let kind = unsafe { libc::ioctl(fd.as_raw_fd(), libc::NS_GET_NSTYPE) };
        match Errno::result(kind) {
            Ok(libc::CLONE_NEWNET) => Ok(NetNs { fd: Arc::new(fd) }),
            Ok(_) => Err(Error::refused(
                what,
                Errno::EINVAL,
                Some("a namespace of another kind".into()),
            )),
            // ENOTTY: a file of some other kind.
            Err(_) => Err(Error::refused(
                what,
                Errno::EINVAL,
                Some("not a namespace".into()),
            )),
        }
    }

    /// The calling thread's.
    pub fn current() -> Result<NetNs> {
        NetNs::open(CURRENT)
    }

    /// A new one without a name; it lives as long as something refers to it. Loopback is down.
    pub fn create() -> Result<NetNs> {
        on_own_thread("create a network namespace", || {
            unshare(CloneFlags::CLONE_NEWNET)
                .map_err(|errno| Error::refused("create a network namespace", errno, None))?;
            NetNs::current()
        })?
    }

    /// A new one, bound to a path, which is made. Exists if the path is there.
    pub fn create_at(path: impl AsRef<Path>) -> Result<NetNs> {
        let path = path.as_ref();
        let what = || format!("create network namespace {}", path.display());
        let netns = NetNs::create()?;
        File::create_new(path).map_err(|error| Error::system(what(), &error))?;
        let source = format!("/proc/thread-self/fd/{}", netns.fd.as_raw_fd());
        let none = None::<&str>;
        if let Err(errno) = mount(Some(&*source), path, none, MsFlags::MS_BIND, none) {
            let _ = fs::remove_file(path);
            return Err(Error::refused(what(), errno, None));
        }
        Ok(netns)
    }

    /// Takes away what [`NetNs::create_at`] made: unmounts and removes the path. Does the rest if
    /// one of both was done before.
    pub fn remove_at(path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let what = || format!("remove network namespace {}", path.display());
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            // EINVAL: nothing is mounted there.
            Ok(()) | Err(Errno::EINVAL) => {}
            Err(errno) => return Err(Error::refused(what(), errno, None)),
        }
        fs::remove_file(path).map_err(|error| Error::system(what(), &error))
    }

    /// Tells whether two are the same.
    pub fn id(&self) -> Result<NetNsId> {
        let stat = nix::sys::stat::fstat(&self.fd)
            .map_err(|errno| Error::refused("identify a network namespace", errno, None))?;
        Ok(NetNsId {
            dev: stat.st_dev,
            ino: stat.st_ino,
        })
    }

    /// Runs a closure in the namespace, on a thread of its own, and waits for it. A panic of the
    /// closure is an error.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        on_own_thread("run in a network namespace", || {
            self.enter()?;
            Ok(f())
        })?
    }

    /// Only for a thread that ends with the closure that called this.
    fn enter(&self) -> Result<()> {
        setns(&self.fd, CloneFlags::CLONE_NEWNET)
            .map_err(|errno| Error::refused("enter a network namespace", errno, None))
    }

    pub(crate) fn shared_fd(&self) -> Arc<OwnedFd> {
        self.fd.clone()
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Runs a test in a fresh namespace with loopback up, on a thread of its own. A panic of the
/// closure goes on in the caller, and the namespace vanishes with its last reference.
///
/// # Panics
///
/// If the closure does, or if no namespace can be had (CAP_SYS_ADMIN is needed).
pub fn in_fresh<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let prepared = || -> Result<T> {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|errno| Error::refused("create a network namespace", errno, None))?;
        let mut conn = Conn::new()?;
        let lo = conn.link_by_name("lo")?.index;
        conn.execute(link::set_up(lo))?;
        drop(conn);
        Ok(f())
    };
    let outcome = std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("fresh netns".into())
            .spawn_scoped(scope, prepared)
            .map(|thread| thread.join())
    });
    match outcome {
        Ok(Ok(Ok(value))) => value,
        Ok(Ok(Err(error @ Error::Permission(_)))) => {
            panic!("needs root: run `cargo xtask test` ({error})")
        }
        Ok(Ok(Err(error))) => panic!("{error}"),
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        Err(error) => panic!("start a thread: {error}"),
    }
}

fn on_own_thread<T: Send>(what: &'static str, f: impl FnOnce() -> T + Send) -> Result<T> {
    let outcome: io::Result<_> = std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, f)
            .map(|thread| thread.join())
    });
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(panic)) => Err(Error::Panicked {
            what: what.into(),
            message: panic_text(panic.as_ref()),
        }),
        Err(error) => Err(Error::system("start a thread", &error)),
    }
}

/// The text of `panic!` is a `&str` or a `String`.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).into(),
        (_, Some(text)) => text.clone(),
        _ => "without a text".into(),
    }
}
