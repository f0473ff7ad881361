//! The plugin's side of the agent's socket: blocking, with one deadline for a whole call.
//!
//! An ADD is one connection from Allocate to Activate: dropping an [`Agent`] earlier makes the
//! agent take back what it gave.

use crate::error::{Code, Error, chain};
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
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long an ADD may wait for the agent, altogether.
pub const ADD_BUDGET: Duration = Duration::from_secs(30);
/// How long any other verb may.
pub const BUDGET: Duration = Duration::from_secs(10);

/// A failed call to the agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Nobody listens, the connection broke, or the deadline passed.
    #[error("agent does not answer on {}", .socket.display())]
    Away { socket: PathBuf, source: io::Error },
    /// The socket cannot be used, whether or not an agent is behind it.
    #[error("agent socket {} cannot be used", .socket.display())]
    Socket { socket: PathBuf, source: io::Error },
    /// The agent's answer makes no sense here.
    #[error("agent on {} gave an answer that is not understood: {reason}", .socket.display())]
    Garbled { socket: PathBuf, reason: String },
    /// The agent's answer is of another version of the messages.
    #[error(
        "agent on {} speaks version {theirs} of the messages, the plugin version {VERSION}",
        .socket.display()
    )]
    OtherVersion { socket: PathBuf, theirs: u32 },
    /// The agent said no.
    #[error(transparent)]
    Refused(ApiError),
}

impl AgentError {
    /// Whether the same call may succeed once the agent is there, ready, and of this release: in
    /// an upgrade the plugin's file is replaced a moment before or after the agent.
    pub fn is_away(&self) -> bool {
        match self {
            Self::Away { .. } | Self::OtherVersion { .. } => true,
            Self::Refused(refusal) => {
                matches!(refusal.code, ErrorCode::NotReady | ErrorCode::Version)
            }
            Self::Socket { .. } | Self::Garbled { .. } => false,
        }
    }
}

impl From<AgentError> for Error {
    fn from(error: AgentError) -> Self {
        const NEXT: &str = "is the sinabro-agent running and ready on this node? see `kubectl -n kube-system get pods -o wide` and `sinabroctl status`";
        const SKEW: &str = "the plugin and the sinabro-agent are of different releases, as for a moment in an upgrade; restarting the agent installs its plugin";
        let (code, next) = match &error {
            AgentError::OtherVersion { .. } => (Code::TryAgainLater, SKEW),
            AgentError::Away { .. } => (Code::TryAgainLater, NEXT),
            AgentError::Socket { .. } => (
                Code::Io,
                "the plugin has to run as root, and `socket` of the network configuration has to be the agent's",
            ),
            AgentError::Garbled { .. } => (
                Code::Decode,
                "are the plugin and the sinabro-agent of one release?",
            ),
            AgentError::Refused(refusal) => match refusal.code {
                ErrorCode::NotReady => (Code::TryAgainLater, NEXT),
                ErrorCode::RangeFull => (
                    Code::RangeFull,
                    "`sinabroctl ipam` shows who has the node's addresses",
                ),
                ErrorCode::AddressUnavailable => (
                    Code::AddressUnavailable,
                    "`sinabroctl ipam` shows the node's ranges and who has the address",
                ),
                ErrorCode::Version => (Code::TryAgainLater, SKEW),
                ErrorCode::NotFound | ErrorCode::Invalid | ErrorCode::Internal => {
                    (Code::Agent, "the sinabro-agent's log says more")
                }
            },
        };
        // Refusals name their object themselves.
        match &error {
            AgentError::Refused(refusal) => Self::new(code, &refusal.message).details(next),
            other => Self::new(code, other.to_string())
                .details(match std::error::Error::source(other) {
                    Some(source) => chain(source),
                    None => String::new(),
                })
                .also(next),
        }
    }
}

/// What any version's reply has.
#[derive(serde::Deserialize)]
struct Version {
    version: u32,
}

/// A connection to the agent.
#[derive(Debug)]
pub struct Agent {
    stream: Timed,
    socket: PathBuf,
}

