//! What leaves a tunnel, what pods send, and what comes by another way.

use super::*;

#[test]
fn only_what_has_the_stamp_leaves_a_tunnel_and_only_for_this_node() {
    both(|w| {
        for (src, to) in [
            ("10.2.0.7", [w.a.v4, w.b.v4, ip("10.1.0.1")]),
            ("fd00:2::7", [w.a.v6, w.b.v6, ip("fd00:1::1")]),
        ] {
            for dst in to {
                let packet = from_to(ip(src), dst);
                w.passes("overlay_in", &w.stamped(&packet), &format!("for {dst}"));
                let unchecked = w.inner(&packet);
                w.dropped("overlay_in", &unchecked, TunnelUnchecked, "no stamp");
            }
        }
        let others = [
            ("10.2.0.7", "10.1.0.99"),
            ("10.2.0.7", "10.3.0.7"),
            ("10.2.0.7", "203.0.113.7"),
            ("10.2.0.7", "192.0.2.1"),
            ("10.2.0.7", "224.0.0.1"),
            ("10.2.0.7", "255.255.255.255"),
            ("10.2.0.7", "127.0.0.1"),
            ("fd00:2::7", "fd00:1::99"),
            ("fd00:2::7", "2001:db8:ffff::7"),
            ("fd00:2::7", "ff02::1"),
            ("fd00:2::7", "::1"),
        ];
        for (src, dst) in others {
            let packet = w.stamped(&from_to(ip(src), ip(dst)));
            w.dropped("overlay_in", &packet, TunnelDestination, dst);
        }
        let arp = packet::arp(
            vxlan_mac(w.underlay[1]),
            [10, 2, 0, 7].into(),
            [10, 1, 0, 5].into(),
        );
        let arp = packet::eth([0xff; 6], vxlan_mac(w.underlay[1]), ARP, &arp);
        w.dropped("overlay_in", &arp, TunnelUnchecked, "ARP");
    });
}

#[test]
fn a_pod_sends_no_tunnel_packets_to_nodes() {
    both(|w| {
        let nodes = w.underlay.into_iter().chain([ip(SECOND_OF_SECOND)]);
        for dst in nodes {
            let src = if dst.is_ipv4() { w.a.v4 } else { w.a.v6 };
            let inner = w.inner(&from_to(ip("10.3.0.7"), w.b.v4));
            let mut outer = w.outer(&inner);
            (outer.src, outer.dst) = (src, dst);
            let from_pod =
                |outer: &Ip| packet::eth(HOST_MAC, w.a.mac, outer.kind(), &outer.bytes());
            w.dropped("pod_out", &from_pod(&outer), EncapProhibited, "whole");
            outer.fragment = if dst.is_ipv4() { FIRST } else { 1 };
            w.dropped(
                "pod_out",
                &from_pod(&outer),
                EncapProhibited,
                "the first fragment",
            );
            outer.fragment = 0;
            // What the stack turned into one: it has come in by the pod's link.
            for src in [src, w.underlay[0]] {
                if src.is_ipv4() == dst.is_ipv4() {
                    outer.src = src;
                    let frame = frame(&outer);
                    let from = w.a.ifindex;
                    w.dropped_from("uplink_out", from, &frame, EncapProhibited, "translated");
                }
            }
            // The node's own.
            outer.src = w.underlay[0];
            if outer.src.is_ipv4() == dst.is_ipv4() {
                w.passes("uplink_out", &frame(&outer), "of the node itself");
            }
        }
        for (src, far) in [(w.a.v4, "203.0.113.7"), (w.a.v6, "2001:db8:ffff::7")] {
            let ip = packet::udp((src, 1), (ip(far), VXLAN_PORT), b"another's tunnel");
            w.passes(
                "pod_out",
                &packet::eth(HOST_MAC, w.a.mac, ip.kind(), &ip.bytes()),
                "to no node",
            );
        }
        for (src, dst) in [(w.a.v4, w.b.v4), (w.a.v6, w.b.v6)] {
            let ip = packet::udp((src, 1), (dst, VXLAN_PORT), b"a pod's own tunnel");
            let frame = packet::eth(HOST_MAC, w.a.mac, ip.kind(), &ip.bytes());
            assert_eq!(w.run("pod_out", 0, &frame).0, REDIRECT, "between pods");
        }
    });
}

#[test]
fn a_pods_address_comes_in_by_the_overlay_alone() {
    both(|w| {
        let sources = [
            "10.2.0.7",
            "10.1.0.6",
            "10.3.0.1",
            "fd00:2::7",
            "fd00:1::6",
            "fd00:3::1",
        ];
        for src in sources.map(ip) {
            let (pod, node, gateway) = match src {
                IpAddr::V4(_) => (w.a.v4, ip("192.0.2.1"), ip("10.1.0.1")),
                IpAddr::V6(_) => (w.a.v6, ip("2001:db8:1::1"), ip("fd00:1::1")),
            };
            for dst in [pod, gateway] {
                let frame = frame(&from_to(src, dst));
                w.dropped("uplink_in", &frame, PodSource, &format!("{src} to {dst}"));
            }
            let to_node = frame(&from_to(src, node));
            match src {
                IpAddr::V4(_) => w.dropped("uplink_in", &to_node, PodSource, "to the node"),
                // Not masqueraded by the node that it comes from.
                IpAddr::V6(_) => w.passes("uplink_in", &to_node, "to the node"),
            }
        }
        // The node's own network is one that pods reach under their own address.
        w.datapath
            .set_non_masquerade(&["192.0.2.0/24".parse().unwrap()])
            .unwrap();
        let frame = frame(&from_to(ip("10.2.0.7"), ip("192.0.2.1")));
        w.passes("uplink_in", &frame, "not masqueraded by setting");
    });
}

#[test]
fn an_agent_that_knows_no_tunnels_does_not_stop_them() {
    both(|w| {
        let before = w.outer(&w.inner(&from_to(ip("10.9.0.7"), w.a.v4)));
        let mut config = kit::node_config();
        config.flags &= !(FLAG_TUNNELS | FLAG_STAMPED);
        w.datapath.set_node_config(config).unwrap();
        w.passes(
            "uplink_in",
            &frame(&before),
            "as the first version left its settings",
        );
        let out = w.inner(&from_to(ip("10.9.0.7"), ip("203.0.113.7")));
        w.passes("overlay_in", &out, "the same");
    });
}

/// As when an agent follows one of the first version, and finds the VXLAN device's program there
/// from before that one.
#[test]
fn what_came_in_before_stamping_arrives() {
    both(|w| {
        let mut config = kit::node_config();
        config.flags &= !(FLAG_TUNNELS | FLAG_STAMPED);
        w.datapath.set_node_config(config).unwrap();
        config.flags |= FLAG_TUNNELS;
        w.datapath.set_node_config(config).unwrap();
        let unstamped = w.inner(&from_to(ip("10.2.0.7"), w.a.v4));
        w.passes("overlay_in", &unstamped, "nobody asks for a stamp yet");
        let tunnel = frame(&w.outer(&unstamped));
        let (action, stamped) = w.run("uplink_in", 0, &tunnel);
        assert_eq!(action, PASS);
        assert_ne!(stamped, tunnel, "it is stamped");
        w.datapath.attach_overlay(w.a.ifindex).unwrap();
        w.dropped("overlay_in", &unstamped, TunnelUnchecked, "asked for");
        // The node's settings change: checks go on.
        w.datapath.set_node_config(config).unwrap();
        w.dropped("overlay_in", &unstamped, TunnelUnchecked, "still asked for");
    });
}
