//! Connections to look at, and how they are looked at without waiting for ever.

use nix::errno::Errno;
use std::{
    io,
    mem::size_of,
    net::SocketAddr,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// How long something that should not happen is given to happen.
pub const MOMENT: Duration = Duration::from_millis(100);
pub const LATE: &str = "nothing in time";

/// Set on a socket before it listens or connects.
#[derive(Clone, Copy, Debug)]
pub struct SocketOption {
    pub level: libc::c_int,
    pub name: libc::c_int,
    pub value: libc::c_int,
}

pub struct Listener {
    pub socket: OwnedFd,
    pub address: SocketAddr,
}

/// Makes connections of one kind.
pub trait Connect: Sync {
    /// Listens at a port that nothing listened at before: what is learnt of a server must not
    /// decide over the next.
    fn listen(&self, options: &[SocketOption]) -> io::Result<Listener>;

    /// Connects to a listener of this kind, and returns once that is done.
    fn connect(&self, to: SocketAddr, options: &[SocketOption]) -> io::Result<OwnedFd>;

    /// How long something that should happen is given to happen.
    fn patience(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// Something that had to be done before there was anything to see.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}")]
pub struct Failed {
    pub what: &'static str,
    pub source: io::Error,
}

/// For `map_err`.
pub fn failed<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Failed {
    move |source| Failed {
        what,
        source: source.into(),
    }
}

/// A TCP socket of the calling thread's network namespace with these options.
pub fn open(family: SocketAddr, options: &[SocketOption]) -> io::Result<OwnedFd> {
    let domain = match family {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(domain, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    Errno::result(fd)?;
    // SAFETY: a descriptor that is ours alone.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    for option in options {
        set(&socket, option.level, option.name, option.value)?;
    }
    Ok(socket)
}

fn set(fd: &OwnedFd, level: i32, name: i32, value: i32) -> Result<(), Errno> {
    set_bytes(fd, level, name, &value.to_ne_bytes())
}

fn set_bytes(fd: &OwnedFd, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
    // SAFETY: a pointer and the length of what it points to.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    Errno::result(result).map(drop)
}

/// A connected pair.
pub struct Pair {
    pub client: Socket,
    pub server: Socket,
}

pub fn pair(connect: &dyn Connect) -> Result<Pair, Failed> {
    pair_with(connect, &[], &[])
}

pub fn pair_with(
    connect: &dyn Connect,
    listening: &[SocketOption],
    connecting: &[SocketOption],
) -> Result<Pair, Failed> {
    let listener = listen(connect, listening)?;
    let client = connect_to(connect, &listener, connecting)?;
    Ok(Pair {
        client,
        server: accept(connect, &listener)?,
    })
}

/// A row over a connection each way: from client to server, from server to client.
pub fn each_way(
    connect: &dyn Connect,
    row: impl Fn(Socket, Socket) -> Result<String, Failed>,
) -> Result<String, Failed> {
    let Pair { client, server } = pair(connect)?;
    let up = row(client, server)?;
    let Pair { client, server } = pair(connect)?;
    let down = row(server, client)?;
    Ok(match up == down {
        true => up,
        false => format!("to the server: {up}; to the client: {down}"),
    })
}

pub fn listen(connect: &dyn Connect, options: &[SocketOption]) -> Result<Listener, Failed> {
    connect.listen(options).map_err(failed("listen"))
}

pub fn connect_to(
    connect: &dyn Connect,
    listener: &Listener,
    options: &[SocketOption],
) -> Result<Socket, Failed> {
    let socket = connect
        .connect(listener.address, options)
        .map_err(failed("connect"))?;
    Ok(Socket(Arc::new(socket)))
}

pub fn accept(connect: &dyn Connect, listener: &Listener) -> Result<Socket, Failed> {
    if poll_fd(&listener.socket, libc::POLLIN, connect.patience()) == Ok(0) {
        return Err(failed("accept")(Errno::ETIMEDOUT));
    }
    let none = std::ptr::null_mut();
    // SAFETY: no address is asked for.
    let fd = unsafe {
        libc::accept4(
            listener.socket.as_raw_fd(),
            none,
            none.cast(),
            libc::SOCK_CLOEXEC,
        )
    };
    Errno::result(fd).map_err(failed("accept"))?;
    // SAFETY: a descriptor that is ours alone.
    Ok(Socket(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) })))
}

fn poll_fd(fd: &OwnedFd, events: i16, timeout: Duration) -> Result<i16, Errno> {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    };
    // SAFETY: one structure.
    let result = unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) };
    Errno::result(result).map(|_| poll.revents)
}

