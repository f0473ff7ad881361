//! Throughput and latency of one TCP connection.

use super::{PATIENCE, accept, connect, tcp};
use crate::namespace::Place;
use anyhow::{Context as _, Result};
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

/// Bits per second that one connection carries for `time`.
pub fn throughput(from: &Place, to: &Place, address: IpAddr, time: Duration) -> Result<f64> {
    let listener = to.run(|| Ok(TcpListener::bind((address, 0))?))?;
    let target = listener.local_addr()?;
    thread::scope(|scope| {
        let server = scope.spawn(|| -> Result<f64> {
            let (mut stream, _) = accept(&listener, Instant::now() + PATIENCE)?;
            let (total, time) = tcp::drain(&mut stream, 1 << 18)?;
            Ok(total as f64 * 8.0 / time.as_secs_f64())
        });
        from.run(|| {
            let mut stream = connect(target).context("cannot connect")?;
            let block = tcp::block();
            let end = Instant::now() + time;
            while Instant::now() < end {
                stream.write_all(&block)?;
            }
            Ok(())
        })?;
        server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))?
    })
    .with_context(|| format!("throughput, {} → {} {address}", from.name(), to.name()))
}

/// Round trips of one byte over an open connection.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    pub p50: Duration,
    pub p99: Duration,
}

pub fn latency(from: &Place, to: &Place, address: IpAddr, rounds: usize) -> Result<Latency> {
    let listener = to.run(|| Ok(TcpListener::bind((address, 0))?))?;
    let target = listener.local_addr()?;
    let mut times = thread::scope(|scope| {
        let server = scope.spawn(|| -> Result<()> {
            let (mut stream, _) = accept(&listener, Instant::now() + PATIENCE)?;
            let mut byte = [0];
            while stream.read(&mut byte)? == 1 {
                stream.write_all(&byte)?;
            }
            Ok(())
        });
        let times = from.run(|| {
            let mut stream = connect(target).context("cannot connect")?;
            let mut byte = [0];
            let mut times = Vec::with_capacity(rounds);
            for _ in 0..rounds {
                let start = Instant::now();
                stream.write_all(&byte)?;
                stream.read_exact(&mut byte)?;
                times.push(start.elapsed());
            }
            Ok(times)
        });
        server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))??;
        times
    })
    .with_context(|| format!("latency, {} → {} {address}", from.name(), to.name()))?;
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    Ok(Latency {
        p50: at(50),
        p99: at(99),
    })
}
