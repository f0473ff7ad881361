//! Addresses on links.

use crate::{Conn, Request, Result};
use ipnet::IpNet;

/// An address on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addr {
    /// Index of the link.
    pub link: u32,
    /// Address and prefix length; the host bits are the address.
    pub net: IpNet,
    /// `libc::RT_SCOPE_*`.
    pub scope: u8,
    /// `libc::IFA_F_*`.
    pub flags: u32,
}

impl Addr {
    /// Scope universe, no flags.
    pub fn new(link: u32, net: IpNet) -> Addr {
        Addr {
            link,
            net,
            scope: 0,
            flags: 0,
        }
    }

    /// No duplicate address detection: the address is usable at once (IPv6; no effect on IPv4).
    pub fn nodad(mut self) -> Addr {
        self.flags |= libc::IFA_F_NODAD;
        self
    }

    pub fn scope(mut self, scope: u8) -> Addr {
        self.scope = scope;
        self
    }

    pub fn add(&self) -> Request {
        unimplemented!()
    }

    /// Adds, or changes the flags and scope of the same address and prefix.
    pub fn replace(&self) -> Request {
        unimplemented!()
    }

    pub fn delete(&self) -> Request {
        unimplemented!()
    }
}

impl Conn {
    /// Addresses of both families, of one link or of all.
    pub fn addrs(&mut self, link: Option<u32>) -> Result<Vec<Addr>> {
        let _ = link;
        unimplemented!()
    }
}
