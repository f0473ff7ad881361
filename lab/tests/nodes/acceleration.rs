//! A pod's wish, all the way: from its CNI_ARGS to what its connections do.

use sinabro_common::api::{EndpointReport, TcpAcceleration};
use sinabro_lab::{Binaries, Lab, Lifetime, Node, Pod, checks::acceleration::round_trips};

/// What the agent reports of a pod.
fn report(node: &Node, pod: &Pod) -> EndpointReport {
    node.endpoint(pod).unwrap().unwrap()
}

/// Two pods with one wish.
fn pair(node: &Node, name: &str, wish: TcpAcceleration) -> [Pod; 2] {
    ["a", "b"].map(|side| {
        node.add_pod_wishing(&format!("{name}-{side}"), wish)
            .unwrap()
    })
}

/// Whether what two pods say to each other goes past their links.
fn bypasses(node: &Node, [client, server]: &[Pod; 2]) -> bool {
    let round_trips = round_trips(node, client, server).unwrap();
    round_trips.bypass().unwrap()
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
    let wishing = pair(node, "wishing", TcpAcceleration::Enabled);
    let without = pair(node, "without", TcpAcceleration::Disabled);
    let silent = ["c", "d"].map(|id| node.add_pod(id).unwrap());
    // Two of which only one wishes it.
    let mixed = [wishing[0].clone(), without[1].clone()];
    let pairs = [&wishing, &without, &silent, &mixed];
    let found = || pairs.map(|pair| bypasses(node, pair));
    assert_eq!(found(), [true, false, false, false]);
    // What pods wish is remembered; what counts is the node's setting now.
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
