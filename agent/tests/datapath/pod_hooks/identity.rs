//! Who a pod may say it is, and what it may not say.

use super::*;

#[test]
fn other_sources_are_dropped() {
    world(|w| {
        for (src, dst) in w.pairs() {
            let good = packet::udp((src, 1), (dst, 2), b"");
            let mac = packet::eth(HOST_MAC, w.b.mac, good.kind(), &good.bytes());
            w.dropped(&mac, DropReason::SourceMac, "the other pod's MAC address");
            for forged in [dst, far(src)] {
                for to in [dst, far(src)] {
                    let ip = packet::udp((forged, 1), (to, 2), b"");
                    w.dropped(
                        &w.frame_of_a(&ip),
                        DropReason::SourceAddr,
                        "a forged source",
                    );
                }
            }
        }
        let zero: IpAddr = "0.0.0.0".parse().unwrap();
        let ip = packet::udp((zero, 68), ("255.255.255.255".parse().unwrap(), 67), b"");
        w.dropped(&w.frame_of_a(&ip), DropReason::SourceAddr, "no IPv4 source");
        let counters = w.datapath.pod_counters(w.a.ifindex).unwrap().unwrap();
        assert_eq!(counters.tx_packets, 0);
    });
}

/// The address that the kernel makes of a hardware address (RFC 4291, appendix A).
fn link_local(m: [u8; 6]) -> IpAddr {
    let identifier = [m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]];
    let mut address = [0; 16];
    address[..2].copy_from_slice(&[0xfe, 0x80]);
    address[8..].copy_from_slice(&identifier);
    address.into()
}

#[test]
fn neighbour_discovery_passes_and_nothing_else_from_such_sources() {
    world(|w| {
        let unspecified: IpAddr = "::".parse().unwrap();
        let own_local = link_local(w.a.mac);
        let other_local: IpAddr = "fe80::1234".parse().unwrap();
        let multicast: IpAddr = "ff02::1:ff00:5".parse().unwrap();
        let gateway: IpAddr = sinabro_common::names::GATEWAY_V6.into();
        let send = |src, dst| w.frame_of_a(&packet::icmp(src, dst, 135, 0));

        for (src, dst) in [
            (unspecified, multicast),
            (own_local, multicast),
            (own_local, gateway),
            (w.a.v6, gateway),
            (w.a.v6, multicast),
        ] {
            w.passes(&send(src, dst), &format!("{src} to {dst}"));
        }
        for (src, dst) in [
            (unspecified, gateway),
            (unspecified, w.b.v6),
            (own_local, w.b.v6),
            (other_local, multicast),
            (other_local, gateway),
            (far(w.a.v6), multicast),
        ] {
            w.dropped(
                &send(src, dst),
                DropReason::SourceAddr,
                &format!("{src} to {dst}"),
            );
        }
    });
}

#[test]
fn arp_speaks_of_the_pods_own_address_only() {
    world(|w| {
        let (IpAddr::V4(a), IpAddr::V4(b)) = (w.a.v4, w.b.v4) else {
            unreachable!()
        };
        let send = |mac, arp: &[u8]| packet::eth([0xff; 6], mac, packet::ARP, arp);
        let good = packet::arp(w.a.mac, a, b);
        w.passes(&send(w.a.mac, &good), "its own");
        w.dropped(&send(w.b.mac, &good), DropReason::SourceMac, "frame");
        let arp = packet::arp(w.b.mac, a, b);
        w.dropped(&send(w.a.mac, &arp), DropReason::SourceMac, "sender MAC");
        let arp = packet::arp(w.a.mac, b, a);
        w.dropped(&send(w.a.mac, &arp), DropReason::SourceAddr, "sender");
        let mut odd = good.clone();
        odd[4] = 8;
        w.dropped(&send(w.a.mac, &odd), DropReason::Malformed, "lengths");
        for len in 14..14 + good.len() {
            let frame = send(w.a.mac, &good);
            w.dropped(
                &frame[..len],
                DropReason::Malformed,
                &format!("{len} bytes"),
            );
        }
    });
}

