//! Tunnels without the stack: `pod_out` wraps up what goes to a pod of another node, `uplink_in` unwraps what comes from one.

use super::*;
use crate::packet::{ACK, IP4, IP6, IcmpError, SCTP, TCP, UDP, icmp_error, in_parts, see, sum};
use sinabro_agent::datapath::{Translation, Way};
use sinabro_common::abi::{Addr, next_hop::NextHop};

/// Who forwards to the second node, and by which interface.
const ROUTER: &str = "192.0.2.254";
const ROUTER_V6: &str = "2001:db8:1::fe";
/// The second node's IPv6 address.
pub(super) const OF_SECOND: &str = "2001:db8:1::2";
pub(super) const MTU: u32 = 1450;

/// The second node is reached past the stack, and so are its pods; by flows that are new, and by such as are remembered.
pub(super) fn direct(test: impl Fn(&World) + Sync) {
    match kernel::wraps().unwrap() {
        true => direct_if_it_can_be(test),
        false => println!("skipped: before Linux 5.13 nothing is put into a tunnel past the stack"),
    }
}

/// The same as far as the kernel does it.
fn direct_if_it_can_be(test: impl Fn(&World) + Sync) {
    for remembers in [false, true] {
        both(|world| {
            world.go_direct();
            if remembers {
                world.remember_flows();
            }
            test(world);
        });
    }
}

pub(super) fn far(near: IpAddr) -> IpAddr {
    ip(if near.is_ipv4() {
        "10.2.0.7"
    } else {
        "fd00:2::7"
    })
}

/// Before Linux 5.13 it cannot be done, and that is known.
#[test]
fn whether_a_kernel_does_it_is_known() {
    direct_if_it_can_be(|world| {
        let wraps = kernel::wraps().unwrap();
        assert_eq!(world.datapath.wraps(), wraps);
        let frame = world.of_pod(&packet::udp(
            (world.a.v4, 4000),
            (far(world.a.v4), 80),
            b"hello",
        ));
        let (action, _, _) = world.leaves(&frame);
        let expected = if wraps { REDIRECT } else { PASS };
        assert_eq!(action, expected);
    });
}

/// Of every protocol, from one to the other.
pub(super) fn of_all(src: IpAddr, dst: IpAddr) -> Vec<Ip> {
    let (from, to) = ((src, 4000), (dst, 80));
    let echo = if src.is_ipv4() { 8 } else { 128 };
    vec![
        packet::tcp(from, to, SYN, b"hello"),
        packet::tcp(from, to, ACK, b"hello"),
        packet::udp(from, to, b"hello"),
        packet::udp(from, to, &[7; 1400]),
        packet::sctp(from, to, b"hello"),
        packet::icmp(src, dst, echo, 77),
    ]
}

/// What no router may just hand on.
pub(super) fn for_a_router(src: IpAddr, dst: IpAddr) -> Vec<(&'static str, Ip)> {
    let whole = packet::udp((src, 4000), (dst, 80), &[7; 64]);
    let with = |change: &dyn Fn(&mut Ip)| {
        let mut changed = whole.clone();
        change(&mut changed);
        changed
    };
    let [first, later] = in_parts(whole.clone());
    let quoted = packet::udp((dst, 80), (src, 4000), b"hello").bytes();
    vec![
        ("a last hop", with(&|ip| ip.ttl = 1)),
        ("options", with(&|ip| ip.options = vec![1; 8])),
        ("a first fragment", first),
        ("a later fragment", later),
        ("an error", icmp_error(src, dst, IcmpError::NoPort, &quoted)),
    ]
}

impl World {
    pub(super) fn go_direct(&self) {
        self.go(self.router(), vxlan_mac(self.underlay[1]));
    }

    pub(super) fn router(&self) -> IpAddr {
        ip(match self.is_over_ipv6() {
            false => ROUTER,
            true => ROUTER_V6,
        })
    }

    /// The pod's addresses to which packets are delivered past the stack, by the way that leads to the second node.
    pub(super) fn delivered_to(&self) -> Vec<IpAddr> {
        let way = self.datapath.next_hop(self.underlay[1].into());
        match way.is_some_and(|way| way.is_native()) {
            true => vec![self.a.v4, self.a.v6],
            false => self.out_of_tunnels(),
        }
    }

