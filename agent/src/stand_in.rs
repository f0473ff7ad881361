//! An HTTP server for tests that stands in for the Kubernetes API server and answers by script.
//!
//! Every request takes the next answer that is for it; a request for which there is none is kept waiting. The
//! end of a connection ends an answer, so that it can also be cut or reset in the middle.

use crate::{cluster_api::ClusterApi, config::ClusterAccess};
use std::{
    collections::VecDeque,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::timeout,
};

/// What a request gets.
pub enum Answer {
    /// Status and body, then the connection ends.
    Whole(u16, String),
    /// Lines of a watch as they are sent here; it ends with the sender.
    Lines(mpsc::UnboundedReceiver<String>),
    /// The connection is reset.
    Reset,
}

/// Each with what is in the request that it is for.
type Answers = Arc<Mutex<VecDeque<(&'static str, Answer)>>>;

/// Sends the lines of a watch.
pub type Lines = mpsc::UnboundedSender<String>;

pub struct StandIn {
    pub address: SocketAddr,
    answers: Answers,
    requests: mpsc::UnboundedReceiver<(String, String)>,
    running: Option<tokio::task::JoinHandle<()>>,
}

impl StandIn {
    pub async fn start() -> Self {
        let mut stand_in = Self {
            address: SocketAddr::from((own_address(), 0)),
            answers: Arc::default(),
            requests: mpsc::unbounded_channel().1,
            running: None,
        };
        stand_in.restart().await;
        stand_in
    }

    /// Begins to listen again, where it did before.
    pub async fn restart(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.address = listener.local_addr().unwrap();
        let (sender, requests) = mpsc::unbounded_channel();
        self.requests = requests;
        let answers = self.answers.clone();
        self.running = Some(tokio::spawn(async move {
            // Ends them with itself.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, answers.clone(), sender.clone()));
            }
        }));
    }

    /// Ends every connection and listens no more.
    pub async fn stop(&mut self) {
        let running = self.running.take().unwrap();
        running.abort();
        let _ = running.await;
    }

    pub fn answer(&self, answer: Answer) {
        self.answer_to("", answer);
    }

    /// Answers a request that has `part` in its line.
    pub fn answer_to(&self, part: &'static str, answer: Answer) {
        self.answers.lock().unwrap().push_back((part, answer));
    }

    /// Answers a request with a watch.
    pub fn watch(&self) -> Lines {
        self.watch_of("")
    }

    /// Answers a request that has `part` in its line with a watch.
    pub fn watch_of(&self, part: &'static str) -> Lines {
        let (sender, lines) = mpsc::unbounded_channel();
        self.answer_to(part, Answer::Lines(lines));
        sender
    }

    /// Answers a request with a failure.
    pub fn fail(&self, code: u16, message: &str) {
        self.answer(Answer::Whole(code, status(code, message)));
    }

    /// The next request: method with path and query, and body.
    pub async fn request(&mut self) -> (String, String) {
        let next = timeout(Duration::from_secs(30), self.requests.recv()).await;
        next.expect("there should be a request").unwrap()
    }

    /// A client of it.
    pub async fn api(&self) -> ClusterApi {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!(
            "{{apiVersion: v1, kind: Config, current-context: c,
              clusters: [{{name: s, cluster: {{server: 'http://{}'}}}}],
              users: [{{name: u, user: {{token: secret}}}}],
              contexts: [{{name: c, context: {{cluster: s, user: u}}}}]}}",
            self.address
        );
        std::fs::write(file.path(), text).unwrap();
        let access = ClusterAccess::Kubeconfig(file.path().into());
        ClusterApi::new(&access).await.unwrap()
    }
}

/// A loopback address that this process has given to nobody, and hardly any other process: what listens on a port of
/// it may end and begin again, and nobody else has the port meanwhile, nor is taken for it.
pub fn own_address() -> Ipv4Addr {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let given = GIVEN.fetch_add(1, Ordering::Relaxed);
    // The first of 127.0.0.0/8 are everybody's.
    let own = (std::process::id() << 8 | given & 0xff) % 0x00ff_0000;
    Ipv4Addr::from_bits(0x7f01_0000 + own)
}

/// A Status object as the API server sends it.
pub fn status(code: u16, message: &str) -> String {
    let status = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {},
        "status": "Failure", "message": message, "reason": "Test", "code": code,
    });
    status.to_string()
}

async fn serve(
    mut stream: TcpStream,
    answers: Answers,
    requests: mpsc::UnboundedSender<(String, String)>,
) {
    let Some((head, body)) = read(&mut stream).await else {
        return;
    };
    assert!(head.contains("authorization: Bearer secret"), "{head}");
    let line = head.lines().next().unwrap_or_default();
    let line = line.trim_end_matches(" HTTP/1.1").to_owned();
    let _ = requests.send((line.clone(), body));
    let next = || {
        let mut all = answers.lock().unwrap();
        let for_it = all.iter().position(|(part, _)| line.contains(part))?;
        all.remove(for_it)
    };
    let answer = loop {
        if let Some((_, answer)) = next() {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let head = |code| {
        format!("HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
    };
    match answer {
        Answer::Whole(code, body) => {
            let _ = stream.write_all((head(code) + &body).as_bytes()).await;
        }
        Answer::Lines(mut lines) => {
            let _ = stream.write_all(head(200).as_bytes()).await;
            while let Some(line) = lines.recv().await {
                let _ = stream.write_all((line + "\n").as_bytes()).await;
            }
        }
        Answer::Reset => {
            let socket = stream.into_std().unwrap();
            // To close with zero linger resets, socket(7).
            nix::sys::socket::setsockopt(
                &socket,
                nix::sys::socket::sockopt::Linger,
                &libc::linger {
                    l_onoff: 1,
                    l_linger: 0,
                },
            )
            .unwrap();
        }
    }
}

async fn read(stream: &mut TcpStream) -> Option<(String, String)> {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                return Some((head.to_owned(), body.to_owned()));
            }
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
}
