//! ICMP errors about packets that say little of whose they are: of protocols without ports, and parts of a packet.

use super::{
    protocols::{families, quotes},
    *,
};
use crate::packet::{IcmpError, UDPLITE, icmp_error, in_two};

const KINDS: [IcmpError; 3] = [
    IcmpError::TooBig(1300),
    IcmpError::TimeExceeded,
    IcmpError::NoPort,
];

fn router(pod: IpAddr) -> IpAddr {
    match pod.is_ipv4() {
        true => "198.51.100.1".parse().unwrap(),
        false => "2001:db8:1::1".parse().unwrap(),
    }
}

/// About what the pod sent, of which `outside` is what is seen of it outside.
fn come(w: &World, (pod, node): (IpAddr, IpAddr), own: &Ip, outside: &Ip) {
    for (quoted, own) in quotes(outside).iter().zip(quotes(own)) {
        for kind in KINDS {
            for from in [router(pod), outside.dst] {
                let error = icmp_error(from, node, kind, quoted);
                let expected = icmp_error(from, pod, kind, &own);
                let what = format!("{} {kind:?}", outside.proto);
                assert_eq!(w.come(&error), (PASS, World::frame(&expected)), "{what}");
            }
        }
    }
}

/// About what the pod got, by it and by the node that forwards it.
fn leave(w: &World, (pod, node): (IpAddr, IpAddr), got: &Ip, outside: &Ip) {
    for (got, sent) in quotes(got).iter().zip(quotes(outside)) {
        for kind in KINDS {
            let what = format!("{} {kind:?}", outside.proto);
            let expected = icmp_error(node, outside.src, kind, &sent);
            let error = icmp_error(pod, outside.src, kind, got);
            assert_eq!(w.out(&error), (PASS, World::frame(&expected)), "{what}");
            let error = icmp_error(node, outside.src, kind, got);
            assert_eq!(
                w.host_out(&error),
                (PASS, World::frame(&expected)),
                "{what}"
            );
        }
    }
}

#[test]
fn errors_about_protocols_without_ports_name_the_addresses_that_each_side_knows() {
    world(|w| {
        // IPIP, IPv6 in either, GRE, ESP.
        for proto in [4, 41, 47, 50] {
            for (pod, node, far) in families(&w) {
                let own = packet::other(pod, far, proto);
                assert_eq!(w.out(&own).0, PASS);
                come(&w, (pod, node), &own, &packet::other(node, far, proto));

                let outside = packet::other(far, node, proto);
                assert_eq!(w.come(&outside).0, PASS);
                let got = packet::other(far, pod, proto);
                leave(&w, (pod, node), &got, &outside);
                // What another pod got is none of its business.
                let other = if pod.is_ipv4() { w.b.v4 } else { w.b.v6 };
                let error = icmp_error(other, far, IcmpError::NoPort, &got.bytes());
                w.dropped("uplink_out", &error, DropReason::NatProtocol);
                // Nor is anything known of what nobody sent.
                let strange = packet::other(node, router(pod), proto);
                let error = icmp_error(router(pod), node, IcmpError::NoPort, &strange.bytes());
                assert_eq!(w.come(&error), (PASS, World::frame(&error)));
            }
        }
        check_table();
    });
}

fn request(proto: u8, src: (IpAddr, u16), dst: (IpAddr, u16)) -> [Ip; 2] {
    in_two(match proto {
        UDPLITE => packet::udplite(src, dst, b"hello"),
        _ => make(proto, src, dst),
    })
}

#[test]
fn errors_about_a_first_part_name_the_ports_that_each_side_knows() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            for proto in [TCP, UDP, UDPLITE, ICMP] {
                let (own, to) = ((pod, 4001), (far, 443));
                let whole = match proto {
                    UDPLITE => packet::udplite(own, to, b"hello"),
                    _ => make(proto, own, to),
                };
                let port = w.sent(&whole).ports.0;
                assert_ne!(port, 4001);
                let [first, later] = request(proto, own, to);
                let [outside, later_outside] = request(proto, (node, port), to);
                assert_eq!(w.out(&first), (PASS, World::frame(&outside)));
                come(&w, (pod, node), &first, &outside);

                // Nobody knows whose connection a later one is of.
                let error = icmp_error(far, node, IcmpError::TimeExceeded, &later_outside.bytes());
                assert_eq!(w.come(&error), (PASS, World::frame(&error)));
                let reversed = Ip {
                    src: later.dst,
                    dst: later.src,
                    ..later
                };
                let error = icmp_error(pod, far, IcmpError::TimeExceeded, &reversed.bytes());
                w.dropped("uplink_out", &error, DropReason::NatProtocol);

                // The pod waited for the rest of an answer in vain.
                let answer = |to: (IpAddr, u16)| match proto {
                    ICMP => {
                        let kind = if far.is_ipv4() { 0 } else { 129 };
                        let [first, _] = in_two(packet::icmp(far, to.0, kind, to.1));
                        first
                    }
                    _ => request(proto, (far, 443), to)[0].clone(),
                };
                let (outside, got) = (answer((node, port)), answer(own));
                assert_eq!(w.come(&outside), (PASS, World::frame(&got)));
                leave(&w, (pod, node), &got, &outside);
            }
        }
        check_table();
    });
}
