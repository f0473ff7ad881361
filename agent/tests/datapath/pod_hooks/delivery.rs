//! Where packets go that may pass.

use super::*;
use crate::{
    packet::{FIN, IcmpError},
    uplink_hooks::age,
};
use sinabro_common::abi::{config::FLAG_MIXED, connection::ALL_SHARES};

#[test]
fn a_pods_own_packets_pass_and_are_counted() {
    world(|w| {
        let mut bytes = 0;
        for (src, _) in w.pairs() {
            for ip in [
                packet::tcp((src, 4000), (far(src), 80), SYN, b"x"),
                packet::udp((src, 4000), (far(src), 53), b"xyz"),
                packet::icmp(src, far(src), if src.is_ipv4() { 8 } else { 128 }, 7),
                packet::other(src, far(src), 132),
                packet::other(src, far(src), 47),
            ] {
                let frame = w.frame_of_a(&ip);
                w.passes(&frame, &format!("{src} protocol {}", ip.proto));
                bytes += frame.len() as u64;
            }
        }
        let counters = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        assert_eq!((counters.tx_packets, counters.tx_bytes), (10, bytes));
        assert_eq!(counters.rx_packets, 0);
    });
}

#[test]
fn same_node_traffic_is_redirected_one_hop_on() {
    world(|w| {
        let mut bytes = 0;
        let mut packets = 0;
        for (src, dst) in w.pairs() {
            let echo = if src.is_ipv4() { 8 } else { 128 };
            for ip in [
                packet::tcp((src, 4000), (dst, 80), SYN | ACK, b"hello"),
                packet::udp((src, 4000), (dst, 53), b"hello"),
                packet::icmp(src, dst, echo, 77),
            ] {
                let frame = w.frame_of_a(&ip);
                let before = see(&frame);
                let (verdict, out) = w.out(&frame);
                assert_eq!(verdict, REDIRECT, "{src} protocol {}", ip.proto);
                let mut expected = before.clone();
                expected.dst_mac = w.b.mac;
                expected.src_mac = HOST_MAC;
                expected.ttl -= 1;
                assert_eq!(see(&out), expected);
                bytes += frame.len() as u64;
                packets += 1;
            }
        }
        let a = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        let b = w.datapath.pod_counters(w.b.ifindex).unwrap().unwrap();
        assert_eq!((a.tx_packets, a.tx_bytes), (packets, bytes));
        assert_eq!((b.rx_packets, b.rx_bytes), (packets, bytes));
        assert_eq!((a.rx_packets, b.tx_packets), (0, 0));
    });
}

#[test]
fn what_needs_a_router_goes_to_the_stack() {
    world(|w| {
        for (src, dst) in w.pairs() {
            let good = packet::udp((src, 4000), (dst, 53), b"hello");
            assert_eq!(w.out(&w.frame_of_a(&good)).0, REDIRECT);

            for ttl in [0, 1] {
                let ip = Ip {
                    ttl,
                    ..good.clone()
                };
                w.passes(&w.frame_of_a(&ip), "its last hop");
            }
            // More fragments; then a later one, whose first bytes are no ports.
            let (first, later) = match src {
                IpAddr::V4(_) => (0x2000, 0x0005),
                IpAddr::V6(_) => (0x0001, 0x0028),
            };
            for fragment in [first, later] {
                let ip = Ip {
                    fragment,
                    ..good.clone()
                };
                w.passes(&w.frame_of_a(&ip), "a fragment");
            }
            let ip = Ip {
                options: vec![1; 8],
                ..good.clone()
            };
            w.passes(&w.frame_of_a(&ip), "options");
            let unreachable = if src.is_ipv4() { 3 } else { 1 };
            let ip = packet::icmp(src, dst, unreachable, 0);
            w.passes(&w.frame_of_a(&ip), "an ICMP error");
            let frame = packet::eth([0xff; 6], w.a.mac, good.kind(), &good.bytes());
            w.passes(&frame, "a broadcast frame");
            let frame = packet::eth(w.b.mac, w.a.mac, good.kind(), &good.bytes());
            w.passes(&frame, "a frame past the gateway");
            let ip = packet::udp((src, 1), (src, 2), b"");
            w.passes(&w.frame_of_a(&ip), "to itself");
        }
        let mut config = kit::node_config();
        config.flags = 0;
        w.datapath.set_node_config(config).unwrap();
        let (src, dst) = w.pairs()[0];
        w.passes(
            &w.frame_of_a(&packet::udp((src, 1), (dst, 2), b"")),
            "not wanted",
        );
    });
}

