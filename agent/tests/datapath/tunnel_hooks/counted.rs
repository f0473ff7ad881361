//! What goes between this node and each other one, counted by its way.

use super::{direct::far, native::on_the_wire, *};
use aya::maps::{Map, MapData, PerCpuHashMap};
use sinabro_agent::datapath::PeerPackets;
use sinabro_common::{
    abi::{
        Addr,
        counters::{NativeCounters, PeerCounters},
        next_hop::NATIVE,
    },
    names,
};
use std::{net::Ipv4Addr, path::Path};

const NONE: PeerCounters = PeerCounters {
    direct_tx: 0,
    direct_rx: 0,
    kernel_tx: 0,
    kernel_rx: 0,
};

fn packets(datapath: &Datapath, tunnel: IpAddr) -> Option<PeerPackets> {
    let all = datapath.peer_packets().unwrap();
    all.get(&Addr::from(tunnel)).copied()
}

fn counted(datapath: &Datapath, tunnel: IpAddr) -> Option<PeerCounters> {
    packets(datapath, tunnel).map(|packets| packets.tunnels)
}

/// Of all together, also those that are gone.
fn sum_of_all(datapath: &Datapath) -> PeerPackets {
    let mut sum = PeerPackets::default();
    for packets in datapath.peer_packets().unwrap().into_values() {
        sum += packets;
    }
    sum
}

fn sum(datapath: &Datapath) -> PeerCounters {
    sum_of_all(datapath).tunnels
}

impl World {
    fn second(&self) -> PeerCounters {
        counted(&self.datapath, self.underlay[1]).unwrap()
    }

    /// As the VXLAN device sends it to a node.
    fn of_device(&self, to: IpAddr) -> Vec<u8> {
        let inner = self.inner(&packet::udp((self.a.v4, 1), (ip("10.2.0.7"), 2), b"hello"));
        let mut outer = self.outer(&inner);
        (outer.src, outer.dst) = (self.underlay[0], to);
        frame(&outer)
    }
}

#[test]
fn each_way_is_counted_and_nothing_twice() {
    direct::direct(|world| {
        for near in world.delivered_to() {
            let before = world.second();
            let there = packet::udp((near, 1), (far(near), 2), b"hello");
            let back = packet::udp((far(near), 2), (near, 1), b"hello");
            let (out, mark) = world.wrapped(&there);
            let direct_tx = before.direct_tx + 1;
            assert_eq!(
                world.second(),
                PeerCounters {
                    direct_tx,
                    ..before
                }
            );
            // What is made here passes the uplink, too.
            assert_eq!(world.passes_the_uplink(&out, mark).0, PASS);
            assert_eq!(
                world.second(),
                PeerCounters {
                    direct_tx,
                    ..before
                }
            );
            assert_eq!(world.run("uplink_in", 0, &world.comes(&back)).0, REDIRECT);
            let expected = PeerCounters {
                direct_tx,
                direct_rx: before.direct_rx + 1,
                ..before
            };
            assert_eq!(world.second(), expected);
            // What is left to the stack is counted where its device sends it.
            let last_hop = Ip { ttl: 1, ..there };
            world.to_the_stack(&last_hop, "a last hop");
            assert_eq!(world.second(), expected);
            world.to_the_device(&world.comes(&Ip { ttl: 1, ..back }), "a last hop");
            let kernel_rx = before.kernel_rx + 1;
            assert_eq!(
                world.second(),
                PeerCounters {
                    kernel_rx,
                    ..expected
                }
            );
        }
        assert_eq!(counted(&world.datapath, world.underlay[2]), Some(NONE));
    });
}

