//! Without a tunnel: `pod_out` sends what goes to a pod of another node as it is, `uplink_in` takes what comes from one.

use super::{
    direct::{MTU, OF_SECOND, far, for_a_router, less_a_hop, of_all},
    *,
};
use sinabro_agent::datapath::Mtus;
use sinabro_common::{abi::next_hop::NATIVE, api::Mac};

/// The VXLAN device.
const DEVICE: u32 = 4712;
const DEVICE_MAC: [u8; 6] = [2, 0, 0, 9, 9, 9];

/// The second node is reached natively, and sends so.
pub(super) fn native(test: impl Fn(&World) + Sync) {
    for remembers in [false, true] {
        both(|world| {
            world.go(world.underlay[1], NATIVE);
            world.take(true);
            if remembers {
                world.remember_flows();
            }
            test(world);
        });
    }
}

impl World {
    pub fn take(&self, is_native: bool) {
        let device = is_native.then_some((DEVICE, Mac(DEVICE_MAC)));
        self.datapath.set_native(device).unwrap();
    }

    /// It goes into the VXLAN device as what came out of a tunnel.
    fn given_to_the_device(&self, frame: &[u8], what: &str) {
        let (action, out) = self.run("uplink_in", 0, frame);
        assert_eq!(action, REDIRECT, "{what}: {:?}", self.datapath.drops());
        assert_eq!(out[..6], DEVICE_MAC, "{what}");
        assert_eq!(out[12..], frame[12..], "{what}");
        self.passes("overlay_in", &out, what);
    }

    fn refused(&self, frame: &[u8], what: &str) {
        self.dropped("uplink_in", frame, PodSource, what);
    }
}

/// As it is on the wire.
pub fn on_the_wire(ip: &Ip) -> Vec<u8> {
    packet::eth(HOST_MAC, [2, 0, 0, 0, 0, 2], ip.kind(), &ip.bytes())
}

#[test]
fn what_a_pod_sends_to_another_nodes_pod_is_as_it_was() {
    native(|world| {
        for src in [world.a.v4, world.a.v6] {
            for packet in of_all(src, far(src)) {
                let (out, mark) = world.wrapped(&packet);
                assert_eq!(out[14..], less_a_hop(&packet));
                // Which the kernel gives its Ethernet header, and the uplink lets pass.
                let kind = packet.kind().to_be_bytes();
                let out = [&out[..12], &kind, &out[14..]].concat();
                assert_eq!(world.passes_the_uplink(&out, mark), (PASS, 0));
            }
            for (what, packet) in for_a_router(src, far(src)) {
                world.to_the_stack(&packet, what);
            }
        }
    });
}

/// The kernel gives IPv6 packets to no IPv4 address.
#[test]
fn ipv6_packets_need_an_ipv6_address_on_the_link() {
    native(|world| {
        let of_ipv4 = world.underlay[1].is_ipv4();
        let mut way = world.datapath.next_hop(world.underlay[1].into()).unwrap();
        way.native_v6 = None;
        world.lead(way);
        let packet = packet::udp((world.a.v6, 1), (far(world.a.v6), 2), b"hello");
        match of_ipv4 {
            true => world.to_the_stack(&packet, "no IPv6 address"),
            false => assert_eq!(world.wrapped(&packet).0[14..], less_a_hop(&packet)),
        }
        let packet = packet::udp((world.a.v4, 1), (far(world.a.v4), 2), b"hello");
        assert_eq!(world.wrapped(&packet).0[14..], less_a_hop(&packet));
    });
}

#[test]
fn what_comes_from_another_nodes_pod_is_put_into_this_ones() {
    native(|world| {
        for dst in [world.a.v4, world.a.v6] {
            for packet in of_all(far(dst), dst) {
                let (action, out) = world.run("uplink_in", 0, &on_the_wire(&packet));
                assert_eq!(action, REDIRECT, "{:?}", world.datapath.drops());
                let expected =
                    packet::eth(world.a.mac, HOST_MAC, packet.kind(), &less_a_hop(&packet));
                assert_eq!(out, expected);
            }
        }
    });
}

