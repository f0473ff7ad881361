//! What is translated and how, what passes as it is, and what is dropped.

use super::*;
use sinabro_agent::datapath::{PortSet, PortsOf};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};

#[test]
fn pods_leave_as_the_node_and_get_their_replies() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            // The one that is kept comes first: the other may be given any.
            for port in [65000, 4000] {
                let ip = make(proto, (w.a.v4, port), (FAR, 443));
                let original = see(&World::frame(&ip));
                let sent = w.sent(&ip);
                assert_eq!(sent.src, NODE_IP);
                assert!((PORT_MIN..=PORT_MAX).contains(&sent.ports.0), "{sent:?}");
                if port == 65000 {
                    assert_eq!(sent.ports.0, port, "a port in the range is kept");
                }
                assert_eq!((sent.dst, sent.ttl), (FAR, original.ttl));
                assert_eq!(sent.data, original.data);

                assert_eq!(w.sent(&ip), sent, "the same flow, the same port");

                let reply = reply_to(&sent);
                let received = w.received(&reply);
                assert_eq!(received.dst, w.a.v4);
                assert_eq!(received.src, FAR);
                let expected = if proto == ICMP {
                    (port, port)
                } else {
                    (443, port)
                };
                assert_eq!(received.ports, expected);
            }
        }
        assert_eq!(table().len(), 6);
        check_table();
    });
}

#[test]
fn while_entries_are_carried_tcp_that_finds_none_waits() {
    world(|w| {
        let known = w.sent(&make(TCP, (w.a.v4, 4000), (FAR, 443)));
        let mut config = kit::node_config();
        config.flags |= FLAG_CARRYING;
        w.datapath.set_node_config(config).unwrap();
        assert_eq!(w.received(&reply_to(&known)).dst, w.a.v4);
        for proto in [TCP, UDP] {
            assert_eq!(
                w.sent(&make(proto, (w.a.v4, 4001), (FAR, 443))).src,
                NODE_IP
            );
        }
        for flags in [ACK, SYN | ACK, FIN | ACK] {
            let leaves = packet::tcp((w.a.v4, 4002), (FAR, 444), flags, b"");
            w.dropped("uplink_out", &leaves, DropReason::NatCarried);
            let comes = packet::tcp((FAR, 444), (NODE_IP, PORT_MIN), flags, b"");
            w.dropped("uplink_in", &comes, DropReason::NatCarried);
            let own = packet::tcp((FAR, 444), (NODE_IP, 4000), flags, b"");
            w.leaves_alone(&own, "the node's");
        }
    });
}

/// What its sockets have, and what netfilter leads from its ports to pods, has no record to wait for.
#[test]
fn while_entries_are_carried_the_nodes_own_connections_go_on() {
    const SERVER: u16 = 62_001;
    const PUBLISHED: u16 = 62_002;
    world(|w| {
        let mut config = kit::node_config();
        config.flags |= FLAG_CARRYING;
        (config.nat_port_min, config.nat_port_max) = (1024, 65535);
        w.datapath.set_node_config(config).unwrap();
        let mut ports = PortSet::default();
        ports.add(TCP, PUBLISHED..=PUBLISHED);
        w.datapath.set_host_ports(PortsOf::Pods, ports).unwrap();
        let own: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        set_source(w.a.ifindex, own[0], own[1]);
        for own in own {
            let _server = TcpListener::bind((own, SERVER)).unwrap();
            let client = TcpStream::connect((own, SERVER)).unwrap();
            let client = (own, client.local_addr().unwrap().port());
            let comes = |from, to, flags| packet::tcp(from, to, flags, b"");
            for flags in [SYN | ACK, ACK, FIN | ACK, RST] {
                for (from, to) in [
                    ((own, SERVER), client),
                    (client, (own, SERVER)),
                    ((own, 444), (own, PUBLISHED)),
                ] {
                    let ip = comes(from, to, flags);
                    assert_eq!(w.come(&ip), (PASS, World::frame(&ip)), "{from:?}, {to:?}");
                }
                // Who but listens speaks with nobody.
                let other = comes((own, 444), (own, SERVER), flags);
                w.dropped("uplink_in", &other, DropReason::NatCarried);
            }
        }
    });
}

