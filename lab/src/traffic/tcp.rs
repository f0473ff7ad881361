//! TCP transfers that prove every byte: both sides digest what they saw.

use super::{PATIENCE, accept, connect, end, seat::Ends, uninterrupted};
use crate::place::Place;
use anyhow::{Context as _, Result, ensure};
use sha2::{Digest as _, Sha256};
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

const CHUNK: usize = 1 << 17;

/// What a transfer showed.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The client's address as the server saw it.
    pub seen: IpAddr,
    pub digest: String,
    pub seconds: f64,
}

/// Sends `bytes` bytes from one place to an address of another and compares SHA-256 digests.
pub fn transfer(from: &Place, to: &Place, address: IpAddr, bytes: u64) -> Result<Transfer> {
    exchange(from, to, address, bytes).with_context(|| {
        format!(
            "TCP, {bytes} bytes, {} → {} {address}",
            from.name(),
            to.name()
        )
    })
}

/// Bytes of the segments that a client's kernel makes of a new connection's stream (TCP_MAXSEG,
/// tcp(7)).
pub fn segment_size(ends: Ends<'_>) -> Result<u32> {
    let listener = ends.listen(0)?;
    let target = listener.local_addr()?;
    ends.client.run(|| {
        let stream = connect(target).context("cannot connect")?;
        let size = socket2::SockRef::from(&stream).tcp_mss();
        size.context("cannot ask for the segment size")
    })
}

fn exchange(from: &Place, to: &Place, address: IpAddr, bytes: u64) -> Result<Transfer> {
    let listener = to
        .run(|| Ok(TcpListener::bind((address, 0))?))
        .context("cannot listen")?;
    let target = listener.local_addr()?;
    let started = Instant::now();
    thread::scope(|scope| {
        let server = scope.spawn(|| serve(&listener));
        let sent = from.run(|| send(target, bytes));
        let served = server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))?;
        let (sent, echoed) = sent?;
        let (seen, received, count) = served?;
        ensure!(count == bytes, "{count} of {bytes} bytes arrived");
        ensure!(
            sent == received,
            "digests differ: sent {sent}, received {received}"
        );
        ensure!(echoed == received, "the digest did not come back");
        Ok(Transfer {
            seen,
            digest: received,
            seconds: started.elapsed().as_secs_f64(),
        })
    })
}

/// Sends and returns the digest of what was sent and the one that came back.
fn send(target: SocketAddr, bytes: u64) -> Result<(String, String)> {
    let mut stream = connect(target).context("cannot connect")?;
    let mut digest = Sha256::new();
    let mut block = block();
    let mut left = bytes;
    while left > 0 {
        // Every block differs, so that a block lost, doubled or moved shows.
        block[..8].copy_from_slice(&left.to_le_bytes());
        let len = left.min(CHUNK as u64) as usize;
        stream.write_all(&block[..len]).context("cannot send")?;
        digest.update(&block[..len]);
        left -= len as u64;
    }
    end(&stream)?;
    let mut back = String::new();
    stream
        .read_to_string(&mut back)
        .context("no digest came back")?;
    Ok((hex(digest), back))
}

fn serve(listener: &TcpListener) -> Result<(IpAddr, String, u64)> {
    let (mut stream, peer) = accept(listener, Instant::now() + PATIENCE)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let mut count = 0;
    loop {
        let read = uninterrupted(|| stream.read(&mut buffer));
        let len = read.context("cannot receive")?;
        if len == 0 {
            break;
        }
        digest.update(&buffer[..len]);
        count += len as u64;
    }
    let digest = hex(digest);
    stream.write_all(digest.as_bytes())?;
    Ok((peer.ip(), digest, count))
}

/// Reads up to `most` bytes at a time until the end; returns how many came, and the time from the
/// first ones to the end.
pub(super) fn drain(stream: &mut TcpStream, most: usize) -> std::io::Result<(u64, Duration)> {
    let mut buffer = vec![0; most];
    let (mut count, mut first) = (0, None);
    loop {
        let len = uninterrupted(|| stream.read(&mut buffer))?;
        let start = *first.get_or_insert_with(Instant::now);
        if len == 0 {
            return Ok((count, start.elapsed()));
        }
        count += len as u64;
    }
}

/// Whether a connection can be made at all: used to see that it cannot.
pub fn connects(from: &Place, target: SocketAddr) -> Result<TcpStream> {
    from.run(|| connect(target).with_context(|| format!("cannot connect to {target}")))
}

fn hex(digest: Sha256) -> String {
    digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Bytes without a period that a checksum could miss (xorshift, fixed seed).
pub(super) fn block() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(CHUNK);
    while bytes.len() < CHUNK {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}
