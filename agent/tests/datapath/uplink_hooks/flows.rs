//! The table of flows: where they come from, when they end, and when it is full.

use super::*;
use sinabro_agent::datapath::ConnectionLimits;
use sinabro_common::{
    abi::connection::{ALL_SHARES, Share},
    algo::lifetime::Stage,
};

#[test]
fn connections_from_outside_keep_the_pods_address() {
    world(|w| {
        for proto in [TCP, UDP] {
            let ip = make(proto, (FAR, 4000), (w.a.v4, 80));
            assert_eq!(w.come(&ip), (PASS, World::frame(&ip)));
            let reply = reply_to(&see(&World::frame(&ip)));
            assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));
            // What the pod begins itself is masqueraded as ever.
            let own = make(proto, (w.a.v4, 81), (FAR, 4000));
            assert_eq!(w.sent(&own).src, NODE_IP);
        }
        let inbound = |entry: &&Connection| entry.has(FLAG_INBOUND);
        assert_eq!(table().values().filter(inbound).count(), 2);

        // An answer to an echo request needs no memory.
        let reply = packet::icmp(w.a.v4, FAR, 0, 9);
        assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));

        // A reset to nobody, and peers that know pods, leave no trace.
        let before = table().len();
        w.come(&packet::tcp((FAR, 4001), (w.a.v4, 80), 0x04, b""));
        let near = "192.0.2.200".parse().unwrap();
        w.datapath
            .set_non_masquerade(&["192.0.2.192/26".parse().unwrap()])
            .unwrap();
        w.come(&packet::tcp((near, 4001), (w.a.v4, 80), SYN, b""));
        assert_eq!(table().len(), before);
    });
}

#[test]
fn who_connects_again_by_the_same_port_is_answered_as_before() {
    world(|w| {
        let come = |flags| {
            w.come(&packet::tcp((FAR, 4000), (w.a.v4, 80), flags, b""))
                .0
        };
        let answer = |flags| {
            let ip = packet::tcp((w.a.v4, 80), (FAR, 4000), flags, b"");
            assert_eq!(w.out(&ip), (PASS, World::frame(&ip)));
        };
        for _ in 0..2 {
            assert_eq!(come(SYN), PASS);
            answer(SYN | ACK);
            assert_eq!(come(ACK), PASS);
            // Longer than a closed connection is remembered.
            age(600);
            answer(ACK);
            assert_eq!(come(FIN | ACK), PASS);
            answer(FIN | ACK);
        }
    });
}

#[test]
fn ports_run_out_for_one_destination_and_not_for_another() {
    world(|w| {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (61000, 61001);
        w.datapath.set_node_config(config).unwrap();

        let to = |port| (FAR, port);
        let first = w.sent(&make(UDP, (w.a.v4, 1), to(53)));
        let second = w.sent(&make(UDP, (w.b.v4, 1), to(53)));
        assert_eq!(
            HashSet::from([first.ports.0, second.ports.0]),
            HashSet::from([61000, 61001])
        );
        let third = make(UDP, (w.a.v4, 2), to(53));
        w.dropped("uplink_out", &third, DropReason::NatPortsExhausted);
        w.sent(&make(UDP, (w.a.v4, 2), to(54)));
        assert_eq!(table().len(), 3);

        assert_eq!(w.sweep_at(31), 3);
        w.sent(&third);
    });
}

