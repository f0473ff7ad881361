//! An agent of the test's own: a socket that answers once, as it is asked to.

use sinabro_common::api::{frame, *};
use std::{
    collections::BTreeMap,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread::{self, JoinHandle},
};
use tempfile::TempDir;

pub fn ctl(socket: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sinabroctl"))
        .env("SINABRO_SOCKET", socket)
        .args(args)
        .output()
        .unwrap()
}

pub fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

/// A socket that serves one connection with `serve`.
pub struct Agent {
    _dir: TempDir,
    pub socket: PathBuf,
    pub thread: JoinHandle<()>,
}

impl Agent {
    pub fn new(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let thread = thread::spawn(move || serve(listener.accept().unwrap().0));
        Self {
            _dir: dir,
            socket,
            thread,
        }
    }

    /// Expects a request and gives a reply.
    pub fn replying(expected: Request, version: u32, reply: Reply) -> Self {
        Self::new(move |mut stream| {
            let request: RequestEnvelope = frame::read(&mut stream).unwrap();
            assert_eq!((request.version, request.request), (VERSION, expected));
            frame::write(&mut stream, &ReplyEnvelope { version, reply }).unwrap();
        })
    }

    /// Expects requests in turn, each on a connection of its own, and replies to each; then the socket goes.
    pub fn conversation(turns: Vec<(Request, Response)>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let thread = thread::spawn(move || {
            for (expected, response) in turns {
                let (mut stream, _) = listener.accept().unwrap();
                let request: RequestEnvelope = frame::read(&mut stream).unwrap();
                assert_eq!((request.version, request.request), (VERSION, expected));
                let reply = Reply::Ok(response);
                let version = VERSION;
                frame::write(&mut stream, &ReplyEnvelope { version, reply }).unwrap();
            }
        });
        Self {
            _dir: dir,
            socket,
            thread,
        }
    }

    pub fn run(self, args: &[&str]) -> Output {
        let output = ctl(&self.socket, args);
        self.thread.join().unwrap();
        output
    }
}

pub fn ask(request: Request, response: Response, args: &[&str]) -> Output {
    Agent::replying(request, VERSION, Reply::Ok(response)).run(args)
}

pub fn status(ready: bool) -> StatusReport {
    StatusReport {
        version: "0.1.0".into(),
        node: "node-a".into(),
        ready,
        conditions: vec![Condition {
            name: "overlay".into(),
            ok: ready,
            detail: "uplink eth0 is gone".into(),
        }],
        troubles: vec![Trouble {
            reason: "ForwardingOff".into(),
            text: "net.ipv4.ip_forward is 0".into(),
        }],
        modes: BTreeMap::from([("attach".into(), "tcx".into())]),
        tcp_self_test: None,
        uplink: "eth0".into(),
        mtu: 1450,
        local_mtu: Some(65_535),
        node_addresses: vec!["192.168.0.1".parse().unwrap()],
        pod_cidrs: vec![
            "10.244.1.0/24".parse().unwrap(),
            "fd00::/64".parse().unwrap(),
        ],
        endpoints: 3,
        masquerade: Some(MasqueradeReport {
            ipv4: true,
            ipv6: true,
            non_masquerade_cidrs: vec!["10.0.0.0/8".parse().unwrap()],
            link_local: true,
            link_local_ipv6: false,
            nodes: true,
            udp_mapping: Some("address-and-port-dependent".into()),
            file: Some("/etc/sinabro/ip-masq-agent".into()),
        }),
        connections: Some(RoomReport {
            connections: 524_288,
            bytes: 168 << 20,
            from: RoomFrom::Memory(47 << 29),
        }),
        nodes: 2,
        peers: None,
        source: SourceReport {
            from: "Kubernetes API at https://10.96.0.1".into(),
            connected: ready,
            lost_seconds: (!ready).then_some(75),
        },
        uptime_seconds: 3700,
        adds: None,
    }
}

pub fn owner() -> Owner {
    Owner {
        container_id: "c0ffee".into(),
        ifname: "eth0".into(),
    }
}

pub fn pod() -> PodRef {
    PodRef {
        namespace: "default".into(),
        name: "web".into(),
        uid: String::new(),
    }
}
