//! Neighbours (ARP and NDP entries).

use crate::{Conn, Mac, Request, Result};
use std::net::IpAddr;

/// A neighbour of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neigh {
    /// Index of the link.
    pub link: u32,
    pub address: IpAddr,
    pub mac: Option<Mac>,
    /// `libc::NUD_*`.
    pub state: u16,
}

impl Neigh {
    /// A permanent entry.
    pub fn new(link: u32, address: IpAddr, mac: Mac) -> Neigh {
        Neigh {
            link,
            address,
            mac: Some(mac),
            state: libc::NUD_PERMANENT,
        }
    }

    pub fn is_permanent(&self) -> bool {
        self.state & libc::NUD_PERMANENT != 0
    }

    /// Adds; fails with Exists if the address has an entry.
    pub fn add(&self) -> Request {
        unimplemented!()
    }

    pub fn replace(&self) -> Request {
        unimplemented!()
    }

    pub fn delete(&self) -> Request {
        unimplemented!()
    }
}

impl Conn {
    /// Neighbours of both families on a link.
    pub fn neighs(&mut self, link: u32) -> Result<Vec<Neigh>> {
        let _ = link;
        unimplemented!()
    }
}
