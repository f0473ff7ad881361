//! A ping socket (icmp(7), ping(8)) of one family, from this node's own end of the tunnels.
//!
//! It takes no capability, but a group within net.ipv4.ping_group_range, for both families. It is
//! bound to the VXLAN device: a request leaves by the tunnel or not at all, and an answer that came
//! another way is none.

use super::wire::{self, Nonce};
use nix::errno::Errno;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::{
    io,
    mem::MaybeUninit,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd as _},
};
use tokio::io::unix::AsyncFd;

/// IP and ICMP headers.
const HEADERS_V4: u32 = 20 + 8;
const HEADERS_V6: u32 = 40 + 8;
const ICMP_HEADER: u32 = 8;
/// Answers that are read in one go.
const AT_ONCE: usize = 256;

#[derive(Debug)]
pub struct Echo {
    socket: AsyncFd<Socket>,
    source: IpAddr,
    nonce: Nonce,
}

/// Why a request did not leave.
#[derive(Debug)]
pub enum NotSent {
    /// No room just now.
    Later,
    /// It is larger than the device takes.
    TooLarge,
    /// The socket, or what it was bound to, is of no use any more; or somebody forbids it.
    Refused(io::Error),
}

impl Echo {
    /// A socket that asks from `source`, an address of `device`.
    ///
    /// # Errors
    /// `PermissionDenied` if net.ipv4.ping_group_range has no group of this process.
    pub fn open(source: IpAddr, device: &str, nonce: Nonce) -> io::Result<Self> {
        let (domain, protocol) = match source {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
        };
        let socket = Socket::new(domain, Type::DGRAM.nonblocking().cloexec(), Some(protocol))?;
        socket.attach_filter(&wire::filter(nonce))?;
        socket.bind_device(Some(device.as_bytes()))?;
        socket.bind(&SocketAddr::new(source, 0).into())?;
        never_fragment(&socket, source)?;
        Ok(Self {
            // SAFETY: the descriptor is the socket's own, which stays open for as long as this does.
            socket: unsafe { AsyncFd::register(socket)? },
            source,
            nonce,
        })
    }

    pub fn source(&self) -> IpAddr {
        self.source
    }

    /// Length of an IP packet's ICMP part.
    pub fn length(&self, packet: u32) -> usize {
        let headers = match self.source {
            IpAddr::V4(_) => HEADERS_V4,
            IpAddr::V6(_) => HEADERS_V6,
        };
        (packet.saturating_sub(headers) + ICMP_HEADER) as usize
    }

    pub fn ask(&self, to: IpAddr, number: u64, length: usize) -> Result<(), NotSent> {
        let request = wire::request(to, self.nonce, number, length);
        let to = SockAddr::from(SocketAddr::new(to, 0));
        match self.socket.get_ref().send_to(&request, &to) {
            Ok(_) => Ok(()),
            Err(error) => Err(match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM) => NotSent::Later,
                Some(Errno::EMSGSIZE) => NotSent::TooLarge,
                _ => NotSent::Refused(error),
            }),
        }
    }

    /// Hands over what came since the last time: from whom, to which request, how long. True if
    /// there may be more; whoever floods this socket does not get all of the agent's time.
    pub fn drain(
        &self,
        buffer: &mut [MaybeUninit<u8>],
        mut take: impl FnMut(IpAddr, u64, usize),
    ) -> bool {
        for _ in 0..AT_ONCE {
            let (length, from) = match self.socket.get_ref().recv_from(buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // Nothing there, or an error that was kept for the next call: as good as nothing.
                Err(_) => return false,
            };
            let Some(from) = from.as_socket().map(|from| from.ip()) else {
                continue;
            };
            // SAFETY: the kernel wrote so many bytes of the buffer.
            let packet = unsafe { buffer[..length].assume_init_ref() };
            if let Some(number) = wire::answered(from, self.nonce, packet) {
                take(from, number, length);
            }
        }
        true
    }

    /// Waits until there may be an answer that was not there before.
    pub async fn readable(&self) {
        // An error is that of a runtime that ends.
        if let Ok(mut ready) = self.socket.readable().await {
            ready.clear_ready();
        }
    }
}

/// DF is set (RFC 791) and path MTUs that were learnt are not minded, so that only a link can refuse
/// what is as large as the device's MTU.
fn never_fragment(socket: &impl AsFd, ip: IpAddr) -> io::Result<()> {
    let (level, option, value) = match ip {
        IpAddr::V4(_) => (
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            libc::IP_PMTUDISC_PROBE,
        ),
        IpAddr::V6(_) => (
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_PROBE,
        ),
    };
    let length = size_of_val(&value) as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the option takes an int, whose address and size are given.
    let set = unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), length) };
    Errno::result(set)?;
    Ok(())
}
