//! One connection, bytes both ways, and what either end's TCP says of it.

use super::{PATIENCE, accept, connect, path::Path};
use anyhow::{Context as _, Result, anyhow, ensure};
use nix::errno::Errno;
use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    thread,
    time::Instant,
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
}

pub struct Stream {
    name: String,
    client: TcpStream,
    server: TcpStream,
}

impl Stream {
    pub fn open(path: &Path) -> Result<Self> {
        let open = || -> Result<Self> {
            let listener = path.to.run(|| Ok(TcpListener::bind(path.listen())?))?;
            let target = path.target(listener.local_addr()?);
            let client = path.from.run(|| Ok(connect(target)?))?;
            let (server, _) = accept(&listener, Instant::now() + PATIENCE)?;
            Ok(Self {
                name: path.name.clone(),
                client,
                server,
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

    pub fn client(&self) -> &TcpStream {
        &self.client
    }

    pub fn server(&self) -> &TcpStream {
        &self.server
    }
}

/// What a stream carries from a place in it on.
fn bytes_at(pattern: &[u8], at: usize, len: usize) -> &[u8] {
    &pattern[at % PERIOD..][..len]
}

fn one_way(mut from: &TcpStream, mut to: &TcpStream, bytes: usize, write: usize) -> Result<()> {
    const READ: usize = 1 << 16;
    let period = (0..PERIOD).map(|at| (at * 31 % 251) as u8);
    let pattern: Vec<u8> = period.cycle().take(PERIOD + READ.max(write)).collect();
    thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<()> {
            let mut sent = 0;
            while sent < bytes {
                let len = write.min(bytes - sent);
                from.write_all(bytes_at(&pattern, sent, len))
                    .context("cannot send")?;
                sent += len;
            }
            Ok(())
        });
        let mut received = 0;
        let mut buffer = vec![0; READ];
        let mut hear = || -> Result<()> {
            while received < bytes {
                let len = to.read(&mut buffer).context("cannot receive")?;
                ensure!(len > 0, "the end came after {received} of {bytes} bytes");
                let expected = bytes_at(&pattern, received, len);
                ensure!(buffer[..len] == *expected, "what arrived differs");
                received += len;
            }
            Ok(())
        };
        let heard = hear();
        let sent = sender.join().map_err(|_| anyhow!("the sender panicked"))?;
        heard
            .and(sent)
            .with_context(|| format!("{received} of {bytes} bytes arrived"))
    })
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
    })
}
