//! Forwarding entries of VXLAN devices: which tunnel endpoint has which MAC.

use crate::conn::{APPEND, CREATE, REPLACE, Request};
use crate::neigh::HEADER;
use crate::wire::{self, Garbage, Message, mac_text};
use crate::{Conn, Mac, Result};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourHeader, NeighbourMessage, NeighbourState,
};
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
        self.request("add", libc::RTM_NEWNEIGH, CREATE)
    }

    /// Makes this the one destination of the MAC.
    pub fn replace(&self) -> Request {
        self.request("replace", libc::RTM_NEWNEIGH, REPLACE)
    }

    /// Adds a further destination (all-zero or multicast MAC only).
    pub fn append(&self) -> Request {
        self.request("append", libc::RTM_NEWNEIGH, APPEND)
    }

    pub fn delete(&self) -> Request {
        self.request("delete", libc::RTM_DELNEIGH, 0)
    }

    fn request(&self, verb: &str, kind: u16, flags: u16) -> Request {
        let Fdb { link, mac, dst } = self;
        let what = format!(
            "{verb} forwarding entry {} to {dst} dev #{link}",
            mac_text(*mac)
        );
        let mut message = NeighbourMessage::default();
        message.header = NeighbourHeader {
            family: AddressFamily::Bridge,
            ifindex: *link,
            state: NeighbourState::Permanent,
            // On the device itself, not on a bridge that it may be a port of.
            flags: NeighbourFlags::Own,
            ..NeighbourHeader::default()
        };
        message.attributes = vec![
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
            NeighbourAttribute::Destination((*dst).into()),
        ];
        Request::new(what, kind, flags, &message)
    }

    /// From the body of an RTM_NEWNEIGH message; none if it names no tunnel endpoint.
    pub(crate) fn parse(body: &[u8]) -> std::result::Result<Option<Fdb>, Garbage> {
        let header = NeighbourHeader::parse(body)?;
        if header.family != AddressFamily::Bridge {
            return Ok(None);
        }
        let (mut dst, mut mac) = (None, None);
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                libc::NDA_DST => dst = Some(attr.ip()?),
                libc::NDA_LLADDR => mac = attr.mac(),
                _ => {}
            }
        }
        Ok(mac.zip(dst).map(|(mac, dst)| Fdb {
            link: header.ifindex,
            mac,
            dst,
        }))
    }
}

impl Conn {
    /// Entries of a device that name a tunnel endpoint.
    pub fn fdb(&mut self, link: u32) -> Result<Vec<Fdb>> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Bridge;
        message.attributes = vec![NeighbourAttribute::IfIndex(link)];
        self.dump(
            "list forwarding entries",
            libc::RTM_GETNEIGH,
            &message,
            |message: &Message<'_>| match message.kind {
                libc::RTM_NEWNEIGH => {
                    Ok(Fdb::parse(message.body)?.filter(|entry| entry.link == link))
                }
                _ => Ok(None),
            },
        )
    }
}
