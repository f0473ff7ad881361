//! Without a tunnel: `pod_out` sends what goes to a pod of another node as it is, `uplink_in` takes what comes from one.

use super::{
    direct::{far, for_a_router, less_a_hop, of_all},
    *,
};
use sinabro_common::{abi::next_hop::NATIVE, api::Mac};

/// The VXLAN device.
const DEVICE: u32 = 4712;
const DEVICE_MAC: [u8; 6] = [2, 0, 0, 9, 9, 9];

/// The second node is reached natively, and sends so.
fn native(test: impl Fn(&World) + Sync) {
    both(|world| {
        world.go(world.underlay[1], NATIVE);
        world.take(true);
        test(world);
    });
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
            // A node with `overlay: kernel`, or one where others translate.
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