#[test]
fn a_pod_leaves_room_for_others_and_keeps_what_it_has() {
    let config = DatapathConfig {
        connections: Some(200),
        ..kit::config()
    };
    world_with(&config, |w| {
        let old = make(TCP, (w.a.v4, 1), (FAR, 80));
        let sent = w.sent(&old);
        w.received(&reply_to(&sent));
        w.sent(&packet::tcp((w.a.v4, 1), (FAR, 80), ACK, b""));
        // Nobody answers: an eighth of the room that is left is its, then no more.
        let flood = |pod: IpAddr| {
            let taken = (1000..2000u16)
                .take_while(|port| w.out(&make(UDP, (pod, *port), (FAR, 53))).0 == PASS);
            taken.count()
        };
        let first = flood(w.a.v4);
        assert!((20..=25).contains(&first), "{first}");
        w.dropped(
            "uplink_out",
            &make(UDP, (w.a.v4, 3000), (FAR, 53)),
            DropReason::ConnectionShare,
        );
        let second = flood(w.b.v4);
        assert!((17..=first).contains(&second), "{second}");
        // From outside the same; those are not answered otherwise, but come in.
        let come = make(UDP, (FAR, 9), (w.b.v4, 80));
        assert_eq!(w.come(&come), (PASS, World::frame(&come)));
        assert_eq!(w.sent(&old).ports, sent.ports);
        assert_eq!(w.received(&reply_to(&sent)).dst, w.a.v4);
        check_table();

        // What is answered is no longer of those, and what is over gives its room back.
        let answered: Vec<_> = table().keys().copied().collect();
        for key in answered {
            let (low, high) = (key.sent_by(false), key.sent_by(true));
            let sent = if low.dst == FAR.into() { low } else { high };
            // The floods' own: what came from outside is answered at another port.
            if sent.proto == UDP && sent.dst_port == 53_u16.to_be_bytes() {
                let port = u16::from_be_bytes(sent.src_port);
                let seen = w.sent(&make(UDP, (IpAddr::from(sent.src), port), (FAR, 53)));
                w.received(&reply_to(&seen));
            }
        }
        assert_eq!(w.out(&make(UDP, (w.a.v4, 3000), (FAR, 53))).0, PASS);
        assert!(w.sweep_at(31) > 30);
        assert!(flood(w.a.v4) >= first - 1);
    });
}

/// Whoever sends from addresses that are not his, to an address of a pod that routers outside know.
#[test]
fn a_pod_begins_what_it_likes_while_it_is_flooded_from_outside() {
    const ROOM: u32 = 400;
    // One of eight records may be a newcomer's.
    const PLACES: usize = ROOM as usize / 8;
    let config = DatapathConfig {
        connections: Some(ROOM),
        ..kit::config()
    };
    world_with(&config, |w| {
        let come = |port, flags| {
            let ip = packet::tcp((FAR, port), (w.a.v4, 80), flags, b"");
            assert_eq!(w.come(&ip), (PASS, World::frame(&ip)));
        };
        let answers = |port, flags| {
            let ip = packet::tcp((w.a.v4, 80), (FAR, port), flags, b"");
            w.out(&ip) == (PASS, World::frame(&ip))
        };
        let opens = |port| {
            come(port, SYN);
            assert!(answers(port, SYN | ACK));
            come(port, ACK);
        };
        opens(1000);
        let share = || {
            let shares = w.datapath.connections().shares().unwrap();
            let (_, share) = shares
                .into_iter()
                .find(|(key, _)| *key == w.a.ifindex)
                .unwrap();
            (share.connections as usize, share.embryonic, share.refused)
        };
        for flood in 1..5 {
            for port in 0..1000 {
                let port = flood * 10_000 + port;
                come(port, SYN);
                match flood {
                    // The pod answers somebody who knows nothing of it,
                    1 => assert!(answers(port, SYN | ACK)),
                    // or refuses,
                    2 => assert!(answers(port, RST | ACK)),
                    // or whoever floods resets what he began.
                    3 => come(port, RST),
                    _ => {}
                }
            }
            let (connections, unanswered, refused) = share();
            assert_eq!((unanswered, refused), (0, 0));
            assert!(connections <= 1 + PLACES, "{connections}");
            assert_eq!(table().len(), connections);
            check_table();
        }
        // Who is known already goes on, the pod may begin what it likes, and a client who is no part of the flood comes in.
        assert!(answers(1000, ACK));
        w.sent(&make(TCP, (w.a.v4, 81), (FAR, 1000)));
        assert_eq!(share().1, 1);
        opens(1001);
        assert!(answers(1001, ACK));
        let before = share();
        w.sweep_at(0);
        assert_eq!(share(), before, "programs and agent count alike");
        let usage = w.datapath.connection_usage();
        assert_eq!(usage.connections as usize, before.0);
        assert!(usage.unanswered as usize > PLACES / 2);
    });
}

