//! The real `sinabroctl` against a socket of the test's own: output, exit codes, bad answers.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use sinabro_common::api::{frame, *};
use std::{
    collections::BTreeMap,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread::{self, JoinHandle},
};
use tempfile::TempDir;

fn ctl(socket: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sinabroctl"))
        .env("SINABRO_SOCKET", socket)
        .args(args)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

/// A socket that serves one connection with `serve`.
struct Agent {
    _dir: TempDir,
    socket: PathBuf,
    thread: JoinHandle<()>,
}

impl Agent {
    fn new(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
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
    fn replying(expected: Request, version: u32, reply: Reply) -> Self {
        Self::new(move |mut stream| {
            let request: RequestEnvelope = frame::read(&mut stream).unwrap();
            assert_eq!((request.version, request.request), (VERSION, expected));
            frame::write(&mut stream, &ReplyEnvelope { version, reply }).unwrap();
        })
    }

    fn run(self, args: &[&str]) -> Output {
        let output = ctl(&self.socket, args);
        self.thread.join().unwrap();
        output
    }
}

fn ask(request: Request, response: Response, args: &[&str]) -> Output {
    Agent::replying(request, VERSION, Reply::Ok(response)).run(args)
}

fn status(ready: bool) -> StatusReport {
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
        node_addresses: vec!["192.168.0.1".parse().unwrap()],
        pod_cidrs: vec![
            "10.244.1.0/24".parse().unwrap(),
            "fd00::/64".parse().unwrap(),
        ],
        endpoints: 3,
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

fn owner() -> Owner {
    Owner {
        container_id: "c0ffee".into(),
        ifname: "eth0".into(),
    }
}

fn pod() -> PodRef {
    PodRef {
        namespace: "default".into(),
        name: "web".into(),
        uid: String::new(),
    }
}

#[test]
fn status_says_what_is_wrong_and_ends_with_1() {
    for (ready, code) in [(true, 0), (false, 1)] {
        let response = Response::Status(Box::new(status(ready)));
        let output = ask(Request::Status, response, &["status"]);
        assert_eq!(output.status.code(), Some(code));
        let text = text(&output.stdout);
        for part in [
            "node-a",
            "1h1m",
            "10.244.1.0/24, fd00::/64",
            "Mode attach:  tcx",
            "uplink eth0 is gone",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let source = match ready {
            true => "Kubernetes API at https://10.96.0.1 (connected)",
            false => "Kubernetes API at https://10.96.0.1 (not connected for 1m15s)",
        };
        assert!(text.contains(source), "{text}");
        assert!(output.stderr.is_empty());
    }
}

fn self_test() -> SelfTestReport {
    let row = |id: &str, passed| RowReport {
        id: id.into(),
        title: format!("{id}(2)"),
        class: Class::Behaviour,
        passed,
        plain: "5".into(),
        accelerated: if passed { "5" } else { "EAGAIN" }.into(),
        meaning: format!("programs that {id} hang"),
    };
    SelfTestReport {
        verdict: Verdict::SomeFail,
        reason: "1 of 2 rows differ".into(),
        kernel: "6.18.0".into(),
        rows: vec![row("splice", false), row("sendfile", true)],
    }
}

#[test]
fn a_healthy_nodes_status_fits_one_screen() {
    let condition = |name: &str| Condition {
        name: name.into(),
        ok: true,
        detail: String::new(),
    };
    // As a node of a cluster with both families has it.
    let report = StatusReport {
        conditions: [
            "facts",
            "node",
            "overlay",
            "endpoints",
            "leases",
            "conflist",
        ]
        .map(condition)
        .into(),
        modes: [
            ("attachPods", "clsact"),
            ("attachUplinks", "tcx"),
            ("btf", "yes"),
            ("redirectPeer", "yes"),
            ("tcpAcceleration", "on, cgroup /host/sys/fs/cgroup/unified"),
        ]
        .map(|(name, mode)| (name.into(), mode.into()))
        .into(),
        tcp_self_test: Some(self_test()),
        ..status(true)
    };
    let response = Response::Status(Box::new(report));
    let output = ask(Request::Status, response, &["status"]);
    let text = text(&output.stdout);
    assert!(text.contains("Conditions:            all 6 hold"), "{text}");
    assert!(text.lines().count() <= 24, "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
}

#[test]
fn conditions_that_hold_are_shown_on_request() {
    let response = Response::Status(Box::new(StatusReport {
        conditions: vec![Condition {
            name: "leases".into(),
            ok: true,
            detail: String::new(),
        }],
        ..status(true)
    }));
    let output = ask(Request::Status, response, &["status", "--verbose"]);
    let text = text(&output.stdout);
    assert!(text.contains("leases     yes  -"), "{text}");
}

#[test]
fn what_acceleration_changes_for_applications_is_asked_for() {
    let report = StatusReport {
        tcp_self_test: Some(self_test()),
        ..status(true)
    };
    let own = |args: &[&str]| {
        let response = Response::Status(Box::new(report.clone()));
        ask(Request::Status, response, args)
    };
    let output = own(&["status"]);
    assert!(!text(&output.stdout).contains("splice"), "{output:?}");
    let json = own(&["acceleration", "--kernel", "-o", "json"]);
    let printed: SelfTestReport = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(printed, self_test());
    let short = ["acceleration", "--kernel"];
    let long = ["acceleration", "--kernel", "--verbose"];
    for args in [&short[..], &long] {
        let output = own(args);
        let text = text(&output.stdout);
        let told = "for pods that ask for it: 1 of 2 rows differ";
        assert!(text.contains(told), "{text}");
        assert!(text.contains("splice(2)"), "{text}");
        assert!(text.contains("programs that splice hang"), "{text}");
        assert_eq!(text.contains("sendfile(2)"), args.len() == 3, "{text}");
        // No difference has no meaning.
        assert!(!text.contains("programs that sendfile hang"), "{text}");
    }
}

#[test]
fn json_is_the_report() {
    let report = StatusReport {
        tcp_self_test: Some(self_test()),
        ..status(false)
    };
    let response = Response::Status(Box::new(report.clone()));
    let output = ask(Request::Status, response, &["-o", "json", "status"]);
    assert_eq!(output.status.code(), Some(1));
    let printed: StatusReport = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed, report);
}

#[test]
fn endpoints_are_aligned_rows() {
    let endpoint = EndpointReport {
        owner: owner(),
        pod: pod(),
        network: "pods".into(),
        link: "snb0123456789ab".into(),
        ifindex: 7,
        mac: "0a:58:0a:f4:01:02".parse().unwrap(),
        addresses: vec!["10.244.1.2".parse().unwrap(), "fd00::2".parse().unwrap()],
        tx_packets: 1,
        tx_bytes: 1536,
        rx_packets: 2,
        rx_bytes: 10,
        acceleration: None,
        acceleration_wish: None,
    };
    let nameless = EndpointReport {
        pod: PodRef::default(),
        ..endpoint.clone()
    };
    let response = Response::Endpoints(vec![endpoint, nameless]);
    let output = ask(Request::Endpoints, response, &["endpoints"]);
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[1].starts_with("default/web  eth0"), "{}", lines[1]);
    assert!(lines[1].contains("10.244.1.2, fd00::2") && lines[1].ends_with("1.5 KiB  10 B"));
    assert!(lines[2].starts_with("c0ffee "));
    let column = lines[0].find("LINK").unwrap();
    assert!(
        lines[1..]
            .iter()
            .all(|line| line[column..].starts_with("snb0123456789ab"))
    );
}

#[test]
fn acceleration_shows_pods_with_reasons_and_servers_with_verdicts() {
    let count = |bytes| MessageCount { messages: 1, bytes };
    let report = AccelerationReport {
        pods: vec![AcceleratedPodReport {
            owner: owner(),
            pod: pod(),
            counters: AccelerationCount {
                enrolled: 3,
                redirected: count(2048),
                passed: [("queue_full".to_owned(), count(512))].into(),
                skipped: [("short".to_owned(), 7), ("stream".to_owned(), 1)].into(),
                memory: MemoryReport {
                    used: 10 << 10,
                    limit: 64 << 20,
                },
            },
        }],
        servers: vec![ServerReport {
            address: "fd00::2".parse().unwrap(),
            port: 80,
            netns: None,
            verdict: "stream".into(),
            connections: 2,
            messages: [1, 2],
            bytes: [10, 4096],
        }],
        memory: Some(MemoryReport {
            used: 20 << 10,
            limit: 1 << 30,
        }),
    };
    let response = Response::Acceleration(report.clone());
    let output = ask(Request::Acceleration, response, &["acceleration"]);
    assert_eq!(output.status.code(), Some(0));
    let cells = |line: &str| -> Vec<String> {
        let cells = line.split("  ").map(str::trim);
        cells.filter(|c| !c.is_empty()).map(Into::into).collect()
    };
    let lines: Vec<_> = text(&output.stdout).lines().map(cells).collect();
    assert_eq!(
        lines[1],
        [
            "default/web",
            "3",
            "2.0 KiB",
            "10.0 KiB of 64.0 MiB",
            "512 B queue_full",
            "7 short, 1 stream"
        ]
    );
    assert_eq!(lines[6], ["Memory of all: 20.0 KiB of 1.0 GiB"]);
    assert_eq!(lines[4], ["[fd00::2]:80", "stream", "2", "10 B", "4.0 KiB"]);

    let response = Response::Acceleration(report.clone());
    let output = ask(
        Request::Acceleration,
        response,
        &["-o", "json", "acceleration"],
    );
    let printed: AccelerationReport = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed, report);
}

#[test]
fn ipam_shows_ranges_leases_and_problems() {
    let report = IpamReport {
        ranges: vec![RangeReport {
            cidr: "10.244.1.0/24".parse().unwrap(),
            capacity: 250,
            leased: 125,
        }],
        leases: vec![LeaseReport {
            address: "10.244.1.2".parse().unwrap(),
            owner: owner(),
            pod: pod(),
            leased_at: 0,
            active: false,
        }],
        problems: vec!["leases/10.244.1.9 is not JSON".into()],
    };
    let output = ask(Request::Ipam, Response::Ipam(report), &["ipam"]);
    assert_eq!(output.status.code(), Some(0));
    let text = text(&output.stdout);
    for part in [
        "125 of 250 (50%)",
        "10.244.1.2  default/web",
        "being set up",
        "is not JSON",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn nodes_show_tunnel_or_problem() {
    let node = |name: &str, tunnel: Option<&str>, problem: Option<&str>| NodeReport {
        name: name.into(),
        addresses: vec![],
        pod_cidrs: vec!["10.244.2.0/24".parse().unwrap()],
        local: name == "node-a",
        tunnel: tunnel.map(|t| t.parse().unwrap()),
        gateway: None,
        probe: None,
        problem: problem.map(Into::into),
    };
    let mut report = vec![
        node("node-a", None, None),
        node("node-b", Some("192.168.0.2"), None),
        node("node-c", None, Some("it has no address")),
    ];
    let answers = |name: &str, probe| NodeReport {
        probe: Some(probe),
        ..node(name, Some("192.168.0.9"), None)
    };
    let took = 312;
    report.extend([
        answers(
            "node-d",
            PeerProbe::Answers {
                round_trip_microseconds: took,
            },
        ),
        answers("node-e", PeerProbe::Silent { seconds: 125 }),
        answers(
            "node-f",
            PeerProbe::SmallOnly {
                round_trip_microseconds: took,
                largest: Some(1352),
            },
        ),
        answers("node-g", PeerProbe::Unknown),
    ]);
    let output = ask(
        Request::Nodes { after: None },
        Response::Nodes(report),
        &["nodes"],
    );
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    assert!(lines[1].contains("this node"));
    assert!(lines[2].contains("192.168.0.2"));
    let shown = [
        "0.31 ms",
        "silent 2m5s",
        "up to 1352 bytes",
        "not known yet",
    ];
    for (line, shown) in lines[4..].iter().zip(shown) {
        assert!(line.contains(shown), "{line}");
    }
    assert!(lines[3].contains("none") && lines[3].ends_with("it has no address"));
}

#[test]
fn metrics_and_drops_are_one_noun() {
    for noun in ["metrics", "drops"] {
        let report = MetricsReport {
            drops: vec![DropReport {
                number: 2,
                reason: "source_address".into(),
                text: "a pod lied".into(),
                packets: 42,
            }],
            acceleration_memory: None,
            nat_flows: 1,
            nat_capacity: 4,
            counters: BTreeMap::from([("sinabro_gc_freed_total".into(), 7)]),
        };
        let output = ask(Request::Metrics, Response::Metrics(report), &[noun]);
        assert_eq!(output.status.code(), Some(0));
        let text = text(&output.stdout);
        for part in [
            "42       source_address  a pod lied",
            "1 of 4 (25%)",
            "sinabro_gc_freed_total:  7",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}

#[test]
fn no_agent_is_exit_code_3_with_the_socket_and_a_next_step() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent.sock");
    let stale = dir.path().join("stale.sock");
    drop(UnixListener::bind(&stale).unwrap());
    for (socket, hint) in [(absent, "is the agent running"), (stale, "has stopped")] {
        let output = ctl(&socket, &["status"]);
        assert_eq!(output.status.code(), Some(3));
        let text = text(&output.stderr);
        assert!(
            text.contains(socket.to_str().unwrap()) && text.contains(hint),
            "{text}"
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_silent_agent_is_given_up_on() {
    let agent = Agent::new(|mut stream| {
        // Until the other side is gone.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let output = agent.run(&["--timeout", "1", "status"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("did not answer within 1 s"));
}

#[test]
fn a_dripping_agent_is_given_up_on() {
    let agent = Agent::new(|mut stream| {
        let mut bytes = 1000u32
            .to_be_bytes()
            .into_iter()
            .chain(std::iter::repeat(b' '));
        while stream.write_all(&[bytes.next().unwrap()]).is_ok() {
            thread::sleep(std::time::Duration::from_millis(100));
        }
    });
    let output = agent.run(&["--timeout", "1", "status"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("did not answer within 1 s"));
}

#[test]
fn refusals_name_their_reason() {
    let refusal = |code| Reply::Error(ApiError::new(code, "starting: restoring endpoints"));
    for (code, exit) in [
        (ErrorCode::NotReady, 1),
        (ErrorCode::Internal, 1),
        (ErrorCode::Version, 3),
    ] {
        let output = Agent::replying(Request::Ipam, VERSION, refusal(code)).run(&["ipam"]);
        assert_eq!(output.status.code(), Some(exit));
        assert!(text(&output.stderr).contains("starting: restoring endpoints"));
    }
}

#[test]
fn wrong_answers_are_errors() {
    let other = Agent::replying(Request::Ipam, VERSION, Reply::Ok(Response::Done)).run(&["ipam"]);
    let newer = Agent::replying(Request::Ipam, 9, Reply::Ok(Response::Done)).run(&["ipam"]);
    let closed = Agent::new(drop).run(&["ipam"]);
    for (output, part) in [
        (other, "another question"),
        (newer, "version 9"),
        (closed, "no usable answer"),
    ] {
        assert_eq!(output.status.code(), Some(3));
        assert!(
            text(&output.stderr).contains(part),
            "{}",
            text(&output.stderr)
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn usage_errors_are_exit_code_2_and_help_documents_the_codes() {
    let nowhere = Path::new("/nonexistent");
    for args in [
        &["nonsense"][..],
        &[],
        &["status", "-o", "xml"],
        &["--timeout", "0", "status"],
    ] {
        assert_eq!(ctl(nowhere, args).status.code(), Some(2), "{args:?}");
    }
    let help = ctl(nowhere, &["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let text = text(&help.stdout);
    for part in ["Exit codes:", "SINABRO_SOCKET", "Examples:", "endpoints"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_closed_reader_is_no_error() {
    let response = Response::Status(Box::new(status(true)));
    let agent = Agent::replying(Request::Status, VERSION, Reply::Ok(response));
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    let mut command = Command::new(env!("CARGO_BIN_EXE_sinabroctl"));
    command.env("SINABRO_SOCKET", &agent.socket).arg("status");
    let mut child = command.stdout(write).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    agent.thread.join().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn garbage_is_an_error_not_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), framed: bool) {
        let agent = Agent::new(move |mut stream| {
            let _: RequestEnvelope = frame::read(&mut stream).unwrap();
            if framed {
                let _ = stream.write_all(&(bytes.len() as u32).to_be_bytes());
            }
            let _ = stream.write_all(&bytes);
        });
        let output = agent.run(&["nodes"]);
        prop_assert_eq!(output.status.code(), Some(3));
        prop_assert!(text(&output.stderr).starts_with("sinabroctl: no usable answer"));
    }
}

#[test]
fn pause_waits_until_it_is_told_to_end_and_ends_well() {
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    let mut pause = Command::new(env!("CARGO_BIN_EXE_sinabroctl"))
        .arg("pause")
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", pause.id());
    let waits = || {
        let status = std::fs::read_to_string(&status).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
        mask & (1 << (Signal::SIGTERM as u64 - 1)) != 0
    };
    while !waits() {
        assert_eq!(pause.try_wait().unwrap(), None);
        thread::yield_now();
    }
    kill(Pid::from_raw(pause.id() as i32), Signal::SIGTERM).unwrap();
    // Killed by the signal it would have no code.
    assert_eq!(pause.wait().unwrap().code(), Some(0));
}

/// As in the image, where one program is both.
#[test]
fn the_agent_called_sinabroctl_is_sinabroctl() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("sinabroctl");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sinabro-agent"), &link).unwrap();
    let output = Command::new(&link).arg("--version").output().unwrap();
    assert!(text(&output.stdout).starts_with("sinabroctl "));
    let output = Command::new(&link).arg("no-such-command").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
