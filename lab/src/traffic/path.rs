//! A way that traffic takes: from one place to an address of another, directly or through
//! something that translates.

use super::{any, bind};
use crate::place::Place;
use anyhow::Result;
use nix::sys::socket::{setsockopt, sockopt};
use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Of who receives datagrams: seconds of them, so that few are lost while it waits for its processor.
const BUFFER: usize = 4 << 20;

#[derive(Clone, Debug)]
pub struct Path {
    /// As in reports: "same node, IPv4".
    pub name: String,
    pub from: Place,
    pub to: Place,
    /// Of the server.
    pub address: IpAddr,
    /// Where clients ask instead, and the port of the server that it leads to.
    through: Option<(SocketAddr, u16)>,
    /// Bytes of the datagrams that come back, if any do.
    echoes: Option<usize>,
}

impl Path {
    pub fn new(name: &str, from: &Place, to: &Place, address: IpAddr) -> Self {
        Self {
            name: name.into(),
            from: from.clone(),
            to: to.clone(),
            address,
            through: None,
            echoes: None,
        }
    }

    /// The meter's datagrams have so many bytes, and the server sends each of them back.
    pub fn with_echoes(mut self, size: usize) -> Self {
        self.echoes = Some(size);
        self
    }

    pub fn echoes(&self) -> Option<usize> {
        self.echoes
    }

    /// Clients ask `target`, which something on the way translates to a port of the server.
    pub fn through(mut self, target: SocketAddr, port: u16) -> Self {
        self.through = Some((target, port));
        self
    }

    /// The same way, both of its ports one higher.
    pub fn next_port(&self) -> Self {
        let next = |(target, port): (SocketAddr, u16)| {
            (SocketAddr::new(target.ip(), target.port() + 1), port + 1)
        };
        Self {
            through: self.through.map(next),
            ..self.clone()
        }
    }

    pub fn is_translated(&self) -> bool {
        self.through.is_some()
    }

    /// What a server binds to: a free port, unless the translation demands one.
    pub fn listen(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.through.map_or(0, |(_, port)| port))
    }

    /// Where clients find a server that was bound.
    pub fn target(&self, bound: SocketAddr) -> SocketAddr {
        self.through.map_or(bound, |(target, _)| target)
    }

    /// A socket that sends datagrams by it, and the one that they are for.
    pub fn datagrams(&self) -> Result<(UdpSocket, UdpSocket)> {
        let to = self.to.run(|| {
            let to = bind::udp(self.listen())?;
            setsockopt(&to, sockopt::RcvBufForce, &BUFFER)?;
            Ok(to)
        })?;
        let target = self.target(to.local_addr()?);
        let from = self.from.run(|| {
            let from = UdpSocket::bind((any(target.ip()), 0))?;
            from.connect(target)?;
            Ok(from)
        })?;
        Ok((from, to))
    }
}