/// By what the settings say instead of the defaults, to programs and sweeps alike.
#[test]
fn connections_are_as_many_and_live_as_long_as_is_set() {
    let mut limits = ConnectionLimits {
        per_pod: 3,
        ..ConnectionLimits::default()
    };
    limits.lifetimes[Stage::Established as usize] = 20;
    limits.lifetimes[Stage::Unreplied as usize] = 300;
    let config = DatapathConfig {
        connection_limits: limits,
        ..kit::config()
    };
    world_with(&config, |w| {
        let open = make(TCP, (w.a.v4, 1), (FAR, 80));
        let sent = w.sent(&open);
        w.received(&reply_to(&sent));
        w.sent(&packet::tcp((w.a.v4, 1), (FAR, 80), ACK, b""));
        for port in [2, 3] {
            w.sent(&make(UDP, (w.a.v4, port), (FAR, 53)));
        }
        let one_more = make(UDP, (w.a.v4, 4), (FAR, 53));
        w.dropped("uplink_out", &one_more, DropReason::ConnectionShare);
        // Another pod's are its own.
        w.sent(&make(UDP, (w.b.v4, 4), (FAR, 53)));
        assert_eq!(w.sweep_at(19), 0);
        assert_eq!(w.sweep_at(21), 1);
        w.sent(&one_more);
        assert_eq!(w.sweep_at(299), 0);
        assert_eq!(w.sweep_at(301), 4);
    });
}

#[test]
fn what_the_programs_counted_wrong_is_set_right() {
    world(|w| {
        w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        let wrong = Share {
            connections: 1 << 40,
            embryonic: 99,
            refused: 7,
        };
        let mut shares = open::<u32, Share>("SHARES");
        shares.insert(w.a.ifindex, wrong, 0).unwrap();
        w.dropped(
            "uplink_out",
            &make(UDP, (w.a.v4, 2), (FAR, 53)),
            DropReason::ConnectionShare,
        );
        w.sweep_at(0);
        let right = shares.get(&w.a.ifindex, 0).unwrap();
        assert_eq!(
            (right.connections, right.embryonic, right.refused),
            (1, 1, 8)
        );
        assert_eq!(shares.get(&ALL_SHARES, 0).unwrap().connections, 1);
        w.sent(&make(UDP, (w.a.v4, 2), (FAR, 53)));
    });
}

#[test]
fn flows_end_when_both_directions_are_idle() {
    world(|w| {
        let udp = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        let answered = w.sent(&make(UDP, (w.a.v4, 2), (FAR, 53)));
        w.received(&reply_to(&answered));
        w.sent(&make(ICMP, (w.a.v4, 3), (FAR, 0)));
        let tcp = w.sent(&make(TCP, (w.a.v4, 4), (FAR, 80)));
        w.received(&reply_to(&tcp));
        w.sent(&make(TCP, (w.a.v4, 5), (FAR, 80)));
        w.come(&make(UDP, (FAR, 6), (w.a.v4, 80)));
        w.sent(&packet::tcp((w.a.v4, 4), (FAR, 80), ACK, b""));
        assert_eq!(table().len(), 6);

        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(w.datapath.connection_usage().connections, 6);
        assert_eq!(w.sweep_at(29), 0);
        assert_eq!(w.sweep_at(32), 4, "UDP both ways, echo");
        assert_eq!(w.come(&reply_to(&udp)).1, World::frame(&reply_to(&udp)));
        assert_eq!(w.sweep_at(119), 0);
        assert_eq!(w.sweep_at(125), 1, "unanswered SYN");
        assert_eq!(w.sweep_at(23 * 3600), 0, "an open connection");
        assert_eq!(w.datapath.connection_usage().connections, 1);

        // Both ends say goodbye.
        w.sent(&packet::tcp((w.a.v4, 4), (FAR, 80), FIN | ACK, b""));
        assert_eq!(w.sweep_at(3500), 0, "half closed");
        let goodbye = packet::tcp((FAR, 80), (NODE_IP, tcp.ports.0), FIN | ACK, b"");
        assert_eq!(w.received(&goodbye).dst, w.a.v4);
        assert_eq!(w.sweep_at(119), 0);
        assert_eq!(w.sweep_at(125), 1);
        assert!(table().is_empty());
    });
}

#[test]
fn flows_of_pods_that_are_gone_end_at_once() {
    world(|w| {
        w.sent(&make(TCP, (w.a.v4, 1), (FAR, 53)));
        w.come(&make(TCP, (FAR, 1), (w.a.v4, 80)));
        let kept = w.sent(&make(TCP, (w.b.v4, 1), (FAR, 53)));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        assert_eq!(w.sweep_at(0), 2);
        assert_eq!(table().len(), 1);
        check_table();
        assert_eq!(w.received(&reply_to(&kept)).dst, w.b.v4);
    });
}

