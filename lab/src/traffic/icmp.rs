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

/// Sends echo requests, one every 200 ms, until one is answered. Returns the time of that one.
pub fn ping(from: &Place, address: IpAddr, patience: Duration) -> Result<Duration> {
    let what = || format!("ICMP echo, {} → {address}", from.name());
    from.run(|| {
        let socket = socket(address)?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let deadline = Instant::now() + patience;
        let mut refused = None;
        for sequence in 0.. {
            let sent = Instant::now();
            let packet = request(address, id, sequence);
            let target = SockAddr::from(SocketAddr::new(address, 0));
            // A route that is not there yet is a reason to try again.
            refused = socket.send_to(&packet, &target).err().or(refused);
            if answered(
                &socket,
                address,
                id,
                sequence,
                sent + Duration::from_millis(200),
            )? {
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

fn socket(address: IpAddr) -> Result<Socket> {
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

fn request(address: IpAddr, id: u16, sequence: u16) -> Vec<u8> {
    let mut packet = vec![request_type(address), 0, 0, 0];
    packet.extend_from_slice(&id.to_be_bytes());
    packet.extend_from_slice(&sequence.to_be_bytes());
    packet.extend_from_slice(b"sinabro lab echo");
    // The kernel fills in ICMPv6's, which covers a pseudo-header (RFC 3542 §3.1).
    if address.is_ipv4() {
        let sum = super::packet::checksum(&[&packet]);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}

fn answered(
    socket: &Socket,
    address: IpAddr,
    id: u16,
    sequence: u16,
    deadline: Instant,
) -> Result<bool> {
    let mut buffer = [0; 2048];
    while readable(socket, deadline)? {
        let (len, source) = receive(socket, &mut buffer)?;
        let Some(icmp) = payload(address, &buffer[..len]) else {
            continue;
        };
        let want = [id.to_be_bytes(), sequence.to_be_bytes()].concat();
        if source == address
            && kind(address, &buffer[..len]) == Some(reply_type(address))
            && icmp.get(4..8) == Some(&want)
        {
            return Ok(true);
        }
    }
    Ok(false)
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
