//! Endpoint-independent mappings of UDP (RFC 4787): one port outside for a pod's port, whoever it is for.

use super::*;
use sinabro_agent::datapath::{ConnectionLimits, PortSet, PortsOf};
use sinabro_common::{
    abi::{
        Addr,
        config::FLAG_ENDPOINT_INDEPENDENT,
        connection::{ALL_SHARES, FLAG_APART, FLAG_MAPPED, FLAG_MAPPING, Share},
    },
    algo::lifetime::Stage,
};
use sinabro_lab::traffic::close::close;
use std::{net::UdpSocket, sync::Barrier};

/// Three remote ends, and another port of one of them, by family.
const REMOTES: [[(&str, u16); 4]; 2] = [
    [
        ("192.0.2.9", 3478),
        ("192.0.2.9", 3479),
        ("203.0.113.4", 3478),
        ("198.51.100.77", 65535),
    ],
    [
        ("2001:db8::9", 3478),
        ("2001:db8::9", 3479),
        ("2001:db8:f::4", 3478),
        ("2600::77", 65535),
    ],
];

fn remotes(pod: IpAddr) -> impl Iterator<Item = (IpAddr, u16)> {
    let of_family = REMOTES[usize::from(pod.is_ipv6())];
    of_family
        .into_iter()
        .map(|(address, port)| (address.parse().unwrap(), port))
}

fn turn(w: &World, on: bool) {
    with_ports(w, on, PORT_MIN, PORT_MAX);
}

fn with_ports(w: &World, on: bool, min: u16, max: u16) {
    let mut config = kit::node_config();
    (config.nat_port_min, config.nat_port_max) = (min, max);
    if on {
        config.flags |= FLAG_ENDPOINT_INDEPENDENT;
    }
    w.datapath.set_node_config(config).unwrap();
}

fn mapped(test: impl FnOnce(World) + Send) {
    mapped_with(ConnectionLimits::default(), test);
}

fn mapped_with(limits: ConnectionLimits, test: impl FnOnce(World) + Send) {
    let config = DatapathConfig {
        connection_limits: limits,
        ..kit::config()
    };
    world_with(&config, |w| {
        turn(&w, true);
        test(w);
    });
}

fn of(flag: u16) -> Vec<(ConnectionKey, Connection)> {
    let table = table().into_iter();
    table.filter(|(_, record)| record.has(flag)).collect()
}

/// The port that a remote end sees.
fn port_of(w: &World, from: (IpAddr, u16), to: (IpAddr, u16)) -> u16 {
    w.sent(&make(UDP, from, to)).ports.0
}

fn share(payer: u32) -> (u64, u64) {
    let share = open::<u32, Share>("SHARES").get(&payer, 0).unwrap();
    (share.connections, share.embryonic)
}

#[test]
fn every_remote_end_sees_one_port_and_its_answers_come() {
    mapped(|w| {
        for (pod, node) in [(w.a.v4, NODE_IP), (w.a.v6, NODE_IP6.parse().unwrap())] {
            // One that is kept, and one that is not of those that are given.
            for port in [62000, 4000] {
                let mut seen = HashSet::new();
                for remote in remotes(pod) {
                    let inside = make(UDP, (pod, port), remote);
                    let sent = w.sent(&inside);
                    let outside = make(UDP, (node, sent.ports.0), remote);
                    assert_eq!(w.out(&inside).1, World::frame(&outside));
                    let back = w.received(&reply_to(&sent));
                    assert_eq!((back.dst, back.ports.1), (pod, port));
                    seen.insert(sent.ports.0);
                }
                assert_eq!(seen.len(), 1, "{pod}:{port}: {seen:?}");
                assert_eq!(seen.contains(&port), port == 62000);
            }
        }
        check_table();
        assert_eq!(of(FLAG_MAPPING).len(), 4);
        assert_eq!(of(FLAG_MAPPED).len(), 16);
        assert_eq!(of(FLAG_APART), []);
    });
}

