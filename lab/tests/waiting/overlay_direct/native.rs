//! Between nodes that say so of themselves packets of pods go without a tunnel, if they go past the stack.

use super::*;
use sinabro_lab::traffic::{
    packet,
    tally::{Kind, Tally},
};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

pub const NATIVE: &str = "--routing=native";

/// The given nodes say that they take what comes without a tunnel.
pub fn say<const NODES: usize>(lab: &Lab, native: [bool; NODES]) {
    for (node, native) in lab.nodes().iter().zip(native) {
        let mut entry = node.entry();
        entry.native = native;
        node.set_entry(entry);
    }
    lab.publish().unwrap();
}

pub fn world(prepare: impl Fn(&Lab), flags: [&[&str]; 2]) -> World {
    let prepare = |lab: &Lab| {
        prepare(lab);
        say(lab, flags.map(|flags| flags.contains(&NATIVE)));
    };
    World::on(prepare, flags)
}

/// Each node sends to the other without a tunnel.
pub fn both(prepare: impl Fn(&Lab)) -> World {
    let world = world(prepare, [&[NATIVE], &[NATIVE]]);
    wait_for_both(&world);
    world
}

fn wait_for_both(world: &World) {
    for node in world.lab.nodes() {
        eventually("both know it", || goes_native(node));
    }
}

/// Packets go the way that the nodes' flags say, in tunnels or without: nothing is left to be found out.
pub fn settled(flags: [&[&str]; 2]) -> World {
    let world = world(|_| {}, flags);
    if flags.iter().all(|flags| flags.contains(&NATIVE)) {
        wait_for_both(&world);
        know_each_other(&world);
    }
    world
}

/// Of two nodes.
pub type Flags = [&'static [&'static str]; 2];

/// Nodes that are [`settled`], for tests that change nothing there and leave nothing on its way: all with the same flags have
/// them in turn, to the end of this process.
pub fn shared(flags: Flags) -> MutexGuard<'static, World> {
    type Shared = &'static OnceLock<Mutex<World>>;
    static ALL: Mutex<Vec<(Flags, Shared)>> = Mutex::new(Vec::new());
    let mut all = ALL.lock().unwrap();
    let known = all.iter().find(|(of, _)| *of == flags);
    let world = match known {
        Some(&(_, world)) => world,
        None => {
            let world: Shared = Box::leak(Box::default());
            all.push((flags, world));
            world
        }
    };
    // Others are made meanwhile.
    drop(all);
    let world = world.get_or_init(|| Mutex::new(settled(flags)));
    // A failed test is that one's failure.
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn goes_native(node: &Node) -> bool {
    other(node).path == Some(PeerPath::Native)
}

/// Each node knows the other's MAC address, without which the stack sends tunnels: by IPv4 these have it found out, by IPv6 the
/// agent.
pub fn know_each_other(world: &World) {
    let nodes = world.lab.nodes();
    for (at, node) in nodes.iter().enumerate() {
        let (peer, pod) = (&nodes[1 - at], &world.pods[1 - at]);
        icmp::ping(node.place(), pod.addresses()[0], PATIENCE).unwrap();
        let eth0 = node.place().index("eth0").unwrap();
        for address in peer.addresses() {
            eventually("the other's MAC address", || {
                let neighbour = node.netlink().unwrap().neigh(eth0, address).unwrap();
                neighbour.is_some_and(|neighbour| neighbour.is_valid())
            });
        }
    }
}

/// How many tunnel packets are on the wire of something.
pub fn in_tunnels(world: &World, what: impl FnOnce()) -> u32 {
    let place = world.lab.node(1).place();
    let kind = Kind::ToUdpPort(names::VXLAN_PORT);
    let uplink = packet::interface(place, "eth0").unwrap();
    let tally = Tally::start(place, uplink, kind).unwrap();
    what();
    tally.count().unwrap()
}