/// As a node port's answers, whose alias may come before their record.
#[test]
fn while_entries_are_carried_what_is_forwarded_as_the_node_keeps_its_port() {
    const PORT: u16 = 30_080;
    for proto in [TCP, UDP] {
        world(|w| {
            let answer = |flags| match proto {
                TCP => packet::tcp((NODE_IP, PORT), (FAR, 4000), flags, b""),
                _ => packet::udp((NODE_IP, PORT), (FAR, 4000), b""),
            };
            assert_eq!(w.sent(&answer(SYN | ACK)).ports, (PORT, 4000));
            let (key, record) = table().into_iter().next().unwrap();
            let alone = Connection { flags: 0, ..record };
            w.datapath.connections().remove(&key, &alone).unwrap();
            assert_eq!((table().len(), aliases().len()), (0, 1));
            let mut config = kit::node_config();
            config.flags |= FLAG_CARRYING;
            w.datapath.set_node_config(config).unwrap();
            assert_eq!(w.sent(&answer(ACK)).ports, (PORT, 4000));
        });
    }
}

#[test]
fn options_are_no_obstacle() {
    world(|w| {
        let mut ip = make(UDP, (w.a.v4, 4000), (FAR, 53));
        ip.options = vec![1; 12];
        let sent = w.sent(&ip);
        assert_eq!((sent.src, sent.data), (NODE_IP, b"hello".to_vec()));
    });
}

#[test]
fn a_udp_packet_without_checksum_stays_so() {
    world(|w| {
        let mut ip = make(UDP, (w.a.v4, 4000), (FAR, 53));
        ip.payload[6..8].copy_from_slice(&[0, 0]);
        let (_, out) = w.out(&ip);
        assert_eq!(see(&out).src, NODE_IP);
        assert_eq!(out[14 + 20 + 6..][..2], [0, 0]);
    });
}

#[test]
fn two_pods_with_the_same_source_port_are_told_apart() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            let a = w.sent(&make(proto, (w.a.v4, 62000), (FAR, 443)));
            let b = w.sent(&make(proto, (w.b.v4, 62000), (FAR, 443)));
            assert_ne!(a.ports.0, b.ports.0);
            assert_eq!(w.received(&reply_to(&a)).dst, w.a.v4);
            assert_eq!(w.received(&reply_to(&b)).dst, w.b.v4);
        }
    });
}

#[test]
fn what_is_not_a_pods_passes_untouched() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            let own = make(proto, (NODE_IP, 4000), (FAR, 443));
            assert_eq!(w.host_out(&own), (PASS, World::frame(&own)));
            w.leaves_alone(&make(proto, (FAR, 443), (NODE_IP, 4000)), "to the node");
            let other = "10.2.0.1".parse().unwrap();
            w.leaves_alone(&make(proto, (other, 1), (FAR, 443)), "another node's pod");
        }
        let mut fragment = make(UDP, (NODE_IP, 4000), (FAR, 443));
        fragment.fragment = 5;
        w.leaves_alone(&fragment, "a fragment of the node's");

        w.datapath
            .set_non_masquerade(&["192.0.2.0/28".parse().unwrap(), "fd00::/8".parse().unwrap()])
            .unwrap();
        let ip = make(UDP, (w.a.v4, 4000), (FAR, 443));
        w.leaves_alone(&ip, "a destination that knows pods");
        let mut fragment = ip.clone();
        fragment.fragment = 5;
        w.leaves_alone(&fragment, "a fragment to there");
        w.leaves_alone(&packet::other(w.a.v4, FAR, 132), "SCTP to there");
        let beyond = make(UDP, (w.a.v4, 4000), ("192.0.2.16".parse().unwrap(), 443));
        assert_eq!(w.sent(&beyond).src, NODE_IP);

        w.datapath.set_non_masquerade(&[]).unwrap();
        assert_eq!(w.sent(&ip).src, NODE_IP);
        assert!(table().values().all(|entry| !entry.has(FLAG_INBOUND)));

        let mut config = kit::node_config();
        config.flags = 0;
        w.datapath.set_node_config(config).unwrap();
        w.leaves_alone(&ip, "masquerade is off");
    });
}

