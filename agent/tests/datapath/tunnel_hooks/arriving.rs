//! Tunnels that come to this node: of whom, for whom, and in how many pieces.

use super::*;

#[test]
fn a_known_node_speaks_for_its_pods_and_itself() {
    both(|w| {
        let [_, peer, _] = w.underlay;
        let of_peer = [
            "10.2.0.7",
            "fd00:2::7",
            "10.2.0.1",
            "fd00:2::1",
            SECOND_OF_SECOND,
        ];
        for src in of_peer.map(ip).into_iter().chain([peer]) {
            let dst = if src.is_ipv4() { w.a.v4 } else { w.a.v6 };
            let inner = w.inner(&from_to(src, dst));
            let mut outer = w.outer(&inner);
            let out = w.admitted(&outer, &inner, &format!("from {src}"));
            assert_ne!(out[6..12], inner[6..12], "no stamp");
            w.passes("overlay_in", &out, "stamped");
            // As the node's other address, and as Linux sends over IPv4: without a checksum.
            outer.src = match peer {
                IpAddr::V4(_) => ip(SECOND_OF_SECOND),
                IpAddr::V6(_) => peer,
            };
            outer.payload[6..8].fill(0);
            let again = w.admitted(&outer, &inner, &format!("from {src}, no checksum"));
            assert_eq!(again, out);
            // With options, or an extension header, before the outer UDP header.
            outer.options = match peer {
                IpAddr::V4(_) => vec![1; 4],
                IpAddr::V6(_) => vec![0, 0, 1, 4, 0, 0, 0, 0],
            };
            let (action, out) = w.run("uplink_in", 0, &frame(&outer));
            assert_eq!(action, PASS);
            assert_eq!(out[out.len() - inner.len()..], again);
        }
    });
}

#[test]
fn an_inner_source_of_another_is_dropped() {
    both(|w| {
        let [own, _, third] = w.underlay;
        // Pods of a third node and of this one, the nodes themselves, somebody outside, an
        // address of the link, none at all.
        let foreign = [
            "10.3.0.7",
            "fd00:3::7",
            "10.1.0.6",
            "fd00:1::6",
            "10.1.0.1",
            "fd00:1::1",
            "203.0.113.7",
            "fe80::1",
            "::ffff:10.2.0.7",
        ];
        for src in foreign.map(ip).into_iter().chain([own, third]) {
            let dst = if src.is_ipv4() { w.a.v4 } else { w.a.v6 };
            let inner = w.inner(&from_to(src, dst));
            w.dropped(
                "uplink_in",
                &frame(&w.outer(&inner)),
                TunnelInner,
                &src.to_string(),
            );
        }
        let arp = packet::arp(
            vxlan_mac(w.underlay[1]),
            [10, 2, 0, 7].into(),
            [10, 1, 0, 5].into(),
        );
        let inner = packet::eth([0xff; 6], vxlan_mac(w.underlay[1]), ARP, &arp);
        w.dropped("uplink_in", &frame(&w.outer(&inner)), TunnelInner, "ARP");
        let tagged = [&[0; 12][..], &[0x81, 0, 0, 0, 8, 0], &[0x45; 40]].concat();
        w.dropped(
            "uplink_in",
            &frame(&w.outer(&tagged)),
            TunnelInner,
            "a VLAN inside",
        );

        // Pods reach IPv6 hosts outside under their own address, so an answer may come so.
        let inner = w.inner(&from_to(ip("2001:db8:ffff::7"), w.a.v6));
        w.admitted(&w.outer(&inner), &inner, "an answer to a pod");
    });
}

#[test]
fn a_tunnel_of_a_stranger_is_dropped() {
    both(|w| {
        let inner = w.inner(&from_to(ip("10.2.0.7"), w.a.v4));
        let strangers = match w.underlay[0] {
            IpAddr::V4(_) => ["192.0.2.200", "10.2.0.7", "127.0.0.1"],
            IpAddr::V6(_) => ["2001:db8:1::200", "fd00:2::7", "::1"],
        };
        // This node does not send to itself either.
        for src in strangers.map(ip).into_iter().chain([w.underlay[0]]) {
            let outer = Ip {
                src,
                ..w.outer(&inner)
            };
            w.dropped("uplink_in", &frame(&outer), TunnelSource, &src.to_string());
        }
    });
}

#[test]
fn nodes_come_and_go() {
    both(|w| {
        let inner = w.inner(&from_to(ip("10.2.0.7"), w.a.v4));
        let outer = w.outer(&inner);
        let before = w.admitted(&outer, &inner, "known");
        w.know(1);
        w.dropped("uplink_in", &frame(&outer), TunnelSource, "forgotten");
        // Another agent, which does not know what the maps hold.
        w.know(2);
        assert_eq!(w.admitted(&outer, &inner, "known again"), before);
        let moved = w.inner(&from_to(ip("10.3.0.7"), w.a.v4));
        w.dropped(
            "uplink_in",
            &frame(&w.outer(&moved)),
            TunnelInner,
            "of nobody",
        );
    });
}

#[test]
fn a_tunnel_in_fragments_is_dropped() {
    both(|w| {
        let inner = w.inner(&from_to(ip("10.2.0.7"), w.a.v4));
        let first = match w.underlay[0] {
            IpAddr::V4(_) => FIRST,
            IpAddr::V6(_) => 1,
        };
        let outer = Ip {
            fragment: first,
            ..w.outer(&inner)
        };
        w.dropped("uplink_in", &frame(&outer), TunnelFragment, "the first");
        // It stays alone.
        let later = match w.underlay[0] {
            IpAddr::V4(_) => LATER,
            IpAddr::V6(_) => 0x05c8,
        };
        let outer = Ip {
            fragment: later,
            ..w.outer(&inner)
        };
        w.passes("uplink_in", &frame(&outer), "a later one");
    });
}

#[test]
fn what_is_not_certainly_of_the_overlay_gets_no_stamp() {
    both(|w| {
        let inner = w.inner(&from_to(ip("10.3.0.7"), w.a.v4));
        let outer = w.outer(&inner);
        for (at, value, what) in [
            (8, 0x0c, "other flags"),
            (11, 1, "a reserved field"),
            (14, 2, "another VNI"),
            (15, 1, "the other reserved field"),
            (3, 0x19, "another port"),
        ] {
            let mut other = outer.clone();
            other.payload[at] = value;
            w.passes("uplink_in", &frame(&other), what);
        }
        let elsewhere = match w.underlay[0] {
            IpAddr::V4(_) => ip("192.0.2.77"),
            IpAddr::V6(_) => ip("2001:db8:1::77"),
        };
        let other = Ip {
            dst: elsewhere,
            ..outer.clone()
        };
        w.passes("uplink_in", &frame(&other), "another address of the node");

        // Cut short: dropped where too little of it is there to be told whose it is.
        let whole = outer.payload;
        for len in 8..whole.len() {
            let cut = Ip {
                payload: whole[..len].to_vec(),
                ..w.outer(&inner)
            };
            let (action, out) = w.run("uplink_in", 0, &frame(&cut));
            assert!(action == DROP || out == frame(&cut), "{len} bytes");
        }
    });
}
