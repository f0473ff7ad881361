//! Other families and protocols, fragments, ICMP errors, and the host's own connections.

use super::*;
use crate::packet::{IcmpError, UDPLITE, in_two, see_error};
use sinabro_common::abi::config::{FLAG_MASQUERADE_PORTLESS, NodeConfig};

fn far6() -> IpAddr {
    "2001:db8::9".parse().unwrap()
}

fn node6() -> IpAddr {
    NODE_IP6.parse().unwrap()
}

/// Pod, node and outside host of either family.
pub fn families(w: &World) -> [(IpAddr, IpAddr, IpAddr); 2] {
    [(w.a.v4, NODE_IP, FAR), (w.a.v6, node6(), far6())]
}

fn echo_request(addr: IpAddr) -> u8 {
    if addr.is_ipv4() { 8 } else { 128 }
}

#[test]
fn both_families_leave_as_the_node_and_get_their_replies() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            for proto in [TCP, UDP, UDPLITE, SCTP, ICMP] {
                let ip = match proto {
                    ICMP => packet::icmp(pod, far, echo_request(pod), 62000),
                    UDPLITE => packet::udplite((pod, 62000), (far, 443), b"hello"),
                    proto => make(proto, (pod, 62000), (far, 443)),
                };
                let sent = w.sent(&ip);
                assert_eq!((sent.src, sent.ports.0), (node, 62000));
                let reply = match proto {
                    ICMP => packet::icmp(far, node, if far.is_ipv4() { 0 } else { 129 }, 62000),
                    UDPLITE => packet::udplite((far, 443), (node, 62000), b"hi"),
                    _ => reply_to(&sent),
                };
                let received = w.received(&reply);
                assert_eq!((received.src, received.dst), (far, pod), "{proto}");
            }
        }
        check_table();
    });
}

#[test]
fn protocols_without_ports_have_one_connection_for_two_addresses() {
    world(|w| {
        for proto in [4, 41, 47, 50] {
            for (pod, node, far) in families(&w) {
                let (verdict, out) = w.out(&packet::other(pod, far, proto));
                assert_eq!(verdict, PASS, "{proto}");
                assert_eq!(
                    out,
                    World::frame(&packet::other(node, far, proto)),
                    "{proto}"
                );
                let (_, back) = w.come(&packet::other(far, node, proto));
                assert_eq!(
                    back,
                    World::frame(&packet::other(far, pod, proto)),
                    "{proto}"
                );
                // Another pod's would be told from this one's by nothing.
                let other = if pod.is_ipv4() { w.b.v4 } else { w.b.v6 };
                w.dropped(
                    "uplink_out",
                    &packet::other(other, far, proto),
                    DropReason::NatPortsExhausted,
                );
            }
        }
        check_table();
    });
}

/// By another pod's link, or by one that is no pod's, as a second network card's or a bridge of containers.
#[test]
fn nobody_else_leaves_as_a_pod() {
    world(|w| {
        for (number, (pod, _, far)) in (0..).zip(families(&w)) {
            let from = |link: u32, ip: &Ip| {
                let ran = w
                    .programs
                    .run_from("uplink_out", w.a.ifindex, link, &World::frame(ip));
                ran.unwrap().0
            };
            // The first begins a connection, the others would go on with it, or begin one.
            let [known, new] = [4000, 4001].map(|port| make(UDP, (pod, port), (far, 443)));
            assert_eq!(from(w.a.ifindex, &known), PASS);
            for link in [w.b.ifindex, 4_000_000] {
                assert_eq!(from(link, &known), DROP, "{number}");
                assert_eq!(from(link, &new), DROP, "{number}");
            }
            assert_eq!(from(w.a.ifindex, &new), PASS);
            assert_eq!(
                kit::dropped(&w.datapath, DropReason::PodSource),
                4 * (number + 1)
            );
        }
    });
}

