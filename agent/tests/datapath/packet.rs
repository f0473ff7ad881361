//! Packets, made and judged by their own code: nothing here is shared with the programs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;
pub const SCTP: u8 = 132;
pub const UDPLITE: u8 = 136;

/// IPv6's extension headers.
pub const HOP_BY_HOP: u8 = 0;
pub const ROUTING: u8 = 43;
pub const FRAGMENT: u8 = 44;
pub const AUTH: u8 = 51;
pub const DEST_OPTIONS: u8 = 60;

pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;
pub const FIN: u8 = 0x01;

pub const IP4: u16 = 0x0800;
pub const ARP: u16 = 0x0806;
pub const IP6: u16 = 0x86dd;

/// Adds up 16-bit words in one's complement.
pub fn sum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub fn pseudo_header(src: IpAddr, dst: IpAddr, proto: u8, len: usize) -> Vec<u8> {
    let mut header = Vec::new();
    for address in [src, dst] {
        match address {
            IpAddr::V4(a) => header.extend(a.octets()),
            IpAddr::V6(a) => header.extend(a.octets()),
        }
    }
    header.extend((len as u32).to_be_bytes());
    header.extend([0, 0, 0, proto]);
    header
}

pub fn eth(dst: [u8; 6], src: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    [&dst[..], &src, &kind.to_be_bytes(), payload].concat()
}

/// An IP packet of either family, with fields that tests like to change.
#[derive(Clone, Debug)]
pub struct Ip {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub proto: u8,
    pub ttl: u8,
    /// What the fragments of a packet have in common; of IPv4 the lower half.
    pub id: u32,
    /// IPv4: flags and offset. IPv6: a fragment header with this field, if not zero.
    pub fragment: u16,
    /// IPv4 options, or a destination options header, of a multiple of four or eight bytes.
    pub options: Vec<u8>,
    /// IPv6: extension headers in front of those, each with its number and of a multiple of eight bytes. The first two, which
    /// say what follows and how long it is, are made here.
    pub extensions: Vec<(u8, Vec<u8>)>,
    pub payload: Vec<u8>,
}

impl Ip {
    pub fn bytes(&self) -> Vec<u8> {
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => self.v4(src, dst),
            (IpAddr::V6(src), IpAddr::V6(dst)) => self.v6(src, dst),
            _ => panic!("two families"),
        }
    }

    fn v4(&self, src: Ipv4Addr, dst: Ipv4Addr) -> Vec<u8> {
        let header_len = 20 + self.options.len();
        let mut header = vec![0x40 | (header_len / 4) as u8, 0];
        header.extend(((header_len + self.payload.len()) as u16).to_be_bytes());
        header.extend((self.id as u16).to_be_bytes());
        header.extend(self.fragment.to_be_bytes());
        header.extend([self.ttl, self.proto, 0, 0]);
        header.extend(src.octets());
        header.extend(dst.octets());
        header.extend(&self.options);
        let checksum = !sum(&[&header]);
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        [header, self.payload.clone()].concat()
    }

    fn v6(&self, src: Ipv6Addr, dst: Ipv6Addr) -> Vec<u8> {
        let mut extensions = Vec::new();
        let mut next = self.proto;
        if self.fragment != 0 {
            let [a, b] = self.fragment.to_be_bytes();
            let header = [&[next, 0, a, b], &self.id.to_be_bytes()[..]];
            extensions = [header.concat(), extensions].concat();
            next = 44;
        }
        if !self.options.is_empty() {
            let mut header = self.options.clone();
            header[0] = next;
            header[1] = (header.len() / 8 - 1) as u8;
            extensions = [header, extensions].concat();
            next = 60;
        }
        for (number, header) in self.extensions.iter().rev() {
            let len = match *number {
                // In words (RFC 4302 §2.2).
                AUTH => header.len() / 4 - 2,
                // None: it is reserved (RFC 8200 §4.5).
                FRAGMENT => 0,
                _ => header.len() / 8 - 1,
            };
            let start = [next, len as u8];
            extensions = [&start, &header[2..], &extensions].concat();
            next = *number;
        }
        let mut header = vec![0x60, 0, 0, 0];
        header.extend(((extensions.len() + self.payload.len()) as u16).to_be_bytes());
        header.extend([next, self.ttl]);
        header.extend(src.octets());
        header.extend(dst.octets());
        [header, extensions, self.payload.clone()].concat()
    }

    pub fn kind(&self) -> u16 {
        if self.src.is_ipv4() { IP4 } else { IP6 }
    }
}

