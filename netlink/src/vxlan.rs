//! VXLAN devices.

use crate::Mac;
use crate::conn::{CREATE, Request};
use crate::link::{self, check_name};
use crate::wire::{self, Garbage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo};
use std::net::IpAddr;

// linux/if_link.h; the libc crate has none of them.
const IFLA_VXLAN_ID: u16 = 1;
const IFLA_VXLAN_LINK: u16 = 3;
const IFLA_VXLAN_LOCAL: u16 = 4;
const IFLA_VXLAN_TTL: u16 = 5;
const IFLA_VXLAN_LEARNING: u16 = 7;
const IFLA_VXLAN_PORT: u16 = 15;
const IFLA_VXLAN_LOCAL6: u16 = 17;
const IFLA_VXLAN_UDP_ZERO_CSUM6_RX: u16 = 20;

/// What identifies a VXLAN device: read back as [`crate::Link::vxlan`], so that a reconciler can
/// compare. The kernel changes few of them on a living device: delete it and create it again.
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
    /// Whether UDP over IPv6 without a checksum is taken (RFC 6935). Set when the device is made, and never after.
    pub zero_checksum6: bool,
}

impl VxlanSettings {
    /// Learning off, no lower link, the kernel's TTL, checksums asked for.
    pub fn new(vni: u32, port: u16, local: IpAddr) -> VxlanSettings {
        VxlanSettings {
            vni,
            port,
            local: Some(local),
            device: None,
            learning: false,
            ttl: 0,
            zero_checksum6: false,
        }
    }

    fn attributes(&self) -> Vec<InfoVxlan> {
        let mut attributes = vec![
            InfoVxlan::Id(self.vni),
            InfoVxlan::Port(self.port),
            InfoVxlan::Learning(self.learning),
            InfoVxlan::Ttl(self.ttl),
        ];
        attributes.extend(self.local.map(|local| match local {
            IpAddr::V4(local) => InfoVxlan::Local(local),
            IpAddr::V6(local) => InfoVxlan::Local6(local),
        }));
        attributes.extend(self.device.map(InfoVxlan::Link));
        attributes.extend(
            self.zero_checksum6
                .then_some(InfoVxlan::UDPZeroCsumRX(true)),
        );
        attributes
    }

    /// From IFLA_INFO_DATA of a link of the kind `vxlan`.
    pub(crate) fn parse(data: &[u8]) -> Result<VxlanSettings, Garbage> {
        let mut settings = VxlanSettings {
            vni: 0,
            port: 0,
            local: None,
            device: None,
            learning: false,
            ttl: 0,
            zero_checksum6: false,
        };
        for attr in wire::attrs(data) {
            let attr = attr?;
            match attr.kind {
                IFLA_VXLAN_ID => settings.vni = attr.u32()?,
                IFLA_VXLAN_LINK => settings.device = Some(attr.u32()?).filter(|index| *index != 0),
                IFLA_VXLAN_LOCAL | IFLA_VXLAN_LOCAL6 => settings.local = Some(attr.ip()?),
                IFLA_VXLAN_TTL => settings.ttl = attr.u8()?,
                IFLA_VXLAN_LEARNING => settings.learning = attr.u8()? != 0,
                IFLA_VXLAN_PORT => settings.port = attr.u16_be()?,
                IFLA_VXLAN_UDP_ZERO_CSUM6_RX => settings.zero_checksum6 = attr.u8()? != 0,
                _ => {}
            }
        }
        Ok(settings)
    }
}

/// A VXLAN device to be made, down.
#[derive(Clone, Debug)]
pub struct Vxlan<'a> {
    pub name: &'a str,
    pub mac: Mac,
    pub mtu: u32,
    pub settings: VxlanSettings,
}

impl Vxlan<'_> {
    pub fn create(&self) -> Request {
        let what = format!("create VXLAN device {}", self.name);
        if let Err(error) = check_name(self.name) {
            return Request::wrong(what, error);
        }
        let message = link::new_down(vec![
            LinkAttribute::IfName(self.name.into()),
            LinkAttribute::Address(self.mac.to_vec()),
            LinkAttribute::Mtu(self.mtu),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Vxlan),
                LinkInfo::Data(InfoData::Vxlan(self.settings.attributes())),
            ]),
        ]);
        Request::new(what, libc::RTM_NEWLINK, CREATE, &message)
    }
}
