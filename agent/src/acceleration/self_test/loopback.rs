//! Connections over the loopback of a network namespace.

use super::check::{Connect, End, Fault, Kind, failed};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, recv, send},
};
use sinabro_netlink::NetNs;
use socket2::{Domain, SockAddr, Socket, Type};
use std::{
    io,
    net::{Ipv4Addr, Shutdown, SocketAddr},
    os::fd::AsRawFd,
    time::Duration,
};

/// How long a connection may take to be made, and a message that waits to be sent.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long one poll waits: what is waited for is looked at again after it.
const A_WHILE: Duration = Duration::from_millis(5);
const SMALL: usize = 16 << 10;
/// Bytes that were not sent yet (linux/sockios.h).
const SIOCOUTQNSD: libc::Ioctl = 0x894b;

pub struct Loopback<'a>(pub &'a NetNs);

impl Connect for Loopback<'_> {
    type End = Socket;

    fn pair(
        &self,
        kind: Kind,
        early: &dyn Fn(&Socket) -> Result<(), Fault>,
    ) -> Result<[Socket; 2], Fault> {
        let made = self.0.run(|| make(kind)).map_err(io::Error::other);
        let [listener, client] = made.flatten().map_err(failed("connect"))?;
        early(&client)?;
        let accept = || {
            poll(&listener, libc::POLLIN, PATIENCE)?;
            // A server that is not there yet is no reason to wait for ever.
            listener.set_nonblocking(true)?;
            let (server, _) = listener.accept()?;
            server.set_nonblocking(false)?;
            server.set_write_timeout(Some(PATIENCE))?;
            Ok(server)
        };
        Ok([client, accept().map_err(failed("accept"))?])
    }
}

/// A listener and a client that is connected to it, or will be by its first data. The port is the
/// kernel's choice: what is learnt of a server must not decide over the next.
fn make(kind: Kind) -> io::Result<[Socket; 2]> {
    let [listener, client] = [(); 2].map(|()| Socket::new(Domain::IPV4, Type::STREAM, None));
    let (listener, client) = (listener?, client?);
    if kind.small {
        listener.set_recv_buffer_size(SMALL)?;
        client.set_send_buffer_size(SMALL)?;
    }
    if kind.fast_open {
        set(&listener, libc::TCP_FASTOPEN, 5)?;
        set(&client, libc::TCP_FASTOPEN_CONNECT, 1)?;
    }
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    listener.bind(&address.into())?;
    listener.listen(1)?;
    let address: SockAddr = listener.local_addr()?;
    client.set_write_timeout(Some(PATIENCE))?;
    client.connect(&address)?;
    Ok([listener, client])
}

impl End for Socket {
    fn send(&self, message: &[u8], wait: bool) -> io::Result<usize> {
        let mut flags = MsgFlags::MSG_NOSIGNAL;
        flags.set(MsgFlags::MSG_DONTWAIT, !wait);
        Ok(send(self.as_raw_fd(), message, flags)?)
    }

    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.as_raw_fd(), into, MsgFlags::MSG_DONTWAIT)?)
    }

    fn wait(&self, to_send: bool) -> io::Result<()> {
        let events = if to_send { libc::POLLOUT } else { libc::POLLIN };
        poll(self, events, A_WHILE)
    }

    /// Nothing is on its way, and the rest waits for the window to open.
    fn is_held_back(&self) -> io::Result<bool> {
        let unsent = number(self, SIOCOUTQNSD)?;
        Ok(unsent > 0 && unsent == number(self, libc::TIOCOUTQ as libc::Ioctl)?)
    }

    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }

    fn abort(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

fn poll(socket: &Socket, events: i16, most: Duration) -> io::Result<()> {
    let mut poll = libc::pollfd {
        fd: socket.as_raw_fd(),
        events,
        revents: 0,
    };
    // SAFETY: one structure.
    let result = unsafe { libc::poll(&raw mut poll, 1, most.as_millis() as libc::c_int) };
    match Errno::result(result) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn number(socket: &Socket, request: libc::Ioctl) -> io::Result<libc::c_int> {
    let mut value = 0;
    // SAFETY: these requests write one int.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut value) };
    Errno::result(result)?;
    Ok(value)
}

fn set(socket: &Socket, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: a pointer and the length of what it points to.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            name,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    Errno::result(result)?;
    Ok(())
}
