//! VXLAN devices.

use crate::{Mac, Request};
use std::net::IpAddr;

/// What identifies a VXLAN device: read back as [`crate::Link::vxlan`], so that a reconciler can
/// compare. The kernel changes few of them on a living device: delete and create anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VxlanSettings {
    pub vni: u32,
    /// UDP destination port.
    pub port: u16,
    /// Source address of the tunnel; its family is the underlay's.
    pub local: Option<IpAddr>,
    /// Index of the lower link, if the device is bound to one.
    pub device: Option<u32>,
    pub learning: bool,
    /// TTL of the outer header; 0 leaves it to the kernel.
    pub ttl: u8,
}

impl VxlanSettings {
    /// Learning off, no lower link, the kernel's TTL.
    pub fn new(vni: u32, port: u16, local: IpAddr) -> VxlanSettings {
        VxlanSettings {
            vni,
            port,
            local: Some(local),
            device: None,
            learning: false,
            ttl: 0,
        }
    }
}

/// A VXLAN device to be made, up.
#[derive(Clone, Debug)]
pub struct Vxlan<'a> {
    pub name: &'a str,
    pub mac: Mac,
    pub mtu: u32,
    pub settings: VxlanSettings,
}

impl Vxlan<'_> {
    pub fn create(&self) -> Request {
        unimplemented!()
    }
}