/// One end of a connection, for as many threads as need it. Nothing raises SIGPIPE.
#[derive(Clone, Debug)]
pub struct Socket(Arc<OwnedFd>);

impl Socket {
    pub fn raw(&self) -> libc::c_int {
        self.0.as_raw_fd()
    }

    /// The same socket by another descriptor.
    pub fn duplicate(&self) -> Result<Self, Failed> {
        let fd = self.0.try_clone().map_err(failed("duplicate"))?;
        Ok(Self(Arc::new(fd)))
    }

    pub fn send(&self, data: &[u8], flags: libc::c_int) -> Result<usize, Errno> {
        let flags = flags | libc::MSG_NOSIGNAL;
        // SAFETY: a pointer and the length of what it points to.
        let sent = unsafe { libc::send(self.raw(), data.as_ptr().cast(), data.len(), flags) };
        Errno::result(sent).map(|sent| sent as usize)
    }

    /// Receives into as much as is given.
    pub fn recv_into(&self, data: &mut [u8], flags: libc::c_int) -> Result<usize, Errno> {
        // SAFETY: a pointer and the length of what it points to.
        let got = unsafe { libc::recv(self.raw(), data.as_mut_ptr().cast(), data.len(), flags) };
        Errno::result(got).map(|got| got as usize)
    }

    pub fn recv(&self, most: usize, flags: libc::c_int) -> Result<Vec<u8>, Errno> {
        let mut data = vec![0; most];
        let got = self.recv_into(&mut data, flags)?;
        data.truncate(got);
        Ok(data)
    }

    pub fn set(&self, level: i32, name: i32, value: i32) -> Result<(), Errno> {
        set(&self.0, level, name, value)
    }

    pub fn set_bytes(&self, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
        set_bytes(&self.0, level, name, value)
    }

    pub fn get(&self, level: i32, name: i32) -> Result<i32, Errno> {
        let mut value = [0; size_of::<i32>()];
        self.get_bytes(level, name, &mut value)?;
        Ok(i32::from_ne_bytes(value))
    }

    pub fn get_bytes(&self, level: i32, name: i32, value: &mut [u8]) -> Result<usize, Errno> {
        let mut len = value.len() as libc::socklen_t;
        let pointer = value.as_mut_ptr().cast();
        // SAFETY: a pointer and the length of what it points to.
        let result = unsafe { libc::getsockopt(self.raw(), level, name, pointer, &raw mut len) };
        Errno::result(result).map(|_| len as usize)
    }

    /// The number that an ioctl answers with (FIONREAD, SIOCOUTQ, SIOCATMARK).
    pub fn number(&self, request: libc::Ioctl) -> Result<i32, Errno> {
        let mut value = 0i32;
        // SAFETY: these requests write one int.
        let result = unsafe { libc::ioctl(self.raw(), request, &raw mut value) };
        Errno::result(result).map(|_| value)
    }

    pub fn shutdown(&self, how: libc::c_int) -> Result<(), Errno> {
        // SAFETY: no pointers.
        Errno::result(unsafe { libc::shutdown(self.raw(), how) }).map(drop)
    }

    /// The events there are within some time; zero if none.
    pub fn poll(&self, events: i16, timeout: Duration) -> Result<i16, Errno> {
        poll_fd(&self.0, events, timeout)
    }

