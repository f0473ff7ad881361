//! By which ways packets of a Service go.

use super::*;
use crate::packet::{IcmpError, icmp_error, see_error};

#[test]
fn a_pod_of_this_node_is_reached_past_the_stack() {
    world(|w| {
        for (number, proto) in (1..).zip(PROTOCOLS) {
            for (client, server) in [(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)] {
                let number = number * 2 + u32::from(client.is_ipv6());
                let (_, at) = w.publish(number, proto, &[(server, 8000)]);
                let (from, to) = ((client, 2000), (server, 8000));
                for flags in [SYN, ACK] {
                    let there = w.sent_by(&w.a, &make(proto, from, at, flags));
                    let expected = one_hop(make(proto, from, to, flags));
                    assert_eq!(there, (REDIRECT, frame_to(&w.b, &expected)));
                    let back = w.sent_by(&w.b, &make(proto, to, from, flags | ACK));
                    let expected = one_hop(make(proto, at, from, flags | ACK));
                    assert_eq!(back, (REDIRECT, frame_to(&w.a, &expected)));
                }
                // What the stack delivers all the same gets there the same.
                let answer = make(proto, to, from, ACK);
                w.arrives_as(&answer, &make(proto, at, from, ACK));
                let question = make(proto, from, to, ACK);
                assert_eq!(w.to_pod(&w.b, &question), (PASS, frame_to(&w.b, &question)));
                // And what is no answer to it does as before.
                let other = make(proto, to, (client, 2001), ACK);
                let (verdict, out) = w.sent_by(&w.b, &other);
                assert_eq!((verdict, see(&out).src), (REDIRECT, server));
            }
        }
        check_table();
    });
}

#[test]
fn a_pod_reaches_itself() {
    world(|w| {
        for (number, proto) in (1..).zip(PROTOCOLS) {
            for client in w.clients() {
                let number = number * 2 + u32::from(client.is_ipv6());
                let (_, at) = w.publish(number, proto, &[(client, 8000)]);
                let itself = address(client, "169.254.1.1", "100::5342:1");
                let (from, to, near) = ((client, 2000), (client, 8000), (itself, 2000));
                for flags in [SYN, ACK, ACK] {
                    let there = w.sent_by(&w.a, &make(proto, from, at, flags));
                    let expected = make(proto, near, to, flags);
                    assert_eq!(there, (REDIRECT, frame_to(&w.a, &expected)));
                    w.arrives_as(&expected, &expected);
                    let back = w.sent_by(&w.a, &make(proto, to, near, flags | ACK));
                    let expected = make(proto, at, from, flags | ACK);
                    assert_eq!(back, (REDIRECT, frame_to(&w.a, &expected)));
                    w.arrives_as(&expected, &expected);
                }
                // From the endpoint's own port nobody could tell which end it is.
                let same = make(proto, to, at, SYN);
                w.dropped(&same, DropReason::ServiceClash);
                // What else is for that address is its own.
                let other = make(proto, (client, 1), (itself, 2000), SYN);
                w.leaves_as(&other, &other);
            }
        }
        check_table();
        assert_eq!((table().len(), aliases().len()), (6, 12));
        set_source(w.b.ifindex, kit::NODE.into(), kit::NODE6.into());
        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(w.datapath.connection_usage().masqueraded, 0);
        assert_eq!(w.sweep_at(24 * 3600 + 1), 6);
        assert!(table().is_empty() && aliases().is_empty());
    });
}

fn one_hop(ip: Ip) -> Ip {
    Ip {
        ttl: ip.ttl - 1,
        ..ip
    }
}

#[test]
fn an_endpoint_outside_sees_the_node() {
    world(|w| {
        let uplink = w.b.ifindex;
        set_source(uplink, kit::NODE.into(), kit::NODE6.into());
        for (number, proto) in (1..).zip(PROTOCOLS) {
            for client in w.clients() {
                let number = number * 2 + u32::from(client.is_ipv6());
                let outside = (address(client, "203.0.113.5", "2001:db8:5::5"), 6443);
                let node = address(client, "192.0.2.1", "2001:db8::1");
                let (_, at) = w.publish(number, proto, &[outside]);
                let from = (client, 2000);
                let mut port = None;
                for flags in [SYN, ACK, ACK] {
                    let (_, out) = w.sent_by(&w.a, &make(proto, from, at, flags));
                    let run = |program, from, frame: &[u8]| {
                        let ran = w.programs.run_from(program, uplink, from, frame);
                        let (verdict, out) = ran.unwrap();
                        assert_eq!(verdict, PASS, "{:?}", w.datapath.drops());
                        out
                    };
                    let out = run("uplink_out", w.a.ifindex, &out);
                    let seen = see(&out);
                    assert_eq!((seen.src, seen.dst, seen.ports.1), (node, outside.0, 6443));
                    assert_eq!(*port.get_or_insert(seen.ports.0), seen.ports.0);

                    let answer = make(proto, outside, (node, seen.ports.0), flags | ACK);
                    let out = run("uplink_in", 0, &frame_to(&w.a, &answer));
                    let (verdict, out) = w.programs.run("pod_in", w.a.ifindex, &out);
                    let expected = make(proto, at, from, flags | ACK);
                    assert_eq!((verdict, out), (PASS, frame_to(&w.a, &expected)));
                }
            }
        }
        check_table();
        // One of each share, two aliases.
        assert_eq!((table().len(), aliases().len()), (6, 12));
        w.sweep_at(0);
        assert_eq!(w.datapath.connection_usage().masqueraded, 6);
        assert_eq!(w.datapath.connection_usage().connections, 6);
    });
}

