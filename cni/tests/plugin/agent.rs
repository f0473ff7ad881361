//! An agent that hands out fixed addresses, notes every call, and does what a script says.

use crate::node::eventually;
use nix::{
    libc,
    sys::socket::{getsockopt, sockopt::PeerCredentials},
};
use sinabro_common::{
    api::{
        Adds, ApiError, Attachment, ErrorCode, LocalMtu, Mac, Owner, Reply, ReplyEnvelope, Request,
        RequestEnvelope, Response, StatusReport, VERSION, frame,
    },
    names,
};
use sinabro_netlink::{Conn, NetNs, ResultExt, link};
use std::{
    collections::BTreeMap,
    io::Write,
    net::IpAddr,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

/// What to do instead of answering.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// Close the connection.
    Die,
    /// Close it in the middle of the answer.
    DieMidway,
    Refuse(ErrorCode),
    /// Answer with what is not JSON.
    Garble,
    /// Answer with a reply of another kind.
    Mistake,
    /// SIGKILL the plugin, then close.
    Kill,
    /// Answer, then SIGKILL the plugin at once.
    AnswerAndKill,
}

pub struct State {
    pub calls: Vec<Request>,
    pub endpoints: BTreeMap<Owner, Attachment>,
    /// Connections not yet done with, also what their end brings about.
    open: usize,
    /// By name of the call.
    pub script: BTreeMap<&'static str, Act>,
    /// Handed out in place of the usual two.
    pub addresses: Option<Vec<IpAddr>>,
    /// Whether pods get no IPv6 address.
    pub v4_only: bool,
    /// Its programs are filters of a clsact qdisc.
    pub clsact: bool,
    pub mtu: u32,
    /// What may be larger; nothing by default.
    pub local: Option<LocalMtu>,
    pub status: StatusReport,
    /// Whether a connection that closes early has its link deleted, as the real agent does.
    pub deletes_links: bool,
    next: u8,
}

pub struct Agent {
    state: Arc<Mutex<State>>,
    path: PathBuf,
    stop: Arc<AtomicBool>,
}

impl Agent {
    pub fn start(path: &Path, node: &NetNs) -> Self {
        let state = Arc::new(Mutex::new(State {
            calls: Vec::new(),
            endpoints: BTreeMap::new(),
            open: 0,
            script: BTreeMap::new(),
            addresses: None,
            v4_only: false,
            clsact: true,
            local: None,
            mtu: 1400,
            status: status(),
            deletes_links: true,
            next: 4,
        }));
        let stop = Arc::new(AtomicBool::new(false));
        let listener = UnixListener::bind(path).unwrap();
        let (for_all, ending, node) = (state.clone(), stop.clone(), node.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ending.load(Ordering::SeqCst) {
                    break;
                }
                let (state, node) = (for_all.clone(), node.clone());
                state.lock().unwrap().open += 1;
                std::thread::spawn(move || Connection::new(state, node).serve(stream.unwrap()));
            }
        });
        Self {
            state,
            path: path.to_owned(),
            stop,
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn script(&self, call: &'static str, act: Act) {
        self.state().script.insert(call, act);
    }

    /// Waits until every connection made so far has ended.
    pub fn settle(&self) {
        // Accepted in order: once this one is, so are those before it.
        let mut stream = UnixStream::connect(&self.path).unwrap();
        let request = RequestEnvelope {
            version: VERSION,
            request: Request::Ipam,
        };
        frame::write(&mut stream, &request).unwrap();
        let _: ReplyEnvelope = frame::read(&mut stream).unwrap();
        drop(stream);
        eventually("all connections end", || self.state().open == 0);
    }

    pub fn calls(&self) -> Vec<&'static str> {
        self.state().calls.iter().map(name).collect()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the listener, which then closes.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

pub fn status() -> StatusReport {
    StatusReport {
        version: "0".into(),
        node: "a".into(),
        ready: true,
        troubles: Vec::new(),
        conditions: Vec::new(),
        modes: BTreeMap::new(),
        tcp_self_test: None,
        uplink: "eth0".into(),
        mtu: 1400,
        local_mtu: None,
        node_addresses: Vec::new(),
        pod_cidrs: Vec::new(),
        endpoints: 0,
        masquerade: None,
        connections: None,
        nodes: 1,
        peers: None,
        source: Default::default(),
        uptime_seconds: 1,
        adds: Some(Adds::Possible),
    }
}

fn name(request: &Request) -> &'static str {
    match request {
        Request::Allocate { .. } => "allocate",
        Request::Activate { .. } => "activate",
        Request::Check { .. } => "check",
        Request::Release { .. } => "release",
        Request::Gc { .. } => "gc",
        Request::Status => "status",
        _ => "other",
    }
}

/// The process at a connection's other end, held by a descriptor: its number may be another's
/// once it has ended.
struct Peer(OwnedFd);

