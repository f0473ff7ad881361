//! Tunnels: `pod_out`, `uplink_out`, `uplink_in` and `overlay_in` on single packets.

use crate::{
    kit::{self, Pod},
    packet::{self, ARP, Ip, SYN},
    run::{DROP, PASS, Programs, REDIRECT},
};
use sinabro_agent::datapath::{Datapath, Tunnels};
use sinabro_common::{
    abi::{
        config::{FLAG_STAMPED, FLAG_TUNNELS},
        drop::DropReason::{self, *},
    },
    names::{HOST_MAC, VXLAN_PORT, VXLAN_VNI, vxlan_mac},
};
use std::{collections::BTreeMap, net::IpAddr};

const FIRST: u16 = 0x2000;
const LATER: u16 = 0x00b9;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Three nodes, known by IPv4 or by IPv6, with pods of both families; this is the first.
struct World {
    datapath: Datapath,
    programs: Programs,
    a: Pod,
    b: Pod,
    underlay: [IpAddr; 3],
}

/// The other address of the second node.
const SECOND_OF_SECOND: &str = "198.51.100.2";

fn both(test: impl Fn(&World) + Sync) {
    for underlay in [
        ["192.0.2.1", "192.0.2.2", "192.0.2.3"],
        ["2001:db8:1::1", "2001:db8:1::2", "2001:db8:1::3"],
    ] {
        kit::fresh(|| {
            let datapath = kit::load();
            let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
            let world = World {
                programs: Programs::of(&datapath),
                datapath,
                a,
                b,
                underlay: underlay.map(ip),
            };
            world.know(3);
            test(&world);
        });
    }
}

impl World {
    /// The first `count` of the nodes are known.
    fn know(&self, count: usize) {
        let mut nodes: BTreeMap<IpAddr, IpAddr> = BTreeMap::new();
        let mut ranges = BTreeMap::new();
        for (number, &tunnel) in (1..).zip(&self.underlay[..count]) {
            nodes.insert(tunnel, tunnel);
            for range in [format!("10.{number}.0.0/24"), format!("fd00:{number}::/64")] {
                ranges.insert(range.parse().unwrap(), tunnel);
            }
        }
        if count > 1 {
            nodes.insert(ip(SECOND_OF_SECOND), self.underlay[1]);
        }
        self.datapath
            .set_tunnels(&Tunnels {
                local: self.underlay[0],
                port: VXLAN_PORT,
                vni: VXLAN_VNI,
                gateways: &[ip("10.1.0.1"), ip("fd00:1::1")],
                nodes: &nodes,
                ranges: &ranges,
            })
            .unwrap();
    }

    fn run(&self, program: &str, from: u32, frame: &[u8]) -> (i32, Vec<u8>) {
        self.programs
            .run_from(program, self.a.ifindex, from, frame)
            .unwrap()
    }

    fn passes(&self, program: &str, frame: &[u8], what: &str) {
        let (action, out) = self.run(program, 0, frame);
        assert_eq!((action, &out[..]), (PASS, frame), "{program}: {what}");
    }

    fn dropped(&self, program: &str, frame: &[u8], reason: DropReason, what: &str) {
        self.dropped_from(program, 0, frame, reason, what);
    }

    fn dropped_from(&self, program: &str, from: u32, frame: &[u8], reason: DropReason, what: &str) {
        let before = kit::dropped(&self.datapath, reason);
        let (action, _) = self.run(program, from, frame);
        let drops = self.datapath.drops();
        assert_eq!(action, DROP, "{program}: {what}");
        let counted = kit::dropped(&self.datapath, reason) - before;
        assert_eq!(counted, 1, "{program}: {what}: {drops:?}");
    }

    /// A tunnel packet from the second node to this one, if not changed.
    fn outer(&self, inner: &[u8]) -> Ip {
        let payload = [&[8, 0, 0, 0, 0, 0, 1, 0], inner].concat();
        let (from, to) = (self.underlay[1], self.underlay[0]);
        packet::udp((from, 40_000), (to, VXLAN_PORT), &payload)
    }

    /// What comes out of a tunnel, as the second node's device sends it.
    fn inner(&self, ip: &Ip) -> Vec<u8> {
        let macs = [0, 1].map(|node| vxlan_mac(self.underlay[node]));
        packet::eth(macs[0], macs[1], ip.kind(), &ip.bytes())
    }

    /// The inner frame behind the header as the uplink lets it in.
    fn admitted(&self, outer: &Ip, inner: &[u8], what: &str) -> Vec<u8> {
        let (action, out) = self.run("uplink_in", 0, &frame(outer));
        assert_eq!(action, PASS, "{what}: {:?}", self.datapath.drops());
        let at = out.len() - inner.len();
        // The inner source MAC address and the outer checksum are all that differs.
        assert_eq!(out[at..at + 6], inner[..6], "{what}");
        assert_eq!(out[at + 12..], inner[12..], "{what}");
        let seen = packet::see(&out);
        assert_eq!((seen.src, seen.dst), (outer.src, outer.dst), "{what}");
        out[at..].to_vec()
    }

    /// An inner frame with the stamp on it.
    fn stamped(&self, inner: &Ip) -> Vec<u8> {
        let honest = packet::udp((ip("10.2.0.7"), 1), (self.a.v4, 2), b"");
        let honest = self.inner(&honest);
        let stamp = &self.admitted(&self.outer(&honest), &honest, "an honest packet")[6..12];
        let mut frame = self.inner(inner);
        frame[6..12].copy_from_slice(stamp);
        frame
    }
}

fn frame(ip: &Ip) -> Vec<u8> {
    packet::eth(
        [2, 0, 0, 0, 0, 1],
        [2, 0, 0, 0, 0, 2],
        ip.kind(),
        &ip.bytes(),
    )
}

/// A packet from one address to another of the same family.
fn from_to(src: IpAddr, dst: IpAddr) -> Ip {
    packet::tcp((src, 4000), (dst, 80), SYN, b"hello")
}

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
