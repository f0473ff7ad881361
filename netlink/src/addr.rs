//! Addresses on links.

use crate::conn::{CREATE, REPLACE, Request};
use crate::wire::{self, Garbage, Message};
use crate::{Conn, Family, Result};
use ipnet::IpNet;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeader, AddressHeaderFlags, AddressMessage,
};

/// Length of `struct ifaddrmsg`.
const HEADER: usize = 8;

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

    /// Adds; fails with Exists if the link has the address with the same prefix length.
    pub fn add(&self) -> Request {
        self.request("add", libc::RTM_NEWADDR, CREATE)
    }

    /// Adds, or changes the flags of the same address and prefix length.
    pub fn replace(&self) -> Request {
        self.request("replace", libc::RTM_NEWADDR, REPLACE)
    }

    pub fn delete(&self) -> Request {
        self.request("delete", libc::RTM_DELADDR, 0)
    }

    /// Whether duplicate address detection is still under way: nothing can be bound to it.
    pub fn is_tentative(&self) -> bool {
        self.flags & libc::IFA_F_TENTATIVE != 0
    }

    fn request(&self, verb: &str, kind: u16, flags: u16) -> Request {
        let what = format!("{verb} address {} dev #{}", self.net, self.link);
        let mut message = AddressMessage::default();
        message.header = AddressHeader {
            family: Family::of(self.net.addr()).code(),
            prefix_len: self.net.prefix_len(),
            // The attribute below carries all flags; the header holds the first eight.
            flags: AddressHeaderFlags::from_bits_retain(self.flags as u8),
            scope: self.scope.into(),
            index: self.link,
        };
        message.attributes = vec![
            AddressAttribute::Local(self.net.addr()),
            AddressAttribute::Address(self.net.addr()),
            AddressAttribute::Flags(AddressFlags::from_bits_retain(self.flags)),
        ];
        Request::new(what, kind, flags, &message)
    }

    /// From the body of an RTM_NEWADDR or RTM_DELADDR message; none if it is of another family.
    pub(crate) fn parse(body: &[u8]) -> std::result::Result<Option<Addr>, Garbage> {
        let header = AddressHeader::parse(body)?;
        if Family::of_code(header.family).is_none() {
            return Ok(None);
        }
        let (mut local, mut address) = (None, None);
        let mut flags = u32::from(header.flags.bits());
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                libc::IFA_LOCAL => local = Some(attr.ip()?),
                libc::IFA_ADDRESS => address = Some(attr.ip()?),
                libc::IFA_FLAGS => flags = attr.u32()?,
                _ => {}
            }
        }
        // With a point-to-point peer IFA_ADDRESS is the peer's; without, IPv6 sends it alone.
        let Some(ip) = local.or(address) else {
            return wire::garbage("an address message without an address");
        };
        let net = IpNet::new(ip, header.prefix_len)
            .map_err(|_| Garbage(format!("prefix length {} of {ip}", header.prefix_len)))?;
        Ok(Some(Addr {
            link: header.index,
            net,
            scope: header.scope.into(),
            flags,
        }))
    }
}

impl Conn {
    /// Addresses of both families, of one link or of all.
    pub fn addrs(&mut self, link: Option<u32>) -> Result<Vec<Addr>> {
        let mut message = AddressMessage::default();
        message.header.index = link.unwrap_or(0);
        self.dump(
            "list addresses",
            libc::RTM_GETADDR,
            &message,
            |message: &Message<'_>| match message.kind {
                libc::RTM_NEWADDR => {
                    let addr = Addr::parse(message.body)?;
                    Ok(addr.filter(|addr| link.is_none_or(|link| link == addr.link)))
                }
                _ => Ok(None),
            },
        )
    }
}
