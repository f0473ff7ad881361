//! Nodes that know each other by IPv6. Programs send UDP without a checksum then (RFC 6935), to who says that he takes it.

use super::{
    auto::{NOTICED, outages},
    fabric::{Fabric, WITHOUT_CHECKSUM},
    native::in_tunnels,
    *,
};

/// Nodes have IPv6 addresses first; the given ones say that they take UDP without a checksum.
pub fn nodes<const NODES: usize>(lab: &Lab, take: [bool; NODES]) {
    for (node, takes) in lab.nodes().iter().zip(take) {
        node.lead_with_ipv6();
        let mut entry = node.entry();
        entry.zero_checksum = takes;
        node.set_entry(entry);
    }
    lab.publish().unwrap();
}

fn world(flags: [&[&str]; 2]) -> World {
    let world = World::on(|lab| nodes(lab, [true; 2]), flags);
    for node in world.lab.nodes() {
        assert!(other(node).tunnel.unwrap().is_ipv6());
    }
    world
}

#[test]
fn no_device_sees_what_goes_past_over_ipv6() {
    let world = world([&[], &[]]);
    let counts = world.counts_of(|| {
        let carried = world.carried(|| assert!(in_tunnels(&world, || exchange(&world)) > 0));
        assert_eq!(carried, [[0, 0]; 2]);
    });
    for (node, counts) in world.lab.nodes().iter().zip(counts) {
        assert!(goes_direct(node), "{:?}", other(node));
        assert!(is_both_ways(counts.direct), "{counts:?}");
        assert_eq!(counts.kernel, NOTHING);
    }
}

#[test]
fn every_pair_of_ways_carries_all_over_ipv6() {
    every_pair(&MTUS[1..2], OUTSIDE_IPV6, |lab| nodes(lab, [true; 2]));
}

/// The sender has the device's checksum or none, and to the receiver's device is left what its programs do not take.
#[test]
fn the_device_takes_what_has_no_checksum() {
    let world = world([&[], &[KERNEL]]);
    let [one, two] = &world.pods;
    for address in two.addresses() {
        let [_, received] = world.counts_of(|| {
            udp::echo(one.place(), two.place(), address, 1000, true).unwrap();
            udp::cut(one.place(), two.place(), address, 1000, 10).unwrap();
        });
        assert!(received.kernel.received > 1, "{address}: {received:?}");
        assert_eq!(received.direct, NOTHING, "{address}");
    }
}

#[test]
fn super_packets_from_over_ipv6_leave_a_pod_again_as_they_came() {
    leave_again(&world([&[], &[]]), [false; 2]);
    // From the device they come with a checksum outside, and so with another type.
    leave_again(&world([&[KERNEL], &[]]), [true, false]);
}

/// They may be of a version that knows no tunnels but over IPv4.
#[test]
fn programs_that_were_kept_put_nothing_into_tunnels_over_ipv6() {
    let world = world([&[], &[]]);
    let n1 = world.lab.node(1);
    n1.kill_agent().unwrap();
    let flags = [&FLAGS[..], &[ASKS_NOBODY]].concat();
    n1.start_agent_refused("current", &flags).unwrap();
    n1.wait_ready().unwrap();
    assert!(why(n1).contains("an earlier version"), "{}", why(n1));
    let [[received, sent], _] = world.carried(|| exchange(&world));
    assert!(received > 0 && sent > 0, "{received} {sent}");
}

/// Nodes begin and end to say so while their pods talk.
#[test]
fn who_takes_no_udp_without_a_checksum_is_sent_none_under_load() {
    let world = World::on(|lab| nodes(lab, [false; 2]), [&[], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    eventually("the way to be known", || other(n1).path.is_some());
    assert!(why(n1).contains("checksum"), "{}", why(n1));
    let traffic = talk(&world);
    let phase = |what: &str, take: [bool; 2], is_direct: [bool; 2]| {
        traffic.event(what).unwrap();
        nodes(&world.lab, take);
        for (node, is_direct) in [n1, n2].into_iter().zip(is_direct) {
            eventually(what, || goes_direct(node) == is_direct);
        }
        let devices = world.carried(|| traffic.watch(PHASE));
        let sent = devices.map(|[_, sent]| sent > 0);
        assert_eq!(sent, is_direct.map(|is_direct| !is_direct), "{what}");
        traffic.must_flow(what).unwrap();
    };
    phase("one takes it", [false, true], [true, false]);
    phase("both take it", [true, true], [true, true]);
    phase("one does not any more", [true, false], [false, true]);
    phase("none does", [false, false], [false, false]);
    println!("{}", traffic.finish().unwrap());
}

/// Both take UDP without a checksum, and ask each other by such.
fn asking(prepare: impl Fn(&Lab)) -> World {
    let prepare = |lab: &Lab| {
        prepare(lab);
        nodes(lab, [true; 2]);
    };
    World::on(prepare, [&[ASKS], &[ASKS]])
}

fn all_go_direct(world: &World) {
    for node in world.lab.nodes() {
        eventually("answers to what has no checksum", || goes_direct(node));
    }
}

/// What is between the nodes may do that (RFC 6936 section 3). It is found out with nothing of pods'.
#[test]
fn nothing_is_lost_under_load_where_udp_without_a_checksum_is_dropped() {
    let world = asking(|lab| Fabric(lab).drops(&[WITHOUT_CHECKSUM]));
    let fabric = Fabric(&world.lab);
    let traffic = talk(&world);
    traffic.event("nodes look who answers").unwrap();
    let before = fabric.dropped();
    eventually("more requests of both nodes", || {
        fabric.dropped() > before + 2
    });
    let reason = "no answers to UDP over IPv6 without a checksum";
    for node in world.lab.nodes() {
        assert_eq!(why(node), reason);
        let probe = other(node).probe;
        assert!(
            matches!(probe, Some(PeerProbe::Answers { .. })),
            "{probe:?}"
        );
        assert!(shown(node, "nodes").contains(&format!("  kernel: {reason}  ")));
    }
    traffic.must_flow("nodes look who answers").unwrap();
    traffic.event("the network lets them pass").unwrap();
    fabric.lets_pass();
    all_go_direct(&world);
    traffic.watch(PHASE);
    traffic.must_flow("the network lets them pass").unwrap();
    println!("{}", traffic.finish().unwrap());
    for counts in world.counts_of(|| exchange(&world)) {
        assert!(is_both_ways(counts.direct), "{counts:?}");
    }
}

#[test]
fn what_no_longer_arrives_under_load_has_a_checksum_again() {
    let world = asking(|_| {});
    all_go_direct(&world);
    for outage in outages(&world, &[WITHOUT_CHECKSUM], |node| !goes_direct(node)) {
        assert!(outage.lost > 0 && outage.gap < NOTICED, "{outage:?}");
    }
}