/// Towards whomever, also those that the other has never sent to.
#[test]
fn two_pods_never_have_one_port() {
    mapped(|w| {
        for (a, b) in [(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)] {
            let mut ends: Vec<_> = remotes(a).collect();
            let of_a = port_of(&w, (a, 62000), ends.remove(0));
            let of_b: HashSet<_> = ends
                .iter()
                .map(|end| port_of(&w, (b, 62000), *end))
                .collect();
            assert_eq!((of_a, of_b.len()), (62000, 1));
            assert!(!of_b.contains(&62000));
            // Another port of the first pod's is another mapping.
            assert!(!of_b.contains(&port_of(&w, (a, 62001), ends[0])));
        }
        assert_eq!(of(FLAG_APART), []);
        check_table();
    });
}

/// RFC 4787 §5: who was not spoken to does not get in.
#[test]
fn a_mapping_lets_nobody_in() {
    mapped(|w| {
        for (pod, node) in [(w.a.v4, NODE_IP), (w.a.v6, NODE_IP6.parse().unwrap())] {
            let mut ends = remotes(pod);
            let port = port_of(&w, (pod, 62000), ends.next().unwrap());
            for stranger in ends {
                let packet = make(UDP, stranger, (node, port));
                assert_eq!(w.come(&packet), (PASS, World::frame(&packet)));
            }
            // Nor who says that it is the end which stands for all.
            let any = IpAddr::from(Addr::from(node).any_remote());
            if pod.is_ipv6() {
                let packet = make(UDP, (any, 0), (node, port));
                assert_eq!(w.come(&packet), (PASS, World::frame(&packet)));
            }
        }
    });
}

#[test]
fn only_udp_has_mappings_and_a_resolver_none() {
    mapped(|w| {
        w.sent(&make(TCP, (w.a.v4, 62000), (FAR, 443)));
        w.sent(&make(ICMP, (w.a.v4, 62000), (FAR, 0)));
        w.sent(&packet::udplite((w.a.v4, 62000), (FAR, 443), b"hello"));
        let resolver = (FAR, 53);
        assert_eq!(port_of(&w, (w.a.v4, 62000), resolver), 62000);
        assert_eq!(of(FLAG_MAPPING), []);
        // It keeps off those of others, and has its client's where there is one.
        let other = port_of(&w, (w.b.v4, 62001), (FAR, 3478));
        assert_eq!(other, 62001);
        assert_ne!(port_of(&w, (w.a.v4, 62001), resolver), 62001);
        assert_eq!(port_of(&w, (w.b.v4, 62001), resolver), 62001);
        let own = port_of(&w, (w.b.v4, 4000), (FAR, 3478));
        assert_eq!(port_of(&w, (w.b.v4, 4000), resolver), own);
        // What was the last packet's says nothing of the next.
        w.sent(&make(TCP, (w.b.v4, 4000), resolver));
        assert_eq!(w.out(&packet::other(w.b.v4, FAR, 47)).0, PASS);
        assert!(of(FLAG_MAPPED).iter().all(|(key, _)| key.proto == UDP));
        check_table();
    });
}

#[test]
fn a_socket_of_the_host_keeps_its_port() {
    mapped(|w| {
        let _socket = UdpSocket::bind(("0.0.0.0", 62030)).unwrap();
        let seen: HashSet<_> = remotes(w.a.v4)
            .map(|end| port_of(&w, (w.a.v4, 62030), end))
            .collect();
        assert!(seen.len() == 1 && !seen.contains(&62030), "{seen:?}");
        check_table();

        // One that comes later, by a mapping's port: whom the pod speaks with already it goes on with, and others see another
        // port each.
        let [first, second, third, _] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert_eq!(port_of(&w, (w.a.v4, 62031), first), 62031);
        let socket = UdpSocket::bind(("0.0.0.0", 62031)).unwrap();
        assert_ne!(port_of(&w, (w.a.v4, 62031), second), 62031);
        assert_eq!(port_of(&w, (w.a.v4, 62031), first), 62031);
        let apart = of(FLAG_APART);
        assert_eq!(apart.len(), 1);
        w.sweep_at(0);
        assert_eq!(w.datapath.connection_usage().apart, 1);
        // What the host sends is left as it is, for the pod has that port towards the first alone.
        let own = make(UDP, (NODE_IP, 62031), third);
        assert_eq!(w.host_out(&own), (PASS, World::frame(&own)));
        let own = make(UDP, (NODE_IP, 62031), first);
        assert_ne!(see(&w.host_out(&own).1).ports.0, 62031);
        close(socket).unwrap();
        assert_eq!(port_of(&w, (w.a.v4, 62031), third), 62031);
        check_table();
    });
}