#[test]
fn what_cannot_be_translated_is_dropped_and_counted() {
    world(|w| {
        // An authentication header covers the address; nobody knows what the other one has.
        for proto in [51, 253] {
            w.dropped(
                "uplink_out",
                &packet::other(w.a.v4, FAR, proto),
                DropReason::NatProtocol,
            );
        }
        let unreachable = packet::icmp(w.a.v4, FAR, 3, 0);
        w.dropped("uplink_out", &unreachable, DropReason::NatProtocol);
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn icmp_that_is_no_echo_request_never_meets_a_flow() {
    world(|w| {
        // Messages without an id, and a reply by chance with the same one.
        for id in [0, 7] {
            w.sent(&make(ICMP, (w.a.v4, id), (FAR, 0)));
        }
        let unreachable = packet::icmp(w.a.v4, FAR, 3, 0);
        w.dropped("uplink_out", &unreachable, DropReason::NatProtocol);
        let reply = packet::icmp(w.a.v4, FAR, 0, 7);
        assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));
    });
}

#[test]
fn every_truncation_of_a_pods_packet_is_dropped_and_of_others_passes() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            let mut ip = make(proto, (w.a.v4, 4000), (FAR, 443));
            ip.options = vec![1; 4];
            let sent = w.sent(&ip);
            let whole = World::frame(&ip);
            // Whether the header tells the truth about a packet that is too short...
            for len in 34..whole.len() {
                let verdict = w.forward(&whole[..len]);
                assert_eq!(verdict, (PASS, whole[..len].to_vec()), "{len} bytes");
            }
            // ...or the packet ends where its header says, in the middle of the next one.
            for len in 0..if proto == TCP { 20 } else { 8 } {
                let mut ip = ip.clone();
                ip.payload.truncate(len);
                w.dropped("uplink_out", &ip, DropReason::Malformed);
            }
            let reply = World::frame(&reply_to(&sent));
            for len in 34..reply.len() {
                let verdict = w.programs.run("uplink_in", w.a.ifindex, &reply[..len]);
                assert_eq!(verdict, (PASS, reply[..len].to_vec()), "{len} bytes");
            }
        }
    });
}

#[test]
fn only_replies_are_reversed() {
    world(|w| {
        let tcp = w.sent(&make(TCP, (w.a.v4, 4000), (FAR, 443)));
        let echo = w.sent(&make(ICMP, (w.a.v4, 7), (FAR, 0)));
        let strange: IpAddr = "192.0.2.77".parse().unwrap();
        for ip in [
            packet::tcp((strange, 443), (NODE_IP, tcp.ports.0), ACK, b""),
            packet::tcp((FAR, 444), (NODE_IP, tcp.ports.0), ACK, b""),
            packet::tcp((FAR, 443), (NODE_IP, tcp.ports.0 ^ 1), ACK, b""),
            packet::udp((FAR, 443), (NODE_IP, tcp.ports.0), b""),
            // A request to the node itself, by chance with the same id.
            packet::icmp(FAR, NODE_IP, 8, echo.ports.0),
            packet::icmp(strange, NODE_IP, 0, echo.ports.0),
            packet::icmp(FAR, NODE_IP, 3, echo.ports.0),
        ] {
            let frame = World::frame(&ip);
            assert_eq!(w.come(&ip), (PASS, frame));
        }
        assert_eq!(table().len(), 2);
    });
}