/// The node may be one end of such a flow, also if it has only received until now.
#[test]
fn what_has_no_ports_is_the_nodes_unless_pods_may_have_it() {
    world(|w| {
        let with = kit::node_config();
        let flags = with.flags & !FLAG_MASQUERADE_PORTLESS;
        let without = NodeConfig { flags, ..with };
        let nodes_own = |w: &World, (node, far), proto| {
            for (ip, ran) in [
                (
                    packet::other(node, far, proto),
                    World::host_out as fn(&World, &Ip) -> _,
                ),
                (packet::other(far, node, proto), World::come),
            ] {
                assert_eq!(ran(w, &ip), (PASS, World::frame(&ip)), "{proto}");
            }
        };
        for proto in [4, 41, 47, 50, 51, 89, 112, 115] {
            for (pod, node, far) in families(&w) {
                w.datapath.set_node_config(without).unwrap();
                nodes_own(&w, (node, far), proto);
                let [first, later] = in_two(packet::other(pod, far, proto));
                for ip in [packet::other(pod, far, proto), first, later] {
                    w.dropped("uplink_out", &ip, DropReason::NatProtocol);
                }
                nodes_own(&w, (node, far), proto);
            }
        }
        check_table();
        assert_eq!(table().len(), 0);
        // What began while pods might have it ends.
        for (pod, node, far) in families(&w) {
            w.datapath.set_node_config(with).unwrap();
            assert_eq!(w.out(&packet::other(pod, far, 47)).0, PASS);
            let comes = packet::other(far, node, 47);
            assert_ne!(w.come(&comes).1, World::frame(&comes));
            w.datapath.set_node_config(without).unwrap();
            w.dropped(
                "uplink_out",
                &packet::other(pod, far, 47),
                DropReason::NatProtocol,
            );
            assert_eq!(w.sweep_at(0), 1);
            nodes_own(&w, (node, far), 47);
        }
        check_table();
    });
}

#[test]
fn sctp_gets_another_port_and_its_checksum_stays_right() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let other = if pod.is_ipv4() { w.b.v4 } else { w.b.v6 };
            w.sent(&make(SCTP, (pod, 62000), (far, 443)));
            for len in [0, 1, 4, 255, 256, 1200, 3000] {
                let data = vec![0xa5; len];
                let (verdict, out) = w.out(&packet::sctp((other, 62000), (far, 443), &data));
                assert_eq!(verdict, PASS);
                let port = see(&out).ports.0;
                assert_ne!(port, 62000, "the first pod has it");
                let expected = packet::sctp((node, port), (far, 443), &data);
                assert_eq!(out, World::frame(&expected), "{len} bytes");
                let (verdict, back) = w.come(&packet::sctp((far, 443), (node, port), &data));
                assert_eq!(verdict, PASS);
                let expected = packet::sctp((far, 443), (other, 62000), &data);
                assert_eq!(back, World::frame(&expected), "{len} bytes");
            }
            // None yet, or none at all.
            let mut without = make(SCTP, (other, 62000), (far, 443));
            without.payload[8..12].fill(0);
            let (verdict, out) = w.out(&without);
            let port = u16::from_be_bytes(
                out[out.len() - without.payload.len()..][..2]
                    .try_into()
                    .unwrap(),
            );
            let mut expected = make(SCTP, (node, port), (far, 443));
            expected.payload[8..12].fill(0);
            assert_eq!((verdict, out), (PASS, World::frame(&expected)));
            // How long the packet is, this fragment does not say.
            let mut first = make(SCTP, (other, 62000), (far, 443));
            first.fragment = if pod.is_ipv4() { 0x2000 } else { 0x0001 };
            w.dropped("uplink_out", &first, DropReason::RewriteFailed);
        }
        check_table();
    });
}

#[test]
fn errors_about_sctp_name_the_ports_that_its_sender_knows() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let ip = make(SCTP, (pod, 4001), (far, 443));
            let outside = w.sent(&ip).ports.0;
            assert_ne!(outside, 4001);
            let quoted = make(SCTP, (node, outside), (far, 443));
            for (quoted, own) in quotes(&quoted).iter().zip(quotes(&ip)) {
                let error = packet::icmp_error(far, node, IcmpError::NoPort, quoted);
                let (verdict, got) = w.come(&error);
                assert_eq!(verdict, PASS);
                let mut seen = see_error(&got);
                assert_eq!((seen.src, seen.dst), (far, pod));
                // The checksum over the packet stays as it was: most errors do not quote all that it is over.
                let at = ip.bytes().len() - ip.payload.len() + 8;
                if seen.quoted.len() > at {
                    seen.quoted[at..at + 4].copy_from_slice(&own[at..at + 4]);
                }
                assert_eq!(seen.quoted, own);
            }
        }
    });
}

