//! Links: finding, changing, deleting.

use crate::vxlan::VxlanSettings;
use crate::{Conn, NetNs, Request, Result};

pub type Mac = [u8; 6];

/// A network interface as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// Absent on links without an Ethernet address.
    pub mac: Option<Mac>,
    pub mtu: u32,
    /// Administratively up (IFF_UP).
    pub up: bool,
    /// Carrier (IFF_LOWER_UP).
    pub carrier: bool,
    pub loopback: bool,
    /// `veth`, `vxlan`, `bridge`, …; absent on loopback and physical devices.
    pub kind: Option<String>,
    /// Index of the other end (veth) or lower link; may count in another namespace.
    pub peer: Option<u32>,
    /// Whether `peer` counts in another namespace.
    pub peer_elsewhere: bool,
    pub master: Option<u32>,
    pub alias: Option<String>,
    /// Settings of a VXLAN device.
    pub vxlan: Option<VxlanSettings>,
}

impl Conn {
    pub fn link_by_name(&mut self, name: &str) -> Result<Link> {
        let _ = name;
        unimplemented!()
    }

    pub fn link_by_index(&mut self, index: u32) -> Result<Link> {
        let _ = index;
        unimplemented!()
    }

    /// All links of the namespace.
    pub fn links(&mut self) -> Result<Vec<Link>> {
        unimplemented!()
    }
}

pub fn set_up(index: u32) -> Request {
    let _ = index;
    unimplemented!()
}

pub fn set_down(index: u32) -> Request {
    let _ = index;
    unimplemented!()
}

pub fn set_mtu(index: u32, mtu: u32) -> Request {
    let _ = (index, mtu);
    unimplemented!()
}

pub fn set_mac(index: u32, mac: Mac) -> Request {
    let _ = (index, mac);
    unimplemented!()
}

pub fn set_name(index: u32, name: &str) -> Request {
    let _ = (index, name);
    unimplemented!()
}

pub fn set_alias(index: u32, alias: &str) -> Request {
    let _ = (index, alias);
    unimplemented!()
}

/// Puts a link under a bridge, or takes it out.
pub fn set_master(index: u32, master: Option<u32>) -> Request {
    let _ = (index, master);
    unimplemented!()
}

/// Moves a link to another namespace.
pub fn set_netns(index: u32, netns: &NetNs) -> Request {
    let _ = (index, netns);
    unimplemented!()
}

pub fn delete(index: u32) -> Request {
    let _ = index;
    unimplemented!()
}

/// Deletes by name: no look-up before it, so no race with a rename or a new link.
pub fn delete_by_name(name: &str) -> Request {
    let _ = name;
    unimplemented!()
}
