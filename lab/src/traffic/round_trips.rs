//! Requests and responses of one size over connections that stay open.
//!
//! One connection is served by blocking calls, as `netperf` does; several by one thread per end
//! that waits for all of them, as event-driven servers do. Nagle's algorithm is off, as every
//! request/response application has it.

use super::{
    PATIENCE, accept, connect,
    seat::{Ends, Measured, thread_cpu, timed},
};
use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Round trips over `connections` new connections, each with one request on its way at a time.
pub fn round_trips(
    ends: Ends<'_>,
    listener: &TcpListener,
    size: usize,
    connections: usize,
    time: Duration,
) -> Result<Measured> {
    let target = ends.target(listener.local_addr()?);
    let client = || -> Result<Measured> {
        let open = |_| connect(target).context("cannot connect");
        let streams = (0..connections).map(open).collect::<Result<Vec<_>>>()?;
        let (start, cpu) = (Instant::now(), thread_cpu()?);
        let count = timed(time, |stop| match <[TcpStream; 1]>::try_from(streams) {
            Ok([stream]) => ask(stream, size, stop),
            Err(streams) => all(streams, size, Phase::Send(size), stop),
        })?;
        Ok(Measured {
            count,
            time: start.elapsed(),
            cpu: thread_cpu()? - cpu,
        })
    };
    let server = || -> Result<(u64, Duration)> {
        let deadline = Instant::now() + PATIENCE;
        let accept = |_| Ok(accept(listener, deadline)?.0);
        let streams = (0..connections).map(accept).collect::<Result<Vec<_>>>()?;
        let cpu = thread_cpu()?;
        let never = AtomicBool::new(false);
        let count = match <[TcpStream; 1]>::try_from(streams) {
            Ok([stream]) => answer(stream, size),
            Err(streams) => all(streams, size, Phase::Receive(size), &never),
        }?;
        Ok((count, thread_cpu()? - cpu))
    };
    let (asked, (answered, cpu)) = ends.run(client, server)?;
    // The server does not see an answer arrive: it counts what it sent.
    ensure!(
        answered == asked.count,
        "{answered} requests were answered, {} answers arrived",
        asked.count
    );
    Ok(Measured {
        cpu: asked.cpu + cpu,
        ..asked
    })
}

/// How long round trips of one byte take over one open connection.
#[derive(Clone, Debug)]
pub struct Latency {
    /// In their order, at least one.
    times: Vec<Duration>,
}

impl Latency {
    /// The time that `percent` of the round trips did not exceed (nearest rank).
    pub fn percentile(&self, percent: f64) -> Duration {
        let rank = (percent * self.times.len() as f64 / 100.0).ceil() as usize;
        self.times[rank.clamp(1, self.times.len()) - 1]
    }
}

/// Times each of so many round trips by itself: a look at the clock costs about a percent of one,
/// which [`round_trips`], for comparisons, does without.
pub fn latency(ends: Ends<'_>, rounds: usize) -> Result<Latency> {
    let listener = ends.listen(0)?;
    let target = ends.target(listener.local_addr()?);
    let client = || -> Result<Vec<Duration>> {
        let mut stream = connect(target).context("cannot connect")?;
        let mut byte = [b'x'];
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let start = Instant::now();
            stream.write_all(&byte).context("cannot ask")?;
            stream.read_exact(&mut byte).context("no answer")?;
            times.push(start.elapsed());
        }
        Ok(times)
    };
    let server = || answer(accept(&listener, Instant::now() + PATIENCE)?.0, 1);
    let (mut times, _) = ends.run(client, server)?;
    times.sort_unstable();
    ensure!(!times.is_empty(), "no round trip was made");
    Ok(Latency { times })
}

fn ask(mut stream: TcpStream, size: usize, stop: &AtomicBool) -> Result<u64> {
    let mut buffer = vec![b'x'; size];
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&buffer).context("cannot ask")?;
        stream.read_exact(&mut buffer).context("no answer")?;
        count += 1;
    }
    Ok(count)
}