#[test]
fn nothing_is_in_a_tunnel_between_nodes_that_both_say_so() {
    let world = both(|_| {});
    for node in world.lab.nodes() {
        assert!(shown(node, "nodes").contains("  native  "));
    }
    let counts = world.counts_of(|| {
        let carried = world.carried(|| assert_eq!(in_tunnels(&world, || exchange(&world)), 0));
        assert_eq!(carried, [[0, 0]; 2]);
    });
    for counts in counts {
        assert!(is_both_ways(counts.native), "{counts:?}");
        assert_eq!((counts.direct, counts.kernel), (NOTHING, NOTHING));
    }
    // Nor is what goes by the stack: packets in parts, and what nodes themselves send.
    let [one, two] = &world.pods;
    let n1 = world.lab.node(1).place();
    for address in two.addresses() {
        let sent = in_tunnels(&world, || {
            udp::echo(one.place(), two.place(), address, 8000, false).unwrap();
            icmp::ping(n1, address, PATIENCE).unwrap();
            tcp::transfer(n1, two.place(), address, 1 << 20).unwrap();
        });
        assert_eq!(sent, 0, "{address}");
    }
}

/// The node's own packets go on the link, and those of pods by a router, which may know them or not.
#[test]
fn rules_that_send_pods_packets_another_way_are_met() {
    const PINGS: u64 = 10;
    let world = both(|_| {});
    let [one, two] = &world.pods;
    let n1 = world.lab.node(1);
    for (at, router) in [ROUTER, ROUTER_IPV6].into_iter().enumerate() {
        let (pods, to) = (n1.entry().pod_cidrs[at], world.lab.node(2).addresses()[at]);
        let run = |command: &str| {
            let command = format!("ip {command}");
            n1.command(&command.split(' ').collect::<Vec<_>>()).unwrap();
        };
        let go_natively = || {
            let counts = world.counts_of(|| {
                for _ in 0..PINGS {
                    icmp::ping(one.place(), two.addresses()[at], PATIENCE).unwrap();
                }
            });
            counts[0].native.sent >= PINGS
        };
        assert!(go_natively());
        run(&format!("route add {to} via {router} table 77"));
        let family = if at == 0 { "-4" } else { "-6" };
        run(&format!("{family} rule add from {pods} lookup 77"));
        eventually("pods' packets to be in tunnels", || !go_natively());
        run(&format!("{family} rule del from {pods} lookup 77"));
        eventually("pods' packets to go on the link again", go_natively);
    }
}

const THEIRS: &str =
    "table inet theirs { chain forward { type filter hook forward priority 0; counter; }; }";

/// As long as others have rules between pods the stack has everything, and needs no tunnel for it, however it checks the ways back.
#[test]
fn what_meets_rules_of_others_needs_no_tunnel() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    say(&lab, [true; 2]);
    for node in lab.nodes() {
        let strict = ["all", "default", "eth0"].map(|of| format!("net.ipv4.conf.{of}.rp_filter=1"));
        let set: Vec<_> = ["sysctl", "-q", "-w"]
            .into_iter()
            .chain(strict.iter().map(String::as_str))
            .collect();
        node.command(&set).unwrap();
        node.command(&["nft", THEIRS]).unwrap();
        node.start_agent_with(&[NATIVE, "--peer-probe=false"])
            .unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
    }
    let pods = [1, 2].map(|node| lab.node(node).add_pod(&format!("pod{node}")).unwrap());
    let world = World { lab, pods };
    for node in world.lab.nodes() {
        eventually("the way to be known", || other(node).path.is_some());
        eventually("the rules to be seen", || {
            why(node) == "rules in chain inet theirs forward"
        });
    }
    know_each_other(&world);
    let counts = world.counts_of(|| assert_eq!(in_tunnels(&world, || exchange(&world)), 0));
    for counts in counts {
        // As each of them is handed to the stack.
        assert!(
            counts.native.sent > 0 && counts.kernel.received > 0,
            "{counts:?}"
        );
        assert_eq!(
            (counts.direct, counts.kernel.sent),
            (NOTHING, 0),
            "{counts:?}"
        );
    }
}

