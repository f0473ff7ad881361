//! `sinabroctl connections`: lists page by page, forgets step by step, counts.

use crate::kit::{Agent, ask, ctl, text};
use sinabro_common::api::*;
use std::path::Path;

fn end(address: &str, port: u16, pod: Option<&str>) -> PacketEnd {
    PacketEnd {
        address: address.parse().unwrap(),
        port: Some(port),
        pod: pod.map(Into::into),
    }
}

fn connection(port: u16) -> ConnectionReport {
    ConnectionReport {
        protocol: "tcp".into(),
        client: end("10.244.1.7", port, Some("shop/cart")),
        server: end("2001:db8::9", 443, None),
        masqueraded_as: Some(end("192.0.2.1", 61000, None)),
        frontend: None,
        state: "ESTABLISHED".into(),
        class: StateClass::Established,
        payer: Some("shop/cart".into()),
        mapping: None,
        through_stack: false,
        age_seconds: 100,
        idle_seconds: 61,
        expires_seconds: 3600,
    }
}

fn page(
    filter: &ConnectionFilter,
    from: Option<u32>,
    ports: impl IntoIterator<Item = u16>,
    next: Option<u32>,
) -> (Request, Response) {
    let filter = filter.clone();
    let connections = ports.into_iter().map(connection).collect();
    (
        Request::Connections { filter, from },
        Response::Connections(ConnectionsPage { connections, next }),
    )
}

#[test]
fn pages_become_one_sorted_table() {
    let filter = ConnectionFilter {
        pod: Some("shop/cart".into()),
        remote: Some("2001:db8::9/128".parse().unwrap()),
        protocol: Some(6),
        port: Some(443),
        state: Some(StateClass::Established),
        masqueraded: true,
    };
    let turns = vec![
        page(&filter, None, [4003, 4002], Some(7)),
        page(&filter, Some(7), [], Some(8)),
        page(&filter, Some(8), [4001], None),
    ];
    let args = "connections list --pod shop/cart --remote 2001:db8::9 --proto TCP --port 443 \
                --state established --masqueraded";
    let args: Vec<&str> = args.split_whitespace().collect();
    let output = Agent::conversation(turns).run(&args);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 4);
    let cells = |line: &str| -> Vec<String> {
        let cells = line.split("  ").map(str::trim).filter(|c| !c.is_empty());
        cells.map(Into::into).collect()
    };
    assert_eq!(
        cells(lines[1]),
        [
            "shop/cart",
            "tcp",
            "10.244.1.7:4001",
            "[2001:db8::9]:443",
            "192.0.2.1:61000",
            "ESTABLISHED",
            "1m1s",
            "1h0m"
        ]
    );
    assert!(lines[3].contains(":4003"));
    assert!(output.stderr.is_empty());
}

#[test]
fn a_mapping_is_to_everybody() {
    let mapping = ConnectionReport {
        protocol: "udp".into(),
        server: PacketEnd {
            port: None,
            ..end("0.0.0.0", 0, None)
        },
        state: "MAPPING".into(),
        mapping: Some(Mapped::Mapping),
        ..connection(4001)
    };
    let connections = vec![mapping];
    let page = Response::Connections(ConnectionsPage {
        connections,
        next: None,
    });
    let request = Request::Connections {
        filter: ConnectionFilter::default(),
        from: None,
    };
    let output = ask(request.clone(), page.clone(), &["connections", "list"]);
    let shown = text(&output.stdout);
    let part = "udp       10.244.1.7:4001  *       192.0.2.1:61000  MAPPING  ";
    assert!(shown.contains(part), "{shown}");
    let args = ["connections", "list", "-o", "json"];
    let output = ask(request, page, &args);
    assert!(text(&output.stdout).contains("\"mapping\":\"mapping\""));
}

#[test]
fn a_limit_is_said_and_zero_is_none() {
    let none = ConnectionFilter::default();
    let turns = || {
        vec![
            page(&none, None, 0..600, Some(1)),
            page(&none, Some(1), 600..1200, Some(2)),
            page(&none, Some(2), 1200..1500, None),
        ]
    };
    let list = |turns, args: &[&str]| {
        let args = [&["connections", "list"][..], args].concat();
        let output = Agent::conversation(turns).run(&args);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let (stdout, stderr) = (text(&output.stdout).to_owned(), text(&output.stderr));
        (stdout, stderr.to_owned())
    };
    let rows = |stdout: &str| stdout.lines().count() - 1;
    // Nobody asks for what is not shown.
    let (stdout, stderr) = list(turns()[..2].to_vec(), &[]);
    assert_eq!(rows(&stdout), 1000);
    assert!(stderr.contains("more than 1000"), "{stderr}");
    let (stdout, stderr) = list(turns(), &["--limit", "0"]);
    assert_eq!((rows(&stdout), stderr.as_str()), (1500, ""));
    // Exactly as many are not more.
    let (stdout, stderr) = list(turns(), &["--limit", "1500"]);
    assert_eq!((rows(&stdout), stderr.as_str()), (1500, ""));
    // One heading over all.
    assert_eq!(stdout.matches("EXPIRES IN").count(), 1);
}