#[test]
fn datagrams_in_parts_get_there_and_back() {
    world(|w| {
        for (number, client) in (1..).zip(w.clients()) {
            let endpoint = (far(client, 1), 8001);
            let (_, at) = w.publish(number, UDP, &[endpoint]);
            let from = (client, 2000);
            let (first, later) = if client.is_ipv4() {
                (0x2000, 0x0002)
            } else {
                (0x0001, 0x0010)
            };
            let data = [b'x'; 24];
            let parts = |src: At, dst: At| {
                let whole = packet::udp(src, dst, &data);
                let part = |fragment, bytes: &[u8]| Ip {
                    fragment,
                    payload: bytes.to_vec(),
                    ..whole.clone()
                };
                [
                    part(first, &whole.payload[..16]),
                    part(later, &whole.payload[16..]),
                ]
            };
            // One that comes before its first.
            w.dropped(&parts(from, at)[1], DropReason::ServiceFragment);
            for (sent, expected) in parts(from, at).iter().zip(parts(from, endpoint)) {
                w.leaves_as(sent, &expected);
            }
            for (sent, expected) in parts(endpoint, from).iter().zip(parts(at, from)) {
                w.arrives_as(sent, &expected);
            }
            // Others' are left alone.
            for part in parts(from, (far(client, 3), 9)) {
                w.leaves_as(&part, &part);
            }
            for part in parts((far(client, 3), 9), from) {
                w.arrives_as(&part, &part);
            }
        }
    });
}

#[test]
fn errors_speak_of_what_the_client_sent() {
    world(|w| {
        let router = |like| address(like, "192.0.2.254", "2001:db8::fe");
        for (number, proto) in (1..).zip(PROTOCOLS) {
            for client in w.clients() {
                let number = number * 2 + u32::from(client.is_ipv6());
                let endpoint = (far(client, 1), 8001);
                let (_, at) = w.publish(number, proto, &[endpoint]);
                let from = (client, 2000);
                w.goes_to(&make(proto, from, at, SYN));
                let between = make(proto, from, endpoint, SYN).bytes();
                let sent = make(proto, from, at, SYN).bytes();
                for (by, error, said_by) in [
                    (router(client), IcmpError::TooBig(1400), router(client)),
                    (endpoint.0, IcmpError::NoPort, at.0),
                ] {
                    let comes = icmp_error(by, client, error, &between);
                    let (verdict, out) = w.to_pod(&w.a, &comes);
                    assert_eq!(verdict, PASS);
                    let seen = see_error(&out);
                    assert_eq!((seen.src, seen.dst), (said_by, client), "{error:?}");
                    let quoted = without_sctp_checksum(proto, seen.quoted);
                    assert_eq!(quoted, without_sctp_checksum(proto, sent.clone()));
                }
                // And what the client says of an answer is about the endpoint's.
                let answer = make(proto, at, from, ACK).bytes();
                let says = icmp_error(client, at.0, IcmpError::NoPort, &answer);
                let (verdict, out) = w.sent_by(&w.a, &says);
                assert_eq!(verdict, PASS);
                let seen = see_error(&out);
                assert_eq!((seen.src, seen.dst), (client, endpoint.0));
                let answered = make(proto, endpoint, from, ACK).bytes();
                let quoted = without_sctp_checksum(proto, seen.quoted);
                assert_eq!(quoted, without_sctp_checksum(proto, answered));

                // Of others' packets it is none of a Service's business.
                let other = make(proto, (client, 2001), endpoint, SYN).bytes();
                let comes = icmp_error(endpoint.0, client, IcmpError::NoPort, &other);
                w.arrives_as(&comes, &comes);
            }
        }
    });
}

/// Who gets an error cannot check the sum over a packet that is cut off, and it is not made anew.
fn without_sctp_checksum(proto: u8, mut quoted: Vec<u8>) -> Vec<u8> {
    if proto == SCTP {
        let header = if quoted[0] >> 4 == 4 { 20 } else { 40 };
        quoted[header + 8..header + 12].fill(0);
    }
    quoted
}
