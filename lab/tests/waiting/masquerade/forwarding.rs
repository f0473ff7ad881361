//! Packets go past the node's stack where Services are the agent's, unless somebody has rules there.

use super::{
    host_port::with_host_port,
    kit::{FAMILIES, World, far},
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Place,
    node::SERVICES_FLAGS,
    traffic::{
        bind, icmp,
        path::Path,
        snmp,
        stream::Stream,
        tcp, udp,
        unbroken::{Pace, Traffic},
    },
};
use std::{fs, net::SocketAddr, time::Duration};

/// Packets that the node's stack has handed on.
pub fn forwarded(world: &World) -> u64 {
    snmp::forwarded(world.node().place()).unwrap()
}

/// Netfilter's connections of the machine's network that the node is, if it keeps any.
fn tracked(world: &World) -> u64 {
    let read = || {
        Ok(fs::read_to_string(
            "/proc/sys/net/netfilter/nf_conntrack_count",
        )?)
    };
    world
        .node()
        .place()
        .run(read)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

/// Has the stack know its neighbours, which it looks for itself.
pub fn greet(world: &World) {
    for far in far() {
        icmp::ping(world.pod(1).place(), far, Duration::from_secs(2)).unwrap();
    }
}

#[test]
fn the_stack_sees_nothing_of_it() {
    let world = World::direct(1);
    greet(&world);
    let pod = world.pod(1).place();
    for (family, far) in far().into_iter().enumerate() {
        let before = forwarded(&world);
        let path = Path::new(FAMILIES[family], pod, &world.beyond, far);
        let stream = Stream::open(&path).unwrap();
        stream.carry(16 << 20, 128 << 10).unwrap();
        assert_eq!(
            tcp::transfer(pod, &world.beyond, far, 1 << 20)
                .unwrap()
                .seen,
            world.own()[family]
        );
        assert_eq!(forwarded(&world), before, "TCP, {}", FAMILIES[family]);
        udp::echo(pod, &world.beyond, far, 1000, true).unwrap();
        assert_eq!(forwarded(&world), before, "UDP, {}", FAMILIES[family]);
        icmp::ping(pod, far, Duration::from_secs(2)).unwrap();
        assert_eq!(forwarded(&world), before, "ICMP, {}", FAMILIES[family]);
    }
}

/// A datagram of theirs may be an answer that the stack has to translate.
#[test]
fn of_pods_with_host_ports_the_stack_sees_first_datagrams_alone() {
    let world = World::direct(1);
    greet(&world);
    let pod = with_host_port(&world, 18_080);
    for far in far() {
        let before = forwarded(&world);
        for questions in 1..=3 {
            udp::echo(pod.place(), &world.beyond, far, 1000, true).unwrap();
            assert_eq!(forwarded(&world), before + questions);
        }
        tcp::transfer(pod.place(), &world.beyond, far, 1 << 20).unwrap();
        icmp::ping(pod.place(), far, Duration::from_secs(2)).unwrap();
        assert_eq!(forwarded(&world), before + 3);
    }
}

/// Rules of kube-proxy, which others have left there, have the kernel track what it forwards.
#[test]
fn netfilter_tracks_nothing_of_it() {
    let world = World::direct(1);
    let rules = "table inet kube-proxy {
        chain forward { type filter hook forward priority filter; ct state invalid drop; }
    }";
    world.node().place().command(&["nft", rules]).unwrap();
    world.wait_for_way("direct");
    greet(&world);
    let pod = world.pod(1).place();
    for far in far() {
        let talk = || {
            tcp::transfer(pod, &world.beyond, far, 1000).unwrap();
            // From another port each time.
            udp::echo(pod, &world.beyond, far, 1000, true).unwrap();
            icmp::ping(pod, far, Duration::from_secs(2)).unwrap();
        };
        let before = tracked(&world);
        for _ in 0..20 {
            talk();
        }
        assert!(tracked(&world) <= before);
    }
}

