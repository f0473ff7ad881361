//! Frames made by hand, to say what a pod may not: another's address, another's MAC.

use crate::place::Place;
use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use socket2::{Domain, Protocol, SockFilter, Socket, Type};
use std::{
    net::{IpAddr, Ipv4Addr},
    os::fd::AsRawFd as _,
};

const ETH_IP4: [u8; 2] = [0x08, 0x00];
const ETH_ARP: [u8; 2] = [0x08, 0x06];
const ETH_IP6: [u8; 2] = [0x86, 0xdd];

/// An Ethernet interface as a place sees it.
#[derive(Clone, Copy, Debug)]
pub struct Interface {
    pub index: u32,
    pub mac: [u8; 6],
    pub mtu: usize,
}

/// Looks an interface up inside a place.
pub fn interface(place: &Place, name: &str) -> Result<Interface> {
    place
        .run(|| {
            let link = sinabro_netlink::Conn::new()?.link_by_name(name)?;
            Ok(Interface {
                index: link.index,
                mac: link.mac.context("it has no MAC address")?,
                mtu: link.mtu as usize,
            })
        })
        .with_context(|| format!("cannot look at {name} of {}", place.name()))
}

/// Where every [`Datagram`] comes from.
pub const SRC_PORT: u16 = 40_000;

/// A UDP datagram, every field of it chosen but the port that it comes from, [`SRC_PORT`].
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    pub src_mac: [u8; 6],
    pub dst_mac: [u8; 6],
    pub src: IpAddr,
    pub dst: IpAddr,
    pub dst_port: u16,
    pub payload: &'a [u8],
    /// Of IPv4: whether a router may cut it. IPv6 packets are never cut on the way.
    pub may_be_cut: bool,
}

impl Datagram<'_> {
    /// The whole frame, checksums right: what is dropped is dropped for its addresses alone.
    pub fn frame(&self) -> Result<Vec<u8>> {
        let len = (8 + self.payload.len()) as u16;
        let mut udp = Vec::new();
        udp.extend_from_slice(&SRC_PORT.to_be_bytes());
        udp.extend_from_slice(&self.dst_port.to_be_bytes());
        udp.extend_from_slice(&len.to_be_bytes());
        udp.extend_from_slice(&[0, 0]);
        udp.extend_from_slice(self.payload);
        let macs = [self.dst_mac, self.src_mac];
        let mut frame = frame(macs, (self.src, self.dst), UDP, udp)?;
        if self.may_be_cut && self.src.is_ipv4() {
            let header = &mut frame[14..34];
            // Flags, and the checksum without them.
            header[6] = 0;
            header[10..12].fill(0);
            let sum = checksum(&[header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        Ok(frame)
    }
}

/// UDP and TCP (RFC 768, RFC 9293), and where each has its checksum.
const UDP: (u8, usize) = (17, 6);
pub(super) const TCP: (u8, usize) = (6, 16);

/// An Ethernet frame around the packet of a transport protocol, whose checksum is put in. Macs are as on
/// the wire: destination, source.
pub(super) fn frame(
    macs: [[u8; 6]; 2],
    (src, dst): (IpAddr, IpAddr),
    (protocol, sum_at): (u8, usize),
    mut body: Vec<u8>,
) -> Result<Vec<u8>> {
    let sum = match transport_checksum(src, dst, protocol, &body) {
        0 => 0xffff, // RFC 768: zero would mean "no checksum"; to TCP they are the same
        sum => sum,
    };
    body[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
    wrap(macs, (src, dst), protocol, &body)
}

/// The same of a packet that has its checksum.
fn wrap(
    macs: [[u8; 6]; 2],
    (src, dst): (IpAddr, IpAddr),
    protocol: u8,
    body: &[u8],
) -> Result<Vec<u8>> {
    let len = body.len() as u16;
    let (kind, header) = match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let mut header = vec![0x45, 0];
            header.extend_from_slice(&(20 + len).to_be_bytes());
            header.extend_from_slice(&[0, 1, 0x40, 0, 64, protocol, 0, 0]);
            header.extend_from_slice(&src.octets());
            header.extend_from_slice(&dst.octets());
            let sum = checksum(&[&header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            (ETH_IP4, header)
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend_from_slice(&len.to_be_bytes());
            header.extend_from_slice(&[protocol, 64]);
            header.extend_from_slice(&src.octets());
            header.extend_from_slice(&dst.octets());
            (ETH_IP6, header)
        }
        _ => bail!("{src} and {dst} are of different families"),
    };
    let [to, from] = macs;
    Ok([&to[..], &from, &kind, &header, body].concat())
}

/// A frame that says of a packet that its port is closed (RFC 792, RFC 4443 §3.1), whosever that was. Macs
/// are as on the wire: destination, source.
pub fn port_unreachable(
    macs: [[u8; 6]; 2],
    (src, dst): (IpAddr, IpAddr),
    packet: &[u8],
) -> Result<Vec<u8>> {
    let head = if src.is_ipv4() { [3, 3] } else { [1, 4] };
    // The IP header and eight bytes are what everybody quotes.
    let quoted = if src.is_ipv4() { 20 + 8 } else { 40 + 8 };
    let quoted = packet.get(..quoted).context("too short to be quoted")?;
    let mut body = [&head[..], &[0; 6], quoted].concat();
    let (protocol, sum) = match src {
        IpAddr::V4(_) => (1, checksum(&[&body])),
        IpAddr::V6(_) => (58, transport_checksum(src, dst, 58, &body)),
    };
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    wrap(macs, (src, dst), protocol, &body)
}

/// A frame that answers an echo request (RFC 792, RFC 4443 §4.2), of which everything behind the IP header is given. Macs are
/// as on the wire: destination, source.
pub fn echo_reply(
    macs: [[u8; 6]; 2],
    (src, dst): (IpAddr, IpAddr),
    request: &[u8],
) -> Result<Vec<u8>> {
    let rest = request.get(4..).context("too short for an echo request")?;
    let kind = if src.is_ipv4() { 0 } else { 129 };
    let mut body = [&[kind, 0, 0, 0], rest].concat();
    let (protocol, sum) = match src {
        IpAddr::V4(_) => (1, checksum(&[&body])),
        IpAddr::V6(_) => (58, transport_checksum(src, dst, 58, &body)),
    };
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    wrap(macs, (src, dst), protocol, &body)
}

/// The checksum of a transport protocol's packet and the pseudo header before it (RFC 9293 §3.1,
/// RFC 8200 §8.1). Zero if the packet has its own, and that is right.
pub(super) fn transport_checksum(src: IpAddr, dst: IpAddr, protocol: u8, body: &[u8]) -> u16 {
    let addresses = match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => [src.octets(), dst.octets()].concat(),
        (IpAddr::V6(src), IpAddr::V6(dst)) => [src.octets(), dst.octets()].concat(),
        // No packet has such a pair.
        _ => Vec::new(),
    };
    let len = (body.len() as u16).to_be_bytes();
    checksum(&[&addresses, &[0, protocol], &len, body])
}

/// A gratuitous ARP announcement (RFC 5227 §3): "`address` is at `mac`".
pub fn arp_claim(mac: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &mac, &ETH_ARP].concat();
    frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend_from_slice(&mac);
    frame.extend_from_slice(&address.octets());
    frame.extend_from_slice(&[0; 6]);
    frame.extend_from_slice(&address.octets());
    frame
}

/// A socket for whole frames of an interface (packet(7)): it hears what comes and goes of a
/// protocol, an EtherType, or nothing if that is zero.
pub fn socket(place: &Place, interface: Interface, protocol: u16) -> Result<Socket> {
    filtered(place, interface, protocol, &[])
}

/// The same, of what a filter lets pass.
pub(super) fn filtered(
    place: &Place,
    interface: Interface,
    protocol: u16,
    filter: &[SockFilter],
) -> Result<Socket> {
    place.run(|| {
        // Of no protocol: it hears nothing before it is bound.
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))
            .context("cannot open a packet socket")?;
        if !filter.is_empty() {
            socket
                .attach_filter(filter)
                .context("cannot filter a packet socket")?;
        }
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: protocol.to_be(),
            sll_ifindex: interface.index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: the address is a sockaddr_ll of the size given.
        Errno::result(unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        })
        .context("cannot bind a packet socket")?;
        Ok(socket)
    })
}

