//! What a router says of a packet that the next link does not carry: "fragmentation needed"
//! (RFC 1191 §4) and "packet too big" (RFC 4443 §3.2).

use super::{PATIENCE, packet, readable};
use crate::place::Place;
use anyhow::{Context as _, Result, bail};
use socket2::Socket;
use std::{
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Instant,
};

const ETH: usize = 14;
const IP4: usize = 20;
const IP6: usize = 40;
const ICMP: usize = 8;

/// One such message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooBig {
    /// Of the next link.
    pub mtu: u32,
    /// Source and destination of the packet that was too big.
    pub src: IpAddr,
    pub dst: IpAddr,
}

impl TooBig {
    /// Reads a frame; none if it is something else.
    pub fn read(frame: &[u8]) -> Option<Self> {
        let ip = frame.get(ETH..)?;
        match frame.get(12..ETH)? {
            // Without options: protocol 1, type 3, code 4.
            [0x08, 0x00] if ip.get(9) == Some(&1) && ip.get(IP4..IP4 + 2)? == [3, 4] => {
                let mtu = ip.get(IP4 + 6..IP4 + 8)?;
                let quoted = ip.get(IP4 + ICMP..)?;
                let addr = |at| {
                    Some(Ipv4Addr::from(
                        <[u8; 4]>::try_from(quoted.get(at..at + 4)?).ok()?,
                    ))
                };
                Some(Self {
                    mtu: u16::from_be_bytes(mtu.try_into().ok()?).into(),
                    src: addr(12)?.into(),
                    dst: addr(16)?.into(),
                })
            }
            // Next header 58, type 2.
            [0x86, 0xdd] if ip.get(6) == Some(&58) && ip.get(IP6) == Some(&2) => {
                let mtu = ip.get(IP6 + 4..IP6 + 8)?;
                let quoted = ip.get(IP6 + ICMP..)?;
                let addr = |at| {
                    Some(Ipv6Addr::from(
                        <[u8; 16]>::try_from(quoted.get(at..at + 16)?).ok()?,
                    ))
                };
                Some(Self {
                    mtu: u32::from_be_bytes(mtu.try_into().ok()?),
                    src: addr(8)?.into(),
                    dst: addr(24)?.into(),
                })
            }
            _ => None,
        }
    }
}

/// Hears what a place is told so.
pub struct Ear {
    sockets: [Socket; 2],
}

impl Ear {
    pub fn in_place(place: &Place, interface: &str) -> Result<Self> {
        let interface = packet::interface(place, interface)?;
        let socket = |protocol| packet::socket(place, interface, protocol);
        Ok(Self {
            sockets: [socket(0x0800)?, socket(0x86dd)?],
        })
    }

    /// The next message about a packet to this address.
    pub fn hear(&self, dst: IpAddr) -> Result<TooBig> {
        let socket = &self.sockets[usize::from(dst.is_ipv6())];
        let mut buffer = vec![0; 1 << 16];
        let deadline = Instant::now() + PATIENCE;
        while readable(socket, deadline)? {
            let len = (&*socket).read(&mut buffer).context("cannot receive")?;
            if let Some(heard) = TooBig::read(&buffer[..len]).filter(|heard| heard.dst == dst) {
                return Ok(heard);
            }
        }
        bail!("nobody said that a packet to {dst} was too big")
    }
}