    /// Those whose packets are taken out of tunnels for that.
    pub(super) fn out_of_tunnels(&self) -> Vec<IpAddr> {
        if kernel::unwraps_others().unwrap() {
            return vec![self.a.v4, self.a.v6];
        }
        println!("skipped: packets of the other IP version than their tunnel's, before Linux 6.3");
        vec![self.of_tunnels()]
    }

    /// The pod's address of the tunnels' IP version.
    pub(super) fn of_tunnels(&self) -> IpAddr {
        match self.is_over_ipv6() {
            true => self.a.v6,
            false => self.a.v4,
        }
    }

    fn is_over_ipv6(&self) -> bool {
        self.underlay[0].is_ipv6()
    }

    /// From the outer IP header to the inner one.
    pub(super) fn room(&self) -> usize {
        if self.is_over_ipv6() { 70 } else { 50 }
    }

    /// To the second node, past the stack.
    pub(super) fn go(&self, gateway: IpAddr, remote_mac: [u8; 6]) {
        kit::all_carry(&self.datapath, MTU);
        self.datapath.set_services(true).unwrap();
        let next = NextHop {
            gateway: gateway.into(),
            ifindex: kit::this_place().index(UPLINK).unwrap(),
            remote_mac,
            own_mac: vxlan_mac(self.underlay[0]),
        };
        self.lead(Way {
            native_v6: next.gateway.as_v4().map(|_| ip(OF_SECOND).into()),
            next,
        });
    }

    pub(super) fn lead(&self, way: Way) {
        kit::lead(UPLINK, self.underlay[1], way.next.gateway.into());
        let hops = BTreeMap::from([(Addr::from(self.underlay[1]), way)]);
        self.datapath.set_next_hops(&hops).unwrap();
    }

    /// As the pod sends it.
    pub(super) fn of_pod(&self, ip: &Ip) -> Vec<u8> {
        packet::eth(HOST_MAC, self.a.mac, ip.kind(), &ip.bytes())
    }

    pub(super) fn leaves(&self, frame: &[u8]) -> (i32, Vec<u8>, u32) {
        let ran = self
            .programs
            .run_marked("pod_out", self.a.ifindex, 0, 0, frame);
        ran.unwrap()
    }

    /// What leaves of a pod's packet, and the mark that it has.
    pub(super) fn wrapped(&self, ip: &Ip) -> (Vec<u8>, u32) {
        let (action, out, mark) = self.leaves(&self.of_pod(ip));
        assert_eq!(action, REDIRECT, "{:?}", self.datapath.drops());
        (out, mark)
    }

    /// The verdict of the uplink on what was wrapped up, and the mark that it has then.
    pub(super) fn passes_the_uplink(&self, wrapped: &[u8], mark: u32) -> (i32, u32) {
        let frame = on_the_link(wrapped);
        let (from, by) = (self.a.ifindex, self.b.ifindex);
        let ran = self
            .programs
            .run_marked("uplink_out", by, from, mark, &frame);
        let (action, _, mark) = ran.unwrap();
        (action, mark)
    }

    pub(super) fn to_the_stack(&self, ip: &Ip, what: &str) {
        let frame = self.of_pod(ip);
        let (action, out, mark) = self.leaves(&frame);
        assert_eq!((action, mark), (PASS, 0), "{what}");
        assert_eq!(out, frame, "{what}");
    }

    /// What the second node sends.
    pub(super) fn comes(&self, inner: &Ip) -> Vec<u8> {
        in_a_frame(&self.outer(&self.inner(inner)))
    }

    /// As programs send it, and over IPv4 the device.
    fn comes_without_checksum(&self, inner: &Ip) -> Vec<u8> {
        let mut outer = self.outer(&self.inner(inner));
        outer.payload[6..8].fill(0);
        in_a_frame(&outer)
    }