#[test]
fn an_address_that_is_given_again_comes_without_the_flows_of_its_last_pod() {
    world(|w| {
        let old = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        w.come(&make(TCP, (FAR, 1), (w.a.v4, 80)));
        let kept = w.sent(&make(UDP, (w.b.v4, 1), (FAR, 53)));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        w.a.attach(&w.datapath);
        let late = reply_to(&old);
        assert_eq!(w.come(&late), (PASS, World::frame(&late)));
        assert_eq!(table().len(), 1);
        assert_eq!(w.received(&reply_to(&kept)).dst, w.b.v4);
        // Attached again without having left, as after a restart, it keeps its flows.
        let own = w.sent(&make(UDP, (w.a.v4, 2), (FAR, 53)));
        w.a.attach(&w.datapath);
        assert_eq!(w.received(&reply_to(&own)).dst, w.a.v4);
    });
}

#[test]
fn flows_end_when_the_node_changes_its_address() {
    world(|w| {
        let ip = make(UDP, (w.a.v4, 1), (FAR, 53));
        w.sent(&ip);
        w.come(&make(UDP, (FAR, 1), (w.a.v4, 80)));
        let new: IpAddr = "192.0.2.2".parse().unwrap();
        set_source(w.a.ifindex, new, NODE_IP6.parse().unwrap());
        assert_eq!(w.sweep_at(0), 1);
        assert_eq!(w.sent(&ip).src, new);
    });
}

#[test]
fn aliases_that_lead_nowhere_go_when_they_are_found_again() {
    world(|w| {
        let kept = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        let orphan = Tuple {
            src: FAR.into(),
            dst: NODE_IP.into(),
            src_port: [0, 53],
            dst_port: [0xff, 1],
            proto: UDP,
            pad: [0; 3],
        };
        let alias = Alias::to(w.a.v4.into(), [0, 2]);
        open("ALIASES").insert(orphan, alias, 0).unwrap();
        let answer = packet::udp((FAR, 53), (NODE_IP, 0xff01), b"");
        assert_eq!(w.come(&answer), (PASS, World::frame(&answer)));
        assert_eq!(w.sweep_at(0), 0, "it may be a claim that is being made");
        let removed: u64 = (0..8).map(|_| w.sweep_at(0)).sum();
        assert_eq!(removed, 1);
        check_table();
        assert_eq!(w.received(&reply_to(&kept)).dst, w.a.v4);
    });
}

#[test]
fn a_count_below_zero_refuses_nobody() {
    world(|w| {
        let mut shares = open::<u32, Share>("SHARES");
        // A sweep set it to what it had found, and what began meanwhile has ended since.
        let drifted = Share {
            connections: u64::MAX,
            embryonic: u64::MAX,
            refused: 0,
        };
        for payer in [w.a.ifindex, ALL_SHARES] {
            shares.insert(payer, drifted, 0).unwrap();
        }
        let sent = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        assert_eq!(sent.src, NODE_IP);
        assert_eq!(shares.get(&w.a.ifindex, 0).unwrap().refused, 0);
    });
}

/// A packet may begin a connection again between the removal of its record and that of its alias: the record is the new
/// one then, and the alias gone.
#[test]
fn a_connection_begun_again_while_it_is_removed_has_its_way_back() {
    world(|w| {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (1024, 65535);
        w.datapath.set_node_config(config).unwrap();
        let own = make(TCP, (w.a.v4, 2000), (FAR, 80));
        let begin_half = || {
            w.sent(&own);
            assert_eq!(w.sweep_at(100_000), 1, "the connection is over");
            let seen = w.sent(&own);
            assert_eq!(seen.ports.0, 2000);
            for alias in aliases().into_keys() {
                w.datapath.connections().remove_alias(&alias).unwrap();
            }
            let answer = reply_to(&seen);
            assert_eq!(w.come(&answer), (PASS, World::frame(&answer)));
            answer
        };
        let answer = begin_half();
        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(w.received(&answer).dst, w.a.v4);
        check_table();
        assert_eq!(w.sweep_at(100_000), 1);

        // The port has become another pod's.
        let answer = begin_half();
        assert_eq!(w.sent(&make(TCP, (w.b.v4, 2000), (FAR, 80))).ports.0, 2000);
        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(w.received(&answer).dst, w.b.v4);
        let again = w.sent(&own);
        assert_ne!(again.ports.0, 2000);
        assert_eq!(w.received(&reply_to(&again)).dst, w.a.v4);
        check_table();
    });
}