impl Agent {
    /// # Errors
    /// [`AgentError::Away`] if nobody listens, [`AgentError::Socket`] if nobody could.
    pub fn connect(path: &Path, budget: Duration) -> Result<Self, AgentError> {
        let deadline = Instant::now() + budget;
        let stream = open(path, budget).map_err(|errno| {
            let socket = path.to_owned();
            let source = errno.into();
            match errno {
                // EAGAIN: the backlog stayed full until the deadline.
                Errno::ENOENT | Errno::ECONNREFUSED | Errno::EAGAIN | Errno::ECONNRESET => {
                    AgentError::Away { socket, source }
                }
                _ => AgentError::Socket { socket, source },
            }
        })?;
        Ok(Self {
            stream: Timed {
                stream: stream.into(),
                deadline,
            },
            socket: path.to_owned(),
        })
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// Every [`AgentError`]; [`AgentError::Garbled`] also if the request is longer than the
    /// agent would read.
    pub fn call(&mut self, request: Request) -> Result<Response, AgentError> {
        let envelope = RequestEnvelope {
            version: VERSION,
            request,
        };
        frame::write(&mut self.stream, &envelope).map_err(|e| self.explain(e))?;
        let body = frame::read_body(&mut self.stream).map_err(|e| self.explain(e))?;
        let Version { version } = frame::decode(&body).map_err(|e| self.explain(e))?;
        let other = || AgentError::OtherVersion {
            socket: self.socket.clone(),
            theirs: version,
        };
        let reply = match frame::decode(&body) {
            Ok(ReplyEnvelope { reply, .. }) => reply,
            // Whatever it means there.
            Err(_) if version != VERSION => return Err(other()),
            Err(error) => return Err(self.explain(error)),
        };
        match reply {
            // An error is worth hearing in whatever version it comes.
            Reply::Error(refusal) => Err(AgentError::Refused(refusal)),
            Reply::Ok(_) if version != VERSION => Err(other()),
            Reply::Ok(response) => Ok(response),
        }
    }

    /// For an answer of the wrong kind.
    pub fn garbled(&self, reason: String) -> AgentError {
        AgentError::Garbled {
            socket: self.socket.clone(),
            reason,
        }
    }

    fn explain(&self, error: FrameError) -> AgentError {
        let source = match error {
            FrameError::Io(source) => source,
            FrameError::Closed => io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the agent closed the connection",
            ),
            FrameError::TooLong(_) | FrameError::Json(_) => {
                return self.garbled(error.to_string());
            }
        };
        // What SO_RCVTIMEO and SO_SNDTIMEO give once the deadline has passed.
        let source = match source.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "no answer within the deadline")
            }
            _ => source,
        };
        AgentError::Away {
            socket: self.socket.clone(),
            source,
        }
    }
}

/// Connects by hand: the standard library has no deadline for connecting, and connecting waits
/// while the listener's backlog is full.
fn open(path: &Path, budget: Duration) -> nix::Result<OwnedFd> {
    let address = UnixAddr::new(path)?;
    let fd = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let secs = i64::try_from(budget.as_secs()).unwrap_or(i64::MAX);
    let timeout = TimeVal::new(secs, i64::from(budget.subsec_micros()));
    setsockopt(&fd, sockopt::SendTimeout, &timeout)?;
    loop {
        match connect(fd.as_raw_fd(), &address) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    }
    Ok(fd)
}

/// A stream whose reads and writes end at one deadline, however many there are.
#[derive(Debug)]
struct Timed {
    stream: UnixStream,
    deadline: Instant,
}

