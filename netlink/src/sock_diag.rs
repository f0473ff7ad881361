//! Sockets of the network namespace (sock_diag), read only: linux/inet_diag.h.

use crate::{
    Conn, Family, Result,
    wire::{self, Message, Raw},
};
use std::net::{IpAddr, SocketAddr};

/// SOCK_DIAG_BY_FAMILY.
const BY_FAMILY: u16 = 20;
/// struct inet_diag_req_v2: family, protocol, extensions, padding, states, the ends.
const REQUEST: usize = 56;
const UDP: u8 = 17;
const TCP: u8 = 6;
/// As bits: TCP_LISTEN; and TCP_CLOSE, in which datagram sockets are that are not connected.
const LISTEN: u32 = 1 << 10;
const CLOSE: u32 = 1 << 7;

/// A socket that no other end is known of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// As `bpf_get_socket_cookie` tells it.
    pub cookie: u64,
    /// The unspecified address: all of the family, and maybe of the other.
    pub at: SocketAddr,
}

/// A socket that lists those of the calling thread's network namespace.
#[derive(Debug)]
pub struct SockDiag(Conn);

impl SockDiag {
    /// # Errors
    /// If there can be none.
    pub fn new() -> Result<Self> {
        Conn::sock_diag().map(Self)
    }

    /// Datagram sockets (UDP) that are not connected.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn datagrams(&mut self, family: Family) -> Result<Vec<Bound>> {
        self.list("list UDP sockets", family, UDP, CLOSE)
    }

    /// Stream sockets (TCP) that listen.
    ///
    /// # Errors
    /// As [`Self::datagrams`].
    pub fn listeners(&mut self, family: Family) -> Result<Vec<Bound>> {
        self.list("list listening TCP sockets", family, TCP, LISTEN)
    }

    fn list(&mut self, what: &str, family: Family, proto: u8, states: u32) -> Result<Vec<Bound>> {
        let mut request = [0; REQUEST];
        request[0] = match family {
            Family::V4 => libc::AF_INET as u8,
            Family::V6 => libc::AF_INET6 as u8,
        };
        request[1] = proto;
        request[4..8].copy_from_slice(&states.to_ne_bytes());
        let parse = |message: &Message<'_>| match message.kind {
            BY_FAMILY => Ok(parse(message.body)),
            _ => Ok(None),
        };
        self.0.dump(what, BY_FAMILY, &Raw(&request), parse)
    }
}

/// struct inet_diag_msg: family, state, timer, retransmissions; then the ports, both addresses, the interface and the
/// cookie.
fn parse(body: &[u8]) -> Option<Bound> {
    let part = |at: usize, len: usize| body.get(at..at + len);
    let four: [u8; 4] = part(8, 4)?.try_into().ok()?;
    let address = match i32::from(*body.first()?) {
        libc::AF_INET => IpAddr::from(four),
        libc::AF_INET6 => IpAddr::from(<[u8; 16]>::try_from(part(8, 16)?).ok()?),
        _ => return None,
    };
    let port = u16::from_be_bytes(part(4, 2)?.try_into().ok()?);
    Some(Bound {
        cookie: u64::from(wire::u32_at(body, 44)?) | u64::from(wire::u32_at(body, 48)?) << 32,
        at: SocketAddr::new(address, port),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{net::UdpSocket, os::fd::AsRawFd as _};

    #[test]
    fn a_socket_is_told_with_its_cookie_and_port() {
        for (family, at) in [(Family::V4, "127.0.0.1:0"), (Family::V6, "[::1]:0")] {
            let socket = UdpSocket::bind(at).unwrap();
            let cookie = cookie(&socket);
            let expected = Bound {
                cookie,
                at: socket.local_addr().unwrap(),
            };
            let told = SockDiag::new().unwrap().datagrams(family).unwrap();
            assert!(told.contains(&expected), "{told:?}");
            socket.connect(socket.local_addr().unwrap()).unwrap();
            let told = SockDiag::new().unwrap().datagrams(family).unwrap();
            assert!(!told.contains(&expected), "{told:?}");
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let told = SockDiag::new().unwrap().listeners(Family::V4).unwrap();
        let at = listener.local_addr().unwrap();
        assert!(told.iter().any(|bound| bound.at == at), "{told:?}");
    }

    #[test]
    fn what_is_too_short_is_nobody() {
        for length in 0..52 {
            for first in [2, 10, 7] {
                let mut body = vec![0; length];
                body.iter_mut().take(1).for_each(|byte| *byte = first);
                assert_eq!(parse(&body), None, "{length}");
            }
        }
    }

    fn cookie(socket: &UdpSocket) -> u64 {
        let (mut cookie, mut size) = (0u64, size_of::<u64>() as libc::socklen_t);
        // SAFETY: both pointers are to locals that outlive the call, and `size` is the cookie's.
        let got = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut size,
            )
        };
        assert_eq!(got, 0);
        cookie
    }
}
