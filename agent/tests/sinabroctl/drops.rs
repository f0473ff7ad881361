//! `sinabroctl drops`: counters, the last packets, and packets as they are dropped.

use crate::kit::{Agent, text};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sinabro_common::api::*;
use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

const AGENT: u64 = 77;

fn packet(number: u64, reason: &str, pod: Option<&str>) -> DroppedPacket {
    DroppedPacket {
        number,
        unix_milliseconds: 1_700_000_000_123 + number,
        reason: reason.into(),
        program: "pod_out".into(),
        ifindex: 7,
        pod: pod.map(Into::into),
        protocol: "tcp".into(),
        source: Some(PacketEnd {
            address: "10.244.1.7".parse().unwrap(),
            port: Some(4711),
            pod: pod.map(Into::into),
        }),
        destination: Some(PacketEnd {
            address: "fd00::9".parse().unwrap(),
            port: Some(443),
            pod: None,
        }),
        detail: Some("SYN".into()),
        source_mac: Some("02:00:00:00:00:07".parse().unwrap()),
        bytes: 74,
        left_out: 0,
    }
}

fn metrics() -> (Request, Response) {
    let drop = |number, reason: &str, packets| DropReport {
        number,
        reason: reason.into(),
        text: format!("meaning of {reason}"),
        packets,
    };
    let drops = vec![drop(1, "source_mac", 0), drop(2, "source_address", 42)];
    let report = MetricsReport {
        drops,
        ..MetricsReport::default()
    };
    (Request::Metrics, Response::Metrics(Box::new(report)))
}

fn page(after: u64, wait: u64, packets: Vec<DroppedPacket>) -> (Request, Response) {
    let request = Request::DropEvents {
        after,
        wait_milliseconds: wait,
    };
    let report = DropEventsReport {
        agent: AGENT,
        lost: 0,
        packets,
    };
    (request, Response::DropEvents(report))
}

fn all() -> Vec<(Request, Response)> {
    let packets = vec![
        packet(5, "source_address", Some("shop/cart")),
        packet(6, "source_mac", Some("shop/web")),
    ];
    vec![
        metrics(),
        page(0, 0, packets),
        page(
            6,
            0,
            vec![DroppedPacket {
                left_out: 9,
                ..packet(7, "source_address", None)
            }],
        ),
        page(7, 0, vec![]),
    ]
}

#[test]
fn counters_and_the_last_packets_are_shown_in_words() {
    let output = Agent::conversation(all()).run(&["drops"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = text(&output.stdout);
    for part in [
        "42       source_address  meaning of source_address",
        "2023-11-14T22:13:20.128Z source_address: tcp 10.244.1.7:4711 (shop/cart) > [fd00::9]:443, SYN, 74 bytes, sent by shop/cart\n",
        "sent by shop/web, from 02:00:00:00:00:07\n",
        "sent by interface 7 (and 9 more before)\n",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn filters_choose_and_json_has_everything() {
    let shown = |args: &[&str]| {
        let args = [&["drops", "-o", "json"][..], args].concat();
        let output = Agent::conversation(all()).run(&args);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let numbers = |name: &str, field: &str| -> Vec<u64> {
            let list = shown[name].as_array().unwrap().iter();
            list.map(|one| one[field].as_u64().unwrap()).collect()
        };
        (numbers("drops", "number"), numbers("packets", "number"))
    };
    assert_eq!(shown(&[]), (vec![1, 2], vec![5, 6, 7]));
    assert_eq!(shown(&["--reason", "source_mac"]), (vec![1], vec![6]));
    assert_eq!(shown(&["--pod", "shop/cart"]), (vec![1, 2], vec![5]));
    // Not asked for packets.
    let output = Agent::conversation(all()[..1].to_vec()).run(&["drops", "--reason", "nonsense"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("nonsense"));
}

/// `drops --follow` with an agent that goes away after some turns.
fn follow(turns: Vec<(Request, Response)>, args: &[&str]) -> (Vec<String>, String, Option<i32>) {
    let output = Agent::conversation(turns).run(&[&["drops", "--follow"][..], args].concat());
    let lines = text(&output.stdout).lines().map(Into::into).collect();
    let told = text(&output.stderr).to_owned();
    (lines, told, output.status.code())
}

#[test]
fn following_shows_what_comes_and_says_that_the_agent_went() {
    let wait = MAX_DROP_WAIT_MS;
    let turns = || {
        vec![
            page(0, 0, vec![packet(3, "source_mac", None)]),
            page(3, 0, vec![]),
            page(3, wait, vec![]),
            page(
                3,
                wait,
                vec![packet(4, "source_mac", None), packet(5, "loopback", None)],
            ),
        ]
    };
    let (lines, told, code) = follow(turns(), &[]);
    assert_eq!((lines.len(), code), (2, Some(3)), "{lines:?}");
    assert!(lines[1].contains(" loopback: "), "{lines:?}");
    assert!(told.contains("the agent went away: "), "{told}");
    let (lines, _, _) = follow(turns(), &["--reason", "loopback", "-o", "json"]);
    assert_eq!(lines.len(), 1, "{lines:?}");
    let read: DroppedPacket = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!(read, packet(5, "loopback", None));
}

#[test]
fn another_agent_is_not_taken_for_the_same() {
    let other = DropEventsReport {
        agent: AGENT + 1,
        lost: 0,
        packets: vec![packet(1, "loopback", None)],
    };
    let (request, _) = page(0, MAX_DROP_WAIT_MS, vec![]);
    let turns = vec![page(0, 0, vec![]), (request, Response::DropEvents(other))];
    let (lines, told, code) = follow(turns, &[]);
    assert_eq!((lines.len(), code), (0, Some(3)));
    assert!(told.contains("the agent was started again"), "{told}");
}

#[test]
fn ctrl_c_ends_it_well_with_whole_lines() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_sinabroctl"))
        .env("SINABRO_SOCKET", &socket)
        .args(["drops", "--follow"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let turns = [
        page(0, 0, vec![]),
        page(0, MAX_DROP_WAIT_MS, vec![packet(1, "loopback", None)]),
    ];
    for (expected, response) in turns {
        let (mut stream, _) = listener.accept().unwrap();
        let request: RequestEnvelope = frame::read(&mut stream).unwrap();
        assert_eq!(request.request, expected);
        let (version, reply) = (VERSION, Reply::Ok(response));
        frame::write(&mut stream, &ReplyEnvelope { version, reply }).unwrap();
    }
    let (_silent, _) = listener.accept().unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("loopback") && line.ends_with('\n'), "{line}");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    // Killed by the signal it would have no code.
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
