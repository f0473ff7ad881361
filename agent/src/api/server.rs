//! Connections: who may talk, how long, how much.
//!
//! Only root and the agent's own user are served (SO_PEERCRED), whatever the socket's mode. The
//! socket appears under its name with its final mode, in place of one that a killed agent left:
//! it is bound beside it and renamed. That no other agent serves there is settled before, by the
//! lock of the state directory.
//!
//! A frame has a deadline from its first byte, an idle connection one too. What is not a request
//! gets an error reply and the connection ends: after garbage nobody knows where the next frame
//! starts.

use super::{call, pod::Session, result, status::Core};
use sinabro_common::api::{
    ApiError, ErrorCode, Reply, ReplyEnvelope, Request, RequestEnvelope, Response, VERSION,
    frame::{self, FrameError},
};
use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::timeout,
};

/// Connections served at once; a node starts a few pods at a time, never hundreds.
const MAX_CONNECTIONS: usize = 512;
/// Longest silence between frames. A plugin's kernel work takes milliseconds.
const IDLE: Duration = Duration::from_secs(60);
/// Longest time for the rest of a frame once it has begun, and for writing one.
const TRANSFER: Duration = Duration::from_secs(5);
/// How long requests under way may take to finish when the agent stops.
const DRAIN: Duration = Duration::from_secs(5);

/// A bound socket, removed when dropped.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
}

impl Server {
    /// Binds the socket, in place of any that is there. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the path cannot be bound.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let mut beside = path.to_owned().into_os_string();
        beside.push(".new");
        let beside = PathBuf::from(beside);
        match fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&beside)?;
        fs::set_permissions(&beside, fs::Permissions::from_mode(0o600))?;
        fs::rename(&beside, path)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
        })
    }

    /// Serves until `stop` becomes true, then lets requests under way finish.
    ///
    /// # Errors
    /// If the socket cannot accept any more.
    pub async fn serve(self, core: Arc<Core>, mut stop: watch::Receiver<bool>) -> io::Result<()> {
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut connections = JoinSet::new();
        let stopping = stop.clone();
        loop {
            let stream = tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) if is_passing(&error) => {
                        tracing::warn!("cannot accept a connection: {error}");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                Some(ended) = connections.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!("a connection's task failed: {error}");
                    }
                    continue;
                }
                () = told(&mut stop) => break,
            };
            let Ok(slot) = slots.clone().try_acquire_owned() else {
                tracing::warn!("{MAX_CONNECTIONS} connections are open, refusing another");
                connections.spawn(refuse(
                    stream,
                    ApiError::new(
                        ErrorCode::NotReady,
                        "the agent has too many connections, try again later",
                    ),
                ));
                continue;
            };
            let (core, stop) = (core.clone(), stopping.clone());
            connections.spawn(async move {
                connection(stream, core, stop).await;
                drop(slot);
            });
        }
        // No new connection finds the socket from here on.
        drop(self);
        let drained = timeout(DRAIN, async {
            while connections.join_next().await.is_some() {}
        });
        if drained.await.is_err() {
            tracing::warn!("{} requests did not finish in time", connections.len());
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Failures of accept(2) that say nothing about the listening socket.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::EMFILE
                | libc::ENFILE
                | libc::ENOBUFS
                | libc::ENOMEM
                | libc::ECONNABORTED
                | libc::EINTR
        )
    )
}

async fn connection(mut stream: UnixStream, core: Arc<Core>, mut stop: watch::Receiver<bool>) {
    if let Err(error) = check_peer(&stream) {
        tracing::warn!("refused a connection: {error}");
        return refuse(stream, error).await;
    }
    let mut session = Session::new(core.clone());
    loop {
        let request = tokio::select! {
            request = read(&mut stream) => request,
            // An ADD under way may finish: its plugin would have to undo everything.
            () = told(&mut stop), if !session.is_open() => break,
        };
        let request = match request {
            Ok(Some(request)) => request,
            Ok(None) => break,
            Err(error) => {
                tracing::debug!("ending a connection: {error}");
                session.close().await;
                return refuse(stream, error).await;
            }
        };
        let (name, started) = (call(&request), Instant::now());
        let outcome = session.handle(request).await;
        core.metrics
            .api_request(name, result(&outcome), started.elapsed());
        if let Err(error) = write(&mut stream, outcome).await {
            tracing::debug!("a reply could not be delivered: {error}");
            break;
        }
        session.delivered();
    }
    session.close().await;
}

