//! Limits that the plugin `bandwidth` gives a pod: a queue on the host's side of its link for what comes, and one on a device of its own,
//! to which that side's ingress leads, for what leaves. Both are set up here as it sets them up.

use super::{native::say, uplinks::says, *};
use std::time::Instant;

/// What it is asked for, in bits a second and bytes.
const RATE: u64 = 80_000_000;
const BURST: u64 = 256 << 10;
const BYTES: usize = 8 << 20;

/// The list of plugins of a node has it behind ours.
fn chain(node: &Node) {
    let dir = node.namespace().path("/run/lab/cni/net.d");
    fs::create_dir_all(&dir).unwrap();
    let list = r#"{"name": "sinabro", "plugins": [{"type": "sinabro"}, {"type": "bandwidth"}]}"#;
    fs::write(dir.join(names::CNI_CONFLIST), list).unwrap();
}

fn unchain(node: &Node) {
    let list = node.namespace().path("/run/lab/cni/net.d");
    fs::remove_file(list.join(names::CNI_CONFLIST)).unwrap();
}

fn limit(node: &Node, pod: &Pod) {
    let link = pod.result()["interfaces"][0]["name"].as_str().unwrap();
    let queue = format!("root tbf rate {RATE}bit burst {BURST}b latency 100ms");
    let filter = "protocol all u32 match u32 0 0 action mirred egress redirect dev bwp0";
    for command in [
        format!("tc qdisc add dev {link} {queue}"),
        "ip link add bwp0 mtu 65535 type ifb".into(),
        "ip link set bwp0 up".into(),
        format!("tc qdisc add dev {link} ingress"),
        format!("tc filter add dev {link} parent ffff: {filter}"),
        format!("tc qdisc add dev bwp0 {queue}"),
    ] {
        let command: Vec<_> = command.split_whitespace().collect();
        node.command(&command).unwrap();
    }
}

/// How long so many bytes take one way.
fn takes(from: &Pod, to: &Pod, family: usize) -> Duration {
    let address = to.addresses()[family];
    let begin = Instant::now();
    tcp::transfer(from.place(), to.place(), address, BYTES as u64).unwrap();
    begin.elapsed()
}

/// No fewer than what does not fit into the burst.
fn least() -> Duration {
    Duration::from_secs_f64((BYTES as u64 - BURST) as f64 * 8.0 / RATE as f64)
}

#[test]
fn limits_of_a_plugin_hold_between_nodes() {
    let flags: &[&str] = &["--attach=tcx"];
    let world = World::on(|lab| chain(lab.node(2)), [flags; 2]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    let [one, two] = &world.pods;
    limit(n2, two);
    for family in [0, 1] {
        for (from, to) in [(one, two), (two, one)] {
            let took = takes(from, to, family);
            println!(
                "{} to {}: {took:?}, not below {:?}",
                from.id(),
                to.id(),
                least()
            );
            assert!(took > least(), "{} to {}: {took:?}", from.id(), to.id());
        }
    }
    says(n2, "the plugin bandwidth limits by queues of the stack");
    assert!(goes_direct(n1));
    unchain(n2);
    // It looks again when something else is new.
    say(&world.lab, [true, false]);
    eventually("no plugin", || goes_direct(n2));
}