#[test]
fn what_is_not_delivered_past_the_stack_comes_out_of_the_device() {
    native(|world| {
        for dst in [world.a.v4, world.a.v6] {
            for (what, packet) in for_a_router(far(dst), dst) {
                world.given_to_the_device(&on_the_wire(&packet), what);
            }
            let packet = packet::udp((far(dst), 1), (dst, 2), b"hello");
            // A node with `dataPath: kernel`, or one where others translate.
            world.datapath.set_next_hops(&BTreeMap::new()).unwrap();
            world.given_to_the_device(&on_the_wire(&packet), "no way back");
            world.go(world.underlay[1], NATIVE);
            world.datapath.set_services(false).unwrap();
            world.given_to_the_device(&on_the_wire(&packet), "others translate");
            world.datapath.set_services(true).unwrap();
        }
    });
}

#[test]
fn nobody_but_another_nodes_pod_speaks_so_and_to_this_nodes_alone() {
    native(|world| {
        for dst in [world.a.v4, world.a.v6] {
            let of = |src: IpAddr| on_the_wire(&packet::udp((src, 1), (dst, 2), b"hello"));
            // A pod of this node, and this node itself.
            for own in ["10.1.0.6", "10.1.0.1", "fd00:1::6", "fd00:1::1"].map(ip) {
                if own.is_ipv4() == dst.is_ipv4() {
                    world.refused(&of(own), &own.to_string());
                }
            }
            // For a pod of a third node.
            let third = ip(if dst.is_ipv4() {
                "10.3.0.7"
            } else {
                "fd00:3::7"
            });
            let through = packet::udp((far(dst), 1), (third, 2), b"hello");
            world.refused(&on_the_wire(&through), "for a third node");
            // Heard where the link is promiscuous.
            let mut other = of(far(dst));
            other[5] ^= 1;
            world.refused(&other, "for another machine");
            // Where it is not on.
            world.take(false);
            world.refused(&of(far(dst)), "not taken");
            world.take(true);
            assert_eq!(world.run("uplink_in", 0, &of(far(dst))).0, REDIRECT);
        }
    });
}

#[test]
fn a_pod_cannot_have_its_packet_come_out_of_the_device() {
    native(|world| {
        // By the stamp alone is a packet known there.
        let packet = packet::udp((far(world.a.v4), 1), (world.a.v4, 2), b"hello");
        let forged = packet::eth(
            DEVICE_MAC,
            [2, 0, 0, 0, 0, 2],
            packet.kind(),
            &packet.bytes(),
        );
        world.dropped("overlay_in", &forged, TunnelUnchecked, "no stamp");
    });
}

const NEIGHBOURS: [&str; 2] = ["192.0.2.2", OF_SECOND];

/// What the stack has given to the VXLAN device is sent as it is, whatever it is.
#[test]
fn what_goes_by_the_stack_needs_no_tunnel_either() {
    native(|world| {
        let here = kit::this_place();
        let frame = |ip: &Ip| {
            let [to, from] = [1, 0].map(|node| vxlan_mac(world.underlay[node]));
            packet::eth(to, from, ip.kind(), &ip.bytes())
        };
        let leaves = |from: u32, frame: &[u8]| {
            let (programs, by) = (&world.programs, world.b.ifindex);
            let ran = programs.run_marked("overlay_out", by, from, 0, frame);
            ran.unwrap()
        };
        for gateway in ["10.1.0.1", "fd00:1::1"].map(ip) {
            for at in NEIGHBOURS {
                let mac = "02:00:00:00:00:02";
                let known = format!("neigh replace {at} lladdr {mac} dev uplink nud permanent");
                kit::ip(&here, &known);
            }
            let far = far(gateway);
            let others = for_a_router(gateway, far)
                .into_iter()
                .map(|(_, packet)| packet);
            let ours: Vec<_> = of_all(gateway, far).into_iter().chain(others).collect();
            for packet in &ours {
                let sent = frame(packet);
                let (action, out, mark) = leaves(0, &sent);
                assert_eq!(action, REDIRECT, "{:?}", world.datapath.drops());
                assert_eq!(out[12..], sent[12..]);
                assert_eq!(
                    world.passes_the_uplink(&on_the_wire(packet), mark),
                    (PASS, 0)
                );
            }
            let stays_of = |from: u32, src: IpAddr, dst: IpAddr, what: &str| {
                let sent = frame(&packet::udp((src, 1), (dst, 2), b"hello"));
                assert_eq!(leaves(from, &sent), (PASS, sent.clone(), 0), "{what}");
            };
            let stays = |src, dst, what: &str| stays_of(0, src, dst, what);
            let [third, outside] = match gateway {
                IpAddr::V4(_) => ["10.3.0.7", "203.0.113.7"],
                IpAddr::V6(_) => ["fd00:3::7", "2001:db8:9::7"],
            }
            .map(ip);
            stays(gateway, third, "a node that is sent tunnels");
            stays(gateway, outside, "nobody's pod");
            // Handed on by this node.
            if world.programs.know_where_from() {
                stays_of(world.a.ifindex, outside, far, "of a stranger");
                stays_of(world.a.ifindex, third, far, "of another node's pod");
            }
            world.datapath.set_next_hops(&BTreeMap::new()).unwrap();
            stays(gateway, far, "no way");
            world.go(world.underlay[1], NATIVE);
            world.take(false);
            stays(gateway, far, "a node that takes none");
            world.take(true);
            // Who would have to be asked for first: the stack does that better.
            let of_v4 = gateway.is_ipv4() && world.underlay[1].is_ipv4();
            let neighbour = NEIGHBOURS[usize::from(!of_v4)];
            kit::ip(&here, &format!("neigh del {neighbour} dev uplink"));
            stays(gateway, far, "an unknown neighbour");
        }
    });
}