#[test]
fn the_devices_packets_are_counted_on_both_ways() {
    both(|world| {
        let own = world.of_device(world.underlay[1]);
        world.passes("uplink_out", &own, "the device's");
        let expected = PeerCounters {
            kernel_tx: 1,
            ..NONE
        };
        assert_eq!(world.second(), expected);
        // By another address of the node it is the same node.
        if world.underlay[0].is_ipv4() {
            world.passes("uplink_out", &world.of_device(ip(SECOND_OF_SECOND)), "");
            assert_eq!(world.second().kernel_tx, 2);
        }
        let before = world.second();
        let inner = world.inner(&from_to(ip("10.2.0.7"), world.a.v4));
        world.admitted(&world.outer(&inner), &inner, "honest");
        let expected = PeerCounters {
            kernel_rx: 1,
            ..before
        };
        assert_eq!(world.second(), expected);
        // What is dropped is counted as that alone.
        let forged = world.inner(&from_to(ip("10.3.0.7"), world.a.v4));
        let forged = frame(&world.outer(&forged));
        world.dropped("uplink_in", &forged, TunnelInner, "forged");
        if !world.programs.skipped() {
            let forwarded = world.run("uplink_out", world.a.ifindex, &own);
            assert_eq!(forwarded.0, DROP);
        }
        assert_eq!(world.second(), expected);
        assert_eq!(sum(&world.datapath), expected);
    });
}

#[test]
fn counts_outlive_agents_and_their_sum_outlives_nodes() {
    both(|world| {
        for &node in &world.underlay[1..] {
            world.passes("uplink_out", &world.of_device(node), "the device's");
        }
        let of = |kernel_tx| PeerCounters { kernel_tx, ..NONE };
        let seen = |datapath: &Datapath| [1, 2].map(|at| counted(datapath, world.underlay[at]));
        let expect = |datapath: &Datapath, each| {
            assert_eq!(seen(datapath), each);
            assert_eq!(sum(datapath), of(2));
        };
        expect(&kit::load(), [Some(of(1)), Some(of(1))]);
        world.know(2);
        expect(&world.datapath, [Some(of(1)), None]);
        world.know(3);
        expect(&world.datapath, [Some(of(1)), Some(NONE)]);
        // Nodes go while no agent is there.
        let next = kit::load();
        world.tell(&next, 1);
        expect(&next, [None, None]);
    });
}

#[test]
fn what_is_in_no_tunnel_is_counted_by_itself() {
    let native = |tx, rx| NativeCounters { tx, rx };
    both(|world| {
        world.go(world.underlay[1], NATIVE);
        world.take(true);
        let there = packet::udp((world.a.v4, 1), (far(world.a.v4), 2), b"hello");
        let back = packet::udp((far(world.a.v4), 2), (world.a.v4, 1), b"hello");
        world.wrapped(&there);
        assert_eq!(world.run("uplink_in", 0, &on_the_wire(&back)).0, REDIRECT);
        let second = world.underlay[1];
        let expected = PeerPackets {
            tunnels: NONE,
            native: native(1, 1),
        };
        assert_eq!(packets(&world.datapath, second), Some(expected));
        // What comes so and goes on by the device is the kernel's.
        let last_hop = on_the_wire(&Ip { ttl: 1, ..back });
        assert_eq!(world.run("uplink_in", 0, &last_hop).0, REDIRECT);
        let kernel_rx = 1;
        let expected = PeerPackets {
            tunnels: PeerCounters { kernel_rx, ..NONE },
            ..expected
        };
        assert_eq!(packets(&world.datapath, second), Some(expected));
        // A third node is counted, too, an agent that begins goes on counting, and what was counted stays in the sum.
        assert_eq!(
            packets(&world.datapath, world.underlay[2]),
            Some(PeerPackets::default())
        );
        let next = kit::load();
        assert_eq!(packets(&next, second), Some(expected));
        world.tell(&next, 1);
        assert_eq!(packets(&next, second), None);
        assert_eq!(sum_of_all(&next), expected);
        world.tell(&next, 2);
        next.set_native(None).unwrap();
        assert_eq!(sum_of_all(&next), expected);
    });
}

