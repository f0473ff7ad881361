//! Sockets at an address that one of this process had until now.
//!
//! What another thread starts has a copy of every descriptor until it executes its program (fork(2)), and so keeps the addresses of
//! sockets that were closed here meanwhile.

use crate::wait::wait_for;
use anyhow::Result;
use std::{
    io,
    net::{TcpListener, ToSocketAddrs, UdpSocket},
};

pub fn udp(at: impl ToSocketAddrs) -> Result<UdpSocket> {
    freed(|| UdpSocket::bind(&at))
}

pub fn tcp(at: impl ToSocketAddrs) -> Result<TcpListener> {
    freed(|| TcpListener::bind(&at))
}

/// What `bind` gives once the address is free.
pub fn freed<S>(bind: impl Fn() -> io::Result<S>) -> Result<S> {
    let bound = wait_for("an address to be free", || match bind() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        other => Ok(Some(other)),
    });
    Ok(bound??)
}

/// Runs `f` while another thread starts a program, which has all descriptors of now until `f` has it go on.
#[cfg(test)]
pub(super) fn while_something_starts(f: impl FnOnce(&(dyn Fn() + Sync))) {
    use std::{
        io::{Read as _, Write as _},
        os::unix::{net::UnixStream, process::CommandExt as _},
        process::Command,
        thread,
    };
    let (mut here, mut there) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut command = Command::new("true");
            let wait = move || {
                there.write_all(b"x")?;
                there.read_exact(&mut [0])
            };
            // SAFETY: it writes to a socket and reads from it.
            unsafe { command.pre_exec(wait) };
            assert!(command.status().unwrap().success());
        });
        here.read_exact(&mut [0]).unwrap();
        f(&|| (&here).write_all(b"x").unwrap());
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread, time::Duration};

    #[test]
    fn what_is_being_started_keeps_no_address() {
        let first = (udp("127.0.0.1:0").unwrap(), tcp("127.0.0.1:0").unwrap());
        let at = (first.0.local_addr().unwrap(), first.1.local_addr().unwrap());
        while_something_starts(|go_on| {
            drop(first);
            let taken = UdpSocket::bind(at.0).unwrap_err();
            assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(50));
                    go_on();
                });
                udp(at.0).unwrap();
                tcp(at.1).unwrap();
            });
        });
    }
}
