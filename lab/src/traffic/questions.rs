//! Questions by UDP, one after another, each from a socket of its own as resolvers ask, and each with an identity: what
//! [`super::identity`] is for TCP.
//!
//! The client says who it is; the server says it back, and as whom it knows the client. A question without an answer is asked
//! again by the same socket, which is kept then: an answer that is late must not come to another who has its port.

use super::{PATIENCE, any, bind, readable};
use crate::place::Place;
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use std::{
    collections::HashSet,
    io::ErrorKind,
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

const IDENTITY: usize = 8;
/// How long an answer is waited for before a question is asked again.
const AGAIN: Duration = Duration::from_secs(1);
/// Of the server: all that is on its way.
const BUFFER: usize = 8 << 20;

/// Answers until it is finished.
pub struct Server {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<usize>>>,
}

impl Server {
    pub fn start(place: &Place, address: SocketAddr) -> Result<Self> {
        let bind = || {
            let socket = bind::udp(address)?;
            setsockopt(&socket, sockopt::RcvBufForce, &BUFFER)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let socket = place
            .run(bind)
            .with_context(|| format!("cannot bind UDP {address}"))?;
        let address = socket.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let stop = stop.clone();
            thread::spawn(move || serve(&socket, &stop))
        };
        Ok(Self {
            address,
            stop,
            thread: Some(thread),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many questions it answered, each counted once.
    pub fn finish(mut self) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it was finished before")?;
        thread.join().map_err(|_| anyhow!("a server panicked"))?
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn serve(socket: &UdpSocket, stop: &AtomicBool) -> Result<usize> {
    const LOOK: Duration = Duration::from_millis(50);
    let mut asked = HashSet::new();
    while !stop.load(Ordering::Relaxed) {
        if !readable(socket, Instant::now() + LOOK)? {
            continue;
        }
        let mut question = [0; IDENTITY + 1];
        let (len, peer) = match socket.recv_from(&mut question) {
            Ok(received) => received,
            // Looked at, and not taken: its checksum was wrong.
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error).context("cannot receive"),
        };
        ensure!(len == IDENTITY, "{peer} asked with {len} bytes");
        let identity = &question[..IDENTITY];
        let address = match peer.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let answer = [identity, &address.octets(), &peer.port().to_be_bytes()].concat();
        socket
            .send_to(&answer, peer)
            .with_context(|| format!("cannot answer {peer}"))?;
        asked.insert(identity.to_vec());
    }
    Ok(asked.len())
}

/// So many questions from a place to a server, `who`'s. Each must be known to the server by an address and a port that are right
/// for those that the client has. How often one was asked again.
pub fn ask(
    from: &Place,
    target: SocketAddr,
    who: u32,
    questions: u32,
    is_right: impl Fn(SocketAddr, SocketAddr) -> bool + Sync,
) -> Result<usize> {
    let mut kept = Vec::new();
    from.run(|| {
        for number in 0..questions {
            let identity = u64::from(who) << 32 | u64::from(number);
            once(target, identity, &is_right, &mut kept)
                .with_context(|| format!("question {number} of {questions}"))?;
        }
        Ok(kept.len())
    })
    .with_context(|| format!("{} → {target}", from.name()))
}

fn once(
    target: SocketAddr,
    identity: u64,
    is_right: impl Fn(SocketAddr, SocketAddr) -> bool,
    kept: &mut Vec<UdpSocket>,
) -> Result<()> {
    let socket = UdpSocket::bind((any(target.ip()), 0))?;
    socket.connect(target)?;
    let own = socket.local_addr()?;
    let identity = identity.to_be_bytes();
    let began = Instant::now();
    let mut times = 0;
    loop {
        socket.send(&identity).context("cannot ask")?;
        times += 1;
        if readable(&socket, Instant::now() + AGAIN)? {
            break;
        }
        if began.elapsed() > PATIENCE {
            bail!("no answer to {own}, which asked {times} times");
        }
    }
    let mut heard = [0; IDENTITY + 16 + 2 + 1];
    let len = socket.recv(&mut heard).context("no answer")?;
    ensure!(len == IDENTITY + 18, "an answer of {len} bytes");
    let (said, seen) = heard[..len].split_at(IDENTITY);
    ensure!(
        said == identity,
        "mixed up: {said:?} came back for {identity:?}"
    );
    let (address, port) = seen.split_at(16);
    let address = Ipv6Addr::from(<[u8; 16]>::try_from(address)?).to_canonical();
    let seen = SocketAddr::new(address, u16::from_be_bytes(port.try_into()?));
    ensure!(is_right(own, seen), "{own} was taken for {seen}");
    if times > 1 {
        kept.push(socket);
    }
    Ok(())
}
