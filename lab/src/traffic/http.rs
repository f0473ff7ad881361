//! An HTTP/1.1 load (RFC 9112): a server with keep-alive, and clients that count failures.
//!
//! Only what a load needs: GET, Content-Length, persistent connections.

use super::{PATIENCE, accept, bind, connect, path::Path};
use crate::place::Place;
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

const BODY: usize = 4096;
/// Every so many requests a client opens a new connection, so that set-up is under load, too.
const REQUESTS_PER_CONNECTION: u64 = 50;

/// What a load has done.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub requests: u64,
    pub failures: Vec<String>,
}

/// A server in one place and clients in another, until [`Load::finish`].
pub struct Load {
    name: String,
    stop: Arc<AtomicBool>,
    /// The server stops after the clients: one of them may be connecting.
    close: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    clients: Vec<JoinHandle<Report>>,
    server: Option<JoinHandle<Result<()>>>,
}

impl Load {
    /// So many clients, each with a pause between two requests.
    pub fn on(path: &Path, clients: usize, pause: Duration) -> Result<Self> {
        let (from, to) = (&path.from, &path.to);
        let asked = path.target(path.listen()).ip();
        let name = format!("HTTP {} → {} {asked}", from.name(), to.name());
        let listener = to
            .run(|| bind::tcp(path.listen()))
            .with_context(|| name.clone())?;
        let target = path.target(listener.local_addr()?);
        let [stop, close] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let done = Arc::new(AtomicU64::new(0));
        let server = {
            let close = close.clone();
            thread::spawn(move || serve(&listener, &close))
        };
        let clients = (0..clients)
            .map(|_| {
                let (from, stop, done) = (from.clone(), stop.clone(), done.clone());
                thread::spawn(move || client(&from, target, pause, &stop, &done))
            })
            .collect();
        Ok(Self {
            name,
            stop,
            close,
            done,
            clients,
            server: Some(server),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Requests answered so far.
    pub fn requests(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub fn finish(mut self) -> Result<Report> {
        self.stop.store(true, Ordering::Relaxed);
        let mut sum = Report::default();
        for client in self.clients.drain(..) {
            let report = client
                .join()
                .map_err(|_| anyhow!("an HTTP client panicked"))?;
            sum.requests += report.requests;
            sum.failures.extend(report.failures);
        }
        self.close.store(true, Ordering::Relaxed);
        if let Some(server) = self.server.take() {
            server
                .join()
                .map_err(|_| anyhow!("the HTTP server panicked"))??;
        }
        Ok(sum)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.close.store(true, Ordering::Relaxed);
    }
}

fn client(
    from: &Place,
    target: SocketAddr,
    pause: Duration,
    stop: &AtomicBool,
    done: &AtomicU64,
) -> Report {
    let mut report = Report::default();
    let result = from.run(|| {
        while !stop.load(Ordering::Relaxed) {
            if let Err(error) = session(target, pause, stop, done, &mut report) {
                report.failures.push(format!("{error:#}"));
                // Enough to tell; a dead path must not fill the memory with words.
                if report.failures.len() >= 20 {
                    break;
                }
            }
        }
        Ok(())
    });
    if let Err(error) = result {
        report.failures.push(format!("{error:#}"));
    }
    report
}

fn session(
    target: SocketAddr,
    pause: Duration,
    stop: &AtomicBool,
    done: &AtomicU64,
    report: &mut Report,
) -> Result<()> {
    let began = Instant::now();
    let stream = connect(target).with_context(|| format!("cannot connect to {target}"))?;
    let from = stream.local_addr()?;
    let mut reader = BufReader::new(stream);
    for number in 1..=REQUESTS_PER_CONNECTION {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        request(&mut reader).with_context(|| {
            let age = began.elapsed();
            format!(
                "request {number} from {from} to {target} failed, {age:.0?} after connecting began"
            )
        })?;
        report.requests += 1;
        done.fetch_add(1, Ordering::Relaxed);
        thread::sleep(pause);
    }
    Ok(())
}

fn request(reader: &mut BufReader<TcpStream>) -> Result<()> {
    reader
        .get_mut()
        .write_all(b"GET / HTTP/1.1\r\nHost: lab\r\n\r\n")
        .context("sending")?;
    let mut line = String::new();
    reader.read_line(&mut line).context("reading the status")?;
    ensure!(
        line.starts_with("HTTP/1.1 200 "),
        "status line `{}`",
        line.trim()
    );
    let mut length = None;
    loop {
        line.clear();
        if reader.read_line(&mut line).context("reading a header")? == 0 {
            bail!("the connection ended inside the headers");
        }
        match line.trim_end().split_once(": ") {
            Some(("Content-Length", value)) => length = Some(value.parse::<usize>()?),
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; length.context("no Content-Length")?];
    reader.read_exact(&mut body).context("reading the body")?;
    ensure!(
        body.len() == BODY && body.iter().all(|b| *b == b'x'),
        "the body differs"
    );
    Ok(())
}

fn serve(listener: &TcpListener, close: &AtomicBool) -> Result<()> {
    let mut connections: Vec<JoinHandle<()>> = Vec::new();
    while !close.load(Ordering::Relaxed) {
        let soon = Instant::now() + Duration::from_millis(100);
        if !super::readable(listener, soon)? {
            continue;
        }
        let (stream, _) = accept(listener, soon + PATIENCE)?;
        connections.retain(|connection| !connection.is_finished());
        connections.push(thread::spawn(move || {
            // A failure shows at the client, which counts it.
            let _ = answer(stream);
        }));
    }
    for connection in connections {
        let _ = connection.join();
    }
    Ok(())
}

fn answer(stream: TcpStream) -> Result<()> {
    let mut reader = BufReader::new(stream);
    let mut response = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY}\r\n\r\n").into_bytes();
    response.extend_from_slice(&[b'x'; BODY]);
    let mut line = String::new();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        if line == "\r\n" {
            reader.get_mut().write_all(&response)?;
        }
    }
}
