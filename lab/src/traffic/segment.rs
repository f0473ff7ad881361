//! TCP segments made by hand, and what arrives of them.
//!
//! What begins a connection says in its options how large the other end's segments may be
//! (RFC 9293 §3.7.1).

use super::{
    PATIENCE,
    packet::{self, Interface, TCP, transport_checksum},
    readable,
};
use crate::place::Place;
use anyhow::{Context as _, Result, bail};
use socket2::Socket;
use std::{
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Instant,
};

pub const SYN: u8 = 0x02;
pub const SYN_ACK: u8 = 0x12;

const ETH: usize = 14;

/// A segment without data, every field of it chosen.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    pub src_mac: [u8; 6],
    pub dst_mac: [u8; 6],
    pub src: SocketAddr,
    pub dst: SocketAddr,
    pub sequence: u32,
    pub flags: u8,
    /// As on the wire; forty bytes at most.
    pub options: &'a [u8],
    /// Length of the header in words, if another is to be said than that of the options.
    pub words: Option<u8>,
}

impl Segment<'_> {
    /// The whole frame, checksums right.
    pub fn frame(&self) -> Result<Vec<u8>> {
        let mut options = self.options.to_vec();
        options.resize(options.len().next_multiple_of(4), 0);
        let words = self.words.unwrap_or((20 + options.len()) as u8 / 4);
        let mut tcp = Vec::new();
        tcp.extend_from_slice(&self.src.port().to_be_bytes());
        tcp.extend_from_slice(&self.dst.port().to_be_bytes());
        tcp.extend_from_slice(&self.sequence.to_be_bytes());
        // It acknowledges nothing that the other end has sent.
        tcp.extend_from_slice(&[0, 0, 0, 0, words << 4, self.flags]);
        // Window, checksum, urgent pointer.
        tcp.extend_from_slice(&[0xff, 0xff, 0, 0, 0, 0]);
        tcp.extend_from_slice(&options);
        let macs = [self.dst_mac, self.src_mac];
        packet::frame(macs, (self.src.ip(), self.dst.ip()), TCP, tcp)
    }
}

/// A segment as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub src: SocketAddr,
    pub dst: SocketAddr,
    pub flags: u8,
    /// All that lies behind the fixed header, whatever length the header says.
    pub options: Vec<u8>,
    pub checksum_is_right: bool,
}

impl Seen {
    /// Reads a frame; none if it is no TCP segment.
    pub fn read(frame: &[u8]) -> Option<Self> {
        let ip = frame.get(ETH..)?;
        let (src, dst, tcp): (IpAddr, IpAddr, _) = match frame.get(12..ETH)? {
            [0x08, 0x00] if ip.get(9) == Some(&TCP.0) => {
                let addr = |at| {
                    Some(Ipv4Addr::from(
                        <[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?,
                    ))
                };
                let header = usize::from(ip[0] & 0xf) * 4;
                let len = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
                (addr(12)?.into(), addr(16)?.into(), ip.get(header..len)?)
            }
            [0x86, 0xdd] if ip.get(6) == Some(&TCP.0) => {
                let addr = |at| {
                    Some(Ipv6Addr::from(
                        <[u8; 16]>::try_from(ip.get(at..at + 16)?).ok()?,
                    ))
                };
                let len = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
                (addr(8)?.into(), addr(24)?.into(), ip.get(40..40 + len)?)
            }
            _ => return None,
        };
        let port = |at| Some(u16::from_be_bytes([*tcp.get(at)?, *tcp.get(at + 1)?]));
        Some(Self {
            src: SocketAddr::new(src, port(0)?),
            dst: SocketAddr::new(dst, port(2)?),
            flags: *tcp.get(13)?,
            options: tcp.get(20..)?.to_vec(),
            checksum_is_right: transport_checksum(src, dst, TCP.0, tcp) == 0,
        })
    }
}

/// Hears the segments that arrive on an interface, as its programs leave them.
pub struct Ear {
    /// One of each family: only who asks for one protocol hears behind an interface's programs.
    sockets: [Socket; 2],
}

impl Ear {
    pub fn on(place: &Place, interface: Interface) -> Result<Self> {
        Ok(Self {
            sockets: [
                packet::socket(place, interface, 0x0800)?,
                packet::socket(place, interface, 0x86dd)?,
            ],
        })
    }

    /// The first segment of a family that is the one.
    pub fn hear(&self, v4: bool, is_it: impl Fn(&Seen) -> bool) -> Result<Seen> {
        let socket = &self.sockets[usize::from(!v4)];
        let mut buffer = vec![0; 1 << 16];
        let deadline = Instant::now() + PATIENCE;
        while readable(socket, deadline)? {
            let len = (&*socket).read(&mut buffer).context("cannot receive")?;
            if let Some(seen) = Seen::read(&buffer[..len]).filter(&is_it) {
                return Ok(seen);
            }
        }
        bail!("the segment did not arrive")
    }
}