#[test]
fn fragments_follow_their_first() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            // The transport checksum is that of the whole, so that of the first fragment alone is not looked at.
            let mut first = packet::udp((pod, 62000), (far, 53), &[7; 64]);
            first.fragment = if pod.is_ipv4() { 0x2000 } else { 0x0001 };
            let mut later = first.clone();
            later.fragment = if pod.is_ipv4() { 0x0009 } else { 0x0048 };
            let mut as_node = later.clone();
            as_node.src = node;
            assert_eq!(
                w.out(&later),
                (PASS, World::frame(&as_node)),
                "before its first"
            );
            let (verdict, out) = w.out(&first);
            assert_eq!(verdict, PASS);
            let mut expected = packet::udp((node, 62000), (far, 53), &[7; 64]);
            expected.fragment = first.fragment;
            assert_eq!(out, World::frame(&expected));
            assert_eq!(w.out(&later), (PASS, World::frame(&as_node)));

            let mut first = packet::udp((far, 53), (node, 62000), &[9; 64]);
            first.fragment = if pod.is_ipv4() { 0x2000 } else { 0x0001 };
            let mut later = first.clone();
            later.fragment = if pod.is_ipv4() { 0x0009 } else { 0x0048 };
            let mut expected = packet::udp((far, 53), (pod, 62000), &[9; 64]);
            expected.fragment = first.fragment;
            assert_eq!(w.come(&first), (PASS, World::frame(&expected)));
            let mut expected = later.clone();
            expected.dst = pod;
            assert_eq!(w.come(&later), (PASS, World::frame(&expected)));
        }
    });
}

/// What an error quotes of a packet: all of it, or as little as it must.
pub fn quotes(ip: &Ip) -> [Vec<u8>; 2] {
    let whole = ip.bytes();
    let header = whole.len() - ip.payload.len();
    [whole.clone(), whole[..header + 8].to_vec()]
}

#[test]
fn errors_about_what_a_pod_sent_reach_it_with_what_it_sent() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let router = if pod.is_ipv4() {
                "198.51.100.1".parse().unwrap()
            } else {
                "2001:db8:1::1".parse().unwrap()
            };
            for proto in [TCP, UDP, UDPLITE, ICMP] {
                let make = |src: IpAddr, id: u16| match proto {
                    ICMP => packet::icmp(src, far, echo_request(src), id),
                    UDPLITE => packet::udplite((src, id), (far, 443), b"hello"),
                    proto => make(proto, (src, id), (far, 443)),
                };
                // The second has another port outside than its own.
                for id in [62001, 4001] {
                    let ip = make(pod, id);
                    let outside = w.sent(&ip).ports.0;
                    for (quoted, own) in quotes(&make(node, outside)).iter().zip(quotes(&ip)) {
                        for kind in [
                            IcmpError::TooBig(1300),
                            IcmpError::TimeExceeded,
                            IcmpError::NoPort,
                        ] {
                            let error = packet::icmp_error(router, node, kind, quoted);
                            let (verdict, got) = w.come(&error);
                            assert_eq!(verdict, PASS);
                            let seen = see_error(&got);
                            assert_eq!((seen.src, seen.dst), (router, pod), "{proto} {kind:?}");
                            assert_eq!(seen.quoted, own, "{proto} {kind:?}");
                            let expected = packet::icmp_error(router, pod, kind, &own);
                            assert_eq!(got, World::frame(&expected));
                        }
                    }
                }
            }
            // Of nobody's packet, and one that somebody else sends to the node.
            let nobody = packet::udp((node, 62009), (far, 443), b"hello");
            let error = packet::icmp_error(router, node, IcmpError::NoPort, &nobody.bytes());
            assert_eq!(w.come(&error), (PASS, World::frame(&error)));
        }
    });
}

#[test]
fn errors_about_what_a_pod_got_leave_with_what_was_sent() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let outside = w.sent(&packet::udp((pod, 4000), (far, 53), b"?")).ports.0;
            w.received(&packet::udp((far, 53), (node, outside), b"!"));
            let got = packet::udp((far, 53), (pod, 4000), b"!");
            let sent = packet::udp((far, 53), (node, outside), b"!");
            for (got, sent) in quotes(&got).iter().zip(quotes(&sent)) {
                let error = packet::icmp_error(pod, far, IcmpError::NoPort, got);
                let expected = packet::icmp_error(node, far, IcmpError::NoPort, &sent);
                assert_eq!(w.out(&error), (PASS, World::frame(&expected)));
                // The node's own: the answer does not fit into the pod's link.
                let error = packet::icmp_error(node, far, IcmpError::TooBig(1200), got);
                let expected = packet::icmp_error(node, far, IcmpError::TooBig(1200), &sent);
                assert_eq!(w.host_out(&error), (PASS, World::frame(&expected)));
            }
            // What another pod got is none of its business.
            let other = if pod.is_ipv4() { w.b.v4 } else { w.b.v6 };
            let error = packet::icmp_error(other, far, IcmpError::NoPort, &got.bytes());
            w.dropped("uplink_out", &error, DropReason::NatProtocol);
        }
    });
}

