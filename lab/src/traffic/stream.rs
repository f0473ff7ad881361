//! One connection, bytes both ways, and what either end's TCP says of it.

use super::{PATIENCE, accept, bind, connect, path::Path, snmp, uninterrupted};
use crate::{
    place::Place,
    wait::{self, wait_within},
};
use anyhow::{Context as _, Result, anyhow, ensure};
use nix::errno::Errno;
use sinabro_netlink::sysctl;
use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    os::fd::AsRawFd as _,
    thread,
    time::{Duration, Instant},
};

/// A prime, so that bytes that are lost or moved show.
const PERIOD: usize = 65_521;

/// What tcp(7) says in TCP_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// Bytes of a segment that it sends.
    pub mss: usize,
    /// Segments that it sent again.
    pub retransmitted: u32,
    /// Those of them that had arrived before, as the other end said (DSACK, RFC 2883): a timer was early, nothing was lost.
    /// Too few by some where many were: the kernel counts what it is told of at once by full segments (`tcp_dsack_seen`),
    /// and a socket's backlog joins smaller ones (`tcp_add_to_backlog`).
    pub needlessly: u32,
    /// Segments with data that it sent, each time counted.
    pub sent: u32,
    /// Segments with data that came, before a socket's backlog joins them (RFC 4898).
    pub received: u32,
    /// Segments that it got behind one that was sent later, or that came while one was missing.
    pub out_of_order: u32,
}

pub struct Stream {
    name: String,
    client: TcpStream,
    server: TcpStream,
    /// Of the client, and of the server.
    places: [Place; 2],
    /// What [`excused`] said before.
    excused: [u64; 2],
}

/// What each of two ends may have sent again though the network has lost nothing.
fn excused([client, server]: &[Place; 2]) -> Result<[u64; 2]> {
    let of = |from, to| -> Result<u64> { Ok(snmp::probes(from)? + snmp::discarded(to)?) };
    Ok([of(client, server)?, of(server, client)?])
}

/// Has TCP say of each segment that it arrived twice. An acknowledgement has room for one, and Linux defers some: until who reads
/// from the socket has taken what came meanwhile (6.7, 133c4c0d3717), and while segments are missing (4.18, 5d9f4262b7ea).
fn tell_of_each_duplicate(place: &Place) -> Result<()> {
    for setting in ["tcp_backlog_ack_defer", "tcp_comp_sack_nr"] {
        let write = || Ok(sysctl::ensure(&["net", "ipv4", setting], "0"));
        match place.run(write)? {
            // An earlier kernel.
            Err(error) if error.errno() == Some(Errno::ENOENT) => {}
            written => drop(written?),
        }
    }
    Ok(())
}

impl Stream {
    pub fn open(path: &Path) -> Result<Self> {
        let open = || -> Result<Self> {
            let places = [path.from.clone(), path.to.clone()];
            for place in &places {
                tell_of_each_duplicate(place)?;
            }
            let excused = excused(&places)?;
            let listener = path.to.run(|| bind::tcp(path.listen()))?;
            let target = path.target(listener.local_addr()?);
            let client = path.from.run(|| Ok(connect(target)?))?;
            let (server, _) = accept(&listener, Instant::now() + PATIENCE)?;
            Ok(Self {
                name: path.name.clone(),
                client,
                server,
                places,
                excused,
            })
        };
        open().with_context(|| path.name.clone())
    }

    /// Sends bytes one way and then the other, in writes of that size, and compares what arrives.
    pub fn carry(&self, bytes: usize, write: usize) -> Result<()> {
        for (way, from, to) in [
            ("there", &self.client, &self.server),
            ("back", &self.server, &self.client),
        ] {
            one_way(from, to, bytes, write).with_context(|| format!("{}, {way}", self.name))?;
        }
        Ok(())
    }

    /// The client's end, and the server's.
    pub fn said(&self) -> Result<[Said; 2]> {
        Ok([said(&self.client)?, said(&self.server)?])
    }

    /// Waits until nothing counts as lost: the last of what was sent needlessly may be told of late.
    ///
    /// # Errors
    /// If something has been lost, with what TCP says.
    pub fn must_have_lost_nothing(&self) -> Result<()> {
        self.must_have_lost_nothing_within(wait::PATIENCE)
    }

