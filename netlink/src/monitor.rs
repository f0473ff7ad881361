//! What the kernel says has changed.

use crate::{Family, NetNs, Result};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A change, coarsely: enough to decide whether to look.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    Link {
        index: u32,
        name: String,
        up: bool,
        removed: bool,
    },
    Addr {
        link: u32,
        address: IpAddr,
        removed: bool,
    },
    Route {
        family: Family,
        protocol: u8,
        table: u32,
        oif: Option<u32>,
        removed: bool,
    },
    Neigh {
        link: u32,
        address: Option<IpAddr>,
        removed: bool,
    },
    Fdb {
        link: u32,
        removed: bool,
    },
    /// Events were lost: everything has to be looked at again.
    Overrun,
}

/// A socket subscribed to links, addresses, routes, neighbours and forwarding entries.
///
/// Non-blocking by itself, so that it can be registered with an event loop ([`AsFd`]).
#[derive(Debug)]
pub struct Monitor {
    fd: OwnedFd,
}

impl Monitor {
    pub fn new() -> Result<Monitor> {
        unimplemented!()
    }

    pub fn in_netns(netns: &NetNs) -> Result<Monitor> {
        let _ = netns;
        unimplemented!()
    }

    /// What is there now; empty if nothing is. Never blocks.
    pub fn read(&mut self) -> Result<Vec<Event>> {
        unimplemented!()
    }

    /// Waits for at least one event; empty after the timeout.
    pub fn wait(&mut self, timeout: std::time::Duration) -> Result<Vec<Event>> {
        let _ = timeout;
        unimplemented!()
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