/// Drops what is for one port of the far host's.
const RULES: &str = "table inet theirs {
    chain forward { type filter hook forward priority filter; tcp dport 4444 drop; }
}";

fn refuses(from: &Place, to: &Place, target: SocketAddr) -> bool {
    let _listener = to.run(|| bind::tcp(target)).unwrap();
    tcp::connects(from, target).is_err()
}

#[test]
fn rules_of_others_are_met() {
    let world = World::direct(1);
    let pod = world.pod(1).place();
    let reaches = |port| {
        let open = |far| !refuses(pod, &world.beyond, SocketAddr::new(far, port));
        far().map(open)
    };
    assert_eq!(reaches(4444), [true; 2]);
    world.node().place().command(&["nft", RULES]).unwrap();
    world.wait_for_way("kernel: rules in chain inet theirs forward");
    assert_eq!(reaches(4444), [false; 2]);
    assert_eq!(reaches(4445), [true; 2]);
    world
        .node()
        .place()
        .command(&["nft", "delete table inet theirs"])
        .unwrap();
    world.wait_for_way("direct");
    assert_eq!(reaches(4444), [true; 2]);
}

/// What Istio's ambient mode gives the node's probes of pods for a source.
const PROBES: [&str; 2] = ["169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"];

/// Rules of NodeLocal DNSCache and of Istio's ambient mode, as those write them.
#[test]
fn rules_of_friends_are_passed_over_and_their_probes_are_answered() {
    let world = World::direct(1);
    let (node, pod) = (world.node().place(), world.pod(1));
    for ((family, own), source) in ["ip", "ip6"].into_iter().zip(pod.addresses()).zip(PROBES) {
        let dns = ["10.96.0.10", "fd00:10:96::10"][usize::from(own.is_ipv6())];
        let rules = format!(
            "table {family} raw {{
                chain PREROUTING {{ type filter hook prerouting priority raw; {family} daddr {dns} udp dport 53 counter notrack; }}
            }}
            table {family} nat {{
                chain ISTIO_POSTRT {{ meta skuid >= 0 {family} daddr {own} counter snat to {source}; }}
                chain POSTROUTING {{ type nat hook postrouting priority srcnat; counter jump ISTIO_POSTRT; }}
            }}"
        );
        node.command(&["nft", &rules]).unwrap();
    }
    let is_probed = || {
        for (own, source) in pod.addresses().into_iter().zip(PROBES) {
            let seen = tcp::transfer(node, pod.place(), own, 1 << 20).unwrap().seen;
            assert_eq!(seen.to_string(), source);
        }
    };
    // So the agent has looked at all of them.
    node.command(&["nft", RULES]).unwrap();
    world.wait_for_way("kernel: rules in chain inet theirs forward");
    is_probed();
    node.command(&["nft", "delete table inet theirs"]).unwrap();
    world.wait_for_way("direct");
    is_probed();
}

#[test]
fn rules_of_others_are_passed_over_where_that_is_wanted() {
    let world = World::direct_with(1, &["--forwarding=direct"]);
    world.node().place().command(&["nft", RULES]).unwrap();
    world.wait_for_way("direct");
    greet(&world);
    let before = forwarded(&world);
    for far in far() {
        tcp::transfer(world.pod(1).place(), &world.beyond, far, 1 << 20).unwrap();
    }
    assert_eq!(forwarded(&world), before);
}

/// The plugin `bandwidth` limits pods by queues on their links, which nothing passes past the stack.
#[test]
fn a_chained_plugin_that_limits_is_not_passed_over() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    node.write_services("{kind: List, items: []}\n").unwrap();
    let path = node
        .namespace()
        .path("/run/lab/cni/net.d/00-sinabro.conflist");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let list = r#"{"name": "s", "cniVersion": "1.0.0", "plugins": [{"type": "sinabro"}, {"type": "bandwidth"}]}"#;
    fs::write(&path, list).unwrap();
    let world = World::in_lab(lab, 1, &SERVICES_FLAGS);
    world.wait_for_way("kernel: the plugin bandwidth");
    let before = forwarded(&world);
    let far = far()[0];
    tcp::transfer(world.pod(1).place(), &world.beyond, far, 1 << 20).unwrap();
    assert!(forwarded(&world) > before + 10);
}

