//! Connections between two network namespaces, which may be one.

use super::{Connect, Listener, SocketOption, stage::open};
use nix::errno::Errno;
use sinabro_netlink::NetNs;
use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

/// Ports to listen at: below those that the kernel gives to who connects.
const FIRST_PORT: u16 = 1024;
const PORTS: u16 = 31_000;

#[derive(Debug)]
pub struct Between {
    client: NetNs,
    server: NetNs,
    address: IpAddr,
    next: AtomicU16,
    patience: Duration,
}

impl Between {
    /// `address` is the server's.
    pub fn new(client: NetNs, server: NetNs, address: IpAddr) -> Self {
        Self {
            client,
            server,
            address,
            next: AtomicU16::new(0),
            patience: Duration::from_secs(1),
        }
    }

    /// With another patience than a second.
    pub fn patient(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }
}

/// An address as the kernel wants it.
fn with_raw<T>(
    address: SocketAddr,
    call: impl FnOnce(*const libc::sockaddr, libc::socklen_t) -> T,
) -> T {
    use nix::sys::socket::{SockaddrLike as _, SockaddrStorage};
    let raw = SockaddrStorage::from(address);
    call(raw.as_ptr(), raw.len())
}

impl Connect for Between {
    fn listen(&self, options: &[SocketOption]) -> io::Result<Listener> {
        let port = FIRST_PORT + self.next.fetch_add(1, Ordering::Relaxed) % PORTS;
        let address = SocketAddr::new(self.address, port);
        let socket = self
            .server
            .run(|| open(address, options))
            .map_err(io::Error::other)??;
        let fd = socket.as_raw_fd();
        // SAFETY: the address is valid while this runs.
        let bound = with_raw(address, |raw, len| unsafe { libc::bind(fd, raw, len) });
        Errno::result(bound)?;
        // SAFETY: no pointers.
        Errno::result(unsafe { libc::listen(fd, 1) })?;
        Ok(Listener { socket, address })
    }

    fn connect(&self, to: SocketAddr, options: &[SocketOption]) -> io::Result<OwnedFd> {
        let socket = self
            .client
            .run(|| open(to, options))
            .map_err(io::Error::other)??;
        let fd = socket.as_raw_fd();
        // SAFETY: the address is valid while this runs.
        let connected = with_raw(to, |raw, len| unsafe { libc::connect(fd, raw, len) });
        Errno::result(connected)?;
        Ok(socket)
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}
