//! Nodes whose uplinks programs send by nothing past the stack: more than one, or one whose packets have no Ethernet header.

use super::*;
use sinabro_lab::{
    lab::UNDERLAY_MTU,
    wire::{Tap, Wire},
};
use sinabro_netlink::Family;
use std::net::IpAddr;

fn by_kernel(counts: PathCounts) -> bool {
    is_both_ways(counts.kernel) && counts.direct == NOTHING && counts.native == NOTHING
}

/// That it reaches the other one by the stack, and why.
pub fn says(node: &Node, reason: &str) {
    eventually(
        reason,
        || matches!(other(node).path, Some(PeerPath::Kernel { why }) if why == reason),
    );
    let nodes = shown(node, "nodes");
    assert!(nodes.contains(&format!("  kernel: {reason}  ")), "{nodes}");
    let status = shown(node, "status");
    assert!(status.contains(&format!(" kernel: {reason}\n")), "{status}");
}

/// A cable from the first node to the outside host, and what it sends there leaves by it.
fn another_way_out(lab: &Lab) {
    let (n1, outside) = (lab.node(1).place(), lab.outside().place());
    let ends = [
        ("wan0", [2, 0x18, 0, 0, 1, 2]),
        ("wan0", [2, 0x18, 0, 0, 1, 1]),
    ];
    n1.cable(ends[0], UNDERLAY_MTU, outside, ends[1]).unwrap();
    for (place, end) in [(n1, 2), (outside, 1)] {
        let net: IpNet = format!("198.18.1.{end}/24").parse().unwrap();
        place.set_up("wan0", &[net]).unwrap();
    }
}

fn leave_by(node: &Node, link: &str, via: &str) {
    let via: IpAddr = via.parse().unwrap();
    let index = node.place().index(link).unwrap();
    let default = Route::default_of(Family::of(via)).via(via).dev(index);
    node.netlink().unwrap().execute(default.replace()).unwrap();
}

/// A second one comes and goes while pods talk.
#[test]
fn a_second_uplink_is_left_to_the_stack_and_noticed_when_it_goes() {
    let world = World::on(another_way_out, [&[], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    let traffic = talk(&world);
    let phase = |what: &str, act: &dyn Fn()| {
        traffic.event(what).unwrap();
        act();
        traffic.watch(PHASE);
        let counts = world.counts_of(|| traffic.watch(PHASE));
        traffic.must_flow(what).unwrap();
        counts
    };
    assert!(goes_direct(n1));
    let [one, two] = phase("a second uplink", &|| {
        leave_by(n1, "wan0", "198.18.1.1");
        says(n1, "several uplinks, see the setting uplinks");
    });
    assert!(by_kernel(one), "{one:?}");
    assert!(is_both_ways(two.direct) && two.kernel == NOTHING, "{two:?}");
    assert!(goes_direct(n2));
    for counts in phase("one again", &|| {
        leave_by(n1, "eth0", ROUTER);
        eventually("one uplink", || goes_direct(n1));
    }) {
        assert!(
            is_both_ways(counts.direct) && counts.kernel == NOTHING,
            "{counts:?}"
        );
    }
    println!("{}", traffic.finish().unwrap());
}

#[test]
fn an_uplink_without_an_ethernet_header_is_left_to_the_stack() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    let ends = [1, 2].map(|number| Tap::of_packets(lab.node(number).place(), "tun0").unwrap());
    let _wire = Wire::between(ends).unwrap();
    let own: Vec<_> = lab.nodes().iter().map(Node::entry).collect();
    for (node, number) in lab.nodes().iter().zip(1..) {
        let nets: [IpNet; 2] = [
            format!("198.18.9.{number}/24").parse().unwrap(),
            format!("2001:db8:18:9::{number}/64").parse().unwrap(),
        ];
        node.place().set_up("tun0", &nets).unwrap();
        let mut entry = node.entry();
        entry.addresses = nets.map(|net| net.addr()).into();
        node.set_entry(entry);
    }
    lab.publish().unwrap();
    let world = World::start(lab, [&["--uplinks=tun0"]; 2]);
    for node in world.lab.nodes() {
        says(node, "the uplink is not Ethernet");
    }
    for counts in world.counts_of(|| exchange(&world)) {
        assert!(by_kernel(counts), "{counts:?}");
    }
    // By the one that they have beside it.
    for (node, own) in world.lab.nodes().iter().zip(own) {
        node.set_entry(own);
        node.kill_agent().unwrap();
    }
    world.lab.publish().unwrap();
    for node in world.lab.nodes() {
        start(node, &["--uplinks=eth0"]);
    }
    for node in world.lab.nodes() {
        node.wait_ready().unwrap();
        eventually("an Ethernet header", || goes_direct(node));
    }
    assert_eq!(world.carried(|| exchange(&world)), [[0, 0]; 2]);
}