fn answer(mut stream: TcpStream, size: usize) -> Result<u64> {
    let mut buffer = vec![0; size];
    let mut count = 0;
    loop {
        match stream.read_exact(&mut buffer) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(count),
            Err(error) => return Err(error).context("cannot read a request"),
        }
        stream.write_all(&buffer).context("cannot answer")?;
        count += 1;
    }
}

/// What an end of a connection does next, with the bytes left.
#[derive(Clone, Copy)]
enum Phase {
    Send(usize),
    Receive(usize),
}

/// Serves many connections by one thread until all have ended; client and server differ in the
/// phase that they begin with. Counts the phases of the other kind that were completed.
fn all(streams: Vec<TcpStream>, size: usize, begin: Phase, stop: &AtomicBool) -> Result<u64> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("cannot make an epoll")?;
    // Edges only: registered once for both directions, as the phases alternate.
    let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
    for (number, stream) in streams.iter().enumerate() {
        stream.set_nonblocking(true)?;
        epoll
            .add(stream, EpollEvent::new(flags, number as u64))
            .context("cannot watch a connection")?;
    }
    let begins_by_sending = matches!(begin, Phase::Send(_));
    let mut connections: Vec<_> = streams
        .into_iter()
        .map(|stream| Some((stream, begin)))
        .collect();
    let mut buffer = vec![b'x'; size];
    let mut events = vec![EpollEvent::empty(); connections.len()];
    let (mut open, mut count) = (connections.len(), 0);
    let patience = EpollTimeout::try_from(PATIENCE)?;
    while open > 0 {
        let ready = match epoll.wait(&mut events, patience) {
            Ok(0) => bail!("{open} of {} connections stalled", connections.len()),
            Err(nix::errno::Errno::EINTR) => continue,
            other => other.context("cannot wait for connections")?,
        };
        for event in &events[..ready] {
            let slot = &mut connections[event.data() as usize];
            let Some((stream, phase)) = slot else {
                continue;
            };
            let ended = loop {
                match advance(stream, *phase, &mut buffer)? {
                    Step::Blocked(left) => {
                        *phase = left;
                        break false;
                    }
                    Step::Ended => break true,
                    Step::Done => {}
                }
                let sent = matches!(phase, Phase::Send(_));
                *phase = match sent {
                    true => Phase::Receive(size),
                    false => Phase::Send(size),
                };
                if sent != begins_by_sending {
                    count += 1;
                    if stop.load(Ordering::Relaxed) {
                        break true;
                    }
                }
                // What was just sent cannot have been answered: the next edge says so.
                if sent {
                    break false;
                }
            };
            if ended {
                *slot = None;
                open -= 1;
            }
        }
    }
    Ok(count)
}

enum Step {
    Done,
    Blocked(Phase),
    Ended,
}

/// Sends or receives what is left of a message, as far as it goes.
fn advance(stream: &mut TcpStream, phase: Phase, buffer: &mut [u8]) -> Result<Step> {
    let (mut left, receives) = match phase {
        Phase::Send(left) => (left, false),
        Phase::Receive(left) => (left, true),
    };
    while left > 0 {
        let result = match receives {
            true => stream.read(&mut buffer[..left]),
            false => stream.write(&buffer[..left]),
        };
        match result {
            Ok(0) if receives && left == buffer.len() => return Ok(Step::Ended),
            Ok(0) => bail!("a connection ended inside a message"),
            Ok(len) => left -= len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let phase = match receives {
                    true => Phase::Receive(left),
                    false => Phase::Send(left),
                };
                return Ok(Step::Blocked(phase));
            }
            Err(error) => return Err(error).context("a connection failed"),
        }
    }
    Ok(Step::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let times = (1..=1000).map(Duration::from_micros).collect();
        let latency = Latency { times };
        for (percent, micros) in [
            (0.0, 1),
            (50.0, 500),
            (99.0, 990),
            (99.9, 999),
            (100.0, 1000),
        ] {
            let found = latency.percentile(percent);
            assert_eq!(found, Duration::from_micros(micros), "{percent}");
        }
        let times = vec![Duration::from_micros(7)];
        assert_eq!(Latency { times }.percentile(99.9), Duration::from_micros(7));
    }
}