    /// It is left to the VXLAN device, stamped.
    pub(super) fn to_the_device(&self, frame: &[u8], what: &str) {
        let (action, out) = self.run("uplink_in", 0, frame);
        assert_eq!(action, PASS, "{what}: {:?}", self.datapath.drops());
        let stamp = 14 + self.room() - 8..14 + self.room() - 2;
        assert_ne!(out[stamp.clone()], frame[stamp.clone()], "{what}");
        let checksum = stamp.start - 16;
        assert_eq!(out[..checksum], frame[..checksum], "{what}");
        let has_one = |frame: &[u8]| frame[checksum..checksum + 2] != [0, 0];
        assert_eq!(has_one(&out), has_one(frame), "{what}");
        assert_eq!(out[stamp.end..], frame[stamp.end..], "{what}");
    }
}

pub(super) fn in_a_frame(outer: &Ip) -> Vec<u8> {
    packet::eth(HOST_MAC, [2, 0, 0, 0, 0, 2], outer.kind(), &outer.bytes())
}

/// As it is on the wire: with the EtherType that the kernel writes for the neighbour.
fn on_the_link(sent: &[u8]) -> Vec<u8> {
    let kind = if sent[14] >> 4 == 4 { IP4 } else { IP6 };
    [&sent[..12], &kind.to_be_bytes(), &sent[14..]].concat()
}

pub(super) fn less_a_hop(ip: &Ip) -> Vec<u8> {
    let ttl = ip.ttl - 1;
    Ip { ttl, ..ip.clone() }.bytes()
}

#[test]
fn what_a_pod_sends_to_another_nodes_pod_is_wrapped_up_as_the_device_does_it() {
    direct(|world| {
        for src in [world.a.v4, world.a.v6] {
            for packet in of_all(src, far(src)) {
                let (out, mark) = world.wrapped(&packet);
                assert_ne!(mark, 0);
                let seen = see(&on_the_link(&out));
                assert_eq!((seen.src, seen.dst), (world.underlay[0], world.underlay[1]));
                assert_eq!((seen.proto, seen.ttl), (UDP, 64));
                let (from, to) = seen.ports;
                assert!((32_768..61_000).contains(&from), "{from}");
                assert_eq!(to, VXLAN_PORT);
                let checksum = 14 + world.room() - 24;
                assert_eq!(out[checksum..checksum + 2], [0, 0]);
                match world.is_over_ipv6() {
                    // No flow label, as the device has none.
                    true => assert_eq!(out[14..18], [0x60, 0, 0, 0]),
                    // Free to be cut.
                    false => assert_eq!(out[14 + 6..14 + 8], [0, 0]),
                }
                let macs = [1, 0].map(|node| vxlan_mac(world.underlay[node]));
                let inner = packet::eth(macs[0], macs[1], packet.kind(), &less_a_hop(&packet));
                assert_eq!(seen.data, [&[8, 0, 0, 0, 0, 0, 1, 0], &inner[..]].concat());
            }
        }
    });
}

#[test]
fn flows_have_ports_of_their_own_and_keep_them() {
    direct(|world| {
        let port = |from: u16| {
            let packet = packet::udp((world.a.v4, from), (far(world.a.v4), 80), b"hello");
            let out = world.wrapped(&packet).0;
            see(&on_the_link(&out)).ports.0
        };
        let ports: std::collections::BTreeSet<u16> = (4000..4064).map(port).collect();
        assert!(ports.len() > 56, "{ports:?}");
        assert_eq!(port(4000), port(4000));
    });
}

