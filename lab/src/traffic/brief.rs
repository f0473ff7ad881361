//! Connections for one request and one response each.
//!
//! The server closes first, as HTTP/1.0 does: TIME-WAIT (RFC 9293 §3.6) is then on its side, and
//! the client's ports are free again at once.

use super::{
    PATIENCE,
    seat::{Ends, Measured, by_threads, timed},
    uninterrupted,
};
use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Bytes of the request, and of the response.
pub const MESSAGE: usize = 128;

/// Connections made, used and closed by `threads` threads at each end. The first `before` of them
/// are not counted.
pub fn brief(
    ends: Ends<'_>,
    listener: &TcpListener,
    threads: usize,
    before: usize,
    time: Duration,
) -> Result<Measured> {
    let target = ends.target(listener.local_addr()?);
    brief_through(ends, listener, &[target], threads, before, time)
}

/// The same, but clients ask these targets in turns, which something on the way leads to the listener.
pub fn brief_through(
    ends: Ends<'_>,
    listener: &TcpListener,
    targets: &[SocketAddr],
    threads: usize,
    before: usize,
    time: Duration,
) -> Result<Measured> {
    let client = || {
        let result = clients(targets, threads, before, time);
        // Wakes the servers up, whatever came of it.
        // SAFETY: no pointers; the listener is open.
        Errno::result(unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) })
            .context("cannot stop listening")?;
        result
    };
    let server = || by_threads(threads, || serve(listener));
    let (asked, (answered, cpu)) = ends.run(client, server)?;
    let all = asked.count + before as u64;
    ensure!(
        answered == all,
        "{answered} of {all} connections were served"
    );
    Ok(Measured {
        cpu: asked.cpu + cpu,
        ..asked
    })
}

fn clients(
    targets: &[SocketAddr],
    threads: usize,
    before: usize,
    time: Duration,
) -> Result<Measured> {
    for target in targets.iter().cycle().take(before) {
        visit(*target)?;
    }
    let start = Instant::now();
    let (count, cpu) = timed(time, |stop| by_threads(threads, || visits(targets, stop)))?;
    let time = start.elapsed();
    Ok(Measured { count, time, cpu })
}

fn visits(targets: &[SocketAddr], stop: &AtomicBool) -> Result<u64> {
    let mut count = 0;
    for target in targets.iter().cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        visit(*target)?;
        count += 1;
    }
    Ok(count)
}

fn visit(target: SocketAddr) -> Result<()> {
    let mut stream =
        TcpStream::connect(target).with_context(|| format!("cannot connect to {target}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut buffer = [b'x'; MESSAGE];
    stream.write_all(&buffer).context("cannot ask")?;
    stream.read_exact(&mut buffer).context("no answer")?;
    let rest = uninterrupted(|| stream.read(&mut buffer)).context("no end")?;
    ensure!(rest == 0, "more than the answer came back");
    Ok(())
}

fn serve(listener: &TcpListener) -> Result<u64> {
    let mut buffer = [0; MESSAGE];
    let mut count = 0;
    loop {
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // No longer listening (accept(2)).
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(count),
            Err(error) => return Err(error).context("cannot accept"),
        };
        stream.read_exact(&mut buffer).context("no request")?;
        stream.write_all(&buffer).context("cannot answer")?;
        count += 1;
    }
}
