//! One request to the agent, one reply.

use crate::ctl::{Common, Exit};
use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
        },
        time::TimeVal,
    },
};
use sinabro_common::api::{
    ApiError, ErrorCode, Reply, ReplyEnvelope, Request, RequestEnvelope, Response, VERSION,
    frame::{self, FrameError},
};
use std::{
    io::{self, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot reach the agent at {}: {source}; {}", socket.display(), hint(source))]
    Connect { socket: PathBuf, source: io::Error },
    #[error(
        "the agent at {} did not answer within {seconds} s; look at its log, or wait longer with --timeout",
        socket.display()
    )]
    Timeout { socket: PathBuf, seconds: u64 },
    #[error("no usable answer from {}: {source}; is it the agent's socket, and of this version?", socket.display())]
    Answer { socket: PathBuf, source: FrameError },
    #[error("{} speaks version {theirs} of the protocol, this is version {VERSION}; use the sinabroctl that came with the agent", socket.display())]
    Version { socket: PathBuf, theirs: u32 },
    #[error("{} answered another question than was asked; is it the agent's socket?", socket.display())]
    Other { socket: PathBuf },
    #[error("the agent refused: {0}")]
    Refused(ApiError),
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
}

impl Error {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Refused(error) if error.code == ErrorCode::Version => Exit::Unreachable,
            Self::Refused(_) | Self::Output(_) => Exit::Problem,
            _ => Exit::Unreachable,
        }
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "is the agent running, and is this its --socket?",
        io::ErrorKind::ConnectionRefused => "the agent has stopped; start it",
        io::ErrorKind::PermissionDenied => "only root may talk to it",
        _ => "give the agent's socket with --socket",
    }
}

/// Asks the agent; `pick` takes the report out of the response it belongs to.
///
/// # Errors
/// Whatever stands between the question and its answer.
pub fn ask<T>(
    common: &Common,
    request: Request,
    pick: fn(Response) -> Option<T>,
) -> Result<T, Error> {
    ask_within(common, common.timeout, request, pick)
}

/// The same with another deadline than usual.
///
/// # Errors
/// As [`ask`].
pub fn ask_within<T>(
    common: &Common,
    seconds: u64,
    request: Request,
    pick: fn(Response) -> Option<T>,
) -> Result<T, Error> {
    let socket = || common.socket.clone();
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut stream =
        Stream::connect(&common.socket, deadline).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => Error::Timeout {
                socket: socket(),
                seconds,
            },
            _ => Error::Connect {
                socket: socket(),
                source,
            },
        })?;

    let request = RequestEnvelope {
        version: VERSION,
        request,
    };
    let exchange = frame::write(&mut stream, &request).and_then(|()| frame::read(&mut stream));
    let reply: ReplyEnvelope = exchange.map_err(|source| match &source {
        FrameError::Io(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ) =>
        {
            Error::Timeout {
                socket: socket(),
                seconds,
            }
        }
        _ => Error::Answer {
            socket: socket(),
            source,
        },
    })?;
    match reply.reply {
        _ if reply.version != VERSION => Err(Error::Version {
            socket: socket(),
            theirs: reply.version,
        }),
        Reply::Error(error) => Err(Error::Refused(error)),
        Reply::Ok(response) => pick(response).ok_or_else(|| Error::Other { socket: socket() }),
    }
}

/// A connection with one deadline for everything, however small the pieces it comes in.
struct Stream {
    stream: UnixStream,
    deadline: Instant,
}

impl Stream {
    fn connect(path: &Path, deadline: Instant) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        // Also bounds connect(2), which waits while the backlog is full (unix(7)).
        let left = left(deadline)?;
        let wait = TimeVal::new(left.as_secs() as i64, i64::from(left.subsec_micros()));
        setsockopt(&fd, sockopt::SendTimeout, &wait)?;
        let address = UnixAddr::new(path)?;
        while let Err(errno) = connect(fd.as_raw_fd(), &address) {
            if errno != Errno::EINTR {
                return Err(errno.into());
            }
        }
        Ok(Self {
            stream: fd.into(),
            deadline,
        })
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    // Zero would mean "for ever" to the kernel.
    if left < Duration::from_micros(1) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.deadline)?))?;
        self.stream.read(buf)
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(left(self.deadline)?))?;
        self.stream.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
