//! `routing: auto`: what needs no tunnel has none to nodes that answer without one.

use super::{
    fabric::{Fabric, PODS},
    native::{goes_native, in_tunnels, say},
    *,
};
use sinabro_lab::traffic::gaps::Meter;

/// Both nodes say that they take what comes without a tunnel.
fn world(prepare: impl Fn(&Lab)) -> World {
    let prepare = |lab: &Lab| {
        prepare(lab);
        say(lab, [true; 2]);
    };
    World::on(prepare, [&[AUTO], &[AUTO]])
}

fn all_go_natively(world: &World) {
    for node in world.lab.nodes() {
        eventually("answers without a tunnel", || goes_native(node));
    }
}

/// Whether a network lets pods' addresses pass is found out with nothing of theirs.
#[test]
fn nothing_is_lost_under_load_where_pods_addresses_are_dropped() {
    let world = world(|lab| Fabric(lab).drops(&PODS));
    let fabric = Fabric(&world.lab);
    let traffic = talk(&world);
    traffic.event("nodes look who answers").unwrap();
    let before = fabric.dropped();
    eventually("more requests of both nodes", || {
        fabric.dropped() > before + 4
    });
    let why = "no answers without a tunnel";
    for node in world.lab.nodes() {
        let NodeReport { path, probe, .. } = other(node);
        let in_tunnels = PeerPath::Direct {
            why: Some(why.into()),
        };
        assert_eq!(path, Some(in_tunnels));
        // In tunnels.
        assert!(
            matches!(probe, Some(PeerProbe::Answers { .. })),
            "{probe:?}"
        );
        assert!(shown(node, "nodes").contains(&format!("  direct: {why}  ")));
    }
    traffic.must_flow("nodes look who answers").unwrap();
    traffic.event("the network lets them pass").unwrap();
    fabric.lets_pass();
    all_go_natively(&world);
    traffic.watch(PHASE);
    traffic.must_flow("the network lets them pass").unwrap();
    println!("{}", traffic.finish().unwrap());
    assert_eq!(in_tunnels(&world, || exchange(&world)), 0);
}

#[test]
fn nodes_that_know_each_other_by_ipv6_are_asked_too() {
    asked_over_ipv6([true; 2], |counts| is_both_ways(counts.direct));
}

/// By requests alone: pods' packets are in tunnels of the kernel, which have one.
#[test]
fn nodes_that_take_no_udp_without_a_checksum_are_asked_too() {
    asked_over_ipv6([false; 2], |counts| {
        is_both_ways(counts.kernel) && counts.direct == NOTHING
    });
}

/// Nodes take UDP without a checksum or not, and before it is found out that they are reached without a tunnel their pods' packets go so.
fn asked_over_ipv6(take: [bool; 2], go_in_tunnels: impl Fn(PathCounts) -> bool) {
    let world = world(|lab| {
        over_ipv6::nodes(lab, take);
        Fabric(lab).drops(&PODS[..1]);
    });
    let fabric = Fabric(&world.lab);
    // In each family, of which one alone is not enough.
    eventually("requests of both nodes", || fabric.dropped() > 2);
    for (node, takes) in world.lab.nodes().iter().zip(take) {
        eventually("pods' packets to be in tunnels", || {
            match other(node).path {
                Some(PeerPath::Direct { .. }) => takes,
                Some(PeerPath::Kernel { .. }) => !takes,
                _ => false,
            }
        });
    }
    for counts in world.counts_of(|| exchange(&world)) {
        assert!(go_in_tunnels(counts), "{counts:?}");
    }
    fabric.lets_pass();
    all_go_natively(&world);
    // Agents still ask each other in tunnels, which they make themselves, whether UDP without a checksum arrives.
    let counts = world.counts_of(|| {
        let devices = world.carried(|| exchange(&world));
        assert_eq!(devices.map(|[_, sent]| sent), [0; 2]);
    });
    for counts in counts {
        assert!(is_both_ways(counts.native), "{counts:?}");
        assert_eq!(counts.direct, NOTHING, "{counts:?}");
    }
}

/// How long packets are lost if a network no longer lets them pass: a round of two seconds, by a quarter longer, and three requests that are waited
/// for, a second each; and what the machine needs for it.
pub const NOTICED: Duration = Duration::from_millis(5_500 + 1_500);

/// Datagrams to an address while the network drops packets.
#[derive(Debug)]
pub struct Outage {
    pub lost: usize,
    /// The longest time without one, less what the whole machine stood still in it: zero does not mean that none was lost.
    pub gap: Duration,
}

/// Has the network drop packets while a pod sends to another, until each node has noticed. For each of the other's addresses.
pub fn outages(world: &World, drops: &[&str], has_noticed: impl Fn(&Node) -> bool) -> [Outage; 2] {
    let [one, two] = &world.pods;
    let paths = two
        .addresses()
        .map(|address| Path::new(&address.to_string(), one.place(), two.place(), address));
    let meter = Meter::start(&paths).unwrap();
    meter.watch(PHASE);
    meter.event("the network drops packets").unwrap();
    Fabric(&world.lab).drops(drops);
    for node in world.lab.nodes() {
        eventually("no answers", || has_noticed(node));
    }
    meter.watch(PHASE);
    let watched = meter.finish().unwrap();
    println!("{}", watched.table().join("\n"));
    paths.map(|path| {
        let datagrams = format!("UDP, {}", path.name);
        Outage {
            lost: watched.lost(&datagrams),
            gap: watched.gap(&datagrams),
        }
    })
}

#[test]
fn what_no_longer_arrives_under_load_is_in_tunnels_again() {
    let world = world(|_| {});
    all_go_natively(&world);
    let [v4, v6] = outages(&world, &PODS[1..], |node| !goes_native(node));
    assert!(v4.gap < PHASE, "{v4:?}");
    assert!(v6.lost > v4.lost && v6.gap < NOTICED, "{v6:?}, {v4:?}");
    assert!(in_tunnels(&world, || exchange(&world)) > 0);
}