impl Timed {
    fn remaining(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(left)
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.remaining()?))?;
        self.stream.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.remaining()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn status(path: &Path, budget: Duration) -> Result<Response, AgentError> {
        Agent::connect(path, budget)?.call(Request::Status)
    }

    /// Runs one call against a listener that does `serve` with its only connection.
    fn against(serve: impl FnOnce(UnixStream) + Send) -> Result<Response, AgentError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || serve(listener.accept().unwrap().0));
            status(&path, Duration::from_millis(300))
        })
    }

    fn reply(stream: &mut UnixStream, version: u32, reply: Reply) {
        let _: RequestEnvelope = frame::read(stream).unwrap();
        frame::write(stream, &ReplyEnvelope { version, reply }).unwrap();
    }

    #[test]
    fn an_answer_comes_back() {
        let response = against(|mut stream| reply(&mut stream, VERSION, Reply::Ok(Response::Done)));
        assert_eq!(response.unwrap(), Response::Done);
    }

    #[test]
    fn nobody_there_is_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let error = status(&path, BUDGET).unwrap_err();
        assert!(error.is_away(), "{error}");

        // A socket file whose listener has died.
        drop(UnixListener::bind(&path).unwrap());
        assert!(status(&path, BUDGET).unwrap_err().is_away());

        let error = Error::from(error);
        assert_eq!(error.code, Code::TryAgainLater);
        assert!(error.msg.contains("agent.sock"), "{error}");
        assert!(error.details.contains("sinabro-agent"), "{error}");
    }

    #[test]
    fn a_path_no_socket_can_have_is_not_away() {
        let path = PathBuf::from(format!("/{}", "a".repeat(200)));
        let error = status(&path, BUDGET).unwrap_err();
        assert!(!error.is_away());
        assert_eq!(Error::from(error).code, Code::Io);
    }

    #[test]
    fn an_agent_that_dies_at_any_point_is_away() {
        let bytes = frame::encode(&ReplyEnvelope {
            version: VERSION,
            reply: Reply::Ok(Response::Done),
        })
        .unwrap();
        assert!(against(drop).unwrap_err().is_away());
        for len in 0..bytes.len() {
            let error = against(|mut stream| {
                let _: RequestEnvelope = frame::read(&mut stream).unwrap();
                stream.write_all(&bytes[..len]).unwrap();
            });
            assert!(error.unwrap_err().is_away(), "{len}");
        }
    }

    #[test]
    fn an_agent_that_hangs_is_away() {
        let error = against(|mut stream| {
            // One byte: a slow answer does not stretch the deadline.
            stream.write_all(&[0]).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        })
        .unwrap_err();
        assert!(error.is_away());
        assert!(Error::from(error).details.contains("deadline"));
    }

    #[test]
    fn an_agent_that_accepts_no_more_is_away() {
        use nix::sys::socket::{Backlog, bind, listen};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let flags = SockFlag::SOCK_CLOEXEC;
        let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let budget = Duration::from_millis(100);
        let waiting: Vec<_> = (0..3).map(|_| Agent::connect(&path, budget)).collect();
        let refused = waiting.into_iter().find_map(Result::err);
        assert!(refused.expect("the backlog is not full").is_away());
    }

    #[test]
    fn each_refusal_has_its_code() {
        for (from, to) in [
            (ErrorCode::NotReady, Code::TryAgainLater),
            (ErrorCode::RangeFull, Code::RangeFull),
            (ErrorCode::AddressUnavailable, Code::AddressUnavailable),
            (ErrorCode::NotFound, Code::Agent),
            (ErrorCode::Invalid, Code::Agent),
            (ErrorCode::Version, Code::TryAgainLater),
            (ErrorCode::Internal, Code::Agent),
        ] {
            let refusal = ApiError::new(from, "range 10.0.0.0/24");
            // A refusal is understood even from another version.
            let error =
                against(move |mut stream| reply(&mut stream, VERSION + 1, Reply::Error(refusal)))
                    .unwrap_err();
            assert_eq!(error.is_away(), to == Code::TryAgainLater);
            let error = Error::from(error);
            assert_eq!(error.code, to);
            assert_eq!(error.msg, "range 10.0.0.0/24");
        }
    }

    #[test]
    fn an_agent_of_another_release_is_for_later() {
        // Also where its answers are of another shape altogether.
        let shapes = [
            format!(r#"{{"version":{},"ok":{{"kind":"done"}}}}"#, VERSION + 1),
            format!(
                r#"{{"version":{},"error":{{"code":"new","message":"x"}}}}"#,
                VERSION + 1
            ),
            format!(r#"{{"version":{},"other":[]}}"#, VERSION - 1),
        ];
        for text in shapes {
            let error = against(|mut stream| {
                let _: RequestEnvelope = frame::read(&mut stream).unwrap();
                let length = (text.len() as u32).to_be_bytes();
                stream.write_all(&length).unwrap();
                stream.write_all(text.as_bytes()).unwrap();
            })
            .unwrap_err();
            assert!(error.is_away(), "{error}");
            let error = Error::from(error);
            assert_eq!(error.code, Code::TryAgainLater, "{text}");
            assert!(error.details.contains("different releases"), "{error}");
        }
    }

    #[test]
    fn answers_that_make_no_sense_are_said_to() {
        for answer in [b"\0\0\0\x04what", &[0xff; 8]] {
            let error = against(|mut stream| {
                // Whatever it answers: an agent that closes before the request is written is
                // away (EPIPE).
                let _: RequestEnvelope = frame::read(&mut stream).unwrap();
                stream.write_all(answer).unwrap();
            })
            .unwrap_err();
            assert!(matches!(error, AgentError::Garbled { .. }), "{error}");
            assert_eq!(Error::from(error).code, Code::Decode);
        }
    }
}
