//! Traffic control: a link's clsact qdisc and the BPF programs on it.

use crate::{
    Conn, Error, Result,
    conn::{CREATE, REPLACE, Request, receive},
    wire::{self, Garbage, Message, Raw},
};
use netlink_sys::Socket;
use std::{
    fmt, io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// struct tcmsg: family and padding, then index, handle, parent and info.
const HEADER: usize = 20;
/// linux/pkt_sched.h.
const TC_H_CLSACT: u32 = 0xffff_fff1;
const CLSACT_HANDLE: u32 = 0xffff_0000;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
/// linux/pkt_cls.h.
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
/// The program's value is the verdict.
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// Which packets the filters see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Those that come in by the link.
    Ingress,
    /// Those that leave by it.
    Egress,
}

impl Direction {
    pub const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];

    /// TC_H_CLSACT with TC_H_MIN_INGRESS or TC_H_MIN_EGRESS (linux/pkt_sched.h).
    fn parent(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// Where a filter is among others': no two have the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub direction: Direction,
    pub priority: u16,
    pub handle: u32,
}

/// Makes a link's clsact qdisc. Exists if it has one.
pub fn add_clsact(link: u32) -> Request {
    let mut body = header(link, CLSACT_HANDLE, TC_H_CLSACT, 0);
    attribute(&mut body, TCA_KIND, b"clsact\0");
    let what = format!("add a clsact qdisc to link #{link}");
    Request::new(what, libc::RTM_NEWQDISC, CREATE, &Raw(&body))
}

/// Has a program see the packets of a link, in the place of the one before if there is one: no
/// packet passes without either.
pub fn set_program(link: u32, place: Place, name: &str, program: &Arc<OwnedFd>) -> Request {
    let mut options = Vec::with_capacity(64);
    let fd = program.as_raw_fd() as u32;
    attribute(&mut options, TCA_BPF_FD, &fd.to_ne_bytes());
    attribute(
        &mut options,
        TCA_BPF_NAME,
        &[name.as_bytes(), b"\0"].concat(),
    );
    let flags = TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes();
    attribute(&mut options, TCA_BPF_FLAGS, &flags);
    let mut body = filter(link, place);
    attribute(&mut body, TCA_KIND, b"bpf\0");
    attribute(&mut body, TCA_OPTIONS, &options);
    let what = format!("set program {name} at {} of link #{link}", place.direction);
    let request = Request::new(what, libc::RTM_NEWTFILTER, REPLACE, &Raw(&body));
    request.holding(program.clone())
}

/// Takes the filter at a place away. NotFound if there is none.
pub fn delete_filter(link: u32, place: Place) -> Request {
    let body = filter(link, place);
    let what = format!("delete a filter at {} of link #{link}", place.direction);
    Request::new(what, libc::RTM_DELTFILTER, 0, &Raw(&body))
}

fn filter(link: u32, place: Place) -> Vec<u8> {
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    let info = u32::from(place.priority) << 16 | u32::from(protocol);
    header(link, place.handle, place.direction.parent(), info)
}

fn header(link: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    for field in [link, handle, parent, info] {
        body.extend_from_slice(&field.to_ne_bytes());
    }
    body
}

fn attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = 4 + value.len() as u16;
    body.extend_from_slice(&length.to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(wire::align(body.len()), 0);
}

/// A filter of a clsact qdisc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    pub direction: Direction,
    pub priority: u16,
    pub handle: u32,
    /// As in `bpf` or `flower`.
    pub kind: String,
    /// Of a BPF filter: the name it was given, and its program.
    pub program: Option<(String, u32)>,
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (direction, kind) = (self.direction, &self.kind);
        write!(
            f,
            "{direction} priority {} handle {:#x} {kind}",
            self.priority, self.handle
        )?;
        match &self.program {
            Some((name, id)) => write!(f, " {name} program {id}"),
            None => Ok(()),
        }
    }
}