/// NodePorts and hostPorts lead elsewhere: new connections keep off them, whatever mapping they are of.
#[test]
fn a_port_that_becomes_somebodys_is_given_to_no_new_connection() {
    mapped(|w| {
        let [first, second, ..] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert_eq!(port_of(&w, (w.a.v4, 62040), first), 62040);
        let mut ports = PortSet::default();
        ports.add(UDP, 62040..=62040);
        w.datapath.set_host_ports(PortsOf::Node, ports).unwrap();
        assert_ne!(port_of(&w, (w.a.v4, 62040), second), 62040);
        assert_eq!(port_of(&w, (w.a.v4, 62040), first), 62040);
        w.datapath
            .set_host_ports(PortsOf::Node, PortSet::default())
            .unwrap();
        with_ports(&w, true, 63000, 64000);
        assert_ne!(port_of(&w, (w.a.v4, 62040), (FAR, 9)), 62040);
    });
}

#[test]
fn a_mapping_lives_as_long_as_one_of_its_connections() {
    mapped(|w| {
        for (pod, node) in [(w.a.v4, NODE_IP), (w.a.v6, NODE_IP6.parse().unwrap())] {
            let [first, second, third, fourth] = remotes(pod).collect::<Vec<_>>()[..] else {
                panic!()
            };
            let port = port_of(&w, (pod, 4000), first);
            assert_eq!(port_of(&w, (pod, 4000), second), port);
            // By what the pod sends.
            age(100);
            assert_eq!(port_of(&w, (pod, 4000), first), port);
            w.sweep_at(29);
            assert_eq!(of(FLAG_MAPPED).len(), 1, "the second was silent");
            w.sweep_at(119);
            assert_eq!(of(FLAG_MAPPING).len(), 1);
            assert_eq!(port_of(&w, (pod, 4000), third), port);
            // By what comes.
            age(20);
            w.come(&make(UDP, third, (node, port)));
            age(90);
            w.come(&make(UDP, third, (node, port)));
            w.sweep_at(119);
            assert_eq!(of(FLAG_MAPPING).len(), 1);
            assert_eq!(port_of(&w, (pod, 4000), fourth), port);
            // And no longer.
            w.sweep_at(121);
            assert!(table().is_empty() && aliases().is_empty());
        }
    });
}

/// Who knocks at the port of a mapping keeps it open for nobody.
#[test]
fn strangers_prolong_no_mapping() {
    mapped(|w| {
        let [first, stranger, ..] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        let port = port_of(&w, (w.a.v4, 4000), first);
        age(100);
        w.come(&make(UDP, stranger, (NODE_IP, port)));
        w.sweep_at(21);
        assert!(table().is_empty());
    });
}

#[test]
fn a_mapping_follows_the_settings_for_connections() {
    let mut limits = ConnectionLimits::default();
    limits.lifetimes[Stage::Unreplied as usize] = 600;
    limits.lifetimes[Stage::Stream as usize] = 300;
    mapped_with(limits, |w| {
        port_of(&w, (w.a.v4, 4000), (FAR, 3478));
        assert_eq!(w.sweep_at(599), 0);
        assert_eq!(w.sweep_at(601), 2);
        check_table();
    });
}

#[test]
fn a_mapping_is_in_its_pods_share_and_unanswered_until_one_of_its_connections_is_answered() {
    mapped_with(
        ConnectionLimits {
            per_pod: 3,
            ..ConnectionLimits::default()
        },
        |w| {
            let [first, second, third, _] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
                panic!()
            };
            let sent = w.sent(&make(UDP, (w.a.v4, 4000), first));
            assert_eq!(share(w.a.ifindex), (2, 2));
            port_of(&w, (w.a.v4, 4000), second);
            assert_eq!(share(w.a.ifindex), (3, 3));
            let more = make(UDP, (w.a.v4, 4000), third);
            w.dropped("uplink_out", &more, DropReason::ConnectionShare);
            w.received(&reply_to(&sent));
            assert_eq!(share(w.a.ifindex), (3, 1));
            assert_eq!(share(ALL_SHARES), (3, 1));
            // The agent counts the same.
            w.sweep_at(0);
            assert_eq!(share(w.a.ifindex), (3, 1));
            let usage = w.datapath.connection_usage();
            assert_eq!(
                (
                    usage.connections,
                    usage.masqueraded,
                    usage.mappings,
                    usage.unanswered
                ),
                (3, 2, 1, 1)
            );
            w.sweep_at(1 << 20);
            assert_eq!((share(w.a.ifindex), share(ALL_SHARES)), ((0, 0), (0, 0)));
        },
    );
}

