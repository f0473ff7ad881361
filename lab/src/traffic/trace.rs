//! Who is on the way to somewhere, as traceroute finds it: packets that may make so many hops only, and
//! who says that they made them.

use super::{
    any,
    errors::{self, Answer, Heard},
    icmp,
};
use crate::place::Place;
use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsFd,
    time::{Duration, Instant},
};

/// Far more than the lab has.
const MAX_HOPS: u32 = 8;
/// Routers limit how many errors they raise (RFC 1812 §4.3.2.8): each hop is asked some times.
const TRIES: u32 = 10;
const TRY: Duration = Duration::from_secs(1);
const PROBE: &[u8] = b"how far is it?";

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Datagrams to a closed port.
    Udp,
    /// Echo requests.
    Echo,
    /// What begins a connection, to a closed port.
    Syn,
}

impl Mode {
    pub const ALL: [Self; 3] = [Self::Udp, Self::Echo, Self::Syn];
}

/// Every hop to an address and a closed port of it, the address itself last.
pub fn trace(from: &Place, mode: Mode, to: SocketAddr) -> Result<Vec<IpAddr>> {
    let mut hops = Vec::new();
    follow(from, mode, to, &mut hops).with_context(|| {
        let from = from.name();
        format!("traceroute by {mode:?}, {from} → {to}, after {hops:?}")
    })?;
    Ok(hops)
}

fn follow(from: &Place, mode: Mode, to: SocketAddr, hops: &mut Vec<IpAddr>) -> Result<()> {
    for ttl in 1..=MAX_HOPS {
        let (hop, is_last) = (1..=TRIES)
            .find_map(|_| from.run(|| probe(mode, to, ttl)).transpose())
            .with_context(|| format!("hop {ttl} does not answer"))??;
        hops.push(hop);
        if is_last {
            return Ok(());
        }
    }
    bail!("it is not reached in {MAX_HOPS} hops")
}

/// Who answers a packet that may make so many hops, and whether that is its destination.
fn probe(mode: Mode, to: SocketAddr, ttl: u32) -> Result<Option<(IpAddr, bool)>> {
    match mode {
        Mode::Udp => datagram(to, ttl),
        Mode::Echo => echo(to.ip(), ttl),
        Mode::Syn => syn(to, ttl),
    }
}

fn datagram(to: SocketAddr, ttl: u32) -> Result<Option<(IpAddr, bool)>> {
    let socket = UdpSocket::bind((any(to.ip()), 0))?;
    limit(&socket, to, ttl)?;
    socket.connect(to)?;
    socket.send(PROBE).context("cannot send")?;
    match errors::answer(&socket, Instant::now() + TRY)? {
        None => Ok(None),
        Some(Answer::Data(_)) => bail!("the port is not closed"),
        Some(Answer::Error(heard)) => {
            ensure!(heard.quoted == PROBE, "{heard:?} quotes something else");
            hop(&heard, to.ip())
        }
    }
}

fn echo(to: IpAddr, ttl: u32) -> Result<Option<(IpAddr, bool)>> {
    let socket = icmp::socket(to)?;
    let target = SocketAddr::new(to, 0);
    limit(&socket, target, ttl)?;
    socket.connect(&target.into())?;
    let (id, deadline) = (icmp::next_id(), Instant::now() + TRY);
    let sent = icmp::request(to, id, 0, PROBE);
    socket.send(&sent).context("cannot send")?;
    while let Some(answer) = errors::answer(&socket, deadline)? {
        match answer {
            Answer::Error(heard) => {
                // The socket hears of every echo request to there; the first eight bytes are quoted by
                // everybody (RFC 792), and the id is what was translated.
                if heard.quoted.get(4..8) == sent.get(4..8) {
                    return hop(&heard, to);
                }
            }
            Answer::Data(packet) => {
                if icmp::is_reply(to, &packet, id, 0) {
                    return Ok(Some((to, true)));
                }
            }
        }
    }
    Ok(None)
}

fn syn(to: SocketAddr, ttl: u32) -> Result<Option<(IpAddr, bool)>> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    limit(&socket, to, ttl)?;
    match socket.connect(&to.into()) {
        Ok(()) => bail!("connected at once"),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error).context("cannot connect"),
    }
    let flags = PollFlags::POLLOUT | PollFlags::POLLERR;
    let mut fds = [PollFd::new(socket.as_fd(), flags)];
    if poll(&mut fds, PollTimeout::try_from(TRY)?).context("cannot wait")? == 0 {
        return Ok(None);
    }
    if let Some(heard) = errors::pending(&socket)? {
        return hop(&heard, to.ip());
    }
    match socket.take_error()? {
        Some(error) if error.raw_os_error() == Some(Errno::ECONNREFUSED as i32) => {
            Ok(Some((to.ip(), true)))
        }
        Some(error) => Err(error).context("the connection failed"),
        None => bail!("the port is not closed"),
    }
}

/// Has a socket's packets make so many hops, and keeps what is said of them.
fn limit(socket: &impl AsFd, to: SocketAddr, ttl: u32) -> Result<()> {
    match to {
        SocketAddr::V4(_) => SockRef::from(socket).set_ttl_v4(ttl)?,
        SocketAddr::V6(_) => SockRef::from(socket).set_unicast_hops_v6(ttl)?,
    }
    errors::keep(socket, to.is_ipv4())
}

fn hop(heard: &Heard, to: IpAddr) -> Result<Option<(IpAddr, bool)>> {
    let is_last = heard.from == to && heard.is_closed_port();
    ensure!(is_last || heard.is_of_a_router(), "unexpected {heard:?}");
    Ok(Some((heard.from, is_last)))
}
