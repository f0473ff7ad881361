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
const AT_ONCE: usize = 64;

#[derive(Debug)]
pub struct Echo {
    socket: AsyncFd<Socket>,
    source: IpAddr,
    nonce: Nonce,
}

/// Why a request did not leave.
#[derive(Debug, thiserror::Error)]
pub enum NotSent {
    #[error("no room just now")]
    Later,
    #[error("it is larger than the device takes")]
    TooLarge,
    /// The socket, or what it was bound to, is of no use any more; or somebody forbids it.
    #[error(transparent)]
    Refused(io::Error),
}

impl NotSent {
    pub fn of(error: io::Error) -> Self {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM) => Self::Later,
            Some(Errno::EMSGSIZE) => Self::TooLarge,
            _ => Self::Refused(error),
        }
    }
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

    /// A request that this socket gets the answer to, whoever sends it.
    pub fn request(&self, to: IpAddr, number: u64) -> io::Result<Vec<u8>> {
        // A ping socket's port is its identifier.
        let own = self.socket.get_ref().local_addr()?.as_socket();
        let identifier = own.map_or(0, |own| own.port());
        Ok(wire::request_of(to, self.nonce, number, identifier))
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
            Err(error) => Err(NotSent::of(error)),
        }
    }

    /// As [`Self::ask`], by the smallest request, with a mark for the programs that it passes.
    pub fn ask_marked(&self, mark: u32, to: IpAddr, number: u64) -> Result<(), NotSent> {
        let socket = self.socket.get_ref();
        socket.set_mark(mark).map_err(NotSent::Refused)?;
        let asked = self.ask(to, number, wire::LEAST);
        socket.set_mark(0).map_err(NotSent::Refused)?;
        asked
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

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_lab::wait::{eventually, eventually_some};
    use sinabro_netlink::{Conn, link, netns::in_fresh, sysctl};
    use std::net::{Ipv4Addr, Ipv6Addr};

    const PING_GROUPS: [&str; 3] = ["net", "ipv4", "ping_group_range"];
    const BOTH: [IpAddr; 2] = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];

    /// In a namespace whose loopback is up, with a runtime for its sockets.
    fn with_loopback<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let lo = conn.link_by_name("lo").unwrap().index;
            conn.execute(link::set_up(lo)).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.enable_io().build().unwrap();
            runtime.block_on(async { test() })
        })
    }

    fn next(echo: &Echo) -> Option<(IpAddr, u64, usize)> {
        let mut buffer = vec![MaybeUninit::uninit(); 65_536];
        let mut first = None;
        echo.drain(&mut buffer, |from, number, length| {
            first.get_or_insert((from, number, length));
        });
        first
    }

    #[test]
    fn the_kernel_answers_small_and_large_requests() {
        with_loopback(|| {
            sysctl::write(&PING_GROUPS, "0 0").unwrap();
            for ip in BOTH {
                let echo = Echo::open(ip, "lo", Nonce::random()).unwrap();
                for (number, packet) in [(1, 0), (2, 1450), (3, 9000)] {
                    let length = echo.length(packet).max(wire::LEAST);
                    echo.ask(ip, number, length).unwrap();
                    let answer = eventually_some("an answer", || next(&echo));
                    assert_eq!(answer, (ip, number, length));
                }
                assert_eq!(next(&echo), None);
            }
        });
    }

    #[test]
    fn what_is_larger_than_the_device_is_refused_and_not_fragmented() {
        with_loopback(|| {
            sysctl::write(&PING_GROUPS, "0 0").unwrap();
            let mut conn = Conn::new().unwrap();
            let lo = conn.link_by_name("lo").unwrap().index;
            conn.execute(link::set_mtu(lo, 1450)).unwrap();
            for ip in BOTH {
                let echo = Echo::open(ip, "lo", Nonce::random()).unwrap();
                let (fits, larger) = (echo.length(1450), echo.length(1451));
                assert!(matches!(echo.ask(ip, 1, larger), Err(NotSent::TooLarge)));
                echo.ask(ip, 2, fits).unwrap();
                let answer = eventually_some("an answer", || next(&echo));
                assert_eq!(answer, (ip, 2, fits));
            }
        });
    }

    /// Sends answers as somebody who knows the socket's identifier.
    fn forge(echo: &Echo, nonce: Nonce, number: u64) {
        let bound = echo.socket.get_ref().local_addr().unwrap();
        let id = bound.as_socket().unwrap().port();
        let mut packet = wire::request(echo.source, nonce, number, 100);
        packet[0] = 0;
        packet[4..6].copy_from_slice(&id.to_be_bytes());
        let sum = sinabro_lab::traffic::packet::checksum(&[&packet]);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
        let to = SockAddr::from(SocketAddr::new(echo.source, 0));
        let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4));
        raw.unwrap().send_to(&packet, &to).unwrap();
    }

    /// Identifier, checksum and source right: whoever floods gets as far as the filter.
    #[test]
    fn what_has_not_the_nonce_does_not_wake_the_agent() {
        with_loopback(|| {
            sysctl::write(&PING_GROUPS, "0 0").unwrap();
            let ip = BOTH[0];
            let (ours, others) = (Nonce([1; 8]), Nonce([2; 8]));
            let echo = Echo::open(ip, "lo", ours).unwrap();
            for number in 0..10 {
                forge(&echo, others, number);
            }
            forge(&echo, ours, 77);
            // Behind them all; so they would have been there, too. Not at once: what is sent on a processor that has many
            // packets to deliver waits for a thread of the kernel's (`net_rx_action`).
            let mut buffer = [MaybeUninit::uninit(); 200];
            let (length, _) = eventually_some("the answer that is ours", || {
                echo.socket.get_ref().recv_from(&mut buffer).ok()
            });
            assert_eq!(length, 100);
            // SAFETY: the kernel wrote so many bytes of the buffer.
            let first = unsafe { buffer[..length].assume_init_ref() };
            assert_eq!(wire::answered(ip, ours, first), Some(77));
        });
    }

    #[test]
    fn whoever_floods_does_not_get_all_of_the_agents_time() {
        with_loopback(|| {
            sysctl::write(&PING_GROUPS, "0 0").unwrap();
            let nonce = Nonce([1; 8]);
            let echo = Echo::open(BOTH[0], "lo", nonce).unwrap();
            for number in 0..100 {
                forge(&echo, nonce, number);
            }
            let mut buffer = vec![MaybeUninit::uninit(); 65_536];
            let mut all = 0;
            // As above, some may come later than others.
            eventually("all of it", || {
                let mut taken = 0;
                let more = echo.drain(&mut buffer, |_, _, _| taken += 1);
                assert_eq!((more, taken.max(AT_ONCE)), (taken == AT_ONCE, AT_ONCE));
                all += taken;
                all == 100
            });
        });
    }

    #[test]
    fn a_group_that_may_not_is_said() {
        with_loopback(|| {
            let error = Echo::open(BOTH[0], "lo", Nonce::random()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            sysctl::write(&PING_GROUPS, "0 0").unwrap();
            let foreign = "192.0.2.1".parse().unwrap();
            let error = Echo::open(foreign, "lo", Nonce::random()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
            Echo::open(BOTH[0], "no-such-link", Nonce::random()).unwrap_err();
        });
    }
}
