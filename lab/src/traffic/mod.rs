//! Real traffic between places of the lab, made by this process.
//!
//! Every exchange has a deadline; every error says from where to where. Servers take a free
//! port, so exchanges may run beside one another.
//!
//! [`round_trips`], [`one_way`], [`brief`], [`datagrams`], [`echoes`] and [`held`] are for measuring: one CPU per end
//! ([`seat`]), a given port, and nothing but the system calls that an application would make.

pub mod awake;
pub mod brief;
pub mod crowd;
pub mod datagrams;
pub mod echoes;
pub mod errors;
pub mod flood;
pub mod fragment;
pub mod gaps;
pub mod held;
pub mod http;
pub mod icmp;
pub mod identity;
pub mod load;
pub mod one_way;
pub mod packet;
pub mod path;
pub mod round_trips;
pub mod sctp;
pub mod seat;
pub mod segment;
pub mod snmp;
pub mod stream;
pub mod tally;
pub mod tcp;
pub mod too_big;
pub mod trace;
pub mod udp;
pub mod unbroken;

use anyhow::{Context as _, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    time::{Duration, Instant},
};

/// Longest silence within an exchange. Generous: the machine may be busy with a build, or a
/// virtual one that is not given a processor for a while.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// `0.0.0.0` or `::`, whichever family `like` has.
pub fn any(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Waits until a socket can be read; false if the deadline passes first.
pub fn readable(socket: &impl AsFd, deadline: Instant) -> Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the last millisecond is not spent spinning.
        let left = left.as_millis().saturating_add(1).min(i32::MAX as u128) as i32;
        let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(left)?) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error).context("cannot wait for a socket"),
        }
    }
}

/// Accepts one connection before the deadline.
pub fn accept(listener: &TcpListener, deadline: Instant) -> Result<(TcpStream, SocketAddr)> {
    if !readable(listener, deadline)? {
        bail!("no connection arrived in time");
    }
    let (stream, peer) = listener.accept().context("cannot accept")?;
    patient(&stream)?;
    Ok((stream, peer))
}

/// Connects before the deadline.
pub fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    patient(&stream)?;
    Ok(stream)
}

/// Says that nothing more comes, and waits until the other end has something to say or ends, too.
///
/// Not in a read: where the kernel hands bytes from socket to socket, one that waits may fail with
/// EAGAIN when the end is acknowledged (`sinabro_battery`, row `end-while-reading`).
pub fn end(stream: &TcpStream) -> Result<()> {
    stream.shutdown(Shutdown::Write)?;
    ensure!(
        readable(stream, Instant::now() + PATIENCE)?,
        "no answer and no end after ours"
    );
    Ok(())
}

fn patient(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)
}