#[test]
fn congestion_is_told_outside_and_inside() {
    direct(|world| {
        for src in [world.a.v4, world.a.v6] {
            for (inside, outside) in [(0u8, 0u8), (1, 1), (2, 2), (3, 2), (0xb8, 0), (0xba, 2)] {
                let mut frame = world.of_pod(&packet::udp((src, 1), (far(src), 2), b"hello"));
                set_service(&mut frame, inside);
                let (action, out, _) = world.leaves(&frame);
                assert_eq!(action, REDIRECT);
                assert_eq!(service(&on_the_link(&out)), outside, "{inside:#x}");
            }
        }
        for src in world.delivered_to() {
            // RFC 6040 §4.2: what is marked outside is marked inside, and dropped if its sender takes no mark.
            for (inside, outside, becomes) in [
                (0u8, 0u8, Some(0u8)),
                (0, 1, Some(0)),
                (0, 2, Some(0)),
                (0, 3, None),
                (1, 0, Some(1)),
                (1, 1, Some(1)),
                (1, 2, Some(1)),
                (1, 3, Some(3)),
                (2, 0, Some(2)),
                // The device makes ECT(1) of it.
                (2, 1, None),
                (2, 2, Some(2)),
                (2, 3, Some(3)),
                (3, 0, Some(3)),
                (3, 1, Some(3)),
                (3, 3, Some(3)),
                (0xb8, 3, None),
                (0xba, 3, Some(0xbb)),
                // Whatever a router has made of the rest.
                (0, 0xbb, None),
                (2, 0xb8, Some(2)),
                (2, 0xbb, Some(3)),
                (0xba, 0x2f, Some(0xbb)),
            ] {
                let packet = packet::udp((far(src), 1), (src, 2), b"hello");
                let mut frame = world.comes(&packet);
                set_service(&mut frame[world.room()..], inside);
                set_service(&mut frame, outside);
                let Some(becomes) = becomes else {
                    world.to_the_device(&frame, "congestion");
                    continue;
                };
                let (action, out) = world.run("uplink_in", 0, &frame);
                assert_eq!(action, REDIRECT, "{inside:#x} in {outside}");
                let mut expected =
                    packet::eth(world.a.mac, HOST_MAC, packet.kind(), &less_a_hop(&packet));
                set_service(&mut expected, becomes);
                assert_eq!(out, expected, "{inside:#x} in {outside}");
            }
        }
    });
}

/// Traffic class or type of service.
fn service(frame: &[u8]) -> u8 {
    match frame[14] >> 4 {
        4 => frame[15],
        _ => frame[14] << 4 | frame[15] >> 4,
    }
}

fn set_service(frame: &mut [u8], service: u8) {
    if frame[12..14] == IP4.to_be_bytes() {
        frame[15] = service;
        frame[24..26].fill(0);
        let checksum = !sum(&[&frame[14..34]]);
        frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    } else {
        frame[14] = 0x60 | service >> 4;
        frame[15] = service << 4;
    }
}

#[test]
fn what_comes_for_a_pod_is_put_into_it() {
    direct_if_it_can_be(|world| {
        for dst in world.delivered_to() {
            for packet in of_all(far(dst), dst) {
                let received = || {
                    world
                        .datapath
                        .pod_counters(world.a.ifindex)
                        .unwrap()
                        .unwrap()
                        .rx_packets
                };
                let before = received();
                let expected =
                    packet::eth(world.a.mac, HOST_MAC, packet.kind(), &less_a_hop(&packet));
                for frame in [world.comes(&packet), world.comes_without_checksum(&packet)] {
                    let (action, out) = world.run("uplink_in", 0, &frame);
                    assert_eq!(action, REDIRECT, "{packet:?}: {:?}", world.datapath.drops());
                    assert_eq!(out, expected);
                }
                assert_eq!(received(), before + 2);
            }
        }
    });
}

#[test]
fn a_router_has_its_part() {
    direct(|world| {
        for near in [world.a.v4, world.a.v6] {
            for (what, packet) in for_a_router(near, far(near)) {
                world.to_the_stack(&packet, what);
            }
            for (what, packet) in for_a_router(far(near), near) {
                world.to_the_device(&world.comes(&packet), what);
                world.to_the_device(&world.comes_without_checksum(&packet), what);
            }
            let header = if near.is_ipv4() { 28 } else { 48 };
            let of = |len: usize| packet::udp((near, 1), (far(near), 2), &vec![7; len - header]);
            world.wrapped(&of(MTU as usize));
            world.to_the_stack(&of(MTU as usize + 1), "too large");
        }
        // For the node itself.
        let gateway = packet::udp((ip("10.2.0.7"), 1), (ip("10.1.0.1"), 2), b"hello");
        world.to_the_device(&world.comes(&gateway), "the gateway");
        // Nodes that nobody knows the way to, addresses of nobody.
        for dst in ["10.3.0.7", "10.1.0.99", "203.0.113.7"] {
            let packet = packet::udp((world.a.v4, 1), (ip(dst), 2), b"hello");
            world.to_the_stack(&packet, dst);
        }
        // To another MAC address than the device's.
        let mut frame = world.comes(&packet::udp((ip("10.2.0.7"), 1), (world.a.v4, 2), b"hello"));
        frame[world.room()] ^= 2;
        world.to_the_device(&frame, "another MAC address");
        // To another machine, which is heard here where the link is promiscuous.
        let mut frame = world.comes(&packet::udp((ip("10.2.0.7"), 1), (world.a.v4, 2), b"hello"));
        frame[5] ^= 1;
        world.to_the_device(&frame, "another machine");
    });
}