fn ip(src: IpAddr, dst: IpAddr, proto: u8, payload: Vec<u8>) -> Ip {
    Ip {
        src,
        dst,
        proto,
        ttl: 64,
        id: 0x0102_1234,
        fragment: 0,
        options: Vec::new(),
        extensions: Vec::new(),
        payload,
    }
}

/// With another payload, of whose protocol it is, and a checksum over it.
pub fn with_payload(ip: Ip, payload: Vec<u8>) -> Ip {
    let offset = match ip.proto {
        TCP => 16,
        UDP | UDPLITE => 6,
        _ => 2,
    };
    let mut ip = Ip { payload, ..ip };
    ip.payload[offset..offset + 2].fill(0);
    with_checksum(ip, offset)
}

fn with_checksum(ip: Ip, offset: usize) -> Ip {
    let mut ip = ip;
    let pseudo = match (ip.proto, ip.src) {
        (ICMP, IpAddr::V4(_)) => Vec::new(),
        _ => pseudo_header(ip.src, ip.dst, ip.proto, ip.payload.len()),
    };
    let checksum = match !sum(&[&pseudo, covered(ip.proto, &ip.payload)]) {
        0 if matches!(ip.proto, UDP | UDPLITE) => 0xffff,
        checksum => checksum,
    };
    ip.payload[offset..offset + 2].copy_from_slice(&checksum.to_be_bytes());
    ip
}

/// What of a packet its checksum is over: of UDP-Lite's so much as it says, or all if that is zero (RFC 3828 §3.1).
fn covered(proto: u8, l4: &[u8]) -> &[u8] {
    match (proto, u16::from_be_bytes([l4[4], l4[5]])) {
        (UDPLITE, 1..) => &l4[..usize::from(u16::from_be_bytes([l4[4], l4[5]]))],
        _ => l4,
    }
}

pub fn tcp(src: (IpAddr, u16), dst: (IpAddr, u16), flags: u8, data: &[u8]) -> Ip {
    let mut bytes = Vec::new();
    bytes.extend(src.1.to_be_bytes());
    bytes.extend(dst.1.to_be_bytes());
    bytes.extend([NUMBER.to_be_bytes(); 2].concat());
    bytes.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    bytes.extend(data);
    with_checksum(ip(src.0, dst.0, TCP, bytes), 16)
}

/// The sequence number of TCP packets made here, and what they acknowledge: each is what the other end expects.
pub const NUMBER: u32 = 0x0102_0304;

/// A segment with other numbers.
pub fn with_numbers(ip: Ip, sequence: u32, acknowledged: u32) -> Ip {
    let mut payload = ip.payload.clone();
    payload[4..8].copy_from_slice(&sequence.to_be_bytes());
    payload[8..12].copy_from_slice(&acknowledged.to_be_bytes());
    with_payload(ip, payload)
}

/// Without data, with options, which end with zeros up to the next word.
pub fn tcp_with(src: (IpAddr, u16), dst: (IpAddr, u16), flags: u8, options: &[u8]) -> Ip {
    let mut ip = tcp(src, dst, flags, options);
    ip.payload.resize(20 + options.len().next_multiple_of(4), 0);
    ip.payload[12] = (ip.payload.len() as u8 / 4) << 4;
    ip.payload[16..18].fill(0);
    with_checksum(ip, 16)
}

