//! Commands that show one noun of the node each.

use crate::kit::{ask, owner, pod, text};
use sinabro_common::api::*;
use std::collections::BTreeMap;

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
        mtu: Some(1450),
        local_mtu: Some(LocalMtu {
            mtu: 65_535,
            destinations: Vec::new(),
        }),
        tx_packets: 1,
        tx_bytes: 1536,
        rx_packets: 2,
        rx_bytes: 10,
        acceleration: None,
        connections: None,
        acceleration_wish: None,
        service_translation: Some(ServiceTranslation::Packet),
    };
    let nameless = EndpointReport {
        pod: PodRef::default(),
        local_mtu: None,
        service_translation: None,
        ..endpoint.clone()
    };
    let response = Response::Endpoints(vec![endpoint, nameless]);
    let output = ask(Request::Endpoints, response, &["endpoints"]);
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[1].starts_with("default/web  eth0"), "{}", lines[1]);
    assert!(lines[1].contains("10.244.1.2, fd00::2") && lines[1].ends_with("1.5 KiB  10 B"));
    assert!(
        lines[1].contains("  1450, local 65535  packet    "),
        "{}",
        lines[1]
    );
    assert!(lines[2].contains("  1450  "), "{}", lines[2]);
    assert!(lines[2].contains("  ?  "), "{}", lines[2]);
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
        path: None,
        packets: None,
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
fn nodes_show_by_which_way_they_are_reached_and_why() {
    // As an agent of before says it.
    let before = serde_json::json!({
        "name": "node-a", "addresses": [], "podCIDRs": [], "local": false,
        "tunnel": "192.168.0.1", "problem": null,
    });
    let before: NodeReport = serde_json::from_value(before).unwrap();
    assert_eq!((&before.path, before.packets), (&None, None));
    let without_native = serde_json::json!({
        "direct": {"sent": 1, "received": 2}, "kernel": {"sent": 3, "received": 4},
    });
    let counts: PathCounts = serde_json::from_value(without_native).unwrap();
    assert_eq!((counts.direct.sent, counts.native.sent), (1, 0));
    let packets = |sent, received| PathPackets { sent, received };
    let reached = |name: &str, path| NodeReport {
        name: name.into(),
        path: Some(path),
        packets: Some(PathCounts {
            direct: packets(812, 790),
            native: packets(55, 56),
            kernel: packets(3, 4),
        }),
        ..before.clone()
    };
    let why = "IPsec has policies".to_owned();
    let report = vec![
        before.clone(),
        reached("node-b", PeerPath::Direct { why: None }),
        reached("node-c", PeerPath::Kernel { why }),
    ];
    let request = || Request::Nodes { after: None };
    let output = ask(request(), Response::Nodes(report.clone()), &["nodes"]);
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    for way in ["  DIRECT", "  NATIVE", "  KERNEL"] {
        assert!(lines[0].contains(way), "{}", lines[0]);
    }
    assert!(lines[1].ends_with("  -"), "{}", lines[1]);
    let counts = "  812 out, 790 in  55 out, 56 in  3 out, 4 in  ";
    for (line, path) in [
        (lines[2], "direct "),
        (lines[3], "kernel: IPsec has policies "),
    ] {
        assert!(line.contains(&format!("{counts}{path}")), "{line}");
    }

    let output = ask(
        request(),
        Response::Nodes(report.clone()),
        &["-o", "json", "nodes"],
    );
    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed[1]["path"]["state"], "direct");
    assert_eq!(printed[2]["path"]["why"], "IPsec has policies");
    assert_eq!(printed[2]["packets"]["direct"]["received"], 790);
    let printed: Vec<NodeReport> = serde_json::from_value(printed).unwrap();
    assert_eq!(printed, report);
}

#[test]
fn metrics_are_drops_connections_and_counters() {
    let report = MetricsReport {
        drops: vec![DropReport {
            number: 2,
            reason: "source_address".into(),
            text: "a pod lied".into(),
            packets: 42,
        }],
        nat_flows: 1,
        nat_capacity: 4,
        connections: Some(TableReport {
            established: 2,
            unanswered: 1,
            closing: 1,
            capacity: 16,
            masqueraded: 3,
            ..TableReport::default()
        }),
        services: None,
        overlay_packets: None,
        acceleration_memory: None,
        counters: BTreeMap::from([("sinabro_gc_freed_total".into(), 7)]),
    };
    // An agent of before says less.
    let before = MetricsReport {
        connections: None,
        ..report.clone()
    };
    for (report, shown) in [
        (report, "4 of 16 (25%), 1 unanswered, 3 masqueraded"),
        (before, "Masqueraded flows:       1 of 4 (25%)"),
    ] {
        let output = ask(
            Request::Metrics,
            Response::Metrics(Box::new(report)),
            &["metrics"],
        );
        assert_eq!(output.status.code(), Some(0));
        let text = text(&output.stdout);
        for part in [
            "42       source_address  a pod lied",
            shown,
            "sinabro_gc_freed_total:  7",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
