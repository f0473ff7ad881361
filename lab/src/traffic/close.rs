//! Sockets that are closed once [`close`] returns: their port refuses, and their peer hears of the end.
//!
//! What another thread starts has a copy of every descriptor until it executes its program (fork(2)). A socket
//! that is dropped here meanwhile stays open for that long, and takes what is sent to it.

use crate::wait::wait_for;
use anyhow::{Context as _, Result, anyhow};
use nix::errno::Errno;
use sinabro_netlink::NetNs;
use std::{
    fs, io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

/// Where the kernel lists sockets of a network namespace, and the field with the inode. It has none for a
/// connection that only TCP still knows.
const TABLES: [(&str, usize); 5] = [
    ("tcp", 9),
    ("tcp6", 9),
    ("udp", 9),
    ("udp6", 9),
    ("unix", 6),
];

/// Closes a socket of TCP, UDP or a path, and waits until no process has it any more.
///
/// # Errors
/// If something keeps a copy of it.
pub fn close(socket: impl Into<OwnedFd>) -> Result<()> {
    let socket = socket.into();
    let stat = nix::sys::stat::fstat(&socket).context("cannot look at a socket")?;
    let (inode, namespace) = (stat.st_ino.to_string(), namespace(&socket)?);
    drop(socket);
    wait_for("a socket to be closed by all that have it", || {
        let open = match &namespace {
            Some(namespace) => namespace.run(|| is_listed(&inode))?,
            None => is_listed(&inode),
        };
        Ok((!open?).then_some(()))
    })
}

/// Where a socket is; none without the right to ask, and then it can only be here.
fn namespace(socket: &OwnedFd) -> Result<Option<NetNs>> {
    /// linux/sockios.h.
    const SIOCGSKNS: libc::Ioctl = 0x894c;
    // SAFETY: the request takes no argument, and the descriptor is open.
    match Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSKNS) }) {
        Ok(fd) => {
            // SAFETY: the kernel has just opened it for this call alone.
            let opened = unsafe { OwnedFd::from_raw_fd(fd) };
            let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
            Ok(Some(NetNs::open(path)?))
        }
        Err(Errno::EPERM) => Ok(None),
        Err(error) => Err(anyhow!(error).context("cannot find a socket's namespace")),
    }
}

/// Whether a process has a socket of the calling thread's namespace.
fn is_listed(inode: &str) -> Result<bool> {
    for (table, field) in TABLES {
        let path = format!("/proc/thread-self/net/{table}");
        let text = match fs::read_to_string(&path) {
            // Without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            read => read.with_context(|| format!("cannot read {path}"))?,
        };
        let mut inodes = text
            .lines()
            .filter_map(|line| line.split_ascii_whitespace().nth(field));
        if inodes.any(|listed| listed == inode) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Place, traffic::bind::while_something_starts};
    use std::{
        net::{TcpListener, TcpStream, UdpSocket},
        thread,
        time::Duration,
    };

    /// What is started has the sockets for a while: one that is dropped still takes what comes.
    #[test]
    fn what_is_closed_refuses_while_something_is_started() {
        let place = Place::fresh("closing").unwrap();
        let all = || -> Result<()> {
            for at in ["127.0.0.1:0", "[::1]:0"] {
                let dropped = TcpListener::bind(at)?;
                let (stream, datagrams) = (TcpListener::bind(at)?, UdpSocket::bind(at)?);
                let client = UdpSocket::bind(at)?;
                client.connect(datagrams.local_addr()?)?;
                client.set_read_timeout(Some(Duration::from_secs(10)))?;
                let [to_dropped, to_closed] = [dropped.local_addr()?, stream.local_addr()?];
                while_something_starts(|go_on| {
                    drop(dropped);
                    TcpStream::connect(to_dropped).unwrap();
                    thread::scope(|scope| {
                        scope.spawn(|| {
                            thread::sleep(Duration::from_secs(1));
                            go_on();
                        });
                        close(datagrams).unwrap();
                        close(stream).unwrap();
                    });
                    client.send(b"too late").unwrap();
                    let heard = client.recv(&mut [0]).unwrap_err();
                    assert_eq!(heard.kind(), io::ErrorKind::ConnectionRefused);
                    let heard = TcpStream::connect(to_closed).unwrap_err();
                    assert_eq!(heard.kind(), io::ErrorKind::ConnectionRefused);
                });
            }
            Ok(())
        };
        place.run(all).unwrap();
    }
}