pub fn udp(src: (IpAddr, u16), dst: (IpAddr, u16), data: &[u8]) -> Ip {
    let mut bytes = Vec::new();
    bytes.extend(src.1.to_be_bytes());
    bytes.extend(dst.1.to_be_bytes());
    bytes.extend((8 + data.len() as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(data);
    with_checksum(ip(src.0, dst.0, UDP, bytes), 6)
}

/// An ICMP or ICMPv6 message; the two bytes after the checksum are an echo message's id.
pub fn icmp(src: IpAddr, dst: IpAddr, kind: u8, id: u16) -> Ip {
    let [a, b] = id.to_be_bytes();
    let proto = if src.is_ipv4() { ICMP } else { ICMPV6 };
    let bytes = vec![kind, 0, 0, 0, a, b, 0, 1, b'p', b'i', b'n', b'g', b'!'];
    with_checksum(ip(src, dst, proto, bytes), 2)
}

/// With a checksum over all of it.
pub fn udplite(src: (IpAddr, u16), dst: (IpAddr, u16), data: &[u8]) -> Ip {
    udplite_covering(src, dst, 0, data)
}

/// With a checksum over so many bytes, or over all of them if that is zero.
pub fn udplite_covering(src: (IpAddr, u16), dst: (IpAddr, u16), coverage: u16, data: &[u8]) -> Ip {
    let mut bytes = Vec::new();
    bytes.extend(src.1.to_be_bytes());
    bytes.extend(dst.1.to_be_bytes());
    bytes.extend(coverage.to_be_bytes());
    bytes.extend([0; 2]);
    bytes.extend(data);
    with_checksum(ip(src.0, dst.0, UDPLITE, bytes), 6)
}

/// With one DATA chunk (RFC 9260 §3.3.1).
pub fn sctp(src: (IpAddr, u16), dst: (IpAddr, u16), data: &[u8]) -> Ip {
    let mut bytes = Vec::new();
    bytes.extend(src.1.to_be_bytes());
    bytes.extend(dst.1.to_be_bytes());
    bytes.extend([1, 2, 3, 4, 0, 0, 0, 0]);
    bytes.extend([0, 3]);
    bytes.extend((16 + data.len() as u16).to_be_bytes());
    bytes.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let checksum = sctp_checksum(&bytes);
    bytes[8..12].copy_from_slice(&checksum);
    ip(src.0, dst.0, SCTP, bytes)
}

/// That of a packet, whatever it says itself.
pub fn sctp_checksum(packet: &[u8]) -> [u8; 4] {
    let crc = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);
    let mut digest = crc.digest();
    digest.update(&packet[..8]);
    digest.update(&[0; 4]);
    digest.update(&packet[12..]);
    digest.finalize().to_le_bytes()
}

/// ICMP errors of either family.
#[derive(Clone, Copy, Debug)]
pub enum IcmpError {
    TooBig(u16),
    TimeExceeded,
    NoPort,
}

pub fn icmp_error(src: IpAddr, dst: IpAddr, error: IcmpError, quoted: &[u8]) -> Ip {
    let (proto, kind, code) = match (src.is_ipv4(), error) {
        (true, IcmpError::TooBig(_)) => (ICMP, 3, 4),
        (true, IcmpError::TimeExceeded) => (ICMP, 11, 0),
        (true, IcmpError::NoPort) => (ICMP, 3, 3),
        (false, IcmpError::TooBig(_)) => (ICMPV6, 2, 0),
        (false, IcmpError::TimeExceeded) => (ICMPV6, 3, 0),
        (false, IcmpError::NoPort) => (ICMPV6, 1, 4),
    };
    let mtu = match error {
        IcmpError::TooBig(mtu) => mtu,
        _ => 0,
    };
    let mut bytes = vec![kind, code, 0, 0, 0, 0];
    bytes.extend(mtu.to_be_bytes());
    bytes.extend(quoted);
    with_checksum(ip(src, dst, proto, bytes), 2)
}

pub struct SeenError {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub quoted: Vec<u8>,
}

/// Takes an ICMP error apart, insisting that its checksums are right.
pub fn see_error(frame: &[u8]) -> SeenError {
    let seen = see(frame);
    SeenError {
        src: seen.src,
        dst: seen.dst,
        quoted: seen.data,
    }
}

/// A datagram of 32 bytes in two.
pub fn in_parts(whole: Ip) -> [Ip; 2] {
    let (first, later) = match whole.src.is_ipv4() {
        true => (0x2000, 0x0002),
        false => (0x0001, 0x0010),
    };
    let part = |fragment, bytes: &[u8]| Ip {
        fragment,
        payload: bytes.to_vec(),
        ..whole.clone()
    };
    [
        part(first, &whole.payload[..16]),
        part(later, &whole.payload[16..]),
    ]
}

/// A packet with 24 bytes more in two: its header, and what is in front of the last bytes, in the first.
pub fn in_two(whole: Ip) -> [Ip; 2] {
    let payload = [&whole.payload[..], &[b'x'; 24]].concat();
    let mut whole = with_payload(whole, payload);
    if whole.proto == UDP {
        let len = whole.payload.len() as u16;
        whole.payload[4..6].copy_from_slice(&len.to_be_bytes());
        let payload = whole.payload.clone();
        whole = with_payload(whole, payload);
    }
    let (first, later) = match whole.src.is_ipv4() {
        true => (0x2000, 0x0003),
        false => (0x0001, 0x0018),
    };
    let part = |fragment, bytes: &[u8]| Ip {
        fragment,
        payload: bytes.to_vec(),
        ..whole.clone()
    };
    [
        part(first, &whole.payload[..24]),
        part(later, &whole.payload[24..]),
    ]
}

/// In parts of so many bytes, a multiple of eight.
pub fn in_parts_of(whole: &Ip, len: usize, id: u32) -> Vec<Ip> {
    let parts = whole.payload.chunks(len).enumerate();
    let part = |(number, bytes): (usize, &[u8])| {
        let offset = number * len;
        let more = u16::from(offset + bytes.len() < whole.payload.len());
        let offset = offset as u16;
        Ip {
            id,
            fragment: match whole.src.is_ipv4() {
                true => (more << 13) | (offset / 8),
                false => offset | more,
            },
            payload: bytes.to_vec(),
            ..whole.clone()
        }
    };
    parts.map(part).collect()
}

pub fn other(src: IpAddr, dst: IpAddr, proto: u8) -> Ip {
    ip(src, dst, proto, vec![0x55; 24])
}

pub fn arp(sender_mac: [u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut bytes = vec![0, 1, 8, 0, 6, 4, 0, 1];
    bytes.extend(sender_mac);
    bytes.extend(sender.octets());
    bytes.extend([0; 6]);
    bytes.extend(target.octets());
    bytes
}

/// A frame, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub dst_mac: [u8; 6],
    pub src_mac: [u8; 6],
    pub src: IpAddr,
    pub dst: IpAddr,
    pub ttl: u8,
    pub proto: u8,
    /// Ports, or the echo id twice.
    pub ports: (u16, u16),
    pub data: Vec<u8>,
}

/// What is behind IPv6's extension headers, if it is a whole packet.
fn behind_extensions(next: u8, bytes: &[u8]) -> (u8, &[u8]) {
    match next {
        HOP_BY_HOP | ROUTING | DEST_OPTIONS => {
            behind_extensions(bytes[0], &bytes[8 * (usize::from(bytes[1]) + 1)..])
        }
        FRAGMENT => {
            assert_eq!([bytes[2], bytes[3] & !0x06], [0, 0], "a part of a packet");
            behind_extensions(bytes[0], &bytes[8..])
        }
        _ => (next, bytes),
    }
}

/// Takes a frame apart, insisting that every checksum is right.
pub fn see(frame: &[u8]) -> Seen {
    let ip = &frame[14..];
    let (src, dst, ttl, proto, l4): (IpAddr, IpAddr, u8, u8, &[u8]) = if ip[0] >> 4 == 4 {
        let header_len = usize::from(ip[0] & 0xf) * 4;
        assert_eq!(sum(&[&ip[..header_len]]), 0xffff, "IPv4 checksum");
        let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        let address = |at: usize| <[u8; 4]>::try_from(&ip[at..at + 4]).unwrap().into();
        (
            address(12),
            address(16),
            ip[8],
            ip[9],
            &ip[header_len..total],
        )
    } else {
        let address = |at: usize| <[u8; 16]>::try_from(&ip[at..at + 16]).unwrap().into();
        let payload = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
        let (proto, l4) = behind_extensions(ip[6], &ip[40..40 + payload]);
        (address(8), address(24), ip[7], proto, l4)
    };
    let word = |at: usize| u16::from_be_bytes([l4[at], l4[at + 1]]);
    if proto == UDP {
        assert_eq!(usize::from(word(4)), l4.len(), "UDP length");
    }
    let no_checksum = proto == UDP && word(6) == 0;
    if proto == SCTP {
        assert_eq!(l4[8..12], sctp_checksum(l4), "SCTP checksum");
    } else if !no_checksum {
        let pseudo = match proto {
            ICMP => Vec::new(),
            _ => pseudo_header(src, dst, proto, l4.len()),
        };
        assert_eq!(
            sum(&[&pseudo, covered(proto, l4)]),
            0xffff,
            "transport checksum"
        );
        assert!(
            proto != UDPLITE || word(6) != 0,
            "none is no checksum of UDP-Lite"
        );
    }
    let (ports, data) = match proto {
        TCP => ((word(0), word(2)), &l4[usize::from(l4[12] >> 4) * 4..]),
        UDP | UDPLITE => ((word(0), word(2)), &l4[8..]),
        SCTP => ((word(0), word(2)), &l4[12..]),
        _ => ((word(4), word(4)), &l4[8..]),
    };
    Seen {
        dst_mac: frame[..6].try_into().unwrap(),
        src_mac: frame[6..12].try_into().unwrap(),
        src,
        dst,
        ttl,
        proto,
        ports,
        data: data.to_vec(),
    }
}
