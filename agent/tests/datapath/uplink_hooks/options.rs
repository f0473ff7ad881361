//! IPv4 options and IPv6 extension headers: what has them is translated as if it had none, also where an ICMP error
//! quotes it.

use super::{
    protocols::{families, quotes},
    *,
};
use crate::packet::{
    AUTH, DEST_OPTIONS, FRAGMENT, HOP_BY_HOP, IcmpError, ROUTING, UDPLITE, icmp_error, in_two,
};
use crate::run::REDIRECT;
use sinabro_common::abi::connection::{Fragment, FragmentKey};

/// What is between addresses and ports.
#[derive(Clone, Debug)]
struct Headers {
    options: Vec<u8>,
    extensions: Vec<(u8, Vec<u8>)>,
}

impl Headers {
    fn v4(options: &[u8]) -> Self {
        Self {
            options: options.to_vec(),
            extensions: Vec::new(),
        }
    }

    fn v6(extensions: &[(u8, &[u8])]) -> Self {
        let owned = extensions.iter().map(|(kind, h)| (*kind, h.to_vec()));
        Self {
            options: Vec::new(),
            extensions: owned.collect(),
        }
    }

    fn on(&self, ip: Ip) -> Ip {
        let Self {
            options,
            extensions,
        } = self.clone();
        Ip {
            options,
            extensions,
            ..ip
        }
    }
}

/// Padding of four bytes (RFC 8200 §4.2), of twenty, and a router alert (RFC 2711).
const PADDING: (u8, &[u8]) = (DEST_OPTIONS, &[0, 0, 1, 4, 0, 0, 0, 0]);
const LONG: (u8, &[u8]) = (
    DEST_OPTIONS,
    &[
        0, 0, 1, 20, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9,
    ],
);
const ALERT: (u8, &[u8]) = (HOP_BY_HOP, &[0, 0, 5, 2, 0, 0, 1, 0]);
/// Nothing is left of the way that it gives (RFC 8200 §4.4).
const TAKEN: (u8, &[u8]) = (ROUTING, &[0, 0, 4, 0, 0, 0, 0, 0]);
/// Of a packet that is whole nevertheless (RFC 6946).
const ATOMIC: (u8, &[u8]) = (FRAGMENT, &[0, 0, 0, 0, 1, 2, 3, 4]);

/// Of a packet that may be in parts.
fn of_parts(v6: bool) -> Vec<Headers> {
    // A router alert (RFC 2113), no-operations, and time stamps as long as options can be.
    let mut stamps = [0; 40];
    stamps[..4].copy_from_slice(&[68, 40, 5, 0]);
    let mut route = [0; 12];
    route[..3].copy_from_slice(&[7, 11, 4]);
    match v6 {
        false => [&[148, 4, 0, 0][..], &[1; 8], &route, &stamps]
            .map(Headers::v4)
            .into(),
        true => [
            &[PADDING][..],
            &[ALERT],
            &[LONG],
            &[ALERT, PADDING],
            &[PADDING, TAKEN],
        ]
        .map(Headers::v6)
        .into(),
    }
}

/// Each of these is tried.
fn all(v6: bool) -> Vec<Headers> {
    let mut all = of_parts(v6);
    if v6 {
        all.extend(
            [
                &[ATOMIC][..],
                &[PADDING, ATOMIC],
                &[ALERT, ATOMIC, LONG],
                // As many as are followed.
                &[ALERT, PADDING, TAKEN, ATOMIC, LONG, PADDING],
            ]
            .map(Headers::v6),
        );
    }
    all
}

fn packet(proto: u8, src: (IpAddr, u16), dst: (IpAddr, u16)) -> Ip {
    match proto {
        UDPLITE => packet::udplite(src, dst, b"hello"),
        _ => make(proto, src, dst),
    }
}

/// The other end's answer, from it and to it being the pod's or the node's end.
fn answer(proto: u8, from: (IpAddr, u16), to: (IpAddr, u16)) -> Ip {
    match proto {
        ICMP => {
            let kind = if from.0.is_ipv4() { 0 } else { 129 };
            packet::icmp(from.0, to.0, kind, to.1)
        }
        _ => packet(proto, from, to),
    }
}