impl Peer {
    /// None if it has ended already.
    fn of(stream: &UnixStream) -> Option<Self> {
        let pid = getsockopt(stream, PeerCredentials).unwrap().pid();
        // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the descriptor is new and nobody else's.
        Some(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// SIGKILL, if it has not ended by itself.
    fn kill(&self) {
        let none = std::ptr::null::<libc::siginfo_t>();
        let fd = self.0.as_raw_fd();
        // SAFETY: integers and a null pointer, which stands for the usual signal information.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, none, 0) };
    }
}

struct Connection {
    state: Arc<Mutex<State>>,
    node: NetNs,
    /// Allocated here and not yet active.
    held: Option<(Owner, Attachment)>,
}

impl Connection {
    fn new(state: Arc<Mutex<State>>, node: NetNs) -> Self {
        Self {
            state,
            node,
            held: None,
        }
    }

    fn serve(mut self, mut stream: UnixStream) {
        let peer = Peer::of(&stream);
        let kill_peer = || peer.as_ref().unwrap().kill();
        while let Ok(envelope) = frame::read::<RequestEnvelope>(&mut stream) {
            assert_eq!(envelope.version, VERSION);
            let act = {
                let mut state = self.state.lock().unwrap();
                state.calls.push(envelope.request.clone());
                state.script.get(name(&envelope.request)).copied()
            };
            let reply = match act {
                Some(Act::Die) => break,
                Some(Act::Kill) => {
                    kill_peer();
                    break;
                }
                Some(Act::Garble) => {
                    let _ = stream.write_all(b"\0\0\0\x04what");
                    continue;
                }
                Some(Act::Refuse(code)) => Reply::Error(ApiError::new(code, "scripted refusal")),
                Some(Act::Mistake) => Reply::Ok(Response::Removed(Vec::new())),
                _ => self.answer(envelope.request),
            };
            let bytes = frame::encode(&ReplyEnvelope {
                version: VERSION,
                reply,
            })
            .unwrap();
            if act == Some(Act::DieMidway) {
                let _ = stream.write_all(&bytes[..bytes.len() / 2]);
                break;
            }
            if stream.write_all(&bytes).is_err() {
                break;
            }
            if act == Some(Act::AnswerAndKill) {
                kill_peer();
            }
        }
        self.take_back();
    }

    fn answer(&mut self, request: Request) -> Reply {
        let mut state = self.state.lock().unwrap();
        Reply::Ok(match request {
            Request::Allocate {
                owner,
                addresses,
                mac,
                ..
            } => {
                let n = state.next;
                // Round again: no test has so many pods at a time.
                state.next = if n == 250 { 4 } else { n + 1 };
                let mut addresses = state.addresses.clone().unwrap_or_else(|| {
                    let mut both = vec![
                        format!("10.77.0.{n}").parse().unwrap(),
                        format!("fd77::{n}").parse().unwrap(),
                    ];
                    for asked in addresses {
                        let same = |a: &&mut IpAddr| a.is_ipv4() == asked.is_ipv4();
                        *both.iter_mut().find(same).unwrap() = asked;
                    }
                    both
                });
                addresses.retain(|address| address.is_ipv4() || !state.v4_only);
                let attachment = Attachment {
                    link: owner.link(),
                    host_mac: Mac(names::HOST_MAC),
                    mac: mac.unwrap_or_else(|| {
                        let first = addresses.first().copied();
                        Mac(names::pod_mac(first.unwrap_or(names::GATEWAY_V4.into())))
                    }),
                    mtu: state.mtu,
                    local: state.local.clone(),
                    gateways: addresses
                        .iter()
                        .map(|a| match a {
                            IpAddr::V4(_) => names::GATEWAY_V4.into(),
                            IpAddr::V6(_) => names::GATEWAY_V6.into(),
                        })
                        .collect(),
                    addresses,
                    clsact: state.clsact,
                };
                self.held = Some((owner, attachment.clone()));
                Response::Attachment(attachment)
            }
            Request::Activate {
                owner,
                ifindex,
                netns_cookie: _,
                local_mtu,
            } => {
                assert_eq!(local_mtu, state.local.is_some());
                let Some((held, attachment)) = self.held.take().filter(|(o, _)| *o == owner) else {
                    return Reply::Error(ApiError::new(ErrorCode::Invalid, "not allocated"));
                };
                // Not by netlink: answering that may set a link's queue to work, which the plugin
                // has to see to itself.
                let index = || nix::net::if_::if_nametoindex(&*attachment.link);
                assert_eq!(self.node.run(index).unwrap(), Ok(ifindex));
                state.endpoints.insert(held, attachment.clone());
                Response::Attachment(attachment)
            }
            Request::Check { owner } => match state.endpoints.get(&owner) {
                Some(record) => Response::Attachment(record.clone()),
                None => return Reply::Error(ApiError::new(ErrorCode::NotFound, "no endpoint")),
            },
            Request::Release { owner } => {
                state.endpoints.remove(&owner);
                let mut conn = Conn::in_netns(&self.node).unwrap();
                let deleted = conn.execute(link::delete_by_name(&owner.link()));
                deleted.ignore_not_found().unwrap();
                // On its own connection, how an ADD is given up.
                self.held.take_if(|(held, _)| *held == owner);
                Response::Done
            }
            Request::Gc { .. } => Response::Removed(Vec::new()),
            Request::Status => Response::Status(Box::new(state.status.clone())),
            _ => return Reply::Error(ApiError::new(ErrorCode::Invalid, "not a plugin's call")),
        })
    }

    fn take_back(&mut self) {
        if let Some((_, attachment)) = self.held.take() {
            let deletes_links = self.state.lock().unwrap().deletes_links;
            if deletes_links {
                let mut conn = Conn::in_netns(&self.node).unwrap();
                let deleted = conn.execute(link::delete_by_name(&attachment.link));
                deleted.ignore_not_found().unwrap();
            }
        }
        self.state.lock().unwrap().open -= 1;
    }
}
