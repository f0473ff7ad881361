//! Real traffic between places of the lab, made by this process.
//!
//! Every exchange has a deadline; every error says from where to where. Servers take a free
//! port, so exchanges may run beside one another.
//!
//! [`round_trips`], [`one_way`], [`brief`], [`datagrams`], [`echoes`] and [`held`] are for measuring: one CPU per end
//! ([`seat`]), a given port, and nothing but the system calls that an application would make.

pub mod awake;
pub mod bind;
pub mod brief;
pub mod bursts;
pub mod capture;
pub mod close;
pub mod crowd;
pub mod datagrams;
pub mod device;
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
pub mod machine_code;
pub mod offload;
pub mod one_way;
pub mod order;
pub mod own_packets;
pub mod packet;
pub mod path;
pub mod questions;
pub mod round_trips;
pub mod sctp;
pub mod seat;
pub mod segment;
pub mod sizes;
pub mod snmp;
pub mod stream;
pub mod tally;
pub mod tcp;
pub mod too_big;
pub mod trace;
pub mod udp;
pub mod udplite;
pub mod unbroken;
pub mod whole_sum;

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

/// Calls again what a signal has interrupted: on a socket with a timeout the kernel does not, whatever the signal's
/// handler says of that (signal(7)), and a process that was stopped for a while has been interrupted, too.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
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

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
    use std::{
        io::{Read as _, Write as _},
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    static SIGNALS: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn who_waits_for_a_socket_goes_on_after_a_signal() {
        let action = SigAction::new(
            SigHandler::Handler(count),
            SaFlags::SA_RESTART,
            SigSet::empty(),
        );
        // SAFETY: the handler does nothing but add to an atomic.
        unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut from = connect(listener.local_addr().unwrap()).unwrap();
        let (mut to, _) = accept(&listener, Instant::now() + PATIENCE).unwrap();
        // SAFETY: it has no conditions.
        let waits = unsafe { libc::pthread_self() };
        let mut byte = [0];
        let read = thread::scope(|scope| {
            scope.spawn(move || {
                // Each comes while the other thread waits, or before: in all but a few it waits.
                for _ in 0..20 {
                    thread::sleep(Duration::from_millis(5));
                    // SAFETY: that thread waits for the end of this one.
                    assert_eq!(unsafe { libc::pthread_kill(waits, libc::SIGUSR1) }, 0);
                }
                to.write_all(b"x").unwrap();
            });
            uninterrupted(|| from.read(&mut byte))
        });
        assert_eq!((read.unwrap(), byte), (1, *b"x"));
        assert!(SIGNALS.load(Ordering::Relaxed) > 0);
    }
}