    /// The same, and waits no longer than that.
    ///
    /// # Errors
    /// As above.
    pub fn must_have_lost_nothing_within(&self, patience: Duration) -> Result<()> {
        wait_within(
            patience,
            &format!("{}: nothing to be lost", self.name),
            || {
                let (lost, said) = (self.lost()?, self.said()?);
                ensure!(lost == [0, 0], "{lost:?} of {said:?}");
                Ok(Some(()))
            },
        )
    }

    /// Segments of each end that the network has lost: each was sent again, and none of them came twice.
    fn lost(&self) -> Result<[u64; 2]> {
        let excused = excused(&self.places)?;
        let said = self.said()?;
        Ok([0, 1].map(|end| {
            let again = said[end].retransmitted.saturating_sub(said[end].needlessly);
            let missing = said[end].sent.saturating_sub(said[1 - end].received);
            u64::from(again.min(missing)).saturating_sub(excused[end] - self.excused[end])
        }))
    }

    pub fn client(&self) -> &TcpStream {
        &self.client
    }

    pub fn server(&self) -> &TcpStream {
        &self.server
    }
}

/// What every stream carries at a place in it.
pub fn byte_at(at: usize) -> u8 {
    (at % PERIOD * 31 % 251) as u8
}

/// Enough of it to begin anywhere and go on for so long.
fn pattern(len: usize) -> Vec<u8> {
    (0..PERIOD + len).map(byte_at).collect()
}

fn one_way(from: &TcpStream, to: &TcpStream, bytes: usize, write: usize) -> Result<()> {
    thread::scope(|scope| {
        let sender = scope.spawn(|| send(from, bytes, write));
        let received = receive(to, bytes);
        let sent = sender.join().map_err(|_| anyhow!("the sender panicked"))?;
        received.and(sent)
    })
}

/// Sends so many bytes, in writes of that size.
pub fn send(mut to: &TcpStream, bytes: usize, write: usize) -> Result<()> {
    let pattern = pattern(write);
    let mut sent = 0;
    while sent < bytes {
        let len = write.min(bytes - sent);
        let written = to.write_all(&pattern[sent % PERIOD..][..len]);
        written.with_context(|| format!("cannot send after {sent} of {bytes} bytes"))?;
        sent += len;
    }
    Ok(())
}

/// Receives so many bytes and compares each.
pub fn receive(mut from: &TcpStream, bytes: usize) -> Result<()> {
    const READ: usize = 1 << 16;
    let pattern = pattern(READ);
    let mut buffer = vec![0; READ];
    let mut received = 0;
    while received < bytes {
        let read = uninterrupted(|| from.read(&mut buffer));
        let len = read.with_context(|| format!("nothing after {received} of {bytes} bytes"))?;
        ensure!(len > 0, "the end came after {received} of {bytes} bytes");
        let expected = &pattern[received % PERIOD..][..len];
        ensure!(buffer[..len] == *expected, "what arrived differs");
        received += len;
    }
    Ok(())
}

/// What TCP says of one end.
pub fn said(stream: &TcpStream) -> Result<Said> {
    // SAFETY: numbers alone, of which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the option gives a tcp_info, for which there is room, or as much of one as the kernel has.
    Errno::result(unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    })
    .context("cannot ask for TCP_INFO")?;
    Ok(Said {
        mss: info.tcpi_snd_mss as usize,
        retransmitted: info.tcpi_total_retrans,
        needlessly: info.tcpi_dsack_dups,
        sent: info.tcpi_data_segs_out,
        received: info.tcpi_data_segs_in,
        out_of_order: info.tcpi_rcv_ooopack,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn a_segment_counts_as_lost_only_if_the_network_has_lost_it() {
        let place = Place::fresh("losing").unwrap();
        let path = Path::new("loopback", &place, &place, Ipv4Addr::LOCALHOST.into());
        let whole = Stream::open(&path).unwrap();
        whole.carry(1 << 20, 1 << 16).unwrap();
        whole.must_have_lost_nothing().unwrap();

        let rules = "add table inet losing; \
            add chain inet losing some { type filter hook input priority 0; }; \
            add rule inet losing some tcp flags & psh == psh numgen inc mod 7 == 6 drop";
        place.command(&["nft", rules]).unwrap();
        let lossy = Stream::open(&path).unwrap();
        lossy.carry(1 << 20, 1 << 10).unwrap();
        let error = lossy.must_have_lost_nothing_within(Duration::ZERO);
        error.unwrap_err();
    }
}