#[test]
fn what_is_neither_ip_nor_arp_is_dropped() {
    world(|w| {
        let ip = packet::udp((w.a.v4, 1), (w.b.v4, 2), b"").bytes();
        for kind in [0x8100u16, 0x88a8, 0x8863, 0x88cc, 0x0026] {
            let inner = [&[0, 1, 8, 0][..], &ip].concat();
            let frame = packet::eth(HOST_MAC, w.a.mac, kind, &inner);
            w.dropped(&frame, DropReason::SourceAddr, &format!("{kind:#06x}"));
        }
    });
}

#[test]
fn a_link_without_a_record_is_dropped() {
    world(|w| {
        let frame = w.frame_of_a(&packet::udp((w.a.v4, 1), (w.b.v4, 2), b""));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        w.dropped(&frame, DropReason::UnknownLink, "a detached pod");
    });
}

#[test]
fn no_router_speaks_from_a_pod() {
    world(|w| {
        let local = link_local(w.a.mac);
        let to: [IpAddr; 3] = ["ff02::1", "fe80::5342:1", "ff02::2"].map(|a| a.parse().unwrap());
        for dst in to {
            for kind in [134, 137] {
                let mut ip = packet::icmp(local, dst, kind, 0);
                ip.ttl = 255;
                let reason = DropReason::RouterMessage;
                w.dropped(&w.frame_of_a(&ip), reason, "whole");
                // Behind an extension header.
                ip.options = vec![0, 0, 1, 4, 0, 0, 0, 0];
                w.dropped(&w.frame_of_a(&ip), reason, "behind options");
                // In fragments, whose later ones do not say what they are.
                ip.fragment = 1;
                w.dropped(&w.frame_of_a(&ip), reason, "first fragment");
                ip.fragment = 8;
                w.dropped(&w.frame_of_a(&ip), reason, "later fragment");
            }
            for kind in [133, 135, 136, 128, 143] {
                w.passes(
                    &w.frame_of_a(&packet::icmp(local, dst, kind, 0)),
                    "of a host",
                );
            }
        }
        let from_global = packet::icmp(w.a.v6, to[0], 134, 0);
        w.dropped(
            &w.frame_of_a(&from_global),
            DropReason::RouterMessage,
            "global source",
        );

        let mut redirect = packet::icmp(w.a.v4, far(w.a.v4), 5, 0);
        let reason = DropReason::RouterMessage;
        w.dropped(&w.frame_of_a(&redirect), reason, "IPv4 redirect");
        w.dropped(
            &w.frame_of_a(&packet::icmp(w.a.v4, w.b.v4, 5, 0)),
            reason,
            "to a pod",
        );
        redirect.options = vec![1; 4];
        w.dropped(&w.frame_of_a(&redirect), reason, "with options");
        redirect.fragment = 0x2000;
        w.dropped(&w.frame_of_a(&redirect), reason, "first fragment");
        w.passes(
            &w.frame_of_a(&packet::icmp(w.a.v4, far(w.a.v4), 3, 0)),
            "an error",
        );
    });
}

#[test]
fn the_nodes_loopback_is_out_of_reach() {
    world(|w| {
        let loopback = ["127.0.0.1", "127.1.2.3", "::1"];
        for dst in loopback.map(|a| a.parse::<IpAddr>().unwrap()) {
            let src = if dst.is_ipv4() { w.a.v4 } else { w.a.v6 };
            for ip in [
                packet::tcp((src, 1), (dst, 10_250), SYN, b""),
                packet::udp((src, 1), (dst, 53), b""),
            ] {
                w.dropped(&w.frame_of_a(&ip), DropReason::Loopback, &dst.to_string());
            }
        }
        let near = packet::udp((w.a.v4, 1), ("128.0.0.1".parse().unwrap(), 53), b"");
        w.passes(&w.frame_of_a(&near), "no loopback address");
    });
}
