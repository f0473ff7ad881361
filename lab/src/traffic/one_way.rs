//! One-way streams of messages of one size, as fast as they go.
//!
//! Sockets are as an application gets them: with Nagle's algorithm (RFC 9293 §3.7.4), because
//! who sends in bulk has no reason to turn it off. The receiver asks for a message at a time, as
//! `iperf3 --length` and `qperf` do.

use super::{
    PATIENCE, accept, connect,
    seat::{Ends, Measured, thread_cpu, timed},
    tcp,
};
use anyhow::{Context as _, Result, ensure};
use std::{
    io::Write as _,
    net::TcpListener,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

/// Bytes that one new connection carries in about `time`, counted and timed where they arrive.
pub fn one_way(
    ends: Ends<'_>,
    listener: &TcpListener,
    message: usize,
    time: Duration,
) -> Result<Measured> {
    let target = listener.local_addr()?;
    let client = || -> Result<(u64, Duration)> {
        let mut stream = connect(target).context("cannot connect")?;
        stream.set_nodelay(false)?;
        let mut block = tcp::block();
        block.resize(message, b'x');
        let cpu = thread_cpu()?;
        let sent = timed(time, |stop| -> Result<u64> {
            let mut sent = 0;
            while !stop.load(Ordering::Relaxed) {
                stream.write_all(&block).context("cannot send")?;
                sent += message as u64;
            }
            Ok(sent)
        })?;
        Ok((sent, thread_cpu()? - cpu))
    };
    let server = || -> Result<Measured> {
        let (mut stream, _) = accept(listener, Instant::now() + PATIENCE)?;
        let cpu = thread_cpu()?;
        let (count, time) = tcp::drain(&mut stream, message).context("cannot receive")?;
        let cpu = thread_cpu()? - cpu;
        Ok(Measured { count, time, cpu })
    };
    let ((sent, cpu), received) = ends.run(client, server)?;
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