fn parse(body: &[u8], direction: Direction) -> std::result::Result<Filter, Garbage> {
    let (Some(handle), Some(info)) = (wire::u32_at(body, 8), wire::u32_at(body, 16)) else {
        return wire::garbage("a filter without a header");
    };
    let mut filter = Filter {
        direction,
        priority: (info >> 16) as u16,
        handle,
        kind: String::new(),
        program: None,
    };
    let mut options = &[][..];
    for attr in wire::attrs_after(body, HEADER)? {
        let attr = attr?;
        match attr.kind {
            TCA_KIND => filter.kind = attr.text(),
            TCA_OPTIONS => options = attr.value,
            _ => {}
        }
    }
    if filter.kind == "bpf" {
        let (mut name, mut id) = (String::new(), None);
        for attr in wire::attrs(options) {
            let attr = attr?;
            match attr.kind {
                TCA_BPF_NAME => name = attr.text(),
                TCA_BPF_ID => id = Some(attr.u32()?),
                _ => {}
            }
        }
        filter.program = id.map(|id| (name, id));
    }
    Ok(filter)
}

impl Conn {
    /// The filters of a link's clsact qdisc, anybody's; none if it has no such qdisc.
    pub fn filters(&mut self, link: u32) -> Result<Vec<Filter>> {
        let mut found = Vec::new();
        for direction in Direction::BOTH {
            let header = header(link, 0, direction.parent(), 0);
            let of_link = |message: &Message<'_>| match message.kind {
                libc::RTM_NEWTFILTER => parse(message.body, direction).map(Some),
                _ => Ok(None),
            };
            let what = "list filters";
            let filters = self.dump(what, libc::RTM_GETTFILTER, &Raw(&header), of_link)?;
            // The first message of a chain has its priority alone.
            found.extend(filters.into_iter().filter(|filter| filter.handle != 0));
        }
        Ok(found)
    }
}

/// What has changed at a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub link: u32,
    /// The name of the BPF filter that was set; none if it was something else, or was removed.
    pub set: Option<String>,
}

impl Change {
    fn parse(message: &Message<'_>) -> std::result::Result<Option<Self>, Garbage> {
        let body = message.body;
        let set = match message.kind {
            // Of a hook it does not say which: its name is all that counts.
            libc::RTM_NEWTFILTER => parse(body, Direction::Ingress)?
                .program
                .map(|(name, _)| name),
            libc::RTM_DELTFILTER | libc::RTM_NEWQDISC | libc::RTM_DELQDISC => None,
            _ => return Ok(None),
        };
        match wire::u32_at(body, 4) {
            Some(link) => Ok(Some(Self { link, set })),
            None => wire::garbage("a change of traffic control without a header"),
        }
    }
}

/// A socket that says which links' qdiscs and filters change, in the network namespace of the thread that made it.
#[derive(Debug)]
pub struct Changes {
    socket: Socket,
    datagram: Vec<u8>,
}

impl Changes {
    /// # Errors
    /// If the kernel does not tell.
    pub fn follow() -> Result<Self> {
        let open = || -> io::Result<Self> {
            let mut socket = Socket::new(netlink_sys::protocols::NETLINK_ROUTE)?;
            socket.bind_auto()?;
            socket.add_membership(libc::RTNLGRP_TC)?;
            Ok(Self {
                socket,
                datagram: Vec::new(),
            })
        };
        open().map_err(|error| Error::system("follow changes of traffic control", &error))
    }

    /// What has changed since the last call; none if some of it was lost. Never blocks.
    ///
    /// # Errors
    /// If the socket failed.
    pub fn read(&mut self) -> Result<Option<Vec<Change>>> {
        let mut changes = Some(Vec::new());
        loop {
            match receive(&self.socket, &mut self.datagram, libc::MSG_DONTWAIT) {
                Ok(()) => {
                    for message in wire::messages(&self.datagram) {
                        match message.and_then(|message| Change::parse(&message)) {
                            Ok(change) => changes
                                .iter_mut()
                                .for_each(|all| all.extend(change.clone())),
                            Err(_) => changes = None,
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(changes),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => changes = None,
                Err(error) => {
                    return Err(Error::system("follow changes of traffic control", &error));
                }
            }
        }
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn garbage_never_panics(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&body, Direction::Ingress);
        }
    }
}