#[test]
fn the_hosts_own_connections_keep_their_ports_until_somebody_has_them() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            for proto in [TCP, UDP] {
                let free = make(proto, (node, 62010), (far, 443));
                assert_eq!(w.host_out(&free), (PASS, World::frame(&free)));
            }
            // A host's echo request is noted: a pod's with the same id gets another one.
            let ping = packet::icmp(node, far, echo_request(node), 77);
            assert_eq!(w.host_out(&ping), (PASS, World::frame(&ping)));
            let kind = if far.is_ipv4() { 0 } else { 129 };
            let pong = packet::icmp(far, node, kind, 77);
            assert_eq!(w.come(&pong), (PASS, World::frame(&pong)));
            let own = w.sent(&packet::icmp(pod, far, echo_request(pod), 77));
            assert_ne!(own.ports.0, 77);
            assert_eq!(w.come(&pong), (PASS, World::frame(&pong)));

            // A pod has the port: the host's connection gets another, and its answers find back.
            for proto in [TCP, UDP] {
                assert_eq!(
                    w.sent(&make(proto, (pod, 62020), (far, 443))).ports.0,
                    62020
                );
                let (verdict, out) = w.host_out(&make(proto, (node, 62020), (far, 443)));
                assert_eq!(verdict, PASS);
                let host = see(&out);
                assert_eq!(host.src, node);
                assert_ne!(host.ports.0, 62020);
                let back = w.received(&reply_to(&host));
                assert_eq!((back.dst, back.ports.1), (node, 62020));
                let to_pod = Seen {
                    src: node,
                    ports: (62020, 443),
                    ..host.clone()
                };
                assert_eq!(w.received(&reply_to(&to_pod)).dst, pod);
                // The next of its packets, too.
                let next = match proto {
                    TCP => packet::tcp((node, 62020), (far, 443), ACK, b""),
                    _ => make(UDP, (node, 62020), (far, 443)),
                };
                assert_eq!(see(&w.host_out(&next).1).ports.0, host.ports.0);
            }
        }
        check_table();
    });
}

#[test]
fn a_socket_of_the_host_that_connects_again_by_a_taken_port_goes_on() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let to = (far, 443);
            w.sent(&make(TCP, (pod, 62020), to));
            let send = |flags| see(&w.host_out(&packet::tcp((node, 62020), to, flags, b"")).1);
            for _ in 0..2 {
                let begun = send(SYN);
                let port = begun.ports.0;
                assert_ne!(port, 62020);
                let come = |flags| {
                    let back = w.received(&packet::tcp(to, (node, port), flags, b""));
                    assert_eq!((back.dst, back.ports.1), (node, 62020));
                };
                come(SYN | ACK);
                assert_eq!(send(ACK).ports.0, port);
                // Longer than a closed connection is remembered.
                age(600);
                assert_eq!(send(ACK).ports.0, port);
                come(FIN | ACK);
                assert_eq!(send(FIN | ACK).ports.0, port);
            }
        }
    });
}

/// The port that one socket of the host was given is no other's of it, as long as its connection goes on.
#[test]
fn two_sockets_of_the_host_never_have_one_port_outside() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            for proto in [TCP, UDP] {
                let to = (far, 443);
                w.sent(&make(proto, (pod, 62020), to));
                let first = see(&w.host_out(&make(proto, (node, 62020), to)).1);
                let given = first.ports.0;
                assert_ne!(given, 62020);
                let second = see(&w.host_out(&make(proto, (node, given), to)).1);
                assert_ne!(second.ports.0, given);
                for (seen, port) in [(&first, 62020), (&second, given)] {
                    let back = w.received(&reply_to(seen));
                    assert_eq!((back.dst, back.ports.1), (node, port));
                }
            }
        }
        check_table();
    });
}

