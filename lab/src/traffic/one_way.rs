//! One-way streams of messages of one size, as fast as they go.
//!
//! Sockets are as an application gets them: with Nagle's algorithm (RFC 9293 §3.7.4), because
//! who sends in bulk has no reason to turn it off. The receiver asks for a message at a time, as
//! `iperf3 --length` and `qperf` do.

use super::{
    PATIENCE, accept, connect,
    seat::{Ends, Measured, by_threads, thread_cpu, timed},
    tcp,
};
use anyhow::{Context as _, Result, ensure};
use std::{
    io::Write as _,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Bytes that one new connection carries in about `time`, counted and timed where they arrive.
pub fn one_way(
    ends: Ends<'_>,
    listener: &TcpListener,
    message: usize,
    time: Duration,
) -> Result<Measured> {
    streams(ends, listener, 1, message, time)
}

/// The same of several connections at once, each with a thread at both ends.
pub fn streams(
    ends: Ends<'_>,
    listener: &TcpListener,
    connections: usize,
    message: usize,
    time: Duration,
) -> Result<Measured> {
    let target = ends.target(listener.local_addr()?);
    let client = || {
        timed(time, |stop| {
            by_threads(connections, || send(target, message, stop))
        })
    };
    let longest = Mutex::new(Duration::ZERO);
    let server = || {
        by_threads(connections, || {
            let (mut stream, _) = accept(listener, Instant::now() + PATIENCE)?;
            let (count, time) = tcp::drain(&mut stream, message).context("cannot receive")?;
            let mut longest = longest.lock().unwrap_or_else(PoisonError::into_inner);
            *longest = time.max(*longest);
            Ok(count)
        })
    };
    let ((sent, client_cpu), (count, server_cpu)) = ends.run(client, server)?;
    ensure!(sent == count, "{count} of {sent} bytes arrived");
    Ok(Measured {
        count,
        time: longest.into_inner().unwrap_or_else(PoisonError::into_inner),
        cpu: client_cpu + server_cpu,
    })
}

/// The other way: bytes that the server sends over a connection that the client makes.
pub fn way_back(
    ends: Ends<'_>,
    listener: &TcpListener,
    message: usize,
    time: Duration,
) -> Result<Measured> {
    let target = ends.target(listener.local_addr()?);
    let client = || -> Result<_> {
        let cpu = thread_cpu()?;
        let mut stream = connect(target).context("cannot connect")?;
        let (count, time) = tcp::drain(&mut stream, message).context("cannot receive")?;
        Ok(Measured {
            count,
            time,
            cpu: thread_cpu()? - cpu,
        })
    };
    let server = || -> Result<_> {
        let (stream, _) = accept(listener, Instant::now() + PATIENCE)?;
        let cpu = thread_cpu()?;
        let sent = timed(time, |stop| fill(stream, message, stop))?;
        Ok((sent, thread_cpu()? - cpu))
    };
    let (received, (sent, cpu)) = ends.run(client, server)?;
    ensure!(
        sent == received.count,
        "{} of {sent} bytes arrived",
        received.count
    );
    Ok(Measured {
        cpu: received.cpu + cpu,
        ..received
    })
}

fn send(target: SocketAddr, message: usize, stop: &AtomicBool) -> Result<u64> {
    fill(connect(target).context("cannot connect")?, message, stop)
}

fn fill(mut stream: TcpStream, message: usize, stop: &AtomicBool) -> Result<u64> {
    stream.set_nodelay(false)?;
    let mut block = tcp::block();
    block.resize(message, b'x');
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&block).context("cannot send")?;
        sent += message as u64;
    }
    Ok(sent)
}
