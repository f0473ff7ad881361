//! UDP packets of one size, one way, as fast as the sender's system calls go.
//!
//! What the receiver cannot take is lost, as with any application: so what arrived is counted and
//! timed, not what was sent. One packet for each system call, without the batches that some
//! applications make: what is to be measured is the way, which batches do not shorten.

use super::{
    PATIENCE, any, readable,
    seat::{Ends, Measured, thread_cpu, timed},
};
use anyhow::{Context as _, Result, ensure};
use std::{
    io::ErrorKind,
    net::{IpAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// What the last packets on their way have to arrive in.
const LAST: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug)]
pub struct Datagrams {
    pub sent: u64,
    /// Of the sender's thread alone: what the kernel does for a packet until it is in the receiver's
    /// queue, or lost in front of it, and for no other. Nothing of what the receiver does with it.
    pub sender_cpu: Duration,
    /// From the first that arrived to the last.
    pub received: Measured,
}

/// Packets whose IP headers and contents are `size` bytes, sent for `time`.
pub fn datagrams(ends: Ends<'_>, size: usize, time: Duration) -> Result<Datagrams> {
    let payload = payload(size, ends.address)?;
    let bind = || Ok(UdpSocket::bind((ends.address, 0))?);
    let server = ends.server.place.run(bind).context("cannot bind")?;
    let target = ends.target(server.local_addr()?);
    let done = AtomicBool::new(false);
    let client = || {
        let open = || -> Result<UdpSocket> {
            let socket = UdpSocket::bind((any(ends.address), 0))?;
            socket.connect(target)?;
            Ok(socket)
        };
        let result = open().and_then(|socket| send(&socket, payload, time));
        done.store(true, Ordering::Release);
        result
    };
    let (sent, received) = ends.run(client, || receive(&server, payload, &done))?;
    Datagrams::new(sent, received)
}

/// The other way: packets that the server sends to where a first one of the client's came from.
pub fn datagrams_back(ends: Ends<'_>, size: usize, time: Duration) -> Result<Datagrams> {
    let payload = payload(size, ends.address)?;
    let bind = || Ok(UdpSocket::bind((ends.address, 0))?);
    let server = ends.server.place.run(bind).context("cannot bind")?;
    let target = ends.target(server.local_addr()?);
    let done = AtomicBool::new(false);
    let client = || -> Result<Measured> {
        let socket = UdpSocket::bind((any(ends.address), 0))?;
        socket.connect(target)?;
        socket.send(b"begin").context("cannot send")?;
        receive(&socket, payload, &done)
    };
    let serve = || {
        let begin = || -> Result<()> {
            ensure!(
                readable(&server, Instant::now() + PATIENCE)?,
                "nothing arrives"
            );
            let (_, from) = server.recv_from(&mut [0; 8])?;
            Ok(server.connect(from)?)
        };
        let result = begin().and_then(|()| send(&server, payload, time));
        done.store(true, Ordering::Release);
        result
    };
    let (received, sent) = ends.run(client, serve)?;
    Datagrams::new(sent, received)
}

impl Datagrams {
    fn new((sent, sender_cpu): (u64, Duration), received: Measured) -> Result<Self> {
        ensure!(received.count > 0, "none of {sent} packets arrived");
        ensure!(received.count <= sent, "more than {sent} packets arrived");
        Ok(Self {
            sent,
            sender_cpu,
            received: Measured {
                cpu: received.cpu + sender_cpu,
                ..received
            },
        })
    }
}

/// How many it sent, and the CPU time of that.
fn send(socket: &UdpSocket, payload: usize, time: Duration) -> Result<(u64, Duration)> {
    let packet = vec![b'x'; payload];
    let cpu = thread_cpu()?;
    let sent = timed(time, |stop| -> Result<u64> {
        let mut sent = 0;
        while !stop.load(Ordering::Relaxed) {
            socket.send(&packet).context("cannot send")?;
            sent += 1;
        }
        Ok(sent)
    })?;
    Ok((sent, thread_cpu()? - cpu))
}

/// Bytes of a packet's headers, without options (RFC 768, RFC 791, RFC 8200).
pub fn headers(address: IpAddr) -> usize {
    match address {
        IpAddr::V4(_) => 20 + 8,
        IpAddr::V6(_) => 40 + 8,
    }
}

/// Bytes of a datagram whose packet has `size`.
fn payload(size: usize, address: IpAddr) -> Result<usize> {
    let payload = size.checked_sub(headers(address));
    payload.with_context(|| format!("no UDP packet has {size} bytes"))
}

/// Counts what arrives until nothing more does after the sender is done.
fn receive(server: &UdpSocket, payload: usize, done: &AtomicBool) -> Result<Measured> {
    server.set_nonblocking(true)?;
    let mut buffer = vec![0; payload + 1];
    let cpu = thread_cpu()?;
    let (mut count, mut first, mut last) = (0, None, None);
    let silence = Instant::now() + PATIENCE;
    loop {
        // Asked before the queue is found empty: what was sent before it is in there, or on its way.
        let finished = done.load(Ordering::Acquire);
        match server.recv(&mut buffer) {
            Ok(length) => {
                ensure!(length == payload, "a packet of {length} bytes arrived");
                count += 1;
                // The clock is asked for the first packet, and where the queue is empty.
                if first.is_none() {
                    first = Some(Instant::now());
                }
                last = None;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let now = Instant::now();
                last.get_or_insert(now);
                let wait = if finished { LAST } else { LAST / 10 };
                if !readable(server, now + wait)? && finished {
                    break;
                }
                ensure!(finished || now < silence || count > 0, "nothing arrives");
            }
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
    let time = match (first, last) {
        (Some(first), Some(last)) => last - first,
        _ => Duration::ZERO,
    };
    // A single packet takes no time from the first to the last.
    let time = time.max(Duration::from_micros(1));
    let cpu = thread_cpu()? - cpu;
    Ok(Measured { count, time, cpu })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Place;
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn headers_are_part_of_a_packet() {
        let [v4, v6]: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        assert_eq!(payload(64, v4).unwrap(), 36);
        assert_eq!(payload(64, v6).unwrap(), 16);
        assert_eq!(payload(48, v6).unwrap(), 0);
        assert!(payload(47, v6).is_err());
    }

    #[test]
    fn packets_go_either_way() {
        let place = Place::fresh("datagrams").unwrap();
        let ends = Ends::apart(&place, &place, "127.0.0.1".parse().unwrap()).unwrap();
        let time = Duration::from_millis(20);
        for sent in [datagrams(ends, 64, time), datagrams_back(ends, 64, time)] {
            let sent = sent.unwrap();
            assert!(sent.sent >= sent.received.count && sent.received.count > 0);
            assert!(sent.sender_cpu > Duration::ZERO && sent.sender_cpu <= sent.received.cpu);
        }
    }
}
