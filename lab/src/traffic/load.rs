//! TCP connections that stay open and busy while something happens.

use super::{PATIENCE, accept, connect, end, tcp, uninterrupted};
use crate::place::Place;
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, TcpListener},
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
                let mut text = Text::new();
                while !stop.load(Ordering::Relaxed) {
                    client.write_all(text.next()).context("sending failed")?;
                    thread::sleep(pause);
                }
                let sent = text.position;
                // The receiver closes once it has read everything.
                end(&client)?;
                let rest = uninterrupted(|| client.read(&mut [0])).context("no end came")?;
                ensure!(rest == 0, "unexpected bytes came back");
                Ok(sent)
            })
        };
        let receiver = {
            let received = received.clone();
            thread::spawn(move || -> Result<u64> {
                let mut buffer = vec![0; 1 << 17];
                let mut text = Text::new();
                loop {
                    let read = uninterrupted(|| server.read(&mut buffer));
                    let len = read.context("receiving failed")?;
                    if len == 0 {
                        return Ok(received.load(Ordering::Relaxed));
                    }
                    text.must_go_on_with(&buffer[..len])?;
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

    /// Ends the connection in order; an error if it was reset or stalled, or if a byte was lost,
    /// doubled, moved or changed.
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

/// What a stream says, known to both ends: no two of its blocks are equal, so that one which is
/// lost, doubled or moved shows, and where.
struct Text {
    block: Vec<u8>,
    position: u64,
}

impl Text {
    fn new() -> Self {
        let block = tcp::block();
        Self { block, position: 0 }
    }

    /// The block that holds this position, and where in it that is.
    fn at(&mut self, position: u64) -> (&[u8], usize) {
        let len = self.block.len() as u64;
        let (number, offset) = (position / len, (position % len) as usize);
        self.block[..8].copy_from_slice(&number.to_le_bytes());
        (&self.block, offset)
    }

    fn next(&mut self) -> &[u8] {
        let position = self.position;
        self.position += self.block.len() as u64;
        self.at(position).0
    }

    fn must_go_on_with(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let position = self.position;
            let (block, offset) = self.at(position);
            let expected = &block[offset..];
            let len = expected.len().min(bytes.len());
            let same = expected.iter().zip(bytes).take_while(|(a, b)| a == b);
            // Byte by byte only to say where.
            if expected[..len] != bytes[..len] {
                bail!(
                    "byte {} is another one than was sent",
                    position + same.count() as u64
                );
            }
            bytes = &bytes[len..];
            self.position += len as u64;
        }
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_that_is_lost_doubled_or_moved_shows() {
        let mut text = Text::new();
        let said: Vec<u8> = (0..3).flat_map(|_| text.next().to_vec()).collect();
        let block = said.len() / 3;
        let check = |heard: &[u8]| {
            let mut text = Text::new();
            // In pieces as a socket gives them.
            let mut pieces = heard.chunks(100_003);
            pieces.try_for_each(|piece| text.must_go_on_with(piece))
        };
        check(&said).unwrap();
        let place = |heard: &[u8]| check(heard).unwrap_err().to_string();
        for at in [0, 1, block - 1, block, 2 * block + 5] {
            let lost = [&said[..at], &said[at + 1..]].concat();
            assert!(place(&lost).starts_with("byte "), "{at}");
        }
        // A whole block less, twice, or in the place of another.
        for heard in [
            [&said[..block], &said[2 * block..]].concat(),
            [&said[..2 * block], &said[block..]].concat(),
            [&said[block..2 * block], &said[..block]].concat(),
        ] {
            assert!(place(&heard).ends_with("is another one than was sent"));
        }
        let mut changed = said.clone();
        changed[block + 70_000] ^= 1;
        assert!(place(&changed).starts_with(&format!("byte {} ", block + 70_000)));
    }
}
