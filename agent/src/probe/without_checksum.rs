//! Echo requests inside a tunnel over IPv6, in UDP without a checksum (RFC 6935): what programs send pods' packets in
//! (`overlay/outer.rs` of theirs). The peer's kernel answers, by its tunnel as always.
//!
//! ```text
//! UDP's payload, from a socket of this process:
//!  0 VXLAN (RFC 7348 section 5): flags, 0 0 0, VNI, 0
//!  8 Ethernet
//! 22 IPv4 or IPv6 without options
//!    ICMP, as a ping socket would have sent it
//! ```

use super::{echo::NotSent, wire};
use nix::errno::Errno;
use sinabro_common::names;
use socket2::{Domain, SockAddr, SockFilter, Socket, Type};
use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::AsRawFd as _,
};

/// Of `linux/udp.h`: sends without a checksum.
const UDP_NO_CHECK6_TX: libc::c_int = 101;
/// Of the VXLAN header: there is a VNI.
const HAS_VNI: u8 = 0x08;
const TTL: u8 = 64;

/// How packets are put into tunnels.
#[derive(Clone, Copy, Debug)]
pub struct Tunnel {
    pub vni: u32,
    pub port: u16,
}

#[derive(Debug)]
pub struct WithoutChecksum {
    socket: Socket,
    source: Ipv6Addr,
}

impl WithoutChecksum {
    /// A socket that sends from `source`, this node's end of the tunnels.
    pub fn open(source: Ipv6Addr) -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV6, Type::DGRAM.nonblocking().cloexec(), None)?;
        let on: libc::c_int = 1;
        // SAFETY: the option takes an int, whose address and size are given.
        Errno::result(unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_UDP,
                UDP_NO_CHECK6_TX,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        })?;
        // Nobody reads it, so nothing is kept of what comes (BPF_RET | BPF_K: no byte of any).
        socket.attach_filter(&[SockFilter::new(0x06, 0, 0, 0)])?;
        socket.bind(&SocketAddr::new(source.into(), 0).into())?;
        Ok(Self { socket, source })
    }

    pub fn source(&self) -> Ipv6Addr {
        self.source
    }

    /// Sends `icmp`, which has its identifier, from one address inside the overlay to another, in the tunnel to a node.
    pub fn ask(
        &self,
        node: Ipv6Addr,
        tunnel: Tunnel,
        (from, to): (IpAddr, IpAddr),
        icmp: Vec<u8>,
    ) -> Result<(), NotSent> {
        let macs = [IpAddr::from(node), self.source.into()].map(names::vxlan_mac);
        let packet = packet(tunnel.vni, macs, (from, to), icmp);
        let to = SockAddr::from(SocketAddr::new(node.into(), tunnel.port));
        match self.socket.send_to(&packet, &to) {
            Ok(_) => Ok(()),
            Err(error) => Err(NotSent::of(error)),
        }
    }
}

/// What is in UDP; the addresses are of one family.
fn packet(
    vni: u32,
    [to_mac, from_mac]: [[u8; 6]; 2],
    (from, to): (IpAddr, IpAddr),
    mut icmp: Vec<u8>,
) -> Vec<u8> {
    let mut packet = vec![HAS_VNI, 0, 0, 0];
    packet.extend_from_slice(&(vni << 8).to_be_bytes());
    packet.extend_from_slice(&to_mac);
    packet.extend_from_slice(&from_mac);
    let length = icmp.len() as u16;
    match (from, to) {
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            const ICMPV6: u8 = libc::IPPROTO_ICMPV6 as u8;
            let addresses = [from.octets(), to.octets()].concat();
            // RFC 8200 section 8.1: the pseudo-header's length and protocol.
            let pseudo = u32::from(length) + u32::from(ICMPV6);
            let sum = checksum(&[&addresses, &pseudo.to_be_bytes(), &icmp]);
            icmp[wire::CHECKSUM].copy_from_slice(&sum);
            packet.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
            packet.extend_from_slice(&length.to_be_bytes());
            packet.extend_from_slice(&[ICMPV6, TTL]);
            packet.extend_from_slice(&addresses);
        }
        (from, to) => {
            const ICMP: u8 = libc::IPPROTO_ICMP as u8;
            let v4 = |address| match address {
                IpAddr::V4(address) => address.octets(),
                IpAddr::V6(_) => [0; 4],
            };
            let sum = checksum(&[&icmp]);
            icmp[wire::CHECKSUM].copy_from_slice(&sum);
            let [high, low] = (20 + length).to_be_bytes();
            // RFC 791 section 3.1: version and length, service, total length, identification, DF, TTL, protocol, checksum.
            let mut header = vec![0x45, 0, high, low, 0, 0, 0x40, 0, TTL, ICMP, 0, 0];
            header.extend_from_slice(&v4(from));
            header.extend_from_slice(&v4(to));
            let sum = checksum(&[&header]);
            header[10..12].copy_from_slice(&sum);
            packet.extend_from_slice(&[0x08, 0x00]);
            packet.extend_from_slice(&header);
        }
    }
    packet.extend_from_slice(&icmp);
    packet
}