#[test]
fn nothing_goes_past_the_stack_while_others_translate() {
    direct(|world| {
        let there = packet::udp((world.a.v4, 1), (far(world.a.v4), 2), b"hello");
        let back = packet::udp((far(world.a.v4), 2), (world.a.v4, 1), b"hello");
        for translation in [
            Translation::Off,
            Translation::Handover,
            Translation::Draining,
        ] {
            world.datapath.set_services(translation).unwrap();
            world.to_the_stack(&there, "others translate");
            world.to_the_device(&world.comes(&back), "others translate");
        }
        world.datapath.set_services(true).unwrap();
        world.wrapped(&there);
        world.datapath.set_next_hops(&BTreeMap::new()).unwrap();
        world.to_the_stack(&there, "no way");
        world.to_the_device(&world.comes(&back), "no way");
    });
}

/// Nobody tells the programs that a route has changed while no agent runs.
#[test]
fn a_way_that_is_no_longer_the_kernels_is_not_taken() {
    direct(|world| {
        let there = packet::udp((world.a.v4, 1), (far(world.a.v4), 2), b"hello");
        let frame = world.of_pod(&there);
        let goes = || world.leaves(&frame).0;
        let (here, node) = (kit::this_place(), world.underlay[1]);
        let other = if node.is_ipv4() {
            "192.0.2.253"
        } else {
            "2001:db8:1::fd"
        };
        let (router, by) = (world.router(), &world.b.link);
        let known = format!("neigh replace {router} lladdr 02:00:00:00:00:09 dev {by}");
        kit::ip(&here, &format!("{known} nud permanent"));
        let mut ways = vec![
            ("", format!(" via {other} dev uplink onlink")),
            ("", " dev uplink".into()),
            ("unreachable ", String::new()),
            ("blackhole ", String::new()),
        ];
        // IPv6 refuses a gateway that is on another link.
        if node.is_ipv4() {
            ways.push(("", format!(" via {router} dev {by} onlink")));
        }
        for (kind, way) in ways {
            kit::lead(UPLINK, node, router);
            assert_eq!(goes(), REDIRECT);
            let route = format!("{kind}{node}");
            kit::ip(&here, &format!("route replace {route}{way}"));
            kit::eventually(&format!("{kind}{way}"), || goes() == PASS);
            kit::ip(&here, &format!("route del {route}"));
        }
        kit::lead(UPLINK, node, router);
        assert_eq!(goes(), REDIRECT);
    });
}

#[test]
fn a_forged_source_is_none_here_either() {
    direct(|world| {
        for (src, dst) in [
            ("10.3.0.7", world.a.v4),
            ("10.1.0.6", world.a.v4),
            ("fd00:3::7", world.a.v6),
        ] {
            let inner = packet::udp((ip(src), 1), (dst, 2), b"hello");
            world.dropped("uplink_in", &world.comes(&inner), TunnelInner, src);
        }
        let inner = packet::udp((far(world.a.v4), 1), (world.a.v4, 2), b"hello");
        let mut outer = world.outer(&world.inner(&inner));
        outer.src = ip(match world.is_over_ipv6() {
            false => "192.0.2.77",
            true => "2001:db8:1::77",
        });
        world.dropped("uplink_in", &frame(&outer), TunnelSource, "of nobody");
        // And a pod says who it is.
        let inner = packet::udp((world.b.v4, 1), (far(world.a.v4), 2), b"hello");
        world.dropped(
            "pod_out",
            &world.of_pod(&inner),
            SourceAddr,
            "of another pod",
        );
    });
}

