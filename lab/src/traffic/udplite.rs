//! Datagrams of UDP-Lite (RFC 3828), whose checksum covers as much of them as their sender says, by sockets, where the kernel
//! has it.

use super::{PATIENCE, any, bind, readable};
use crate::place::Place;
use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    time::Instant,
};

/// How many bytes of a datagram a sender has covered, and a receiver wants covered at least; both are of all of it otherwise, and
/// eight is its header (linux/udp.h).
const OPTIONS: [libc::c_int; 2] = [10, 11];

/// How much of each datagram its checksum covers.
#[derive(Clone, Copy, Debug)]
pub enum Coverage {
    Whole,
    /// So many bytes, its header's eight among them.
    First(u16),
}

/// Whether the kernel has sockets of UDP-Lite; Linux 7.1 and later have none.
pub fn is_known() -> Result<bool> {
    match socket(any([127, 0, 0, 1].into())) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(false),
        Err(error) => Err(error).context("cannot ask for a socket"),
    }
}

/// Each place sends a datagram of `size` bytes from the same port, and has it come back; whom the other end takes them for.
/// Either end's kernel drops what has a wrong sum, or a smaller part covered.
pub fn exchange(
    from: &[&Place],
    port: u16,
    to: &Place,
    address: IpAddr,
    coverage: Coverage,
    size: usize,
) -> Result<Vec<SocketAddr>> {
    let server = to.run(|| bound(SocketAddr::new(address, 0), coverage))?;
    let target = server.local_addr()?;
    let open = |place: &&Place| {
        place.run(|| {
            let client = bound(SocketAddr::new(any(address), port), coverage)?;
            client.connect(target)?;
            Ok(client)
        })
    };
    let clients: Vec<_> = from.iter().map(open).collect::<Result<_>>()?;
    let mut seen = Vec::new();
    for (number, (client, place)) in clients.iter().zip(from).enumerate() {
        let exchange = || -> Result<SocketAddr> {
            let said: Vec<u8> = (0..size).map(|at| (number * 31 + at * 7) as u8).collect();
            client.send(&said).context("cannot send")?;
            let (heard, peer) = next(&server, size).context("nothing arrives")?;
            ensure!(heard == said, "something else arrived");
            server.send_to(&said, peer).context("cannot answer")?;
            let (heard, _) = next(client, size).context("it arrived, and no answer")?;
            ensure!(heard == said, "the answer is another");
            Ok(peer)
        };
        let one = exchange().with_context(|| {
            let (from, to) = (place.name(), to.name());
            format!("UDP-Lite, {size} bytes, {coverage:?} covered, {from} → {to} {target}")
        })?;
        seen.push(one);
    }
    Ok(seen)
}

fn socket(like: IpAddr) -> io::Result<Socket> {
    let protocol = Protocol::from(libc::IPPROTO_UDPLITE);
    let domain = Domain::for_address(SocketAddr::new(like, 0));
    Socket::new(domain, Type::DGRAM, Some(protocol))
}

/// One that sends with this coverage and takes no smaller one. As a socket of datagrams, which it is to the kernel, too.
pub fn bound(at: SocketAddr, coverage: Coverage) -> Result<UdpSocket> {
    let socket = socket(at.ip()).context("no socket of UDP-Lite")?;
    if let Coverage::First(bytes) = coverage {
        for option in OPTIONS {
            let value = libc::c_int::from(bytes);
            // SAFETY: the option takes an int, whose address and size are given.
            Errno::result(unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::IPPROTO_UDPLITE,
                    option,
                    (&raw const value).cast(),
                    size_of_val(&value) as libc::socklen_t,
                )
            })
            .context("cannot say how much is covered")?;
        }
    }
    bind::freed(|| socket.bind(&at.into()))?;
    Ok(socket.into())
}

fn next(socket: &UdpSocket, size: usize) -> Result<(Vec<u8>, SocketAddr)> {
    ensure!(readable(socket, Instant::now() + PATIENCE)?, "too late");
    let mut heard = vec![0; size + 1];
    let (len, from) = socket.recv_from(&mut heard)?;
    heard.truncate(len);
    Ok((heard, from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_that_covers_too_little_is_not_taken() {
        if !is_known().unwrap() {
            println!("skipped: this kernel has no UDP-Lite");
            return;
        }
        let place = Place::fresh("udplite").unwrap();
        let bind = |coverage| {
            let at = "127.0.0.1:0".parse().unwrap();
            place.run(|| bound(at, coverage)).unwrap()
        };
        let server = bind(Coverage::First(20));
        let to = server.local_addr().unwrap();
        for (coverage, said) in [
            (Coverage::First(19), b"less"),
            (Coverage::First(20), b"part"),
            (Coverage::Whole, b"full"),
        ] {
            bind(coverage).send_to(&said.repeat(10), to).unwrap();
        }
        for said in [b"part", b"full"] {
            assert_eq!(next(&server, 40).unwrap().0, said.repeat(10));
        }
    }
}