/// What a node was counted in the hash alone: not in its place.
fn in_the_hash(node: IpAddr) -> u64 {
    let pin = Path::new(names::BPF_DIR).join("v2/PEER_COUNTERS");
    let map = Map::PerCpuHashMap(MapData::from_pin(pin).unwrap());
    let map: PerCpuHashMap<_, Addr, PeerCounters> = map.try_into().unwrap();
    let values = map.get(&Addr::from(node), 0).unwrap();
    values.iter().map(|counters| counters.kernel_tx).sum()
}

#[test]
fn of_nodes_with_one_place_the_first_has_it_and_each_its_own_counters() {
    kit::fresh(|| {
        let datapath = kit::load();
        let local = ip("192.0.2.1");
        // Their last nine bits are the same.
        let [first, second] = ["192.0.2.2", "192.0.4.2"].map(ip);
        let know = |datapath: &Datapath, others: &[IpAddr]| {
            let nodes = others.iter().chain([&local]).map(|&node| (node, node));
            let tunnels = Tunnels {
                local,
                port: VXLAN_PORT,
                vni: VXLAN_VNI,
                gateways: &[],
                nodes: &nodes.collect(),
                ranges: &BTreeMap::new(),
            };
            datapath.set_tunnels(&tunnels).unwrap();
        };
        let pod = Pod::silent(&datapath, 5);
        let send = |datapath: &Datapath, to: IpAddr, times: u32| {
            let tunnel = frame(&packet::udp((local, 40_000), (to, VXLAN_PORT), b"hello"));
            let programs = Programs::of(datapath);
            for _ in 0..times {
                assert_eq!(programs.run("uplink_out", pod.ifindex, &tunnel).0, PASS);
            }
        };
        let expect = |datapath: &Datapath, node, all: Option<u64>, hash| {
            assert_eq!(
                counted(datapath, node).map(|of| of.kernel_tx),
                all,
                "{node}"
            );
            if all.is_some() {
                assert_eq!(in_the_hash(node), hash, "{node}");
            }
        };
        know(&datapath, &[first]);
        know(&datapath, &[first, second]);
        send(&datapath, first, 3);
        send(&datapath, second, 5);
        expect(&datapath, first, Some(3), 0);
        expect(&datapath, second, Some(5), 5);
        // The next agent knows who has the place, and gives it to another once it is free.
        let next = kit::load();
        send(&next, first, 1);
        send(&next, second, 1);
        expect(&next, first, Some(4), 0);
        expect(&next, second, Some(6), 6);
        know(&next, &[second]);
        expect(&next, first, None, 0);
        assert_eq!(sum(&next).kernel_tx, 10);
        let last = kit::load();
        send(&last, second, 2);
        expect(&last, second, Some(8), 6);
        assert_eq!(sum(&last).kernel_tx, 12);
    });
}

/// Kernels may have fewer counters at hand than that (`__alloc_percpu_gfp` without waiting).
#[test]
fn thousands_of_nodes_are_counted() {
    kit::fresh(|| {
        const NODES: u32 = 10_000;
        let datapath = kit::load();
        let local = IpAddr::from(Ipv4Addr::new(10, 0, 0, 1));
        let nodes = (0..=NODES).map(|n| IpAddr::from(Ipv4Addr::from(0x0a00_0001 + n)));
        let nodes: BTreeMap<IpAddr, IpAddr> = nodes.map(|node| (node, node)).collect();
        let mut tunnels = Tunnels {
            local,
            port: VXLAN_PORT,
            vni: VXLAN_VNI,
            gateways: &[],
            nodes: &nodes,
            ranges: &BTreeMap::new(),
        };
        datapath.set_tunnels(&tunnels).unwrap();
        let counted = datapath.peer_packets().unwrap();
        assert_eq!(counted.len(), NODES as usize);
        let alone = BTreeMap::from([(local, local)]);
        tunnels.nodes = &alone;
        datapath.set_tunnels(&tunnels).unwrap();
        let left: Vec<Addr> = datapath.peer_packets().unwrap().into_keys().collect();
        assert_eq!(left, [Addr::UNSPECIFIED]);
    });
}
