//! The model's packets: of every protocol that is masqueraded, whole and in parts.

use super::*;

pub const IPIP: u8 = 4;
pub const IP6_IN_IP: u8 = 41;
pub const GRE: u8 = 47;
pub const ESP: u8 = 50;

/// Parts of a packet that is sent in parts.
pub const PARTS: usize = 3;
/// Bytes of each but the last: what TCP's header needs, and no more.
const PART: usize = 24;

/// One end of a packet.
pub type At = (IpAddr, u16);

/// Whether several flows between two addresses can be told apart.
pub fn has_ports(proto: u8) -> bool {
    !matches!(proto, IPIP | IP6_IN_IP | GRE | ESP)
}

/// Whether the kernel knows of a protocol's ports which of its sockets have them towards whom.
pub fn has_sockets(proto: u8) -> bool {
    matches!(proto, TCP | UDP)
}

/// A packet, but for its ends.
#[derive(Clone, Copy, Debug)]
pub struct Making {
    pub proto: u8,
    /// Of TCP. UDP-Lite has none: there they say how much the checksum covers.
    pub flags: u8,
    /// From who began the connection.
    pub is_request: bool,
    /// Of one that is sent in parts what they have in common.
    pub id: Option<u32>,
}

impl Making {
    pub fn request(proto: u8, flags: u8) -> Self {
        Self {
            proto,
            flags,
            is_request: true,
            id: None,
        }
    }

    pub fn answer(proto: u8, flags: u8) -> Self {
        Self {
            is_request: false,
            ..Self::request(proto, flags)
        }
    }

    pub fn in_parts(self, id: u32) -> Self {
        Self {
            id: Some(id),
            ..self
        }
    }

    fn whole(self, src: At, dst: At) -> Ip {
        let data: &[u8] = match self.id {
            None => b"some data",
            Some(_) => b"more data than two parts have any room for..",
        };
        match self.proto {
            TCP => packet::tcp(src, dst, self.flags, data),
            UDP => packet::udp(src, dst, data),
            UDPLITE => packet::udplite_covering(src, dst, self.coverage(), data),
            SCTP => packet::sctp(src, dst, data),
            ICMP | ICMPV6 => self.echo(src, dst, data),
            proto => Ip {
                payload: [&[0x55; 8], data].concat(),
                ..packet::other(src.0, dst.0, proto)
            },
        }
    }

    fn coverage(self) -> u16 {
        match self.flags {
            SYN => 0,
            ACK => 8,
            _ => 12,
        }
    }

    fn echo(self, src: At, dst: At, data: &[u8]) -> Ip {
        // The id is the port of who asks.
        let (kind, id) = match (self.proto, self.is_request) {
            (ICMP, true) => (8, src.1),
            (ICMP, false) => (0, dst.1),
            (_, true) => (128, src.1),
            (_, false) => (129, dst.1),
        };
        let ip = packet::icmp(src.0, dst.0, kind, id);
        let payload = [&ip.payload[..8], data].concat();
        packet::with_payload(ip, payload)
    }

    /// All of it, or its parts.
    pub fn parts(self, src: At, dst: At) -> Vec<Ip> {
        let whole = self.whole(src, dst);
        match self.id {
            None => vec![whole],
            Some(id) => packet::in_parts_of(&whole, PART, id),
        }
    }

    /// All of it, or the first of its parts.
    pub fn first(self, src: At, dst: At) -> Ip {
        self.parts(src, dst).swap_remove(0)
    }

    /// The port of who has sent a frame with all of it or its first part.
    pub fn source_port(self, frame: &[u8]) -> u16 {
        let ip = &frame[14..];
        let at = match (ip[0] >> 4, self.id) {
            (4, _) => 20,
            (_, None) => 40,
            (_, Some(_)) => 48,
        };
        let offset = match self.proto {
            ICMP | ICMPV6 => 4,
            proto if has_ports(proto) => 0,
            _ => return 0,
        };
        u16::from_be_bytes([ip[at + offset], ip[at + offset + 1]])
    }

    /// Whether it cannot be given another port: how long the packet is that SCTP's checksum is over, its first part does
    /// not say.
    pub fn keeps_port(self) -> bool {
        self.proto == SCTP && self.id.is_some()
    }
}
