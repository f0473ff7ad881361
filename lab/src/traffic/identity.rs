//! TCP connections by sockets as applications have them, one after another, each with an identity.
//!
//! The client says who it is; the server says it back, and as whom it knows the client. Then it closes, so
//! that TIME-WAIT is on its side, and the client's port free at once ([`super::brief`]).

use super::{accept, bind, connect, uninterrupted};
use crate::place::Place;
use anyhow::{Context as _, Result, anyhow, ensure};
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

const IDENTITY: usize = 8;
/// An address, mapped if it is one of IPv4 (RFC 4291 §2.5.5.2), and a port.
const SEEN: usize = 16 + 2;

/// Answers until it is finished.
pub struct Server {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<u64>>>,
}

impl Server {
    pub fn start(place: &Place, address: SocketAddr, threads: usize) -> Result<Self> {
        let listener = place.run(|| {
            let listener = bind::tcp(address)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = Arc::new(listener.with_context(|| format!("cannot listen at {address}"))?);
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let serve = |_| {
            let (listener, stop) = (listener.clone(), stop.clone());
            thread::spawn(move || serve(&listener, &stop))
        };
        let threads = (0..threads).map(serve).collect();
        Ok(Self {
            address,
            stop,
            threads,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections it answered.
    pub fn finish(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = 0;
        for thread in self.threads.drain(..) {
            all += thread.join().map_err(|_| anyhow!("a server panicked"))??;
        }
        Ok(all)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn serve(listener: &TcpListener, stop: &AtomicBool) -> Result<u64> {
    const LOOK: Duration = Duration::from_millis(50);
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        if !super::readable(listener, Instant::now() + LOOK)? {
            continue;
        }
        // Another thread may have been faster.
        let Ok((stream, peer)) = accept(listener, Instant::now()) else {
            continue;
        };
        stream.set_nonblocking(false)?;
        answer(stream, peer).with_context(|| format!("the connection of {peer}"))?;
        count += 1;
    }
    Ok(count)
}

fn answer(mut stream: TcpStream, peer: SocketAddr) -> Result<()> {
    let mut said = [0; IDENTITY];
    stream.read_exact(&mut said).context("no identity")?;
    let address = match peer.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    let seen = [&said[..], &address.octets(), &peer.port().to_be_bytes()].concat();
    stream.write_all(&seen).context("cannot answer")
}

/// So many connections from a place to a server, `who`'s. Each must be known to the server by an address
/// and a port that are right for those that the client has.
pub fn visit(
    from: &Place,
    target: SocketAddr,
    who: u32,
    connections: u32,
    is_right: impl Fn(SocketAddr, SocketAddr) -> bool + Sync,
) -> Result<()> {
    from.run(|| {
        for number in 0..connections {
            let identity = u64::from(who) << 32 | u64::from(number);
            once(target, identity, &is_right)
                .with_context(|| format!("connection {number} of {connections}"))?;
        }
        Ok(())
    })
    .with_context(|| format!("{} → {target}", from.name()))
}

fn once(
    target: SocketAddr,
    identity: u64,
    is_right: impl Fn(SocketAddr, SocketAddr) -> bool,
) -> Result<()> {
    let mut stream = connect(target).context("cannot connect")?;
    let own = stream.local_addr()?;
    let identity = identity.to_be_bytes();
    stream.write_all(&identity).context("cannot ask")?;
    let mut heard = [0; IDENTITY + SEEN];
    stream.read_exact(&mut heard).context("no answer")?;
    let (said, seen) = heard.split_at(IDENTITY);
    ensure!(
        said == identity,
        "mixed up: {said:?} came back for {identity:?}"
    );
    let (address, port) = seen.split_at(16);
    let address = Ipv6Addr::from(<[u8; 16]>::try_from(address)?).to_canonical();
    let seen = SocketAddr::new(address, u16::from_be_bytes(port.try_into()?));
    ensure!(is_right(own, seen), "{own} was taken for {seen}");
    ensure!(
        uninterrupted(|| stream.read(&mut [0]))? == 0,
        "more than the answer came back"
    );
    Ok(())
}