#[test]
fn what_has_options_leaves_as_the_node_and_gets_its_answers() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            // Ports that are kept come first: the others may be given any.
            for first in [62000, 4000] {
                for (id, headers) in (first..).zip(all(pod.is_ipv6())) {
                    for proto in [TCP, UDP, UDPLITE, SCTP, ICMP] {
                        let what = format!("{proto} behind {headers:?}");
                        let ip = headers.on(packet(proto, (pod, id), (far, 443)));
                        // Its checksums are looked at, too.
                        let port = w.sent(&ip).ports.0;
                        assert_eq!(port == id, first == 62000, "{what}");
                        let expected = headers.on(packet(proto, (node, port), (far, 443)));
                        assert_eq!(w.out(&ip), (PASS, World::frame(&expected)), "{what}");

                        let back = headers.on(answer(proto, (far, 443), (node, port)));
                        w.received(&back);
                        let expected = headers.on(answer(proto, (far, 443), (pod, id)));
                        assert_eq!(w.come(&back), (PASS, World::frame(&expected)), "{what}");
                    }
                }
            }
        }
        check_table();
    });
}

#[test]
fn parts_behind_options_follow_their_first() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            for headers in of_parts(pod.is_ipv6()) {
                for (proto, id) in [(TCP, 4001), (UDP, 4002), (ICMP, 4003)] {
                    let parts = |ip: Ip| in_two(headers.on(ip));
                    let ip = make(proto, (pod, id), (far, 443));
                    let port = w.sent(&headers.on(ip.clone())).ports.0;
                    let outside = make(proto, (node, port), (far, 443));
                    for (ip, expected) in parts(ip).iter().zip(parts(outside)) {
                        assert_eq!(w.out(ip), (PASS, World::frame(&expected)), "{headers:?}");
                    }
                    let back = parts(answer(proto, (far, 443), (node, port)));
                    let inside = parts(answer(proto, (far, 443), (pod, id)));
                    comes_in_whichever_order(&w, &back, &inside);
                }
            }
        }
        check_table();
    });
}

/// The later one waits for the first, which sends it in once more.
fn comes_in_whichever_order(w: &World, [first, later]: &[Ip; 2], inside: &[Ip; 2]) {
    let own = inside.each_ref().map(World::frame);
    let frame = World::frame(later);
    assert_eq!(w.come(later), (PASS, frame.clone()), "{later:?}");
    assert_eq!(w.come(first), (REDIRECT, frame), "{first:?}");
    for (ip, own) in [first, later].into_iter().zip(own) {
        assert_eq!(w.come(ip), (PASS, own), "{ip:?}");
    }
    // All have the same id: as if that had been long ago.
    let mut notes = open::<FragmentKey, Fragment>("FRAGMENTS");
    let known: Vec<_> = notes.keys().collect::<Result<_, _>>().unwrap();
    known.iter().for_each(|key| notes.remove(key).unwrap());
}

/// Options for the destination alone are a part of what is divided. What is behind the fragment header is then another protocol's
/// in the first part than in the later ones (RFC 8200 §4.5).
#[test]
fn parts_of_what_begins_with_options_follow_their_first() {
    world(|w| {
        let [_, (pod, node, far)] = families(&w);
        for (proto, id) in [(TCP, 4001), (UDP, 4002), (ICMP, 4003)] {
            let parts = |ip: Ip| {
                let [first, later] = in_two(ip);
                let fragment = |a, b| vec![(FRAGMENT, vec![0, 0, a, b, 1, 2, 3, 4])];
                let first = Ip {
                    fragment: 0,
                    extensions: fragment(0, 1),
                    options: PADDING.1.to_vec(),
                    ..first
                };
                let later = Ip {
                    fragment: 0,
                    extensions: fragment(0, 8 + 24),
                    proto: DEST_OPTIONS,
                    ..later
                };
                [first, later]
            };
            let ip = make(proto, (pod, id), (far, 443));
            let port = w.sent(&ip).ports.0;
            let outside = parts(make(proto, (node, port), (far, 443)));
            for (ip, expected) in parts(ip).iter().zip(outside) {
                assert_eq!(w.out(ip), (PASS, World::frame(&expected)));
            }
            let back = parts(answer(proto, (far, 443), (node, port)));
            let inside = parts(answer(proto, (far, 443), (pod, id)));
            comes_in_whichever_order(&w, &back, &inside);
        }
    });
}

