//! TCP connections that stay open and busy while something happens.

use super::{PATIENCE, accept, connect, tcp};
use crate::namespace::Place;
use anyhow::{Context as _, Result, anyhow, ensure};
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Shutdown, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// One connection that is written to as fast as it takes it, or at a pace.
pub struct Stream {
    name: String,
    stop: Arc<AtomicBool>,
    received: Arc<AtomicU64>,
    sender: Option<JoinHandle<Result<u64>>>,
    receiver: Option<JoinHandle<Result<u64>>>,
}

impl Stream {
    /// Opens the connection; from then on it must not fail. A `pause` between blocks leaves the
    /// machine time for others.
    pub fn start(from: &Place, to: &Place, address: IpAddr, pause: Duration) -> Result<Self> {
        let name = format!("stream {} → {} {address}", from.name(), to.name());
        let open = || -> Result<_> {
            let listener = to.run(|| Ok(TcpListener::bind((address, 0))?))?;
            let target = listener.local_addr()?;
            let client = from.run(|| Ok(connect(target)?))?;
            let (server, _) = accept(&listener, Instant::now() + PATIENCE)?;
            Ok((client, server))
        };
        let (mut client, mut server) = open().with_context(|| name.clone())?;
        let stop = Arc::new(AtomicBool::new(false));
        let received = Arc::new(AtomicU64::new(0));
        let sender = {
            let stop = stop.clone();
            thread::spawn(move || -> Result<u64> {
                let block = tcp::block();
                let mut sent = 0;
                while !stop.load(Ordering::Relaxed) {
                    client.write_all(&block).context("sending failed")?;
                    sent += block.len() as u64;
                    thread::sleep(pause);
                }
                client.shutdown(Shutdown::Write)?;
                // The receiver closes once it has read everything.
                let rest = client
                    .read(&mut [0])
                    .context("waiting for the end failed")?;
                ensure!(rest == 0, "unexpected bytes came back");
                Ok(sent)
            })
        };
        let receiver = {
            let received = received.clone();
            thread::spawn(move || -> Result<u64> {
                let mut buffer = vec![0; 1 << 17];
                loop {
                    let len = server.read(&mut buffer).context("receiving failed")?;
                    if len == 0 {
                        return Ok(received.load(Ordering::Relaxed));
                    }
                    received.fetch_add(len as u64, Ordering::Relaxed);
                }
            })
        };
        Ok(Self {
            name,
            stop,
            received,
            sender: Some(sender),
            receiver: Some(receiver),
        })
    }

    /// Bytes that arrived so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Ends the connection in order; an error if it was reset, stalled or lost anything.
    pub fn finish(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let join = |thread: Option<JoinHandle<Result<u64>>>| {
            thread
                .ok_or_else(|| anyhow!("already finished"))
                .and_then(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
        };
        let (sent, received) = (join(self.sender.take()), join(self.receiver.take()));
        let check = || -> Result<u64> {
            let (sent, received) = (sent?, received?);
            ensure!(sent == received, "{received} of {sent} bytes arrived");
            Ok(received)
        };
        check().with_context(|| self.name.clone())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
