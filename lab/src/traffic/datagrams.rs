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
    /// From the first that arrived to the last.
    pub received: Measured,
}

/// Packets whose IP headers and contents are `size` bytes, sent for `time`.
pub fn datagrams(ends: Ends<'_>, size: usize, time: Duration) -> Result<Datagrams> {
    let payload = payload(size, ends.address)?;
    let bind = || Ok(UdpSocket::bind((ends.address, 0))?);
    let server = ends.server.place.run(bind).context("cannot bind")?;
    let target = server.local_addr()?;
    let done = AtomicBool::new(false);
    let client = || {
        let send = || -> Result<(u64, Duration)> {
            let socket = UdpSocket::bind((any(ends.address), 0))?;
            socket.connect(target)?;
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
        };
        let result = send();
        done.store(true, Ordering::Release);
        result
    };
    let ((sent, cpu), received) = ends.run(client, || receive(&server, payload, &done))?;
    ensure!(received.count > 0, "none of {sent} packets arrived");
    ensure!(received.count <= sent, "more than {sent} packets arrived");
    Ok(Datagrams {
        sent,
        received: Measured {
            cpu: received.cpu + cpu,
            ..received
        },
    })
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
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn headers_are_part_of_a_packet() {
        let [v4, v6]: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        assert_eq!(payload(64, v4).unwrap(), 36);
        assert_eq!(payload(64, v6).unwrap(), 16);
        assert_eq!(payload(48, v6).unwrap(), 0);
        assert!(payload(47, v6).is_err());
    }
}