#[test]
fn what_is_too_large_for_the_receivers_link_goes_to_the_stack() {
    world(|w| {
        for (src, dst) in w.pairs() {
            let headers = if src.is_ipv4() { 28 } else { 48 };
            let of_size = |size: usize| {
                let data = vec![0; size - headers];
                w.frame_of_a(&packet::udp((src, 4000), (dst, 53), &data))
            };
            // Nobody said how large its link is.
            assert_eq!(w.out(&of_size(1501)).0, REDIRECT);
            w.b.attach_with_mtu(&w.datapath, 1500);
            assert_eq!(w.out(&of_size(1500)).0, REDIRECT);
            w.passes(&of_size(1501), "a byte too large");
            w.b.attach_with_mtu(&w.datapath, 65_535);
            assert_eq!(w.out(&of_size(1501)).0, REDIRECT);
            w.b.attach_with_mtu(&w.datapath, 0);
        }
    });
}

#[test]
fn replies_to_what_the_stack_delivered_go_back_through_it() {
    world(|w| {
        for (src, dst) in w.pairs() {
            for proto in [TCP, UDP] {
                let make = |from: (IpAddr, u16), to: (IpAddr, u16)| match proto {
                    TCP => packet::tcp(from, to, ACK, b""),
                    _ => packet::udp(from, to, b""),
                };
                let reply = w.frame_of_a(&make((src, 80), (dst, 4000)));
                assert_eq!(w.out(&reply).0, REDIRECT);

                // Comes to pod a through the stack.
                let ip = make((dst, 4000), (src, 80));
                let frame = packet::eth(w.a.mac, HOST_MAC, ip.kind(), &ip.bytes());
                let (verdict, out) = w.programs.run("pod_in", w.a.ifindex, &frame);
                assert_eq!((verdict, out), (PASS, frame));

                w.passes(&reply, "a reply");
                let other = w.frame_of_a(&make((src, 80), (dst, 4001)));
                assert_eq!(w.out(&other).0, REDIRECT, "another flow");
            }
        }
        let a = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        assert_eq!(a.rx_packets, 4);
    });
}

/// netfilter has not seen what went past it, and takes an error about that for invalid.
#[test]
fn an_error_goes_the_way_of_what_it_is_about() {
    world(|w| {
        for (src, dst) in w.pairs() {
            for proto in [TCP, UDP] {
                let make = |from: (IpAddr, u16), to: (IpAddr, u16)| match proto {
                    TCP => packet::tcp(from, to, ACK, b""),
                    _ => packet::udp(from, to, b"hello"),
                };
                // Pod b's packet to pod a, and what a says of it.
                let about = |port: u16| make((dst, port), (src, 80));
                let error = |kind, from, quoted: &Ip| {
                    w.frame_of_a(&packet::icmp_error(from, dst, kind, &quoted.bytes()))
                };
                for kind in [
                    IcmpError::NoPort,
                    IcmpError::TimeExceeded,
                    IcmpError::TooBig(1280),
                ] {
                    let (verdict, out) = w.out(&error(kind, src, &about(4000)));
                    assert_eq!(verdict, REDIRECT, "{kind:?}");
                    assert_eq!(out[..12], [w.b.mac, HOST_MAC].concat()[..]);
                }
                // What the stack delivered, and has translated perhaps.
                let stacks = about(4001);
                let frame = packet::eth(w.a.mac, HOST_MAC, stacks.kind(), &stacks.bytes());
                assert_eq!(w.programs.run("pod_in", w.a.ifindex, &frame).0, PASS);
                w.passes(&error(IcmpError::NoPort, src, &stacks), "the stack's");
                // What others sent, or to others, is nothing that went past it.
                let strange = make((src, 1), (dst, 80));
                w.passes(
                    &error(IcmpError::NoPort, src, &strange),
                    "the wrong way round",
                );
                let mut short =
                    packet::icmp_error(src, dst, IcmpError::NoPort, &about(4000).bytes()[..12]);
                w.passes(&w.frame_of_a(&short), "cut short");
                short.ttl = 1;
                w.passes(&w.frame_of_a(&short), "the last hop");
            }
        }
    });
}