#[test]
fn one_that_does_not_say_so_is_sent_tunnels_and_sends_them() {
    let world = world(|_| {}, [&[NATIVE], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    assert!(goes_direct(n1) && goes_direct(n2));
    assert!(in_tunnels(&world, || exchange(&world)) > 0);
    // The other one says so, and does not send so: each direction by itself.
    say(&world.lab, [true, true]);
    eventually("it is known", || goes_native(n1));
    assert!(goes_direct(n2));
    let [one, two] = world.counts_of(|| {
        assert_eq!(world.carried(|| exchange(&world)), [[0, 0]; 2]);
    });
    for (ways, sent, received) in [(one, one.native, one.direct), (two, two.direct, two.native)] {
        assert!(sent.sent > 0 && received.received > 0, "{ways:?}");
        assert_eq!((sent.received, received.sent), (0, 0), "{ways:?}");
        assert_eq!(ways.kernel, NOTHING, "{ways:?}");
    }
}

/// A node with `dataPath: kernel` has its stack see what comes.
#[test]
fn what_a_stack_is_to_see_comes_out_of_its_device() {
    let world = world(|_| {}, [&[NATIVE], &[NATIVE, KERNEL]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    eventually("it is known", || goes_native(n1));
    assert_eq!(why(n2), "the setting dataPath is kernel");
    let [one, two] = world.counts_of(|| exchange(&world));
    assert!(
        one.native.sent > 0 && one.direct.received > 0 && one.kernel == NOTHING,
        "{one:?}"
    );
    let by_others = (two.direct, two.native);
    assert!(
        is_both_ways(two.kernel) && by_others == (NOTHING, NOTHING),
        "{two:?}"
    );
}

#[test]
fn all_of_every_size_arrives_without_a_tunnel() {
    for mtu in MTUS {
        let world = both(|lab| set_mtu(lab, mtu));
        let sent = in_tunnels(&world, || large(&world, mtu as usize));
        assert_eq!(sent, 0, "{mtu}");
    }
}

#[test]
fn what_datagrams_are_cut_from_needs_no_tunnel() {
    let world = both(|_| {});
    let [one, two] = &world.pods;
    for address in two.addresses() {
        for datagrams in [1, 10] {
            let sent = in_tunnels(&world, || {
                udp::cut(one.place(), two.place(), address, 1000, datagrams).unwrap();
            });
            assert_eq!(sent, 0, "{address}: {datagrams}");
        }
    }
}

/// Also if tunnels to them, for want of what they say, would be the kernel's.
#[test]
fn nodes_that_know_each_other_by_ipv6_need_no_device() {
    let by_ipv6 = |lab: &Lab| lab.nodes().iter().for_each(Node::lead_with_ipv6);
    let world = both(by_ipv6);
    for node in world.lab.nodes() {
        assert!(other(node).tunnel.unwrap().is_ipv6());
    }
    assert_eq!(world.carried(|| exchange(&world)), [[0, 0]; 2]);
}

#[test]
fn a_router_between_two_nodes_is_sent_tunnels() {
    let world = world(|_| {}, [&[NATIVE], &[NATIVE]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    eventually("it is known", || goes_native(n1));
    let to = format!("{}/32", n2.addresses()[0]);
    n1.command(&["ip", "route", "add", &to, "via", ROUTER])
        .unwrap();
    eventually("the router is noticed", || goes_direct(n1));
    assert!(goes_native(n2));
    assert!(in_tunnels(&world, || exchange(&world)) > 0);
    n1.command(&["ip", "route", "del", &to]).unwrap();
    eventually("it is gone", || goes_native(n1));
    assert_eq!(in_tunnels(&world, || exchange(&world)), 0);
}

/// Nodes begin and end to say so, and to do so, while their pods talk.
#[test]
fn routing_changes_under_load() {
    let world = world(|_| {}, [&[], &[]]);
    let [n1, n2] = [1, 2].map(|number| world.lab.node(number));
    let traffic = talk(&world);
    let phase = |what: &str, act: &dyn Fn(), is_native: [bool; 2]| {
        traffic.event(what).unwrap();
        act();
        for (node, is_native) in [n1, n2].into_iter().zip(is_native) {
            eventually(what, || goes_native(node) == is_native);
        }
        traffic.watch(PHASE);
        traffic.must_flow(what).unwrap();
    };
    let restart = |node: &Node, flags: &[&str]| {
        node.kill_agent().unwrap();
        start(node, flags);
        node.wait_ready().unwrap();
    };
    phase("the first may", &|| restart(n1, &[NATIVE]), [false; 2]);
    phase("the second may", &|| restart(n2, &[NATIVE]), [false; 2]);
    phase(
        "the second says so",
        &|| say(&world.lab, [false, true]),
        [true, false],
    );
    phase("both say so", &|| say(&world.lab, [true; 2]), [true; 2]);
    phase("an agent is killed", &|| restart(n1, &[NATIVE]), [true; 2]);
    phase("the first may not", &|| restart(n1, &[]), [false, true]);
    phase("it says so", &|| say(&world.lab, [false, true]), [false; 2]);
    println!("{}", traffic.finish().unwrap());
}
