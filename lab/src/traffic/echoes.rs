//! Requests and responses by UDP, each flow with one request on its way at a time.

use super::{
    PATIENCE, any, bind,
    seat::{Ends, Measured, thread_cpu, timed},
    uninterrupted,
};
use anyhow::{Context as _, Result, ensure};
use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// How often the server looks whether the client is done, while nothing arrives.
const LOOK: Duration = Duration::from_millis(20);

/// Round trips of `size` bytes over `flows` sockets of the client's, whom one socket answers.
pub fn echoes(ends: Ends<'_>, size: usize, flows: usize, time: Duration) -> Result<Measured> {
    let bind = || Ok(UdpSocket::bind((ends.address, 0))?);
    let server = ends.server.place.run(bind).context("cannot bind")?;
    let target = server.local_addr()?;
    exchanged(ends, &server, target, size, flows, time)
}

/// Each request from a socket of its own, one after the other, as resolvers ask. No more than `most`: the ports towards one remote end
/// are as many as there are, for as long as a flow is kept.
pub fn questions(ends: Ends<'_>, size: usize, most: u64, time: Duration) -> Result<Measured> {
    let bind = || Ok(UdpSocket::bind((ends.address, 0))?);
    let server = ends.server.place.run(bind).context("cannot bind")?;
    let target = server.local_addr()?;
    answered(ends, &server, size, || {
        measured(time, |stop| {
            let mut count = 0;
            while count < most && !stop.load(Ordering::Relaxed) {
                rounds(&[open(target)?], size, &AtomicBool::new(true))?;
                count += 1;
            }
            Ok(count)
        })
    })
}

/// The same, but clients ask a target which something on the way leads to a port of the server.
pub fn echoes_through(
    ends: Ends<'_>,
    target: SocketAddr,
    port: u16,
    size: usize,
    flows: usize,
    time: Duration,
) -> Result<Measured> {
    let bind = || bind::udp((ends.address, port));
    let server = ends.server.place.run(bind).context("cannot bind")?;
    exchanged(ends, &server, target, size, flows, time)
}

fn exchanged(
    ends: Ends<'_>,
    server: &UdpSocket,
    target: SocketAddr,
    size: usize,
    flows: usize,
    time: Duration,
) -> Result<Measured> {
    answered(ends, server, size, || {
        let sockets = (0..flows).map(|_| open(target));
        let sockets = sockets.collect::<Result<Vec<_>>>()?;
        measured(time, |stop| rounds(&sockets, size, stop))
    })
}

fn open(target: SocketAddr) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((any(target.ip()), 0))?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// What the calling thread counts until the flag goes up, or it is done.
fn measured(time: Duration, count: impl FnOnce(&AtomicBool) -> Result<u64>) -> Result<Measured> {
    let (start, cpu) = (Instant::now(), thread_cpu()?);
    timed(time, |stop| {
        Ok(Measured {
            count: count(stop)?,
            // It may have been done before.
            time: start.elapsed(),
            cpu: thread_cpu()? - cpu,
        })
    })
}

/// Has a client ask a server, which answers until that is done.
fn answered(
    ends: Ends<'_>,
    server: &UdpSocket,
    size: usize,
    ask: impl FnOnce() -> Result<Measured> + Send,
) -> Result<Measured> {
    let done = AtomicBool::new(false);
    let client = || {
        let result = ask();
        done.store(true, Ordering::Release);
        result
    };
    let (asked, (answered, cpu)) = ends.run(client, || answer(server, size, &done))?;
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

/// Each socket in its turn: its answer is there by then, or the first that is waited for.
fn rounds(sockets: &[UdpSocket], size: usize, stop: &AtomicBool) -> Result<u64> {
    let request = vec![b'x'; size];
    let mut answer = vec![0; size + 1];
    for socket in sockets {
        socket.send(&request).context("cannot ask")?;
    }
    let mut count = 0;
    loop {
        let last = stop.load(Ordering::Relaxed);
        for socket in sockets {
            let received = uninterrupted(|| socket.recv(&mut answer));
            let length = received.context("no answer")?;
            ensure!(length == size, "an answer of {length} bytes arrived");
            count += 1;
            if !last {
                socket.send(&request).context("cannot ask")?;
            }
        }
        if last {
            return Ok(count);
        }
    }
}

fn answer(server: &UdpSocket, size: usize, done: &AtomicBool) -> Result<(u64, Duration)> {
    server.set_read_timeout(Some(LOOK))?;
    let mut buffer = vec![0; size + 1];
    let (mut count, cpu) = (0, thread_cpu()?);
    // Every request is answered before the client is done.
    while !done.load(Ordering::Acquire) {
        match uninterrupted(|| server.recv_from(&mut buffer)) {
            Ok((length, from)) => {
                ensure!(length == size, "a request of {length} bytes arrived");
                server
                    .send_to(&buffer[..length], from)
                    .context("cannot answer")?;
                count += 1;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
    Ok((count, thread_cpu()? - cpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Place;

    #[test]
    fn every_request_is_answered_and_counted() {
        let place = Place::fresh("echoes").unwrap();
        for (address, flows) in [("127.0.0.1", 1), ("::1", 5)] {
            let ends = Ends::apart(&place, &place, address.parse().unwrap()).unwrap();
            let measured = echoes(ends, 64, flows, Duration::from_millis(20)).unwrap();
            assert!(measured.count >= flows as u64);
            assert_eq!(measured.count % flows as u64, 0);
            let asked = questions(ends, 64, 3, Duration::from_secs(9)).unwrap();
            assert_eq!(asked.count, 3);
        }
    }
}
