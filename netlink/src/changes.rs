//! That something has changed, of which the kernel says no more than is read.

use crate::{Error, Result};
use netlink_sys::{
    Socket,
    protocols::{NETLINK_NETFILTER, NETLINK_ROUTE},
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

/// NFNLGRP_NFTABLES.
const RULES: u32 = 7;

/// A socket that can be read when something has changed in the network namespace of the thread that made it.
#[derive(Debug)]
pub struct Changes {
    socket: Socket,
    of: &'static str,
}

impl Changes {
    /// Rules of nf_tables.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn of_rules() -> Result<Self> {
        Self::of("nf_tables", NETLINK_NETFILTER, &[RULES])
    }

    /// Settings below `net.ipv4.conf` and `net.ipv6.conf`, and whether the node forwards.
    ///
    /// # Errors
    /// As [`Self::of_rules`].
    pub fn of_settings() -> Result<Self> {
        let groups = [libc::RTNLGRP_IPV4_NETCONF, libc::RTNLGRP_IPV6_NETCONF];
        Self::of("settings", NETLINK_ROUTE, &groups)
    }

    fn of(of: &'static str, protocol: isize, groups: &[u32]) -> Result<Self> {
        let open = || -> io::Result<Socket> {
            let mut socket = Socket::new(protocol)?;
            socket.bind_auto()?;
            for group in groups {
                socket.add_membership(*group)?;
            }
            Ok(socket)
        };
        let socket = open().map_err(|error| failed(of, &error))?;
        Ok(Self { socket, of })
    }

    /// Reads what there is, so that it can be waited for the next change. Never blocks.
    ///
    /// # Errors
    /// If the socket failed.
    pub fn drain(&mut self) -> Result<()> {
        let mut datagram = [0; 64];
        loop {
            // The rest of a longer one goes with it.
            match self.socket.recv(&mut &mut datagram[..], libc::MSG_DONTWAIT) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // More than there was room for: a change like any other.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(error) => return Err(failed(self.of, &error)),
            }
        }
    }
}

fn failed(of: &str, error: &io::Error) -> Error {
    Error::system(format!("follow changes of {of}"), error)
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
