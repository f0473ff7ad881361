//! How many packets of a kind pass an interface, counted by the kernel: none is missed, however fast
//! they are, since none has to be read.

use super::packet::{self, Interface};
use crate::place::Place;
use anyhow::{Context as _, Result};
use nix::errno::Errno;
use socket2::{SockFilter, Socket};
use std::os::fd::AsRawFd as _;

const ETH: u32 = 14;
const UDP: u32 = 17;
const ETH_P_ALL: u16 = 0x0003;

/// A kind of packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Larger than this, the link's header not counted.
    LargerThan(usize),
    /// As large as this.
    AsLargeAs(usize),
    /// A part of a packet (RFC 791 §3.2, RFC 8200 §4.5).
    Fragment,
    /// UDP to this port, behind an IP header without options.
    ToUdpPort(u16),
}

pub struct Tally {
    socket: Socket,
}

impl Tally {
    /// Counts from now on what comes and goes.
    pub fn start(place: &Place, interface: Interface, kind: Kind) -> Result<Self> {
        let socket = packet::filtered(place, interface, ETH_P_ALL, &kind.filter())?;
        Ok(Self { socket })
    }

    /// The same of what comes alone.
    pub fn of_incoming(place: &Place, interface: Interface, kind: Kind) -> Result<Self> {
        let tally = Self::start(place, interface, kind)?;
        let set: libc::c_int = 1;
        // SAFETY: the option takes a number, of the size given.
        Errno::result(unsafe {
            libc::setsockopt(
                tally.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_IGNORE_OUTGOING,
                (&raw const set).cast(),
                size_of_val(&set) as libc::socklen_t,
            )
        })
        .context("cannot have a packet socket hear what comes alone")?;
        tally.count()?;
        Ok(tally)
    }

    /// How many there were since the start, or since the last time that this was asked.
    pub fn count(&self) -> Result<u32> {
        let [packets, _] = packet::statistics(&self.socket)?;
        Ok(packets)
    }
}

impl Kind {
    /// A program of the classic packet filter that accepts the kind's packets (bpf(4)): no more of each
    /// than its beginning is kept.
    fn filter(self) -> Vec<SockFilter> {
        const KEPT: u32 = 64;
        let op = |code: u32, k| SockFilter::new(code as u16, 0, 0, k);
        let jump = |code: u32, k, yes, no| {
            SockFilter::new((libc::BPF_JMP | code | libc::BPF_K) as u16, yes, no, k)
        };
        let length = op(libc::BPF_LD | libc::BPF_W | libc::BPF_LEN, 0);
        let [accept, reject] = [KEPT, 0].map(|k| op(libc::BPF_RET | libc::BPF_K, k));
        let load = |size, at| op(libc::BPF_LD | size | libc::BPF_ABS, at);
        let frame = |len: usize| len as u32 + ETH;
        match self {
            Self::LargerThan(len) => {
                vec![
                    length,
                    jump(libc::BPF_JGT, frame(len), 0, 1),
                    accept,
                    reject,
                ]
            }
            Self::AsLargeAs(len) => {
                vec![
                    length,
                    jump(libc::BPF_JEQ, frame(len), 0, 1),
                    accept,
                    reject,
                ]
            }
            Self::Fragment => vec![
                load(libc::BPF_H, ETH - 2),
                jump(libc::BPF_JEQ, 0x0800, 0, 2),
                // More fragments, or an offset.
                load(libc::BPF_H, ETH + 6),
                jump(libc::BPF_JSET, 0x3fff, 3, 4),
                jump(libc::BPF_JEQ, 0x86dd, 0, 3),
                // The next header is the fragment header.
                load(libc::BPF_B, ETH + 6),
                jump(libc::BPF_JEQ, 44, 0, 1),
                accept,
                reject,
            ],
            Self::ToUdpPort(port) => vec![
                load(libc::BPF_H, ETH - 2),
                jump(libc::BPF_JEQ, 0x0800, 0, 4),
                load(libc::BPF_B, ETH + 9),
                jump(libc::BPF_JEQ, UDP, 0, 8),
                load(libc::BPF_H, ETH + 20 + 2),
                jump(libc::BPF_JEQ, port.into(), 5, 6),
                jump(libc::BPF_JEQ, 0x86dd, 0, 5),
                load(libc::BPF_B, ETH + 6),
                jump(libc::BPF_JEQ, UDP, 0, 3),
                load(libc::BPF_H, ETH + 40 + 2),
                jump(libc::BPF_JEQ, port.into(), 0, 1),
                accept,
                reject,
            ],
        }
    }
}