/// What is checked is behind an extension header outside, and what would be delivered inside of that.
#[test]
fn nothing_is_delivered_that_another_packet_was_checked_for() {
    direct(|world| {
        let honest = packet::udp((far(world.a.v4), 1), (world.a.v4, 2), b"hello");
        let forged = packet::udp((ip("10.3.0.7"), 1), (world.a.v4, 2), b"hello").bytes();
        let mut outer = world.outer(&world.inner(&honest));
        if world.is_over_ipv6() {
            // From the end of the fixed header to the inner MAC address, EtherType, IP header.
            outer.options = vec![0; 96];
            outer.options[16..22].copy_from_slice(&vxlan_mac(world.underlay[0]));
            outer.options[28..30].copy_from_slice(&IP4.to_be_bytes());
            outer.options[30..30 + forged.len()].copy_from_slice(&forged);
        } else {
            outer.options = vec![1; 8];
        }
        let (action, out) = world.run("uplink_in", 0, &in_a_frame(&outer));
        assert_eq!(action, PASS, "{:?}", world.datapath.drops());
        assert_eq!(out.len(), in_a_frame(&outer).len());
    });
}

#[test]
fn the_uplink_knows_what_is_made_here_by_its_mark_alone() {
    direct(|world| {
        let packet = packet::udp((world.a.v4, 1), (far(world.a.v4), 2), b"hello");
        let (out, mark) = world.wrapped(&packet);
        let run = |mark| world.passes_the_uplink(&out, mark);
        assert_eq!(run(mark), (PASS, 0));
        for other in [0, 1, mark ^ 2, mark & 0xffff] {
            let before = kit::dropped(&world.datapath, EncapProhibited);
            assert_eq!(run(other), (DROP, other));
            assert_eq!(kit::dropped(&world.datapath, EncapProhibited), before + 1);
        }
    });
}

#[test]
fn what_the_stack_translates_for_another_nodes_pod_keeps_to_it() {
    direct(|world| {
        let uplink = kit::leads_out(world.b.ifindex);
        world.datapath.set_uplinks(&[uplink]).unwrap();
        for (proto, near) in [(TCP, world.a.v4), (UDP, world.a.v6), (SCTP, world.a.v6)] {
            let of = |src: (IpAddr, u16), dst: (IpAddr, u16)| match proto {
                TCP => packet::tcp(src, dst, SYN, b"hello"),
                UDP => packet::udp(src, dst, b"hello"),
                _ => packet::sctp(src, dst, b"hello"),
            };
            // Came by a port of the node, which led to the pod, outside of a tunnel.
            let there = of((far(near), 4000), (near, 80));
            let arrived = packet::eth(world.a.mac, HOST_MAC, there.kind(), &there.bytes());
            let answer = of((near, 80), (far(near), 4000));
            world.wrapped(&answer);
            assert_eq!(world.run("pod_in", uplink.0, &arrived).0, PASS);
            world.to_the_stack(&answer, "an answer");
            world.wrapped(&of((near, 81), (far(near), 4000)));
        }
    });
}

#[test]
fn what_a_syn_announces_is_lowered_on_both_ways() {
    direct(|world| {
        let announce = |src, dst| packet::tcp_with((src, 1), (dst, 2), SYN, &[2, 4, 0xff, 0x00]);
        for near in [world.a.v4, world.a.v6] {
            let most = MTU as u16 - if near.is_ipv4() { 40 } else { 60 };
            let out = world.wrapped(&announce(near, far(near))).0;
            assert_eq!(out[out.len() - 2..], most.to_be_bytes());
        }
        for near in world.delivered_to() {
            let most = MTU as u16 - if near.is_ipv4() { 40 } else { 60 };
            let (_, out) = world.run("uplink_in", 0, &world.comes(&announce(far(near), near)));
            see(&out);
            assert_eq!(out[out.len() - 2..], most.to_be_bytes());
        }
    });
}