/// Waits for the word to stop, or for the end of whoever would give it.
async fn told(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

fn check_peer(stream: &UnixStream) -> Result<(), ApiError> {
    let invalid = |text| ApiError::new(ErrorCode::Invalid, text);
    let peer = stream
        .peer_cred()
        .map_err(|error| invalid(format!("the peer cannot be identified: {error}")))?;
    if peer.uid() == 0 || peer.uid() == nix::unistd::geteuid().as_raw() {
        return Ok(());
    }
    Err(invalid(format!(
        "user {} may not talk to the agent",
        peer.uid()
    )))
}

/// Reads a request; none if the peer closed or was silent too long.
async fn read(stream: &mut UnixStream) -> Result<Option<Request>, ApiError> {
    let invalid = |text: String| ApiError::new(ErrorCode::Invalid, text);
    let mut header = [0; 4];
    let first = match timeout(IDLE, stream.read(&mut header)).await {
        Ok(Ok(n)) if n > 0 => n,
        // Nobody is there to read a reply.
        _ => return Ok(None),
    };
    let rest = async {
        stream.read_exact(&mut header[first..]).await?;
        let mut body = vec![0; frame::body_len(header)?];
        stream.read_exact(&mut body).await?;
        Ok::<_, FrameError>(body)
    };
    let body = match timeout(TRANSFER, rest).await {
        Ok(Ok(body)) => body,
        Ok(Err(FrameError::Io(error))) => {
            tracing::debug!("a connection ended in the middle of a frame: {error}");
            return Ok(None);
        }
        Ok(Err(error)) => return Err(invalid(error.to_string())),
        Err(_) => return Err(invalid("the frame did not arrive in time".into())),
    };
    /// What any version's request has.
    #[derive(serde::Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = frame::decode(&body).map_err(|error| invalid(error.to_string()))?;
    if version != VERSION {
        return Err(ApiError::new(
            ErrorCode::Version,
            format!(
                "the agent speaks version {VERSION} of its messages, the request has {version}"
            ),
        ));
    }
    let envelope: RequestEnvelope =
        frame::decode(&body).map_err(|error| invalid(error.to_string()))?;
    Ok(Some(envelope.request))
}

async fn write(stream: &mut UnixStream, outcome: Result<Response, ApiError>) -> io::Result<()> {
    let reply = match outcome {
        Ok(response) => Reply::Ok(response),
        Err(error) => Reply::Error(error),
    };
    let envelope = ReplyEnvelope {
        version: VERSION,
        reply,
    };
    let bytes = frame::encode(&envelope).or_else(|error| {
        let error = ApiError::new(
            ErrorCode::Internal,
            format!("the reply is not valid: {error}"),
        );
        frame::encode(&ReplyEnvelope {
            version: VERSION,
            reply: Reply::Error(error),
        })
    });
    let bytes = bytes.map_err(io::Error::other)?;
    timeout(TRANSFER, stream.write_all(&bytes)).await?
}

/// Says why and ends the connection.
async fn refuse(mut stream: UnixStream, error: ApiError) {
    if write(&mut stream, Err(error)).await.is_ok() {
        let _ = stream.shutdown().await;
        // What was sent and not read would make the kernel discard the reply (ECONNRESET).
        let mut rest = [0; 4096];
        let drain = async { while matches!(stream.read(&mut rest).await, Ok(n) if n > 0) {} };
        let _ = timeout(Duration::from_secs(1), drain).await;
    }
}
