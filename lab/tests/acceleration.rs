//! A pod's wish, all the way: from its CNI_ARGS to what its connections do.
#![allow(clippy::unwrap_used)]

use sinabro_common::api::{EndpointReport, Request, Response, TcpAcceleration};
use sinabro_lab::{Binaries, Lab, Lifetime, Node, Pod, traffic::rate};

/// Round trips, each of which is two messages of a byte.
const ROUNDS: usize = 500;

fn report(node: &Node, pod: &Pod) -> EndpointReport {
    let Response::Endpoints(reports) = node.ask(Request::Endpoints).unwrap() else {
        panic!("not endpoints");
    };
    let of_pod = |report: &EndpointReport| report.owner == pod.owner();
    reports.into_iter().find(of_pod).unwrap()
}

/// Two pods with one wish.
fn pair(node: &Node, name: &str, wish: &str) -> [Pod; 2] {
    ["a", "b"].map(|side| {
        let args = [("SINABRO_TCP_ACCELERATION", wish)];
        node.add_pod_with(&format!("{name}-{side}"), &args).unwrap()
    })
}

/// Whether what two pods say to each other goes past their links.
fn bypasses(node: &Node, [client, server]: &[Pod; 2]) -> bool {
    let packets = || report(node, client).tx_packets;
    let before = packets();
    for address in server.addresses() {
        rate::latency(client.place(), server.place(), address, ROUNDS).unwrap();
    }
    let sent = packets() - before;
    match sent as usize {
        // Handshakes and ends.
        0..50 => true,
        sent if sent >= 2 * ROUNDS => false,
        sent => panic!("{sent} packets: neither the stack's way nor past it"),
    }
}

#[test]
fn a_pod_is_accelerated_as_it_wishes_and_as_the_node_allows() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    let start = |mode: &str| {
        node.start_agent_with(&[&format!("--tcp-acceleration={mode}")])
            .unwrap();
        node.wait_ready().unwrap();
    };
    start("opt-in");
    let wishing = pair(node, "wishing", "enabled");
    let without = pair(node, "without", "disabled");
    let silent = ["c", "d"].map(|id| node.add_pod(id).unwrap());
    // Two of which only one wishes it.
    let mixed = [wishing[0].clone(), without[1].clone()];
    let pairs = [&wishing, &without, &silent, &mixed];
    let found = || pairs.map(|pair| bypasses(node, pair));
    assert_eq!(found(), [true, false, false, false]);
    // What pods wish is remembered; what counts is what the node is told now.
    for (mode, expected) in [
        ("off", [false; 4]),
        ("all", [true; 4]),
        ("opt-in", [true, false, false, false]),
    ] {
        node.kill_agent().unwrap();
        start(mode);
        assert_eq!(found(), expected, "{mode}");
        let reported = pairs.map(|[pod, _]| report(node, pod).acceleration.is_some());
        let opt_in = mode == "opt-in";
        let wish = report(node, &wishing[0]).acceleration_wish;
        assert_eq!(wish, Some(TcpAcceleration::Enabled));
        assert_eq!(reported[0], expected[0], "{mode}");
        assert_eq!(reported[1], expected[1] && !opt_in, "{mode}");
    }
}
