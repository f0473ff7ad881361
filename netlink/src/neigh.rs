//! Neighbours (ARP and NDP entries).

use crate::conn::{CREATE, REPLACE, Request, malformed};
use crate::wire::{self, Garbage, Message};
use crate::{Conn, Family, Mac, Result, ResultExt as _};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourHeader, NeighbourMessage,
};
use std::net::IpAddr;

/// Length of `struct ndmsg`.
pub(crate) const HEADER: usize = 12;

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

    /// Has the kernel find out who has an address on a link. Not for an address that it [knows](Self::is_valid): who is so by hand
    /// would not be any more.
    pub fn ask(link: u32, address: IpAddr) -> Request {
        let what = format!("ask for neighbour {address} dev #{link}");
        let mut message = message(link, address);
        message.header.flags = NeighbourFlags::Use;
        Request::new(what, libc::RTM_NEWNEIGH, REPLACE, &message)
    }

    /// Whether its MAC address is known, however long ago that was (`NUD_VALID` in the kernel's net/neighbour.h).
    pub fn is_valid(&self) -> bool {
        const VALID: u16 = libc::NUD_PERMANENT
            | libc::NUD_NOARP
            | libc::NUD_REACHABLE
            | libc::NUD_PROBE
            | libc::NUD_STALE
            | libc::NUD_DELAY;
        self.state & VALID != 0
    }

    pub fn is_permanent(&self) -> bool {
        self.state & libc::NUD_PERMANENT != 0
    }

    /// Adds; fails with Exists if the address has an entry.
    pub fn add(&self) -> Request {
        self.request("add", libc::RTM_NEWNEIGH, CREATE)
    }

    /// Adds, or takes the place of the address's entry.
    pub fn replace(&self) -> Request {
        self.request("replace", libc::RTM_NEWNEIGH, REPLACE)
    }

    pub fn delete(&self) -> Request {
        self.request("delete", libc::RTM_DELNEIGH, 0)
    }

    fn request(&self, verb: &str, kind: u16, flags: u16) -> Request {
        let what = format!("{verb} neighbour {} dev #{}", self.address, self.link);
        let mut message = message(self.link, self.address);
        message.header.state = self.state.into();
        message.attributes.extend(
            self.mac
                .map(|mac| NeighbourAttribute::LinkLayerAddress(mac.to_vec())),
        );
        Request::new(what, kind, flags, &message)
    }

    /// From the body of an RTM_NEWNEIGH message; none if it is of another family.
    pub(crate) fn parse(body: &[u8]) -> std::result::Result<Option<Neigh>, Garbage> {
        let header = NeighbourHeader::parse(body)?;
        if Family::of_code(header.family).is_none() {
            return Ok(None);
        }
        let (mut address, mut mac) = (None, None);
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                libc::NDA_DST => address = Some(attr.ip()?),
                libc::NDA_LLADDR => mac = attr.mac(),
                _ => {}
            }
        }
        Ok(address.map(|address| Neigh {
            link: header.ifindex,
            address,
            mac,
            state: header.state.into(),
        }))
    }
}

fn message(link: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = Family::of(address).code();
    message.header.ifindex = link;
    message.attributes = vec![NeighbourAttribute::Destination(address.into())];
    message
}

impl Conn {
    /// A neighbour on a link, found without a look at any other.
    pub fn neigh(&mut self, link: u32, address: IpAddr) -> Result<Option<Neigh>> {
        let what = format!("look up neighbour {address} dev #{link}");
        let message = message(link, address);
        let request = Request::get(what.clone(), libc::RTM_GETNEIGH, &message);
        match self.query(request).ignore_not_found()? {
            Some(body) => Neigh::parse(&body).map_err(|garbage| malformed(what, garbage)),
            None => Ok(None),
        }
    }

    /// Neighbours of both families on a link.
    pub fn neighs(&mut self, link: u32) -> Result<Vec<Neigh>> {
        let mut message = NeighbourMessage::default();
        message.attributes = vec![NeighbourAttribute::IfIndex(link)];
        self.dump(
            "list neighbours",
            libc::RTM_GETNEIGH,
            &message,
            |message: &Message<'_>| match message.kind {
                libc::RTM_NEWNEIGH => {
                    Ok(Neigh::parse(message.body)?.filter(|neigh| neigh.link == link))
                }
                _ => Ok(None),
            },
        )
    }
}
