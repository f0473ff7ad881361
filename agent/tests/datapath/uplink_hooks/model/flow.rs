//! What the model knows of a flow.

use super::*;
use socket2::Socket;

/// Protocol, pod (or the node), its port, somebody outside, their port.
pub type Key = (u8, IpAddr, u16, IpAddr, u16);

/// What one end of a TCP connection has sent.
#[derive(Clone, Copy, Default)]
pub struct Sent {
    pub any: bool,
    pub syn: bool,
    pub ack: bool,
    pub fin: bool,
    pub rst: bool,
}

impl Sent {
    pub fn add(&mut self, other: &mut Self, flags: u8) {
        self.any = true;
        let has = |flag| flags & flag != 0;
        match has(SYN) {
            true => self.syn = true,
            false => {
                self.ack |= has(ACK);
                self.fin |= has(FIN);
                self.rst |= has(RST);
            }
        }
        // Who goes on has not taken the other's reset.
        other.rst &= has(RST);
    }
}

/// What is remembered on the way.
pub struct Record {
    /// Outside.
    pub port: u16,
    pub client: Sent,
    pub server: Sent,
}

impl Record {
    pub fn new(port: u16) -> Self {
        Self {
            port,
            client: Sent::default(),
            server: Sent::default(),
        }
    }

    pub fn is_closed(&self) -> bool {
        self.client.rst || self.server.rst || (self.client.fin && self.server.fin)
    }

    /// Whether it is there when nothing came for [`AWAY`] seconds.
    pub fn stays(&self, proto: u8) -> bool {
        let is_open = self.server.any && (self.client.ack || !self.server.syn);
        match proto {
            TCP => !self.is_closed() && (is_open || self.client.fin || self.server.fin),
            SCTP => self.server.any,
            _ => self.server.any && !has_ports(proto),
        }
    }
}

/// A pod's has a record. One of the host's has none where a socket says that it is there, unless somebody had its port
/// before.
#[derive(Default)]
pub struct Flow {
    pub record: Option<Record>,
    pub socket: Option<Socket>,
    /// The client's last whole packet, inside and outside.
    pub last: Option<(Vec<u8>, Vec<u8>)>,
}

impl Flow {
    pub fn is_closed(&self) -> bool {
        self.record.as_ref().is_some_and(Record::is_closed)
    }

    /// Nothing is remembered of it any more.
    pub fn forget(&mut self) {
        self.record = None;
        self.last = None;
    }

    /// Whether nobody knows of it.
    pub fn is_gone(&self) -> bool {
        self.record.is_none() && self.socket.is_none()
    }
}
