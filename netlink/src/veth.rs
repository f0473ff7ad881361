//! Pairs of virtual Ethernet links.

use crate::{Conn, Link, Mac, NetNs, Request, Result};

/// A pair to be made by one request, both ends up, the peer in its namespace under its final name.
#[derive(Clone, Debug)]
pub struct Veth<'a> {
    pub name: &'a str,
    pub mac: Mac,
    pub mtu: u32,
    pub peer_name: &'a str,
    pub peer_mac: Mac,
    /// The namespace that the peer is put into; the same as the first end's if absent.
    pub peer_netns: Option<&'a NetNs>,
}

impl Veth<'_> {
    pub fn create(&self) -> Request {
        unimplemented!()
    }
}

impl Conn {
    /// Creates the pair and returns the first end, in one system call each way. The peer's index
    /// in its own namespace is the link's `peer`.
    pub fn create_veth(&mut self, veth: &Veth<'_>) -> Result<Link> {
        let _ = veth;
        unimplemented!()
    }
}
