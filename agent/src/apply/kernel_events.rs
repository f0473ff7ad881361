//! The kernel's events, as tokio wants them.

use crate::chain::Chain;
use sinabro_netlink::{Event, Monitor, NetNs, changes::Changes};
use std::{
    future::pending,
    io,
    os::fd::{AsFd, AsRawFd, RawFd},
};
use tokio::io::{Interest, unix::AsyncFd};
use tracing::warn;

/// A socket that the kernel says on what has changed.
#[derive(Debug)]
pub struct KernelEvents(AsyncFd<Fd<Monitor>>);

/// What owns a socket, as tokio wants it.
#[derive(Debug)]
pub struct Fd<T>(pub T);

impl<T: AsFd> AsRawFd for Fd<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl<T: AsFd> Fd<T> {
    /// # Errors
    /// If the runtime cannot wait for it.
    pub fn register(owner: T) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the owner's socket is its own, and Fd neither closes nor replaces it before AsyncFd is dropped.
        Ok(unsafe { AsyncFd::register_with_interest(Self(owner), Interest::READABLE)? })
    }
}

/// A socket on which the kernel says what has changed; none, and a warning, if there can be none: who has none looks from time to time.
pub fn follow<T: AsFd>(opened: sinabro_netlink::Result<T>, what: &str) -> Option<AsyncFd<Fd<T>>> {
    let opened = opened.map_err(io::Error::other);
    opened
        .and_then(Fd::register)
        .inspect_err(|error| warn!("cannot follow {what}, polling: {error}"))
        .ok()
}

/// Waits until something has changed, for ever if nobody tells, and takes it for read. `open`: as the socket was opened, for one that failed.
pub async fn changed(
    changes: &mut Option<AsyncFd<Fd<Changes>>>,
    open: impl Fn() -> Option<AsyncFd<Fd<Changes>>>,
    settle: impl Future<Output = ()>,
) {
    let Some(there) = changes else {
        return pending().await;
    };
    readable(there).await;
    settle.await;
    if let Err(error) = there.get_mut().0.drain() {
        warn!("lost changes, looking again: {}", Chain(&error));
        *changes = open();
    }
}

/// Waits until there is something to read.
pub async fn readable<T: AsFd>(events: &AsyncFd<Fd<T>>) {
    // Only an end of the runtime fails here.
    if let Ok(mut ready) = events.readable().await {
        // The caller now reads all there is; what comes later wakes it again.
        ready.clear_ready();
    }
}

impl KernelEvents {
    pub fn open(netns: Option<&NetNs>) -> Option<Self> {
        let monitor = match netns {
            Some(netns) => Monitor::in_netns(netns),
            None => Monitor::new(),
        };
        follow(monitor, "the kernel's events").map(Self)
    }

    /// Waits until there is something to read.
    pub async fn readable(&self) {
        readable(&self.0).await;
    }

    /// All events until now.
    ///
    /// # Errors
    /// If events were lost or the socket failed.
    pub fn read(&mut self) -> sinabro_netlink::Result<Vec<Event>> {
        let mut all = Vec::new();
        loop {
            let events = self.0.get_mut().0.read()?;
            if events.is_empty() {
                return Ok(all);
            }
            all.extend(events);
        }
    }
}
