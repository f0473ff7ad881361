//! UDP echoes, also with packets that fill the MTU and may not be fragmented.

use super::{any, bind, readable};
use crate::place::Place;
use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    errno::Errno,
    sys::socket::{setsockopt, sockopt},
};
use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::{AsFd, AsRawFd as _},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// UDP may lose packets: a few tries, each this long.
const TRIES: u32 = 30;
const TRY: Duration = Duration::from_millis(500);

/// Sends a datagram with `size` bytes of payload and waits for its echo. Returns the source
/// address that the other side saw. With `whole`, neither way may fragment (RFC 1191, DF).
pub fn echo(from: &Place, to: &Place, address: IpAddr, size: usize, whole: bool) -> Result<IpAddr> {
    exchange(from, to, address, size, whole).with_context(|| {
        format!(
            "UDP, {size} bytes, {} → {} {address}",
            from.name(),
            to.name()
        )
    })
}

/// The same with several sizes, each from a new port, by sockets as applications have them, of a server that
/// the client knows by another address, which something on the way translates. The server keeps its socket: one
/// that is bound again at once may find the address in use by a copy that a process being started still has.
pub fn echo_through(
    from: &Place,
    to: &Place,
    at: SocketAddr,
    target: SocketAddr,
    sizes: &[usize],
) -> Result<()> {
    let server = to
        .run(|| bind::udp(at))
        .with_context(|| format!("{} cannot bind UDP {at}", to.name()))?;
    for &size in sizes {
        let exchange = || {
            let client = from.run(|| {
                let socket = UdpSocket::bind((any(target.ip()), 0))?;
                socket.connect(target)?;
                Ok(socket)
            })?;
            between(&client, &server, size)
        };
        exchange().with_context(|| {
            let (from, to) = (from.name(), to.name());
            format!("UDP, {size} bytes, {from} → {target} → {to} {at}")
        })?;
    }
    Ok(())
}

fn exchange(from: &Place, to: &Place, address: IpAddr, size: usize, whole: bool) -> Result<IpAddr> {
    let bind = |ip: IpAddr| -> Result<UdpSocket> {
        let socket = UdpSocket::bind((ip, 0))?;
        if whole {
            forbid_fragments(&socket, ip, libc::IP_PMTUDISC_PROBE)?;
        }
        Ok(socket)
    };
    let server = to.run(|| bind(address)).context("cannot bind")?;
    let client = from.run(|| {
        let socket = bind(any(address))?;
        socket.connect(server.local_addr()?)?;
        Ok(socket)
    })?;
    between(&client, &server, size)
}

fn between(client: &UdpSocket, server: &UdpSocket, size: usize) -> Result<IpAddr> {
    let payload: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
    let heard = AtomicBool::new(false);
    thread::scope(|scope| {
        let served = scope.spawn(|| serve(server, &payload, &heard));
        let mut last = None;
        for _ in 0..TRIES {
            client.send(&payload).context("cannot send")?;
            let mut buffer = vec![0; size + 1];
            match receive(client, &mut buffer) {
                Ok(Some(len)) => {
                    ensure!(buffer[..len] == payload, "the echo differs");
                    last = None;
                    break;
                }
                Ok(None) => last = Some(anyhow::anyhow!("no echo")),
                Err(error) => last = Some(error),
            }
        }
        heard.store(true, Ordering::Relaxed);
        let served = served
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))?;
        match (served, last) {
            (Ok(seen), None) => Ok(seen),
            (Err(error), _) => Err(error),
            (Ok(seen), Some(error)) => {
                Err(error.context(format!("it arrived (from {seen}), but nothing came back")))
            }
        }
    })
}

/// Answers until the client has heard.
fn serve(server: &UdpSocket, payload: &[u8], heard: &AtomicBool) -> Result<IpAddr> {
    let mut buffer = vec![0; payload.len() + 1];
    let mut seen = None;
    let deadline = Instant::now() + TRY * TRIES;
    while Instant::now() < deadline && !heard.load(Ordering::Relaxed) {
        if readable(server, Instant::now() + Duration::from_millis(5))? {
            let (len, peer) = server.recv_from(&mut buffer)?;
            ensure!(buffer[..len] == *payload, "what arrived differs");
            server
                .send_to(&buffer[..len], peer)
                .context("cannot answer")?;
            seen = Some(peer.ip());
        }
    }
    seen.context("nothing arrived")
}

fn receive(client: &UdpSocket, buffer: &mut [u8]) -> Result<Option<usize>> {
    Ok(match readable(client, Instant::now() + TRY)? {
        true => Some(client.recv(buffer).context("cannot receive")?),
        false => None,
    })
}

/// Sends datagrams of `size` bytes in one call, which the kernel cuts them from (UDP_SEGMENT), and has all arrive.
pub fn cut(from: &Place, to: &Place, address: IpAddr, size: u16, datagrams: usize) -> Result<()> {
    let server = to.run(|| Ok(UdpSocket::bind((address, 0))?))?;
    let payload: Vec<u8> = (0..usize::from(size) * datagrams)
        .map(|i| (i % 251) as u8)
        .collect();
    from.run(|| {
        let client = UdpSocket::bind((any(address), 0))?;
        setsockopt(&client, sockopt::UdpGsoSegment, &size.into())
            .context("cannot ask for segments")?;
        client.send_to(&payload, server.local_addr()?)?;
        Ok(())
    })?;
    let mut buffer = vec![0; usize::from(size) + 1];
    for (number, expected) in payload.chunks(size.into()).enumerate() {
        let len = receive(&server, &mut buffer)?;
        let len = len.with_context(|| format!("{number} of {datagrams} datagrams arrived"))?;
        ensure!(buffer[..len] == *expected, "datagram {number} differs");
    }
    Ok(())
}

/// A datagram one byte longer than fits must be refused by the sender's own kernel.
pub fn is_too_long(from: &Place, address: IpAddr, size: usize) -> Result<()> {
    from.run(|| {
        let socket = UdpSocket::bind((any(address), 0))?;
        forbid_fragments(&socket, address, libc::IP_PMTUDISC_DO)?;
        match socket.send_to(&vec![0; size], (address, 9)) {
            Err(error) if error.raw_os_error() == Some(Errno::EMSGSIZE as i32) => Ok(()),
            other => bail!("{size} bytes should not fit, but: {other:?}"),
        }
    })
}

/// Has a socket send whole packets only, as large as the way to where they go is known to carry.
pub fn never_cut(socket: &impl AsFd, ip: IpAddr) -> io::Result<()> {
    forbid_fragments(socket, ip, libc::IP_PMTUDISC_DO)
}

/// Has a socket send whole packets only, as large as its link carries, whatever is known of the way.
pub fn probes(socket: &impl AsFd, ip: IpAddr) -> io::Result<()> {
    forbid_fragments(socket, ip, libc::IP_PMTUDISC_PROBE)
}

/// IP_MTU_DISCOVER: sets DF. DO goes by the route and by what was learnt of the way; PROBE ignores
/// both, so only links can refuse. The numbers are the same for IPv6.
fn forbid_fragments(socket: &impl AsFd, ip: IpAddr, value: libc::c_int) -> io::Result<()> {
    let (level, option) = match ip {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    };
    // SAFETY: the option takes an int, whose address and size are given.
    Errno::result(unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    })?;
    Ok(())
}