#[test]
fn without_room_for_its_mapping_a_connection_leaves_nothing_behind() {
    let limits = ConnectionLimits {
        per_pod: 1,
        ..ConnectionLimits::default()
    };
    mapped_with(limits, |w| {
        let packet = make(UDP, (w.a.v4, 62000), (FAR, 3478));
        w.dropped("uplink_out", &packet, DropReason::ConnectionShare);
        assert!(table().is_empty() && aliases().is_empty());
        assert_eq!(share(w.a.ifindex), (0, 0));
    });
}

#[test]
fn every_port_becomes_a_mappings_and_then_connections_get_others() {
    world_with(&DatapathConfig::default(), |w| {
        with_ports(&w, true, 61000, 61999);
        // Each to a remote end of its own, which has every port left.
        let to = |n: u16| (FAR, 10_000 + n);
        let mut seen = HashSet::new();
        for n in 0..1000 {
            seen.insert(port_of(&w, (w.a.v4, 1 + n), to(n)));
        }
        assert_eq!(seen.len(), 1000);
        assert_eq!(of(FLAG_APART), []);
        // Others have the ports that are free towards each remote end, as without mappings.
        for n in 0..100 {
            port_of(&w, (w.b.v4, 1), to(5000 + n));
        }
        assert_eq!((of(FLAG_MAPPING).len(), of(FLAG_APART).len()), (1000, 100));
        check_table();
        assert_eq!(w.sweep_at(121), 2100);
        port_of(&w, (w.b.v4, 1), to(5000));
        assert_eq!(of(FLAG_MAPPING).len(), 1);
    });
}

#[test]
fn a_live_connection_goes_on_whichever_way_the_setting_is_turned() {
    world(|w| {
        let [first, second, third, fourth] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        let own = (w.a.v4, 4000);
        let before = port_of(&w, own, first);
        turn(&w, true);
        assert_eq!(port_of(&w, own, first), before);
        let mapping = port_of(&w, own, second);
        assert_eq!(port_of(&w, own, third), mapping);
        assert_eq!(port_of(&w, own, first), before);
        turn(&w, false);
        for (end, port) in [(first, before), (second, mapping), (third, mapping)] {
            assert_eq!(port_of(&w, own, end), port);
            let answer = make(UDP, end, (NODE_IP, port));
            assert_eq!(w.received(&answer).dst, w.a.v4);
        }
        let mappings = of(FLAG_MAPPING).len();
        port_of(&w, own, fourth);
        port_of(&w, (w.a.v4, 4001), fourth);
        assert_eq!((mappings, of(FLAG_MAPPING).len()), (1, 1));
        check_table();
    });
}

/// One way, so that the record is over when the next datagram leaves.
#[test]
fn a_connection_that_is_over_keeps_its_port_and_gets_its_mapping() {
    world(|w| {
        let [first, second, third, _] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        let own = (w.a.v4, 4000);
        let before = port_of(&w, own, first);
        turn(&w, true);
        age(40);
        assert_eq!(port_of(&w, own, first), before);
        assert_eq!(port_of(&w, own, second), before);
        assert_eq!((of(FLAG_MAPPING).len(), of(FLAG_MAPPED).len()), (1, 2));
        // With it, too.
        age(40);
        assert_eq!(port_of(&w, own, first), before);
        assert_eq!(of(FLAG_MAPPED).len(), 2);
        check_table();
        assert_eq!(share(w.a.ifindex), (3, 3));
        // And where the mapping has another one by now.
        turn(&w, false);
        let apart = port_of(&w, own, third);
        assert_ne!(apart, before);
        turn(&w, true);
        age(40);
        assert_eq!(port_of(&w, own, third), before);
    });
}