/// What the agent has marked to see whether it gets to a node without a tunnel goes so, or nowhere; all else is in tunnels meanwhile.
#[test]
fn what_is_to_find_out_whether_a_node_is_reached_is_in_no_tunnel() {
    native(|world| {
        let here = kit::this_place();
        let mark = world.datapath.mark_of_requests().unwrap().unwrap();
        let leaves = |mark: u32, packet: &Ip| {
            let [to, from] = [1, 0].map(|node| vxlan_mac(world.underlay[node]));
            let frame = packet::eth(to, from, packet.kind(), &packet.bytes());
            let (programs, by) = (&world.programs, world.b.ifindex);
            programs
                .run_marked("overlay_out", by, 0, mark, &frame)
                .unwrap()
        };
        let in_tunnels = vxlan_mac(world.underlay[1]);
        for gateway in ["10.1.0.1", "fd00:1::1"].map(ip) {
            for at in NEIGHBOURS {
                let mac = "02:00:00:00:00:02";
                let known = format!("neigh replace {at} lladdr {mac} dev uplink nud permanent");
                kit::ip(&here, &known);
            }
            let request = if gateway.is_ipv4() { 8 } else { 128 };
            let echo = packet::icmp(gateway, far(gateway), request, 7);
            let is_sent = |mark| leaves(mark, &echo).0;
            world.go(world.underlay[1], in_tunnels);
            assert_eq!(
                [is_sent(0), is_sent(mark), is_sent(mark ^ 2)],
                [PASS, REDIRECT, PASS]
            );
            let (_, _, left) = leaves(mark, &echo);
            assert_eq!(
                world.passes_the_uplink(&on_the_wire(&echo), left),
                (PASS, 0)
            );
            // As what is sent so in any case.
            world.go(world.underlay[1], NATIVE);
            assert_eq!([is_sent(0), is_sent(mark)], [REDIRECT, REDIRECT]);
            let drops = world.datapath.drops().unwrap();
            world.go(world.router(), in_tunnels);
            assert_eq!([is_sent(0), is_sent(mark)], [PASS, DROP], "beyond a router");
            world.datapath.set_next_hops(&BTreeMap::new()).unwrap();
            assert_eq!([is_sent(0), is_sent(mark)], [PASS, DROP], "no way");
            world.go(world.underlay[1], in_tunnels);
            for at in NEIGHBOURS {
                kit::ip(&here, &format!("neigh del {at} dev uplink"));
            }
            assert_eq!(
                [is_sent(0), is_sent(mark)],
                [PASS, DROP],
                "an unknown neighbour"
            );
            // Nobody's loss.
            assert_eq!(world.datapath.drops().unwrap(), drops);
        }
    });
}

/// Of the uplink, which pods have in their routes.
const OF_UPLINK: u32 = 1500;

impl World {
    fn carries_more_without_a_tunnel(&self) {
        let mtus = Mtus {
            tunnels: MTU,
            uplinks: OF_UPLINK,
        };
        self.datapath.set_mtus(mtus).unwrap();
    }

    fn goes_in_tunnels(&self) {
        self.go_direct();
        self.carries_more_without_a_tunnel();
    }

    fn goes_natively(&self) {
        self.go(self.underlay[1], NATIVE);
        self.carries_more_without_a_tunnel();
    }
}

/// A UDP packet of a size.
fn of_size(src: IpAddr, dst: IpAddr, size: u32) -> Ip {
    let headers = if src.is_ipv4() { 28 } else { 48 };
    packet::udp((src, 1), (dst, 2), &vec![7; size as usize - headers])
}

