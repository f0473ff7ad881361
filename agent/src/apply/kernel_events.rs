//! The kernel's events, as tokio wants them.

use sinabro_netlink::{Event, Monitor, NetNs};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, RawFd},
};
use tokio::io::{Interest, unix::AsyncFd};
use tracing::warn;

/// A socket that the kernel says on what has changed.
#[derive(Debug)]
pub struct KernelEvents(AsyncFd<Fd>);

#[derive(Debug)]
struct Fd(Monitor);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl KernelEvents {
    pub fn open(netns: Option<&NetNs>) -> Option<Self> {
        let monitor = match netns {
            Some(netns) => Monitor::in_netns(netns),
            None => Monitor::new(),
        };
        let monitor = monitor.map_err(io::Error::other).and_then(|monitor| {
            // SAFETY: Monitor owns its socket, and Fd neither closes nor replaces it before
            // AsyncFd is dropped.
            Ok(unsafe { AsyncFd::register_with_interest(Fd(monitor), Interest::READABLE)? })
        });
        monitor
            .inspect_err(|error| warn!("cannot follow the kernel's events, polling: {error}"))
            .map(Self)
            .ok()
    }

    /// Waits until there is something to read.
    pub async fn readable(&self) {
        // Only an end of the runtime fails here.
        if let Ok(mut ready) = self.0.readable().await {
            // The caller now reads all there is; what comes later wakes it again.
            ready.clear_ready();
        }
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
