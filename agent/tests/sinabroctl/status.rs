//! `sinabroctl status`, and what of it is asked for elsewhere.

use crate::kit::{ask, status, text};
use sinabro_common::api::*;

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
            "Mode attach:      tcx",
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
    SelfTestReport {
        verdict: Verdict::Accelerate,
        tried: true,
        reason: "order and back-pressure hold".into(),
        kernel: "6.18.0".into(),
        ..SelfTestReport::default()
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
fn who_sees_pods_own_addresses_is_told() {
    let shown = |masquerade: MasqueradeReport| {
        let is_endpoint_independent =
            masquerade.udp_mapping.as_deref() == Some("endpoint-independent");
        let response = Response::Status(Box::new(StatusReport {
            masquerade: Some(masquerade),
            ..status(true)
        }));
        let output = ask(Request::Status, response, &["status"]);
        let text = text(&output.stdout);
        let line = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_default().trim().to_owned()
        };
        let mapping = line("UDP mapping:") == "endpoint-independent";
        assert_eq!(mapping, is_endpoint_independent, "{text}");
        [line("Masquerade:"), line("Not masqueraded:")]
    };
    let by_file = status(true).masquerade.unwrap();
    assert_eq!(
        shown(by_file.clone()),
        [
            "IPv4, IPv6",
            "pods, fe80::/10, 10.0.0.0/8 (/etc/sinabro/ip-masq-agent)"
        ]
    );
    let many = (0..300u16).map(|n| format!("10.{}.{}.0/24", n / 256, n % 256).parse().unwrap());
    let many = MasqueradeReport {
        ipv6: false,
        non_masquerade_cidrs: many.collect(),
        link_local: false,
        nodes: false,
        udp_mapping: Some("endpoint-independent".into()),
        file: None,
        ..by_file
    };
    let [families, spared] = shown(many);
    assert_eq!(families, "IPv4");
    assert!(
        spared.starts_with("pods, nodes, 169.254.0.0/16, 10.0.0.0/24, "),
        "{spared}"
    );
    assert!(spared.ends_with("10.0.4.0/24, 295 more"), "{spared}");
    assert_eq!(shown(MasqueradeReport::default()), ["off", "-"]);
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
fn whether_the_kernel_can_accelerate_is_asked_for() {
    let own = |found: Option<SelfTestReport>, args: &[&str]| {
        let report = StatusReport {
            tcp_self_test: found,
            ..status(true)
        };
        let response = Response::Status(Box::new(report));
        text(&ask(Request::Status, response, args).stdout).to_owned()
    };
    let json = own(
        Some(self_test()),
        &["acceleration", "--kernel", "-o", "json"],
    );
    let printed: SelfTestReport = serde_json::from_str(&json).unwrap();
    assert_eq!(printed, self_test());
    let refused = SelfTestReport {
        verdict: Verdict::Refused,
        reason: "on this kernel bytes arrive in another order than sent".into(),
        ..self_test()
    };
    for (found, told) in [
        (Some(self_test()), "possible: order and back-pressure hold"),
        (
            Some(refused),
            "refused: on this kernel bytes arrive in another order than sent",
        ),
    ] {
        assert_eq!(
            own(found.clone(), &["acceleration", "--kernel"]),
            format!("{told}\n")
        );
        assert!(own(found, &["status"]).contains(told));
    }
    let none = own(None, &["acceleration", "--kernel"]);
    assert!(none.contains("no pod has asked"), "{none}");
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
