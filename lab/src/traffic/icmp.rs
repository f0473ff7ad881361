//! ICMP echo requests through raw sockets (RFC 792, RFC 4443 §4.1).

use super::readable;
use crate::place::Place;
use anyhow::{Context as _, Result, bail};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::{
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

/// Told apart from other pings of this process.
static NEXT_ID: AtomicU16 = AtomicU16::new(1);

const SAID: &[u8] = b"sinabro lab echo";

/// Sends echo requests, one every 200 ms, until one is answered. Returns the time of that one.
pub fn ping(from: &Place, address: IpAddr, patience: Duration) -> Result<Duration> {
    ping_with((from, None), address, SAID, patience)
}

/// The same by a socket that is bound to an address of the place: as `ping -I`.
pub fn ping_from(from: &Place, source: IpAddr, address: IpAddr) -> Result<Duration> {
    ping_with((from, Some(source)), address, SAID, super::PATIENCE)
}

/// The same with so many bytes, which have to come back as they were: as `ping -s`.
pub fn ping_large(from: &Place, address: IpAddr, size: usize) -> Result<Duration> {
    let said: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
    ping_with((from, None), address, &said, super::PATIENCE)
}

fn ping_with(
    (from, source): (&Place, Option<IpAddr>),
    address: IpAddr,
    said: &[u8],
    patience: Duration,
) -> Result<Duration> {
    let what = || {
        let (from, size) = (from.name(), said.len());
        let source = source.map(|source| format!(" {source}"));
        let source = source.unwrap_or_default();
        format!("ICMP echo, {size} bytes, {from}{source} → {address}")
    };
    from.run(|| {
        let socket = socket(address)?;
        if let Some(source) = source {
            let source = SockAddr::from(SocketAddr::new(source, 0));
            socket.bind(&source).context("cannot bind")?;
        }
        let id = next_id();
        let deadline = Instant::now() + patience;
        let mut refused = None;
        for sequence in 0.. {
            let sent = Instant::now();
            let packet = request(address, id, sequence, said);
            let target = SockAddr::from(SocketAddr::new(address, 0));
            // A route that is not there yet is a reason to try again.
            refused = socket.send_to(&packet, &target).err().or(refused);
            let until = sent + Duration::from_millis(200);
            if answered(&socket, address, &packet, until)? {
                return Ok(sent.elapsed());
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        match refused {
            Some(error) => Err(error).context("cannot send"),
            None => bail!("no answer within {} s", patience.as_secs_f32()),
        }
    })
    .with_context(what)
}

/// Pings and says which source address the other side saw.
pub fn ping_seen(from: &Place, to: &Place, address: IpAddr) -> Result<IpAddr> {
    let ear = to.run(|| socket(address))?;
    ping(from, address, super::PATIENCE)?;
    let deadline = Instant::now() + super::PATIENCE;
    let mut buffer = [0; 2048];
    while readable(&ear, deadline)? {
        let (len, seen) = receive(&ear, &mut buffer)?;
        if kind(address, &buffer[..len]) == Some(request_type(address)) {
            return Ok(seen);
        }
    }
    bail!("{} heard no echo request", to.name())
}

/// An id that no other echo request of this process has.
pub(super) fn next_id() -> u16 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

pub(super) fn socket(address: IpAddr) -> Result<Socket> {
    let (domain, protocol) = match address {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
    };
    Socket::new(domain, Type::RAW, Some(protocol)).context("cannot open a raw socket")
}

fn request_type(address: IpAddr) -> u8 {
    if address.is_ipv4() { 8 } else { 128 }
}

fn reply_type(address: IpAddr) -> u8 {
    if address.is_ipv4() { 0 } else { 129 }
}

pub(super) fn request(address: IpAddr, id: u16, sequence: u16, said: &[u8]) -> Vec<u8> {
    let mut packet = vec![request_type(address), 0, 0, 0];
    packet.extend_from_slice(&id.to_be_bytes());
    packet.extend_from_slice(&sequence.to_be_bytes());
    packet.extend_from_slice(said);
    // The kernel fills in ICMPv6's, which covers a pseudo-header (RFC 3542 §3.1).
    if address.is_ipv4() {
        let sum = super::packet::checksum(&[&packet]);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}

/// Whether the reply to a request comes, as long as that.
fn answered(socket: &Socket, address: IpAddr, sent: &[u8], deadline: Instant) -> Result<bool> {
    let mut buffer = vec![0; 1 << 16];
    while readable(socket, deadline)? {
        let (len, source) = receive(socket, &mut buffer)?;
        let Some(icmp) = payload(address, &buffer[..len]) else {
            continue;
        };
        // All but type and checksum.
        if source == address
            && icmp.first() == Some(&reply_type(address))
            && icmp.get(4..) == sent.get(4..)
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a raw socket got the reply to a request.
pub(super) fn is_reply(address: IpAddr, packet: &[u8], id: u16, sequence: u16) -> bool {
    let want = [id.to_be_bytes(), sequence.to_be_bytes()].concat();
    payload(address, packet).is_some_and(|icmp| {
        icmp.first() == Some(&reply_type(address)) && icmp.get(4..8) == Some(&want)
    })
}

/// Skips the IPv4 header, which raw IPv4 sockets deliver and raw IPv6 sockets do not.
fn payload(address: IpAddr, packet: &[u8]) -> Option<&[u8]> {
    match address {
        IpAddr::V4(_) => packet.get(usize::from(packet.first()? & 0xf) * 4..),
        IpAddr::V6(_) => Some(packet),
    }
}

fn kind(address: IpAddr, packet: &[u8]) -> Option<u8> {
    payload(address, packet)?.first().copied()
}

fn receive(socket: &Socket, buffer: &mut [u8]) -> Result<(usize, IpAddr)> {
    // SAFETY: u8 may be seen as MaybeUninit<u8>; recv_from only writes initialised bytes.
    let uninit = unsafe { &mut *(std::ptr::from_mut(buffer) as *mut [std::mem::MaybeUninit<u8>]) };
    let (len, source) = socket.recv_from(uninit).context("cannot receive")?;
    let source = source.as_socket().context("a packet without source")?;
    Ok((len, source.ip()))
}
