//! Sockets of the network namespace (sock_diag): linux/inet_diag.h.

use crate::{
    Conn, Family, Request, Result, ResultExt as _,
    wire::{self, Message, Raw},
};
use std::net::{IpAddr, SocketAddr};

/// SOCK_DIAG_BY_FAMILY.
const BY_FAMILY: u16 = 20;
/// struct inet_diag_req_v2: family, protocol, extensions, padding, states, the ends.
const REQUEST: usize = 56;
const UDP: u8 = 17;
const TCP: u8 = 6;
/// SOCK_DESTROY.
const DESTROY: u16 = 21;
/// Where struct inet_diag_sockid is in a request, and in what is told; and its size.
const REQUEST_ID: usize = 8;
const ID: usize = 4;
const ID_SIZE: usize = 48;
/// As bits: TCP_LISTEN; and TCP_CLOSE and TCP_ESTABLISHED, in which datagram sockets are that are not connected, and that are.
const LISTEN: u32 = 1 << 10;
const CLOSE: u32 = 1 << 7;
const ESTABLISHED: u32 = 1 << 1;

/// A socket that no other end is known of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// As `bpf_get_socket_cookie` tells it.
    pub cookie: u64,
    /// The unspecified address: all of the family, and maybe of the other.
    pub at: SocketAddr,
}

/// A datagram socket that is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// As `bpf_get_socket_cookie` tells it.
    pub cookie: u64,
    pub remote: SocketAddr,
    /// The socket's own family.
    family: Family,
    /// As the kernel names it.
    id: [u8; ID_SIZE],
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
        self.list("list UDP sockets", family, UDP, CLOSE, bound)
    }

    /// Datagram sockets (UDP) that are connected.
    ///
    /// # Errors
    /// As [`Self::datagrams`].
    pub fn connected(&mut self, family: Family) -> Result<Vec<Connected>> {
        let parse = |body: &[u8]| connected(family, body);
        self.list(
            "list connected UDP sockets",
            family,
            UDP,
            ESTABLISHED,
            parse,
        )
    }

    /// Disconnects a datagram socket: recv(2) says ECONNABORTED once, and send(2) EDESTADDRREQ until it is connected
    /// again. Whether it was still there and connected.
    ///
    /// # Errors
    /// If the kernel refuses, as one without CONFIG_INET_DIAG_DESTROY does (EOPNOTSUPP).
    pub fn disconnect(&mut self, socket: &Connected) -> Result<bool> {
        let what = format!("disconnect a UDP socket from {}", socket.remote);
        let mut request = request(socket.family, UDP, ESTABLISHED);
        request[REQUEST_ID..].copy_from_slice(&socket.id);
        let request = Request::new(what, DESTROY, 0, &Raw(&request));
        let done = self.0.execute(request).ignore_not_found()?;
        Ok(done.is_some())
    }

    /// Stream sockets (TCP) that listen.
    ///
    /// # Errors
    /// As [`Self::datagrams`].
    pub fn listeners(&mut self, family: Family) -> Result<Vec<Bound>> {
        self.list("list listening TCP sockets", family, TCP, LISTEN, bound)
    }

    fn list<T>(
        &mut self,
        what: &str,
        family: Family,
        proto: u8,
        states: u32,
        parse: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>> {
        let request = request(family, proto, states);
        let parse = |message: &Message<'_>| match message.kind {
            BY_FAMILY => Ok(parse(message.body)),
            _ => Ok(None),
        };
        self.0.dump(what, BY_FAMILY, &Raw(&request), parse)
    }
}

/// struct inet_diag_req_v2 about no socket in particular.
fn request(family: Family, proto: u8, states: u32) -> [u8; REQUEST] {
    let mut request = [0; REQUEST];
    request[0] = match family {
        Family::V4 => libc::AF_INET as u8,
        Family::V6 => libc::AF_INET6 as u8,
    };
    request[1] = proto;
    request[4..REQUEST_ID].copy_from_slice(&states.to_ne_bytes());
    request
}

fn bound(body: &[u8]) -> Option<Bound> {
    Some(Bound {
        cookie: cookie(body)?,
        at: end(body, 4, 8)?,
    })
}

fn connected(family: Family, body: &[u8]) -> Option<Connected> {
    Some(Connected {
        cookie: cookie(body)?,
        remote: end(body, 6, 24)?,
        family,
        id: body.get(ID..ID + ID_SIZE)?.try_into().ok()?,
    })
}

fn cookie(body: &[u8]) -> Option<u64> {
    Some(u64::from(wire::u32_at(body, 44)?) | u64::from(wire::u32_at(body, 48)?) << 32)
}

/// An end of struct inet_diag_msg: family, state, timer, retransmissions; then the ports, both addresses, the interface
/// and the cookie.
fn end(body: &[u8], port: usize, address: usize) -> Option<SocketAddr> {
    let part = |at: usize, len: usize| body.get(at..at + len);
    let four: [u8; 4] = part(address, 4)?.try_into().ok()?;
    let address = match i32::from(*body.first()?) {
        libc::AF_INET => IpAddr::from(four),
        libc::AF_INET6 => IpAddr::from(<[u8; 16]>::try_from(part(address, 16)?).ok()?),
        _ => return None,
    };
    let port = u16::from_be_bytes(part(port, 2)?.try_into().ok()?);
    Some(SocketAddr::new(address, port))
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
    fn a_connected_socket_is_disconnected_and_no_other_in_its_place() {
        for (family, at) in [(Family::V4, "127.0.0.1:0"), (Family::V6, "[::1]:0")] {
            let server = UdpSocket::bind(at).unwrap();
            let remote = server.local_addr().unwrap();
            let socket = UdpSocket::bind(at).unwrap();
            socket.connect(remote).unwrap();
            let mut diag = SockDiag::new().unwrap();
            let told = diag.connected(family).unwrap();
            let own = told.into_iter().find(|one| one.cookie == cookie(&socket));
            let own = own.unwrap();
            assert_eq!(own.remote, remote);
            // The cookie says which socket is meant, as another may have its ends by now.
            let mut other = own.clone();
            other.id[ID_SIZE - 8] ^= 1;
            assert!(!diag.disconnect(&other).unwrap());
            socket.send(b"x").unwrap();
            assert!(diag.disconnect(&own).unwrap());
            let heard = socket.recv(&mut [0]).unwrap_err();
            assert_eq!(heard.raw_os_error(), Some(libc::ECONNABORTED));
            let heard = socket.send(b"x").unwrap_err();
            assert_eq!(heard.raw_os_error(), Some(libc::EDESTADDRREQ));
            assert!(socket.peer_addr().is_err());
            assert!(!diag.disconnect(&own).unwrap());
            // It may be connected again.
            socket.connect(remote).unwrap();
            socket.send(b"x").unwrap();
        }
    }

    #[test]
    fn what_is_too_short_is_nobody() {
        for length in 0..52 {
            for first in [2, 10, 7] {
                let mut body = vec![0; length];
                body.iter_mut().take(1).for_each(|byte| *byte = first);
                assert_eq!(bound(&body), None, "{length}");
                assert_eq!(connected(Family::V4, &body), None, "{length}");
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