/// Where no mapping may have the port of before, the connection gets a new one.
#[test]
fn a_connection_that_is_over_gives_way_to_anothers_mapping() {
    world(|w| {
        let [first, second, ..] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert_eq!(port_of(&w, (w.a.v4, 62000), first), 62000);
        turn(&w, true);
        assert_eq!(port_of(&w, (w.b.v4, 62000), second), 62000);
        age(40);
        let now = port_of(&w, (w.a.v4, 62000), first);
        assert_ne!(now, 62000);
        assert_eq!(port_of(&w, (w.a.v4, 62000), second), now);
    });
}

#[test]
fn each_address_outside_has_mappings_of_its_own() {
    mapped(|w| {
        let [first, second, third, _] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        let port = port_of(&w, (w.a.v4, 4000), first);
        let other: IpAddr = "192.0.2.2".parse().unwrap();
        set_source(w.a.ifindex, other, NODE_IP6.parse().unwrap());
        let sent = w.sent(&make(UDP, (w.a.v4, 4000), second));
        assert_eq!(sent.src, other);
        assert_eq!(port_of(&w, (w.a.v4, 4000), third), sent.ports.0);
        assert_eq!(port_of(&w, (w.a.v4, 4000), first), port, "as it began");
        assert_eq!(of(FLAG_MAPPING).len(), 2);
        // The address before is no uplink's any more.
        assert_eq!(w.sweep_at(0), 2);
        assert_eq!(of(FLAG_MAPPING).len(), 1);
        check_table();
    });
}

#[test]
fn a_pods_mappings_go_with_it() {
    mapped(|w| {
        port_of(&w, (w.a.v4, 62000), (FAR, 3478));
        port_of(&w, (w.b.v4, 62001), (FAR, 3478));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        w.a.attach(&w.datapath);
        assert_eq!(of(FLAG_MAPPING).len(), 1);
        assert_eq!(port_of(&w, (w.b.v4, 62000), (FAR, 3478)), 62000);
        check_table();
    });
}

/// What the host sends that needs another port gets none that is a mapping's.
#[test]
fn the_host_keeps_off_mappings() {
    mapped(|w| {
        with_ports(&w, true, 61000, 61002);
        let [first, second, third, _] = remotes(w.a.v4).collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert_eq!(port_of(&w, (w.a.v4, 61000), first), 61000);
        assert_eq!(port_of(&w, (w.b.v4, 61001), second), 61001);
        let own = see(&w.host_out(&make(UDP, (NODE_IP, 61000), first)).1);
        assert_eq!(own.ports.0, 61002);
        assert_eq!(port_of(&w, (w.b.v4, 61001), first), 61001);
        // Its own, which nobody has towards that end, it keeps.
        let own = make(UDP, (NODE_IP, 61000), third);
        assert_eq!(w.host_out(&own), (PASS, World::frame(&own)));
        check_table();
    });
}

#[test]
fn two_processors_begin_one_mapping() {
    let limits = ConnectionLimits::default();
    mapped_with(limits, |w| {
        let ends: Vec<_> = remotes(w.a.v4).collect();
        let barrier = Barrier::new(2);
        for same in [false, true] {
            let run = |end| {
                let ports = 1..=400u16;
                let ports = ports.map(|port| {
                    barrier.wait();
                    let port = port + if same { 1000 } else { 0 };
                    let (verdict, frame) = w.out(&make(UDP, (w.a.v4, port), end));
                    (verdict == PASS).then(|| see(&frame).ports.0)
                });
                ports.collect::<Vec<_>>()
            };
            let other = ends[if same { 0 } else { 2 }];
            let (one, two) = std::thread::scope(|scope| {
                let other = scope.spawn(|| run(other));
                (run(ends[0]), other.join().unwrap())
            });
            // Whoever was a moment too late for the other's record may lose one packet.
            let pairs = one.iter().zip(&two);
            let both = pairs.filter_map(|(one, two)| Some(((*one)?, (*two)?)));
            let both: Vec<_> = both.collect();
            assert!(both.len() > 300, "{}", both.len());
            assert!(both.iter().all(|(one, two)| one == two), "{both:?}");
            check_table();
            // Of one connection, whoever comes between the other's alias and its record gets another port for it.
            assert!(same || of(FLAG_APART).is_empty());
        }
    });
}
