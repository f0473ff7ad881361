//! Forwarding entries of VXLAN devices: which tunnel endpoint has which MAC.

use crate::{Conn, Mac, Request, Result};
use std::net::IpAddr;

/// A permanent forwarding entry on the device itself (NTF_SELF).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fdb {
    /// Index of the device.
    pub link: u32,
    pub mac: Mac,
    /// Tunnel endpoint.
    pub dst: IpAddr,
}

impl Fdb {
    /// Adds; fails with Exists if the MAC has an entry.
    pub fn add(&self) -> Request {
        unimplemented!()
    }

    /// Makes this the one destination of the MAC.
    pub fn replace(&self) -> Request {
        unimplemented!()
    }

    /// Adds a further destination (all-zero or multicast MAC only).
    pub fn append(&self) -> Request {
        unimplemented!()
    }

    pub fn delete(&self) -> Request {
        unimplemented!()
    }
}

impl Conn {
    /// Entries of a device that name a tunnel endpoint.
    pub fn fdb(&mut self, link: u32) -> Result<Vec<Fdb>> {
        let _ = link;
        unimplemented!()
    }
}
