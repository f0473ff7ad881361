//! Programs that somebody takes off a link come back, and it is said.

use sinabro_common::{abi::drop::DropReason, names};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    checks::{Scene, spoof},
    node::SERVICES_FLAGS,
    wait::eventually,
};
use std::time::{Duration, Instant};

/// How long it takes at most where the kernel tells of it: less than half of the time between two looks at all.
const TOLD: Duration = Duration::from_secs(12);

/// The programs on a link by filters, by name.
fn filters(node: &Node, link: &str) -> Vec<String> {
    let mut conn = node.netlink().unwrap();
    let index = conn.link_by_name(link).unwrap().index;
    let filters = conn.filters(index).unwrap().into_iter();
    let mut names: Vec<_> = filters
        .filter_map(|f| f.program.map(|(name, _)| name))
        .collect();
    names.sort();
    names
}

/// As agents of other vendors clean up what they do not know (cilium#28433).
#[test]
fn filters_that_somebody_deletes_come_back() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.write_services("{kind: List, items: []}\n").unwrap();
        let flags = [&["--attach=clsact"], &SERVICES_FLAGS[..]].concat();
        node.start_agent_with(&flags).unwrap();
        node.wait_ready().unwrap();
    }
    let scene = Scene::new(lab).unwrap();
    let node = scene.node(1);
    let pod = names::pod_link(scene.pod(1, 1).id(), "eth0");
    let all = |link| format!("tc qdisc del dev {link} clsact");
    let one = |link| format!("tc filter del dev {link} egress pref 91");
    for (link, programs) in [
        (pod.as_str(), ["pod_in", "pod_out"]),
        (names::VXLAN_LINK, ["overlay_in", "overlay_out"]),
        ("eth0", ["uplink_in", "uplink_out"]),
    ] {
        assert_eq!(filters(node, link), programs, "{link}");
        for command in [all(link), one(link)] {
            let command: Vec<&str> = command.split(' ').collect();
            node.place().command(&command).unwrap();
            let since = Instant::now();
            eventually("the programs to be back", || {
                filters(node, link) == programs
            });
            let took = since.elapsed();
            println!("{link}: {} ms", took.as_millis());
            assert!(took < TOLD, "{link}: {took:?}");
        }
        let said = || node.status().unwrap().troubles;
        eventually("it to be said", || {
            let mut troubles = said().into_iter();
            troubles.any(|t| t.reason == "ProgramsRemoved")
        });
    }
    // And they do what they did.
    spoof::spoofed_address(&scene).unwrap();
    assert!(spoof::drops(node, DropReason::SourceAddr).unwrap() > 0);
}
