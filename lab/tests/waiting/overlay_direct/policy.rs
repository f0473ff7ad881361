//! A second uplink, by which rules send what is from pods (`ip rule from … lookup …`).

use super::*;
use sinabro_lab::{
    lab::UNDERLAY_MTU,
    traffic::{
        packet,
        tally::{Kind, Tally},
    },
};

/// What has no more specific route leaves by the second uplink if it is from pods.
const OF_PODS: &str = "77";
/// What is from the node itself to the other one leaves by it.
const OF_NODE: &str = "78";
/// A network of the router's and the first node's second uplink, by family.
const ROUTER_THERE: [&str; 2] = ["172.31.0.1", "fd00:172:31::1"];
const NODE_THERE: [&str; 2] = ["172.31.0.11", "fd00:172:31::b"];
const LENGTHS: [u8; 2] = [24, 64];
const FAMILIES: [&str; 2] = ["-4", "-6"];

fn ip(node: &Node, arguments: &str) {
    let command: Vec<_> = ["ip"].into_iter().chain(arguments.split(' ')).collect();
    node.command(&command).unwrap();
}

/// The first node has another cable to the router, and what its pods send out of the cluster leaves by that.
fn second_uplink(lab: &Lab) {
    let (n1, router) = (lab.node(1), lab.router().place());
    let ends = [
        ("eth1", [2, 0x1a, 0xb2, 0, 0, 1]),
        ("second", [2, 0x1a, 0xb2, 0, 0, 2]),
    ];
    n1.place()
        .cable(ends[0], UNDERLAY_MTU, router, ends[1])
        .unwrap();
    let nets = |of: [&str; 2]| [0, 1].map(|at| format!("{}/{}", of[at], LENGTHS[at]));
    for (place, link, of) in [
        (n1.place(), "eth1", NODE_THERE),
        (router, "second", ROUTER_THERE),
    ] {
        let nets = nets(of).map(|net| net.parse().unwrap());
        place.set_up(link, &nets).unwrap();
    }
    // The outside host answers by the router, as it does all others.
    for (net, via) in nets(ROUTER_THERE)
        .into_iter()
        .zip(["192.0.2.1", "2001:db8:2::1"])
    {
        let net = net.parse::<IpNet>().unwrap().trunc().to_string();
        let route = ["ip", "route", "add", &net, "via", via];
        lab.outside().place().command(&route).unwrap();
    }
    // The rule for what has no route of its own: what is for other nodes' pods has one, which a default route would hide.
    for (at, pods) in n1.entry().pod_cidrs.into_iter().enumerate() {
        let via = ROUTER_THERE[at];
        for change in [
            format!("route add default via {via} dev eth1 table {OF_PODS}"),
            format!("rule add from {pods} lookup main suppress_prefixlength 0 pref 100"),
            format!("rule add from {pods} lookup {OF_PODS} pref 101"),
        ] {
            ip(n1, &format!("{} {change}", FAMILIES[at]));
        }
    }
}

/// All of a stream and all parts of a packet get there and back, and what was counted meanwhile.
fn arrives(world: &World) -> [PathCounts; 2] {
    let [one, two] = &world.pods;
    let counts = world.counts_of(|| exchange(world));
    for (from, to) in [(one, two), (two, one)] {
        for address in to.addresses() {
            tcp::transfer(from.place(), to.place(), address, stream_len()).unwrap();
            // By the stack in any case.
            udp::echo(from.place(), to.place(), address, 8000, false).unwrap();
        }
    }
    counts
}

fn is_direct(counts: PathCounts) -> bool {
    is_both_ways(counts.direct) && counts.kernel == NOTHING && counts.native == NOTHING
}

fn is_by_kernel(counts: PathCounts) -> bool {
    is_both_ways(counts.kernel) && counts.direct == NOTHING && counts.native == NOTHING
}

/// Tunnels are from the node, which rules for pods say nothing of.
fn tunnels_leave_by_the_uplink(prepare: impl Fn(&Lab)) {
    let world = World::on(
        |lab| {
            prepare(lab);
            second_uplink(lab);
        },
        [&[], &[]],
    );
    for node in world.lab.nodes() {
        assert!(goes_direct(node), "{:?}", other(node));
    }
    for counts in arrives(&world) {
        assert!(is_direct(counts), "{counts:?}");
    }
    // Until rules send them, too, by another link.
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    let [from, to] = [n1, n2].map(|node| node.addresses()[0]);
    let at = usize::from(to.is_ipv6());
    for change in [
        format!(
            "route add {to} via {} dev eth1 src {from} table {OF_NODE}",
            ROUTER_THERE[at]
        ),
        format!("rule add from {from} lookup {OF_NODE}"),
    ] {
        ip(n1, &format!("{} {change}", FAMILIES[at]));
    }
    eventually("the rule to be noticed", || !goes_direct(n1));
    assert_eq!(
        why(n1),
        "the route to it is not by the uplink, see ip route get"
    );
    let mut counts = [PathCounts::default(); 2];
    let [[received, sent], of_second] = world.carried(|| counts = arrives(&world));
    let [one, two] = counts;
    assert!(received > 0 && sent > 0, "{received} {sent}");
    // The parts of packets alone, and each transfer's.
    assert!(of_second[1] < sent, "{of_second:?}");
    // What leaves by a link that is no uplink is not counted.
    assert_eq!((one.direct.sent, one.native), (0, NOTHING), "{one:?}");
    assert!(one.kernel.received > 0, "{one:?}");
    assert!(is_direct(two), "{two:?}");
}

#[test]
fn rules_for_pods_lead_no_tunnel_by_another_uplink() {
    tunnels_leave_by_the_uplink(|_| {});
}

#[test]
fn rules_for_pods_lead_no_tunnel_over_ipv6_by_another_uplink() {
    tunnels_leave_by_the_uplink(|lab| over_ipv6::nodes(lab, [true; 2]));
}

/// What is for other nodes gets there by the kernel's way, and what is for the outside by the link that the rules say.
#[test]
fn two_uplinks_and_rules_for_pods_are_left_to_the_stack() {
    let world = World::on(second_uplink, [&["--uplinks=eth0,eth1"], &[]]);
    let n1 = world.lab.node(1);
    uplinks::says(n1, "several uplinks, see the setting uplinks");
    let uplinks = ["eth0", "eth1"].map(|name| {
        let uplink = packet::interface(n1.place(), name).unwrap();
        Tally::start(n1.place(), uplink, Kind::LargerThan(1000)).unwrap()
    });
    let large = || uplinks.each_ref().map(|uplink| uplink.count().unwrap() > 0);
    let [one, two] = arrives(&world);
    assert!(is_by_kernel(one), "{one:?}");
    assert!(is_direct(two), "{two:?}");
    assert_eq!(large(), [true, false]);
    let outside = world.lab.outside().place();
    for address in world.lab.outside_addresses().unwrap() {
        let pod = world.pods[0].place();
        tcp::transfer(pod, outside, address, 1 << 20).unwrap();
        assert_eq!(large(), [false, true], "{address}");
    }
}