#[test]
fn what_is_in_no_tunnel_is_as_large_as_the_uplink_carries() {
    native(|world| {
        world.carries_more_without_a_tunnel();
        for near in [world.a.v4, world.a.v6] {
            let full = of_size(near, far(near), OF_UPLINK);
            assert_eq!(world.wrapped(&full).0[14..], less_a_hop(&full));
            let larger = of_size(near, far(near), OF_UPLINK + 1);
            world.to_the_stack(&larger, "larger than the uplink");
            let arrives = on_the_wire(&of_size(far(near), near, OF_UPLINK));
            assert_eq!(world.run("uplink_in", 0, &arrives).0, REDIRECT);
        }
        if world.datapath.wraps() {
            world.goes_in_tunnels();
            for near in [world.a.v4, world.a.v6] {
                world.wrapped(&of_size(near, far(near), MTU));
                let larger = of_size(near, far(near), MTU + 1);
                world.to_the_stack(&larger, "larger than a tunnel's");
            }
        }
    });
}

/// Larger than any.
const ANNOUNCED: [u8; 4] = [2, 4, 0xff, 0xd7];

pub(super) fn syn(src: IpAddr, dst: IpAddr) -> Ip {
    packet::tcp_with((src, 4000), (dst, 80), SYN, &ANNOUNCED)
}

/// The size of packets that the SYN of a frame allows, if its first option says that of segments.
pub(super) fn allowed(frame: &[u8]) -> u32 {
    let (is_v4, header) = match frame[14] >> 4 {
        4 => (true, 20),
        _ => (false, 40),
    };
    let option = &frame[14 + header + 20..][..4];
    assert_eq!(option[..2], ANNOUNCED[..2], "{frame:x?}");
    let segment = u32::from(u16::from_be_bytes([option[2], option[3]]));
    segment + if is_v4 { 40 } else { 60 }
}

#[test]
fn a_syn_announces_what_the_way_of_the_answer_carries() {
    native(|world| {
        world.carries_more_without_a_tunnel();
        for near in [world.a.v4, world.a.v6] {
            let leaves = |dst: IpAddr| {
                let (action, out, _) = world.leaves(&world.of_pod(&syn(near, dst)));
                (action, allowed(&out))
            };
            let arrives = |frame: &[u8], what: &str| {
                let (action, out) = world.run("uplink_in", 0, frame);
                assert_eq!(action, REDIRECT, "{what}: {:?}", world.datapath.drops());
                allowed(&out)
            };
            let outside = ip(if near.is_ipv4() {
                "203.0.113.7"
            } else {
                "2001:db8:9::7"
            });
            let came = on_the_wire(&syn(far(near), near));
            assert_eq!(leaves(far(near)), (REDIRECT, OF_UPLINK));
            assert_eq!(leaves(outside), (PASS, OF_UPLINK));
            assert_eq!(arrives(&came, "without a tunnel"), OF_UPLINK);
            // What this node's stack has to see may go on in a tunnel.
            world.datapath.set_services(false).unwrap();
            assert_eq!(leaves(far(near)), (PASS, MTU));
            assert_eq!(arrives(&came, "into the device"), MTU);
            world.goes_natively();
            // By the stack, out of the device and by an uplink.
            if world.programs.know_where_from() {
                let (device, uplink) = (world.b.ifindex, world.a.ifindex);
                world
                    .datapath
                    .set_native(Some((device, Mac(DEVICE_MAC))))
                    .unwrap();
                for (by, carried) in [(device, MTU), (uplink, OF_UPLINK)] {
                    let (action, out) = world.run("pod_in", by, &came);
                    assert_eq!((action, allowed(&out)), (PASS, carried));
                }
                world.take(true);
            }
            // In a tunnel, to which the answer is in none.
            if world.out_of_tunnels().contains(&near) {
                let came_in_one = world.comes(&syn(far(near), near));
                assert_eq!(arrives(&came_in_one, "in a tunnel"), MTU);
            }
            // In none, and the answer is in one.
            world.goes_in_tunnels();
            assert_eq!(arrives(&came, "back in a tunnel"), MTU);
            if world.datapath.wraps() {
                let (out, _) = world.wrapped(&syn(near, far(near)));
                assert_eq!(allowed(&out[world.room()..]), MTU);
            }
            world.goes_natively();
        }
    });
}