    /// Waits until so many bytes can be received at once; that they never can will show.
    pub fn gather(&self, connect: &dyn Connect, bytes: usize) {
        let deadline = Instant::now() + connect.patience();
        let there = || match self.recv(bytes, libc::MSG_PEEK | libc::MSG_DONTWAIT) {
            Ok(data) => data.is_empty() || data.len() == bytes,
            Err(errno) => errno != Errno::EAGAIN,
        };
        while !there() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// What a blocking receive gets, if it gets something in time.
    pub fn hear(&self, connect: &dyn Connect, most: usize, flags: i32) -> Result<String, Failed> {
        let socket = self.clone();
        let got = Work::start(&[self], move || socket.recv(most, flags))?;
        Ok(got.done(connect).map_or_else(|| LATE.into(), heard))
    }

    /// As [`Self::hear`], of what will be there in a moment, without a thread.
    pub fn hear_now(&self, connect: &dyn Connect, most: usize) -> Result<Vec<u8>, Errno> {
        self.poll(libc::POLLIN, connect.patience())?;
        self.recv(most, libc::MSG_DONTWAIT)
    }

    /// Asks for all the bytes of a small message to be sent.
    pub fn say(&self, data: &[u8]) -> Result<(), Failed> {
        match self.send(data, 0) {
            Ok(sent) if sent == data.len() => Ok(()),
            Ok(_) => Err(failed("send")(Errno::ENOBUFS)),
            Err(errno) => Err(failed("send")(errno)),
        }
    }
}

/// Bytes or errno, in words.
pub fn heard(got: Result<Vec<u8>, Errno>) -> String {
    match got {
        Ok(data) if data.is_empty() => "the end".into(),
        Ok(data) if data.len() <= 24 => format!("{:?}", String::from_utf8_lossy(&data)),
        Ok(data) => format!("{} bytes", data.len()),
        Err(errno) => said(Err::<u8, _>(errno)),
    }
}

/// A value or errno, in words.
pub fn said<T: ToString>(result: Result<T, Errno>) -> String {
    match result {
        Ok(value) => value.to_string(),
        Err(errno) => format!("{errno:?}"),
    }
}

/// Work that may never end by itself, on a thread of its own.
pub struct Work<T> {
    result: Receiver<T>,
    early: Option<T>,
    sockets: Vec<Socket>,
    over: bool,
}

impl<T: Send + 'static> Work<T> {
    /// `sockets` are shut down if it has to be ended.
    pub fn start(
        sockets: &[&Socket],
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Self, Failed> {
        let (sender, result) = mpsc::channel();
        thread::Builder::new()
            .name("tcp-battery".into())
            .spawn(move || {
                // Nobody listens if it came too late.
                let _ = sender.send(work());
            })
            .map_err(failed("start a thread"))?;
        Ok(Self {
            result,
            early: None,
            sockets: sockets.iter().map(|&socket| socket.clone()).collect(),
            over: false,
        })
    }

    /// Whether it has not ended after a moment.
    pub fn goes_on(&mut self) -> bool {
        self.early.is_none() && {
            match self.result.recv_timeout(MOMENT) {
                Ok(result) => {
                    self.early = Some(result);
                    self.over = true;
                }
                Err(RecvTimeoutError::Disconnected) => self.over = true,
                Err(RecvTimeoutError::Timeout) => {}
            }
            !self.over
        }
    }

    /// Its result, if there is one in time.
    pub fn done(self, connect: &dyn Connect) -> Option<T> {
        self.done_within(connect.patience())
    }

    pub fn done_within(mut self, patience: Duration) -> Option<T> {
        let result = match self.early.take() {
            Some(result) => Some(result),
            None => self.result.recv_timeout(patience).ok(),
        };
        self.over = result.is_some();
        result
    }
}

impl<T> Drop for Work<T> {
    fn drop(&mut self) {
        if !self.over {
            for socket in &self.sockets {
                let _ = socket.shutdown(libc::SHUT_RDWR);
            }
        }
    }
}
