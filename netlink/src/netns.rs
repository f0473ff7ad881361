//! Network namespaces, entered on threads of their own.
//!
//! A thread that entered a namespace is never used for anything else: it runs one closure and
//! ends. So no other code can find itself in the wrong namespace, whatever fails.

use crate::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

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
        let _ = path.as_ref();
        unimplemented!()
    }

    /// The calling thread's.
    pub fn current() -> Result<NetNs> {
        unimplemented!()
    }

    /// A new one without a name; it lives as long as something refers to it. Loopback is down.
    pub fn create() -> Result<NetNs> {
        unimplemented!()
    }

    /// A new one, bound to a path, which is made. Exists if the path is there.
    pub fn create_at(path: impl AsRef<Path>) -> Result<NetNs> {
        let _ = path.as_ref();
        unimplemented!()
    }

    /// Takes away what [`NetNs::create_at`] made: unmounts and removes the path.
    pub fn remove_at(path: impl AsRef<Path>) -> Result<()> {
        let _ = path.as_ref();
        unimplemented!()
    }

    pub fn id(&self) -> Result<NetNsId> {
        unimplemented!()
    }

    /// Runs a closure in the namespace, on a thread of its own, and waits for it.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        let _ = f;
        unimplemented!()
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Runs a test in a fresh namespace with loopback up, on a thread of its own. A panic of the
/// closure goes on in the caller, and the namespace vanishes with its last reference.
pub fn in_fresh<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let _ = f;
    unimplemented!()
}