/// RFC 1071; each part has an even length.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 = words
        .map(|word| {
            u32::from(u16::from_be_bytes([
                word[0],
                word.get(1).copied().unwrap_or(0),
            ]))
        })
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    (!(folded as u16)).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::wire::Nonce;
    use sinabro_lab::traffic::packet as independent;
    use sinabro_netlink::{Conn, link, netns::in_fresh};
    use std::net::UdpSocket;

    #[test]
    fn what_comes_to_the_socket_is_not_kept() {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let lo = conn.link_by_name("lo").unwrap().index;
            conn.execute(link::set_up(lo)).unwrap();
            let asks = WithoutChecksum::open(Ipv6Addr::LOCALHOST).unwrap();
            let to = asks.socket.local_addr().unwrap().as_socket().unwrap();
            let [from, other] = [(); 2].map(|()| UdpSocket::bind("[::1]:0").unwrap());
            from.send_to(b"to be read by nobody", to).unwrap();
            from.send_to(b"x", other.local_addr().unwrap()).unwrap();
            assert_eq!(other.recv(&mut [0; 1]).unwrap(), 1);
            let kept = asks.socket.peek(&mut [std::mem::MaybeUninit::uninit()]);
            assert_eq!(kept.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        });
    }

    #[test]
    fn a_packet_has_the_checksums_that_another_implementation_finds() {
        let nonce = Nonce::random();
        for (from, to) in [("10.244.1.1", "10.244.2.1"), ("fd00:1::1", "fd00:2::1")] {
            let [from, to]: [IpAddr; 2] = [from, to].map(|address| address.parse().unwrap());
            let icmp = wire::request_of(to, nonce, 7, 0xabcd);
            let packet = packet(0x123456, [[1; 6], [2; 6]], (from, to), icmp.clone());
            assert_eq!(packet[..8], [8, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
            assert_eq!(packet[8..20], [[1; 6], [2; 6]].concat());
            let inner = &packet[22..];
            let (header, rest) = inner.split_at(if to.is_ipv4() { 20 } else { 40 });
            let total = match to {
                IpAddr::V4(_) => u16::from_be_bytes([header[2], header[3]]) - 20,
                IpAddr::V6(_) => u16::from_be_bytes([header[4], header[5]]),
            };
            assert_eq!(usize::from(total), rest.len());
            // A sum over what has its checksum is zero.
            let sum = match to {
                IpAddr::V4(_) => {
                    assert_eq!(independent::checksum(&[header]), 0);
                    independent::checksum(&[rest])
                }
                IpAddr::V6(_) => {
                    let pseudo = (u32::from(total) + 58).to_be_bytes();
                    independent::checksum(&[&header[8..], &pseudo, rest])
                }
            };
            assert_eq!(sum, 0, "{to}");
            assert_eq!(rest[4..6], [0xab, 0xcd]);
            assert_eq!(rest[8..], icmp[8..]);
        }
    }
}