/// While programs of two layouts run, a connection without a record may have one in the other's table.
#[test]
fn who_has_no_record_keeps_to_the_stack_while_there_are_two_tables() {
    world(|w| {
        let come = |w: &World, ip: &Ip| {
            let frame = packet::eth(w.a.mac, HOST_MAC, ip.kind(), &ip.bytes());
            assert_eq!(w.programs.run("pod_in", w.a.ifindex, &frame).0, PASS);
        };
        let records = |w: &World| {
            let shares = w.datapath.connections().shares().unwrap();
            let all = shares.iter().find(|(payer, _)| *payer == ALL_SHARES);
            all.map_or(0, |(_, share)| share.connections)
        };
        for mixed in [0, FLAG_MIXED] {
            let mut config = kit::node_config();
            config.flags |= mixed;
            w.datapath.set_node_config(config).unwrap();
            for (src, dst) in w.pairs() {
                let before = records(&w);
                let port = 4000 + mixed as u16;
                let segment = |flags| packet::tcp((src, 80), (dst, port), flags, b"");
                let (sent, _) = w.out(&w.frame_of_a(&segment(ACK)));
                assert_eq!(sent, if mixed == 0 { REDIRECT } else { PASS });
                // Its record is on its way, or it has none as it was never translated.
                come(&w, &packet::tcp((dst, port), (src, 80), ACK, b""));
                let noted = u64::from(mixed == 0);
                assert_eq!(records(&w) - before, noted);
                // What begins is noted, and of datagrams nobody can say what they are.
                come(&w, &packet::tcp((dst, port + 1), (src, 80), SYN, b""));
                come(&w, &packet::udp((dst, port), (src, 80), b""));
                assert_eq!(records(&w) - before, noted + 2);
            }
        }
    });
}

#[test]
fn a_connection_by_the_ports_of_one_that_is_closed_is_a_new_one() {
    world(|w| {
        for (src, dst) in w.pairs() {
            let come = |flags| {
                let ip = packet::tcp((dst, 4000), (src, 80), flags, b"");
                let frame = packet::eth(w.a.mac, HOST_MAC, ip.kind(), &ip.bytes());
                assert_eq!(w.programs.run("pod_in", w.a.ifindex, &frame).0, PASS);
            };
            let answer = |flags| {
                let ip = packet::tcp((src, 80), (dst, 4000), flags, b"");
                w.passes(&w.frame_of_a(&ip), "an answer");
            };
            for _ in 0..2 {
                come(SYN);
                answer(SYN | ACK);
                come(ACK);
                // Longer than a closed connection is remembered.
                age(600);
                answer(ACK);
                come(FIN | ACK);
                answer(FIN | ACK);
            }
        }
    });
}

#[test]
fn nothing_delivered_to_a_pod_is_ever_dropped() {
    world(|w| {
        let (v4, v6) = (w.pairs()[0], w.pairs()[1]);
        for (kind, ip) in [
            (IP4, packet::tcp((v4.1, 1), (v4.0, 2), SYN, b"x").bytes()),
            (IP6, packet::udp((v6.1, 1), (v6.0, 2), b"x").bytes()),
            (packet::ARP, vec![0; 28]),
            (0x8100, vec![1; 60]),
        ] {
            let frame = packet::eth(w.a.mac, HOST_MAC, kind, &ip);
            for len in 14..=frame.len() {
                let frame = &frame[..len];
                if let Some((verdict, out)) = w.programs.try_run("pod_in", w.a.ifindex, frame) {
                    assert_eq!((verdict, &out[..]), (PASS, frame));
                }
            }
        }
    });
}