/// A pod's claim of a port that turns out to be a socket's is there for a moment.
#[test]
fn a_connection_of_the_host_that_goes_on_minds_no_claim() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let to = (far, 443);
            // One has another port, so that others are looked at, too.
            w.sent(&make(TCP, (pod, 62020), to));
            w.host_out(&make(TCP, (node, 62020), to));
            let begun = make(TCP, (node, 62021), to);
            assert_eq!(w.host_out(&begun), (PASS, World::frame(&begun)));
            w.sent(&make(TCP, (pod, 62021), to));
            let goes_on = packet::tcp((node, 62021), to, ACK, b"and so on");
            assert_eq!(w.host_out(&goes_on), (PASS, World::frame(&goes_on)));
        }
    });
}

/// kube-proxy, or another runtime's containers: netfilter chose the port, and knows nothing of ours.
#[test]
fn what_others_translated_to_the_node_is_told_from_what_we_did() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            for proto in [TCP, UDP] {
                // Theirs first, then a pod's with the same port; and the other way round.
                let theirs = w.sent(&make(proto, (node, 62080), (far, 443)));
                assert_eq!((theirs.src, theirs.ports.0), (node, 62080));
                let ours = w.sent(&make(proto, (pod, 62080), (far, 443)));
                assert_ne!(ours.ports.0, 62080);
                assert_eq!(w.received(&reply_to(&theirs)).dst, node);
                assert_eq!(w.received(&reply_to(&ours)).dst, pod);

                let ours = w.sent(&make(proto, (pod, 62081), (far, 443)));
                assert_eq!(ours.ports.0, 62081);
                let theirs = w.sent(&make(proto, (node, 62081), (far, 443)));
                assert_ne!(theirs.ports.0, 62081);
                let back = w.received(&reply_to(&theirs));
                assert_eq!((back.dst, back.ports.1), (node, 62081));
                assert_eq!(w.received(&reply_to(&ours)).dst, pod);
            }
        }
        check_table();
    });
}

#[test]
fn a_pod_gets_no_port_that_a_socket_of_the_host_has() {
    world(|w| {
        // Listening, and unconnected: whatever comes for the port may be for them.
        let (far, port) = (FAR, 62030);
        let _tcp = std::net::TcpListener::bind(("0.0.0.0", port)).unwrap();
        let _udp = std::net::UdpSocket::bind(("0.0.0.0", port)).unwrap();
        for proto in [TCP, UDP] {
            let sent = w.sent(&make(proto, (w.a.v4, port), (far, 443)));
            assert_ne!(sent.ports.0, port);
            assert_eq!(w.received(&reply_to(&sent)).dst, w.a.v4);
        }
        check_table();
    });
}

#[test]
fn no_connection_gets_what_the_host_reserves() {
    world(|w| {
        let mut set = sinabro_agent::datapath::PortSet::default();
        for proto in [TCP, UDP] {
            set.add(proto, 62040..=62049);
        }
        w.datapath
            .set_host_ports(sinabro_agent::datapath::PortsOf::Node, set)
            .unwrap();
        for proto in [TCP, UDP] {
            for port in [62040, 62049] {
                let sent = w.sent(&make(proto, (w.a.v4, port), (FAR, 443)));
                assert!(!(62040..=62049).contains(&sent.ports.0));
            }
            let sent = w.sent(&make(proto, (w.a.v4, 62050), (FAR, 443)));
            assert_eq!(sent.ports.0, 62050);
        }
    });
}

#[test]
fn an_outside_packet_does_not_decide_what_a_pod_begins() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            // Planted, and never answered.
            w.come(&packet::tcp((far, 443), (pod, 62060), ACK, b""));
            let sent = w.sent(&packet::tcp((pod, 62060), (far, 443), SYN, b""));
            assert_eq!(sent.src, node);
            assert_eq!(w.received(&reply_to(&sent)).dst, pod);
        }
        check_table();
    });
}

#[test]
fn nothing_that_is_quoted_is_believed_beyond_its_end() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let outside = w.sent(&packet::udp((pod, 4000), (far, 53), b"?")).ports.0;
            let sent = packet::udp((node, outside), (far, 53), b"?").bytes();
            for len in 0..sent.len() {
                let error = packet::icmp_error(far, node, IcmpError::NoPort, &sent[..len]);
                let (verdict, out) = w.come(&error);
                assert_eq!(verdict, PASS);
                if out != World::frame(&error) {
                    assert_eq!(see_error(&out).dst, pod, "{len}");
                }
            }
        }
    });
}
