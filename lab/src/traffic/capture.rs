//! What passes an interface, as tcpdump sees it: whole frames, and in which direction each went.

use super::{
    packet::{self, Interface},
    readable,
};
use crate::place::Place;
use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{LinkAddr, recvfrom, setsockopt, sockopt};
use socket2::Socket;
use std::{os::fd::AsRawFd as _, time::Instant};

const ETH_P_ALL: u16 = 0x0003;
const BUFFER: usize = 8 << 20;
/// More than any frame, also one that is cut later.
const LONGEST: usize = 1 << 17;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    In,
    Out,
}

pub struct Capture(Socket);

impl Capture {
    /// Hears from now on what comes and goes.
    pub fn start(place: &Place, interface: Interface) -> Result<Self> {
        let socket = packet::socket(place, interface, ETH_P_ALL)?;
        setsockopt(&socket, sockopt::RcvBufForce, &BUFFER)
            .context("cannot make room for frames")?;
        Ok(Self(socket))
    }

    /// All that has come and gone, Ethernet header included.
    ///
    /// # Errors
    /// If one of them is missing, for want of room.
    pub fn frames(&self) -> Result<Vec<(Direction, Vec<u8>)>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; LONGEST];
        while readable(&self.0, Instant::now())? {
            let (len, from) = recvfrom::<LinkAddr>(self.0.as_raw_fd(), &mut buffer)?;
            let from = from.context("a frame of no link")?;
            let direction = match from.pkttype() == libc::PACKET_OUTGOING {
                true => Direction::Out,
                false => Direction::In,
            };
            frames.push((direction, buffer[..len].to_vec()));
        }
        let [_, missing] = packet::statistics(&self.0)?;
        ensure!(missing == 0, "{missing} frames found no room");
        Ok(frames)
    }
}