#[test]
fn errors_are_told_of_what_was_sent_with_options() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            let router = match pod.is_ipv4() {
                true => "198.51.100.1".parse().unwrap(),
                false => "2001:db8:1::1".parse().unwrap(),
            };
            let kinds = [
                IcmpError::TooBig(1300),
                IcmpError::TimeExceeded,
                IcmpError::NoPort,
            ];
            for (n, headers) in (0..).zip(all(pod.is_ipv6())) {
                for proto in [TCP, UDP, ICMP] {
                    let id = 4000 + n;
                    let what = format!("{proto} behind {headers:?}");
                    let ip = headers.on(packet(proto, (pod, id), (far, 443)));
                    let port = w.sent(&ip).ports.0;
                    let outside = headers.on(packet(proto, (node, port), (far, 443)));
                    for (quoted, own) in quotes(&outside).iter().zip(quotes(&ip)) {
                        for kind in kinds {
                            let error = icmp_error(router, node, kind, quoted);
                            let expected = icmp_error(router, pod, kind, &own);
                            assert_eq!(w.come(&error), (PASS, World::frame(&expected)), "{what}");
                            // The error may have options itself.
                            let (error, expected) = (headers.on(error), headers.on(expected));
                            assert_eq!(w.come(&error), (PASS, World::frame(&expected)), "{what}");
                        }
                    }
                    // What the pod itself says of an answer.
                    let got = headers.on(answer(proto, (far, 443), (pod, id)));
                    let sent = headers.on(answer(proto, (far, 443), (node, port)));
                    w.received(&sent);
                    for (got, sent) in quotes(&got).iter().zip(quotes(&sent)) {
                        for kind in kinds {
                            let error = headers.on(icmp_error(pod, far, kind, got));
                            let expected = headers.on(icmp_error(node, far, kind, &sent));
                            assert_eq!(w.out(&error), (PASS, World::frame(&expected)), "{what}");
                        }
                    }
                }
            }
        }
        check_table();
    });
}

/// Behind more than six headers nobody looks: the seventh is a protocol that cannot be translated.
#[test]
fn too_many_extension_headers_are_a_protocol_that_is_dropped() {
    world(|w| {
        let [_, (pod, node, far)] = families(&w);
        let six = Headers::v6(&[PADDING; 6]);
        let seven = Headers::v6(&[PADDING; 7]);
        for proto in [TCP, UDP, ICMP] {
            let ip = packet(proto, (pod, 4000), (far, 443));
            w.dropped("uplink_out", &seven.on(ip.clone()), DropReason::NatProtocol);
            let port = w.sent(&six.on(ip)).ports.0;
            // For the node, as far as anybody knows.
            let back = seven.on(answer(proto, (far, 443), (node, port)));
            assert_eq!(w.come(&back), (PASS, World::frame(&back)));
            let quoted = seven.on(packet(proto, (node, port), (far, 443))).bytes();
            let error = icmp_error(far, node, IcmpError::TimeExceeded, &quoted);
            assert_eq!(w.come(&error), (PASS, World::frame(&error)));
        }
    });
}

/// It is over both addresses (RFC 4302 §3.3.3.1.2): with another one the receiver would throw the packet away. So it is dropped
/// as IPv4's is, wherever it stands.
#[test]
fn an_authentication_header_is_a_protocol_that_is_dropped() {
    world(|w| {
        let [_, (pod, node, far)] = families(&w);
        let auth: (u8, &[u8]) = (AUTH, &[7; 24]);
        for headers in [&[auth][..], &[PADDING, auth], &[auth, PADDING]] {
            let headers = Headers::v6(headers);
            for proto in [TCP, UDP, ICMP] {
                let ip = packet(proto, (pod, 4000), (far, 443));
                w.dropped(
                    "uplink_out",
                    &headers.on(ip.clone()),
                    DropReason::NatProtocol,
                );
                let port = w.sent(&ip).ports.0;
                let back = headers.on(answer(proto, (far, 443), (node, port)));
                assert_eq!(w.come(&back), (PASS, World::frame(&back)));
            }
        }
    });
}
