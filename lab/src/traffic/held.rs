//! Connections that stay open, for what they cost while nothing is read from them, or little.
//!
//! Both ends are driven by the calling thread: when it is done with all of them, so is the kernel, but
//! for what it does by timers.

use super::{PATIENCE, accept, connect, seat::Ends};
use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

/// For how long no socket takes more before all are held to be full: longer than the kernel defers
/// acknowledgements on connections without delay.
const SILENCE: Duration = Duration::from_millis(100);

pub struct Held {
    clients: Vec<TcpStream>,
    servers: Vec<TcpStream>,
}

impl Held {
    /// Opens so many connections.
    pub fn open(ends: Ends<'_>, listener: &TcpListener, connections: usize) -> Result<Self> {
        allow_open_files(2 * connections as u64)?;
        let mut held = Self {
            clients: Vec::with_capacity(connections),
            servers: Vec::with_capacity(connections),
        };
        let target = ends.target(listener.local_addr()?);
        ends.client.run(|| {
            for number in 1..=connections {
                let open = || -> Result<_> {
                    let client = connect(target).context("cannot connect")?;
                    Ok((client, accept(listener, Instant::now() + PATIENCE)?.0))
                };
                let (client, server) =
                    open().with_context(|| format!("connection {number} of {connections}"))?;
                held.clients.push(client);
                held.servers.push(server);
            }
            Ok(())
        })?;
        Ok(held)
    }

    /// A request and a response of `size` bytes over each.
    pub fn exchange(&mut self, size: usize) -> Result<()> {
        let mut buffer = vec![b'x'; size];
        for (client, server) in self.clients.iter_mut().zip(&mut self.servers) {
            client.write_all(&buffer).context("cannot ask")?;
            server.read_exact(&mut buffer).context("no request")?;
            server.write_all(&buffer).context("cannot answer")?;
            client.read_exact(&mut buffer).context("no answer")?;
        }
        Ok(())
    }

    /// Clients send until none can send more; the bytes that the kernel took.
    pub fn fill(&mut self) -> Result<u64> {
        for client in &self.clients {
            client.set_nonblocking(true)?;
        }
        let block = super::tcp::block();
        let (deadline, mut taken) = (Instant::now() + PATIENCE, 0);
        while self.are_writable()? {
            ensure!(Instant::now() < deadline, "sockets do not fill up");
            for client in &mut self.clients {
                match client.write(&block) {
                    Ok(bytes) => taken += bytes as u64,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error).context("cannot send"),
                }
            }
        }
        Ok(taken)
    }

    /// Servers read so many bytes, which must have come.
    pub fn read(&mut self, bytes: usize) -> Result<()> {
        let mut buffer = vec![0; bytes];
        for server in &mut self.servers {
            server.read_exact(&mut buffer).context("cannot read")?;
        }
        Ok(())
    }

    /// Whether any client becomes writable within [`SILENCE`].
    fn are_writable(&self) -> Result<bool> {
        let clients = self.clients.iter();
        let mut fds: Vec<_> = clients
            .map(|client| PollFd::new(client.as_fd(), PollFlags::POLLOUT))
            .collect();
        loop {
            match poll(&mut fds, PollTimeout::try_from(SILENCE)?) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("cannot wait for sockets"),
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // By RST: what was not read is gone at once, and nothing is left in TIME-WAIT.
        for stream in self.clients.iter().chain(&self.servers) {
            let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
        }
    }
}

/// Lets this process have so many more files open than the few that it has.
fn allow_open_files(more: u64) -> Result<()> {
    const FEW: u64 = 256;
    let wanted = more + FEW;
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure outlives the call.
    Errno::result(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    if limit.rlim_cur >= wanted {
        return Ok(());
    }
    if limit.rlim_max < wanted {
        bail!(
            "{wanted} open files are needed, and {} allowed (ulimit -Hn)",
            limit.rlim_max
        );
    }
    limit.rlim_cur = wanted;
    // SAFETY: the structure outlives the call.
    Errno::result(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
        .context("cannot raise the limit of open files")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{place::Place, wait::eventually};

    #[test]
    fn connections_are_filled_up_to_what_nobody_reads() {
        let place = Place::fresh("held").unwrap();
        let ends = Ends::apart(&place, &place, "127.0.0.1".parse().unwrap()).unwrap();
        let listener = ends.listen(0).unwrap();
        let mut held = Held::open(ends, &listener, 3).unwrap();
        held.exchange(1024).unwrap();
        let taken = held.fill().unwrap();
        assert!(taken > 3 * (64 << 10), "{taken}");
        assert_eq!(held.fill().unwrap(), 0, "they were full");
        // What the kernel took comes, also where it does not fit into the receiver's socket at once.
        held.read(1 << 10).unwrap();
        drop((held, listener));
        // What another thread starts has them for a moment, too.
        let read = || Ok(std::fs::read_to_string("/proc/thread-self/net/tcp")?);
        eventually("no socket to be left", || {
            place.run(read).unwrap().lines().count() == 1
        });
    }

    #[test]
    fn a_limit_that_cannot_be_raised_is_named() {
        let error = allow_open_files(1 << 60).unwrap_err().to_string();
        assert!(error.contains("ulimit -Hn"), "{error}");
    }
}