/// How many packets a packet socket was to hear since the last time that this was asked, and how many of them found no room.
pub(super) fn statistics(socket: &Socket) -> Result<[u32; 2]> {
    let mut stats = [0_u32; 2];
    let mut len = size_of_val(&stats) as libc::socklen_t;
    // SAFETY: the option gives a tpacket_stats, two numbers, for which there is room.
    Errno::result(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            stats.as_mut_ptr().cast(),
            &raw mut len,
        )
    })
    .context("cannot ask a packet socket")?;
    Ok(stats)
}

/// Puts frames on an interface as they are.
pub fn inject(place: &Place, interface: Interface, frames: &[Vec<u8>]) -> Result<()> {
    let socket = socket(place, interface, 0)?;
    for frame in frames {
        socket.send(frame).context("cannot inject a frame")?;
    }
    Ok(())
}

/// The Internet checksum (RFC 1071) over parts of even length, the last of any.
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u32;
    for part in parts {
        for pair in part.chunks(2) {
            let low = pair.get(1).copied().unwrap_or(0);
            sum += u32::from(u16::from_be_bytes([pair[0], low]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_with_its_checksum_sums_to_zero() {
        // RFC 1071's own example.
        assert_eq!(
            checksum(&[&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]]),
            !0xddf2
        );
        let frame = Datagram {
            src_mac: [2; 6],
            dst_mac: [4; 6],
            src: "10.0.0.1".parse().unwrap(),
            dst: "10.0.0.2".parse().unwrap(),
            dst_port: 9,
            payload: b"odd",
            may_be_cut: true,
        }
        .frame()
        .unwrap();
        assert_eq!(checksum(&[&frame[14..34]]), 0);
        let pseudo = [&frame[26..34], &[0, 17, 0, 11]].concat();
        assert_eq!(checksum(&[&pseudo, &frame[34..]]), 0);
    }
}
