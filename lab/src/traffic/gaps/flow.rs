//! One path's datagrams, those that come back, or its requests and responses.

use super::{
    TICKS_PER_REQUEST, now,
    series::{Series, Stamp},
};
use crate::traffic::{PATIENCE, accept, bind, connect, path::Path};
use anyhow::{Context as _, Result, anyhow, ensure};
use nix::{
    errno::Errno,
    sys::{
        epoll::Epoll,
        socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt},
    },
};
use std::{
    io::{ErrorKind, IoSliceMut, Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// Bytes of a message; its number is in the first eight.
const MESSAGE: usize = 64;
/// Of who gets echoes.
const BUFFER: usize = 4 << 20;

pub struct Flow {
    pub name: String,
    /// Over the meter's own cable.
    pub is_control: bool,
    sockets: Sockets,
    state: Mutex<State>,
    ended: AtomicBool,
}

enum Sockets {
    Datagrams {
        from: UdpSocket,
        to: UdpSocket,
    },
    Echoes {
        client: UdpSocket,
        server: UdpSocket,
        size: usize,
    },
    Requests {
        client: TcpStream,
        server: TcpStream,
    },
}

#[derive(Default)]
pub struct State {
    pub series: Series,
    /// The first error of each end.
    pub failures: Vec<String>,
    /// Bytes of a response that has not arrived whole.
    partial: usize,
    /// As whom the server knows the client of echoes.
    known_as: Option<SocketAddr>,
}

impl Flow {
    /// Both kinds of a path.
    pub fn both(path: &Path) -> Result<[Self; 2]> {
        let kind = match path.echoes() {
            Some(size) => format!("UDP and its echo of {size} bytes"),
            None => "UDP".into(),
        };
        let (datagrams, requests) = (Self::datagrams(path), Self::requests(path));
        let what = || format!("cannot watch {}", path.name);
        Ok([
            Self::new(&kind, path, datagrams.with_context(what)?),
            Self::new("TCP", path, requests.with_context(what)?),
        ])
    }

    fn new(kind: &str, path: &Path, sockets: Sockets) -> Self {
        Self {
            name: format!("{kind}, {}", path.name),
            is_control: false,
            sockets,
            state: Mutex::default(),
            ended: AtomicBool::new(false),
        }
    }

    fn datagrams(path: &Path) -> Result<Sockets> {
        let (from, to) = path.datagrams()?;
        let last = if path.echoes().is_some() { &from } else { &to };
        setsockopt(last, sockopt::ReceiveTimestampns, &true)?;
        from.set_nonblocking(true)?;
        to.set_nonblocking(true)?;
        Ok(match path.echoes() {
            None => Sockets::Datagrams { from, to },
            Some(size) => {
                ensure!(size >= MESSAGE, "{size} bytes have no room for a message");
                setsockopt(&from, sockopt::RcvBufForce, &BUFFER)?;
                let (client, server) = (from, to);
                Sockets::Echoes {
                    client,
                    server,
                    size,
                }
            }
        })
    }

    fn requests(path: &Path) -> Result<Sockets> {
        let listener = path.to.run(|| bind::tcp(path.listen()))?;
        let target: SocketAddr = path.target(listener.local_addr()?);
        let client = path.from.run(|| Ok(connect(target)?))?;
        let (server, _) = accept(&listener, Instant::now() + PATIENCE)?;
        client.set_nonblocking(true)?;
        server.set_nonblocking(true)?;
        Ok(Sockets::Requests { client, server })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No message is sent any more.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    pub fn is_complete(&self) -> bool {
        let state = self.state();
        state.series.arrived() == state.series.sent()
    }

    /// Sends the message of a tick, if there is one. A socket that does not take it has lost it.
    pub fn send(&self, tick: u64) -> Result<()> {
        if self.ended.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut message = [0; MESSAGE];
        // Released before the system call, which may deliver the message on this very processor.
        let number = |state: &mut State| -> Result<u64> { Ok(state.series.send(now()?)) };
        let mut whole = MESSAGE;
        let sent = match &self.sockets {
            Sockets::Echoes { client, size, .. } => {
                if !tick.is_multiple_of(TICKS_PER_REQUEST) {
                    return Ok(());
                }
                let number = number(&mut self.state())?;
                whole = *size;
                client.send(&large(number, whole))
            }
            Sockets::Datagrams { from, .. } => {
                let number = number(&mut self.state())?;
                message[..8].copy_from_slice(&number.to_ne_bytes());
                from.send(&message)
            }
            Sockets::Requests { client, .. } => {
                if !tick.is_multiple_of(TICKS_PER_REQUEST) {
                    return Ok(());
                }
                let mut state = self.state();
                if state.partial > 0 || !state.failures.is_empty() || state.awaits() {
                    return Ok(());
                }
                let number = number(&mut state)?;
                drop(state);
                message[..8].copy_from_slice(&number.to_ne_bytes());
                (&*client).write(&message)
            }
        };
        match sent {
            Ok(len) if len == whole => {}
            Ok(len) => self
                .state()
                .fail(&anyhow!("{len} of {whole} bytes were taken")),
            Err(error) => self.state().fail(&anyhow!(error).context("cannot send")),
        }
        Ok(())
    }

    /// The sockets to be read from; their places are the `side` of [`Flow::hear`].
    pub fn ears(&self) -> Vec<BorrowedFd<'_>> {
        match &self.sockets {
            Sockets::Datagrams { to, .. } => vec![to.as_fd()],
            Sockets::Echoes { client, server, .. } => vec![client.as_fd(), server.as_fd()],
            Sockets::Requests { client, server } => vec![client.as_fd(), server.as_fd()],
        }
    }

    /// Reads everything that one of the sockets has.
    pub fn hear(&self, side: usize, epoll: &Epoll) -> Result<()> {
        let heard = match (&self.sockets, side) {
            (Sockets::Datagrams { to, .. }, _) => self.hear_datagrams(to),
            (Sockets::Echoes { client, size, .. }, 0) => self.hear_echoes(client, *size),
            (Sockets::Echoes { server, size, .. }, _) => self.echo(server, *size),
            (Sockets::Requests { client, .. }, 0) => self.hear_responses(client),
            (Sockets::Requests { server, .. }, _) => answer(server),
        };
        if let Err(error) = heard {
            // It would be ready for ever.
            epoll.delete(self.ears()[side])?;
            self.state().fail(&error);
        }
        Ok(())
    }

    fn hear_datagrams(&self, socket: &UdpSocket) -> Result<()> {
        let mut message = [0; MESSAGE];
        while let Some((_, stamp)) = receive(socket, &mut message)? {
            self.state().series.arrive(number(&message), stamp);
        }
        Ok(())
    }

    fn hear_echoes(&self, client: &UdpSocket, size: usize) -> Result<()> {
        let mut echo = vec![0; size + 1];
        while let Some((len, stamp)) = receive(client, &mut echo)? {
            ensure!(is_whole(&echo[..len], size), "what came back is another");
            self.state().series.arrive(number(&echo), stamp);
        }
        Ok(())
    }

    /// The server sends back what it gets, which is always the same client's to it.
    fn echo(&self, server: &UdpSocket, size: usize) -> Result<()> {
        let mut heard = vec![0; size + 1];
        loop {
            let (len, peer) = match server.recv_from(&mut heard) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("cannot receive a datagram"),
            };
            ensure!(is_whole(&heard[..len], size), "what arrived is another");
            let known_as = *self.state().known_as.get_or_insert(peer);
            ensure!(peer == known_as, "{known_as} became {peer}");
            server
                .send_to(&heard[..len], peer)
                .context("cannot answer")?;
        }
    }

    fn hear_responses(&self, mut client: &TcpStream) -> Result<()> {
        let mut buffer = [0; 4 * MESSAGE];
        loop {
            match client.read(&mut buffer) {
                Ok(0) => return Err(anyhow!("the connection was closed")),
                Ok(len) => {
                    let now = now()?;
                    let mut state = self.state();
                    state.partial += len;
                    while state.partial >= MESSAGE {
                        state.partial -= MESSAGE;
                        let number = state.series.arrived() as u64;
                        state.series.arrive(number, now);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("the connection failed"),
            }
        }
    }
}

impl State {
    fn awaits(&self) -> bool {
        self.series.arrived() < self.series.sent()
    }

    fn fail(&mut self, error: &anyhow::Error) {
        // A dead path must not fill the memory.
        if self.failures.len() < 8 {
            self.failures.push(format!("{error:#}"));
        }
    }
}

/// The server's end gives back what it gets.
fn answer(mut server: &TcpStream) -> Result<()> {
    let mut buffer = [0; 4 * MESSAGE];
    loop {
        match server.read(&mut buffer) {
            Ok(0) => return Err(anyhow!("the connection was closed")),
            // One request is on its way at a time: the socket's buffer always has room.
            Ok(len) => server.write_all(&buffer[..len]).context("cannot answer")?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error).context("the server's connection failed"),
        }
    }
}

/// The next datagram that a socket has: how long it is, and when the kernel received it.
fn receive(socket: &UdpSocket, message: &mut [u8]) -> Result<Option<(usize, Stamp)>> {
    let mut space = nix::cmsg_space!(nix::sys::time::TimeSpec);
    let mut parts = [IoSliceMut::new(message)];
    let flags = MsgFlags::MSG_DONTWAIT;
    match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
        Ok(received) => Ok(Some((received.bytes, stamp(received.cmsgs()?)?))),
        Err(Errno::EAGAIN) => Ok(None),
        Err(error) => Err(error).context("cannot receive a datagram"),
    }
}

fn number(message: &[u8]) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&message[..8]);
    u64::from_ne_bytes(number)
}

/// A message of so many bytes, no two of which are alike.
fn large(number: u64, size: usize) -> Vec<u8> {
    let mut message = vec![number as u8; size];
    message[..8].copy_from_slice(&number.to_ne_bytes());
    message
}

fn is_whole(message: &[u8], size: usize) -> bool {
    message.len() == size && *message == large(number(message), size)
}

/// When the kernel received it; where a redirect cleared the stamp, the socket layer has made one.
fn stamp(messages: impl Iterator<Item = ControlMessageOwned>) -> Result<Stamp> {
    for message in messages {
        if let ControlMessageOwned::ScmTimestampns(time) = message {
            return Ok(time.tv_sec() * 1_000_000_000 + time.tv_nsec());
        }
    }
    now()
}