#[test]
fn json_is_one_document_however_many_pages() {
    let none = ConnectionFilter::default();
    let turns = || {
        vec![
            page(&none, None, 0..1200, Some(1)),
            page(&none, Some(1), 1200..1500, None),
        ]
    };
    for (args, count, more) in [
        (&["--limit", "0"][..], 1500, false),
        (&["--limit", "1201"], 1201, true),
    ] {
        let args = [&["-o", "json", "connections", "list"][..], args].concat();
        let output = Agent::conversation(turns()).run(&args);
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(shown["more"], more);
        let rows: Vec<ConnectionReport> =
            serde_json::from_value(shown["connections"].clone()).unwrap();
        assert_eq!(rows.len(), count);
        assert_eq!(rows[7], connection(7));
    }
    let output = Agent::conversation(vec![page(&none, None, [], None)]).run(&[
        "connections",
        "list",
        "-o",
        "json",
    ]);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["connections"], serde_json::json!([]));
}

#[test]
fn a_flush_goes_on_to_the_end_and_says_how_many() {
    let filter = ConnectionFilter {
        port: Some(53),
        ..ConnectionFilter::default()
    };
    let step = |filter: &ConnectionFilter, all, from, flushed, next| {
        let filter = filter.clone();
        (
            Request::FlushConnections { filter, all, from },
            Response::Flushed(FlushReport { flushed, next }),
        )
    };
    let turns = vec![
        step(&filter, false, None, 40, Some(3)),
        step(&filter, false, Some(3), 2, None),
    ];
    let output = Agent::conversation(turns.clone()).run(&["connections", "flush", "--port", "53"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), "42 connections forgotten\n");
    let all = ConnectionFilter::default();
    let turns_all = vec![step(&all, true, None, 1, None)];
    let output =
        Agent::conversation(turns_all).run(&["connections", "flush", "--all", "-o", "json"]);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["flushed"], 1);
    // The agent goes in the middle.
    let output =
        Agent::conversation(turns[..1].to_vec()).run(&["connections", "flush", "--port", "53"]);
    assert_eq!(output.status.code(), Some(3));
    let told = text(&output.stderr);
    assert!(
        told.contains("40 connections were forgotten before"),
        "{told}"
    );
}

#[test]
fn what_is_meant_has_to_be_said() {
    let nowhere = Path::new("/nonexistent");
    for args in [
        &["flush"][..],
        &["flush", "--all", "--port", "53"],
        &["list", "--remote", "10.0.0.0/33"],
        &["list", "--proto", "http"],
        &["list", "--state", "open"],
        &["list", "--port", "65536"],
        &[],
    ] {
        let output = ctl(nowhere, &[&["connections"][..], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn stats_are_totals_pods_and_remote_ends() {
    let pod = |name: &str, connections, refused| PodConnections {
        pod: name.into(),
        connections,
        limit: 1000,
        unanswered: 1,
        unanswered_limit: 100,
        refused,
    };
    let report = ConnectionStats {
        connections: 42,
        capacity: 168,
        room: Some(RoomReport {
            connections: 168,
            bytes: 56_448,
            from: RoomFrom::Limit(64 << 20),
        }),
        masqueraded: 40,
        apart: 3,
        by_class: [("established".to_owned(), 42)].into(),
        by_state: [("ESTABLISHED".to_owned(), 30), ("ASSURED".to_owned(), 12)].into(),
        by_protocol: [("tcp".to_owned(), 30), ("udp".to_owned(), 12)].into(),
        pods: vec![pod("shop/cart", 42, 7), pod("shop/idle", 0, 0)],
        remotes: vec![RemoteConnections {
            protocol: "udp".into(),
            remote: end("10.0.0.10", 53, None),
            connections: 12,
        }],
    };
    let response = || Response::ConnectionStats(report.clone());
    let output = ask(
        Request::ConnectionStats,
        response(),
        &["connections", "stats"],
    );
    assert_eq!(output.status.code(), Some(0));
    let shown = text(&output.stdout);
    for part in [
        "42 of 168 (25%)",
        "40, 3 by another port than their mapping\n",
        "168, for the agent's limit of 64.0 MiB; takes 55.1 KiB",
        "30 ESTABLISHED, 12 ASSURED",
        "shop/cart  42 of 1000   1 of 100    7\n",
        "10.0.0.10:53  udp       12\n",
        "Pods without connections: 1\n",
    ] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let args = ["connections", "stats", "-o", "json"];
    let output = ask(Request::ConnectionStats, response(), &args);
    let printed: ConnectionStats = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed, report);
}