/// A port of the node that the stack leads to a pod, as the plugin `portmap` has it.
pub fn host_port(world: &World, port: u16, to: SocketAddr) {
    let (family, own) = match to {
        SocketAddr::V4(_) => ("ip", world.own()[0]),
        SocketAddr::V6(_) => ("ip6", world.own()[1]),
    };
    let rules = format!(
        "table {family} cni_hostport {{
            chain prerouting {{ type nat hook prerouting priority dstnat;
                {family} daddr {own} meta l4proto {{ tcp, udp }} th dport {port} dnat to {to}
            }}
        }}"
    );
    world.node().place().command(&["nft", &rules]).unwrap();
}

#[test]
fn who_comes_by_a_host_port_is_answered_by_the_stack() {
    const PORT: u16 = 18_080;
    let world = World::direct(1);
    let pod = world.pod(1);
    for (family, far) in far().into_iter().enumerate() {
        let address = pod.addresses()[family];
        host_port(&world, PORT, SocketAddr::new(address, 8080));
        world.wait_for_way("direct");
        let target = SocketAddr::new(world.own()[family], PORT);
        let path = Path::new(FAMILIES[family], &world.beyond, pod.place(), address);
        let by_port = Stream::open(&path.through(target, 8080)).unwrap();
        let out = Path::new(FAMILIES[family], pod.place(), &world.beyond, far);
        let out = Stream::open(&out).unwrap();
        for _ in 0..3 {
            by_port.carry(4 << 20, 64 << 10).unwrap();
            out.carry(4 << 20, 64 << 10).unwrap();
        }
    }
}

/// Rules and agents come and go while pods talk with the far host: nothing is lost, and nothing stands still.
#[test]
fn ways_change_under_load() {
    const BEFORE_EVENTS: Duration = Duration::from_secs(4);
    const PHASE: Duration = Duration::from_secs(2);
    let world = World::direct(1);
    let paths = [0, 1].map(|family| {
        let far = far()[family];
        Path::new(FAMILIES[family], world.pod(1).place(), &world.beyond, far)
    });
    let pace = Pace {
        pause: Duration::from_millis(10),
        clients: 1,
    };
    let traffic = Traffic::start(&paths, pace).unwrap();
    traffic.watch(BEFORE_EVENTS);
    // Whether the stack hands on more than first packets, after something happened.
    let during = |what: &str, act: &dyn Fn()| {
        traffic.event(what).unwrap();
        act();
        let before = forwarded(&world);
        traffic.watch(PHASE);
        traffic.must_flow(what).unwrap();
        forwarded(&world) - before > 100
    };
    let (node, place) = (world.node(), world.node().place());
    let nft = |rules: &str, way: &str| {
        place.command(&["nft", rules]).unwrap();
        world.wait_for_way(way);
    };
    assert!(!during("nothing happened", &|| {}));
    assert!(during("somebody made rules", &|| nft(
        RULES,
        "kernel: rules"
    )));
    let act = || nft("delete table inet theirs", "direct");
    assert!(!during("the rules went", &act));
    assert!(during("the agent was stopped", &|| node
        .stop_agent()
        .unwrap()));
    let start = || {
        node.start_agent_with(&SERVICES_FLAGS).unwrap();
        node.wait_ready().unwrap();
        world.wait_for_way("direct");
    };
    assert!(!during("it was started", &start));
    assert!(!during("it was killed", &|| node.kill_agent().unwrap()));
    assert!(!during("it was started again", &start));
    println!("{}", traffic.finish().unwrap());
}
