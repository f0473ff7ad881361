//! What is remembered of flows: the next packet goes as the last one did, as long as nothing has changed.

use super::{
    direct::{MTU, direct, far, for_a_router, in_a_frame, less_a_hop},
    native::{allowed, native, on_the_wire, syn},
    *,
};
use crate::{
    packet::{ACK, FIN, RST},
    services::publish,
};
use aya::maps::{Array, HashMap, Map, MapData};
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_MIXED, NodeConfig},
        endpoint::Endpoint,
        next_hop::NextHop,
    },
    algo::flow::ENOUGH,
    names,
};

fn pinned(name: &str) -> MapData {
    MapData::from_pin(format!("{}/{name}", names::BPF_DIR)).unwrap()
}

/// Writes past the agent, which would raise its number.
fn next_hops() -> HashMap<MapData, Addr, NextHop> {
    Map::HashMap(pinned("v2/NEXT_HOPS")).try_into().unwrap()
}

fn endpoints() -> HashMap<MapData, Addr, Endpoint> {
    Map::HashMap(pinned("ENDPOINTS")).try_into().unwrap()
}

fn by_both_ways(test: impl Fn(&World) + Sync) {
    direct(&test);
    native(&test);
}

/// Of flows that have begun, by a client's port. Both would have one place by the same ports, where one forgets the other.
fn of_flow(port: u16, src: IpAddr, dst: IpAddr) -> [Ip; 2] {
    [
        packet::udp((src, port), (dst, 80), b"hello"),
        packet::tcp((src, port), (dst, 81), ACK, b"hello"),
    ]
}

/// Another flow of datagrams, which has the place of the one from port 4000.
fn turned(src: IpAddr, dst: IpAddr) -> Ip {
    packet::udp((src, 80), (dst, 4000), b"hello")
}

impl World {
    /// Has the programs remember flows that tests look at, in both directions.
    pub(super) fn remember_flows(&self) {
        for near in [self.a.v4, self.a.v6] {
            for port in [1, 4000] {
                for packet in of_flow(port, near, far(near)) {
                    for _ in 0..=ENOUGH {
                        self.leaves(&self.of_pod(&packet));
                    }
                }
                for packet in of_flow(port, far(near), near) {
                    for frame in [self.comes(&packet), on_the_wire(&packet)] {
                        for _ in 0..=ENOUGH {
                            self.run("uplink_in", 0, &frame);
                        }
                    }
                }
            }
        }
    }

    /// Sends as many packets as a flow is remembered for.
    fn goes_often(&self, packet: &Ip) {
        for _ in 0..=ENOUGH {
            assert_eq!(self.goes(packet), REDIRECT, "{packet:?}");
        }
    }

    fn is_delivered_often(&self, packet: &Ip) {
        for _ in 0..=ENOUGH {
            assert!(self.is_delivered(packet), "{packet:?}");
        }
    }

    /// As the second node sends it.
    fn sent_here(&self, packet: &Ip) -> Vec<u8> {
        let way = self.datapath.next_hop(self.underlay[1].into()).unwrap();
        match way.is_native() {
            true => on_the_wire(packet),
            false => self.comes(packet),
        }
    }

    fn goes(&self, packet: &Ip) -> i32 {
        self.leaves(&self.of_pod(packet)).0
    }

    /// Whether it is put into the pod that it is for.
    fn is_delivered(&self, packet: &Ip) -> bool {
        let (action, out) = self.run("uplink_in", 0, &self.sent_here(packet));
        action == REDIRECT && out[14..] == less_a_hop(packet)
    }

    /// Raises the agent's number, and changes nothing.
    fn raise(&self) {
        let way = self.datapath.next_hop(self.underlay[1].into()).unwrap();
        self.lead(way);
    }
}

/// Seen by what was changed behind the agent's back: what is remembered does not know.
#[test]
fn a_flow_goes_on_without_being_looked_up_until_the_agent_says_so() {
    by_both_ways(|world| {
        for near in [world.a.v4, world.a.v6] {
            let [known, tcp] = of_flow(4000, near, far(near));
            let [other, _] = of_flow(4001, near, far(near));
            let second = Addr::from(world.underlay[1]);
            for packet in [&known, &tcp] {
                world.goes_often(packet);
            }
            let way = next_hops().get(&second, 0).unwrap();
            next_hops().remove(&second).unwrap();
            for other in [other, turned(near, far(near))] {
                assert_eq!(world.goes(&other), PASS);
            }
            for packet in [&known, &tcp, &known] {
                assert_eq!(world.goes(packet), REDIRECT, "{packet:?}");
            }
            world.raise();
            for packet in [&known, &tcp] {
                assert_eq!(world.goes(packet), PASS, "{packet:?}");
            }
            next_hops().insert(second, way, 0).unwrap();
        }
    });
}

/// To write down what is never read would cost more than it saves.
#[test]
fn brief_flows_are_not_remembered() {
    direct(|world| {
        let [brief, _] = of_flow(4002, world.a.v4, far(world.a.v4));
        for _ in 0..ENOUGH {
            assert_eq!(world.goes(&brief), REDIRECT);
        }
        next_hops().remove(&Addr::from(world.underlay[1])).unwrap();
        assert_eq!(world.goes(&brief), PASS);
    });
}

#[test]
fn what_a_router_has_to_do_with_is_none_of_a_known_flows() {
    by_both_ways(|world| {
        for (near, other) in [(world.a.v4, world.b.v4), (world.a.v6, world.b.v6)] {
            for dst in [far(near), other] {
                world.goes_often(&of_flow(4000, near, dst)[0]);
                for (what, packet) in for_a_router(near, dst) {
                    // About what went past the stack as well.
                    if (what, dst) == ("an error", other) {
                        assert_eq!(world.leaves(&world.of_pod(&packet)).0, REDIRECT);
                        continue;
                    }
                    world.to_the_stack(&packet, what);
                }
            }
        }
    });
}

#[test]
fn what_comes_on_a_flow_is_not_looked_up_until_the_agent_says_so() {
    by_both_ways(|world| {
        for near in world.delivered_to() {
            let [known, tcp] = of_flow(4000, far(near), near);
            let [other, _] = of_flow(4001, far(near), near);
            for packet in [&known, &tcp] {
                world.is_delivered_often(packet);
            }
            let address = Addr::from(near);
            let endpoint = endpoints().get(&address, 0).unwrap();
            endpoints().remove(&address).unwrap();
            for other in [other, turned(far(near), near)] {
                assert!(!world.is_delivered(&other));
            }
            for packet in [&known, &tcp, &known] {
                assert!(world.is_delivered(packet), "{packet:?}");
            }
            world.raise();
            for packet in [&known, &tcp] {
                assert!(!world.is_delivered(packet), "{packet:?}");
            }
            endpoints().insert(address, endpoint, 0).unwrap();
        }
    });
}

/// Whoever was to raise a number may have been killed.
#[test]
fn nothing_is_remembered_for_long() {
    by_both_ways(|world| {
        let near = world.of_tunnels();
        let [leaving, _] = of_flow(4000, near, far(near));
        let [coming, _] = of_flow(4000, far(near), near);
        world.goes_often(&leaving);
        world.is_delivered_often(&coming);
        let coming = world.sent_here(&coming);
        next_hops().remove(&Addr::from(world.underlay[1])).unwrap();
        endpoints().remove(&Addr::from(near)).unwrap();
        kit::eventually("the way is looked up", || world.goes(&leaving) == PASS);
        let is_left = || world.run("uplink_in", 0, &coming).1[..6] != world.a.mac;
        kit::eventually("the pod is looked up", is_left);
    });
}

#[test]
fn what_changes_counts_for_flows_that_are_known() {
    direct(|world| {
        for near in world.delivered_to() {
            let [packet, _] = of_flow(4000, near, far(near));
            let inner_dst = |wrapped: &[u8]| wrapped[world.room()..world.room() + 6].to_vec();
            for mac in [[2, 0, 0, 0, 7, 1], [2, 0, 0, 0, 7, 2]] {
                world.go(world.router(), mac);
                for _ in 0..=ENOUGH {
                    assert_eq!(inner_dst(&world.wrapped(&packet).0), mac);
                }
            }
            let [coming, _] = of_flow(4000, far(near), near);
            world.is_delivered_often(&coming);
            world.know(1);
            world.dropped(
                "uplink_in",
                &world.comes(&coming),
                TunnelSource,
                "a stranger",
            );
            assert_eq!(world.goes(&packet), PASS);
            world.know(3);
            assert!(world.is_delivered(&coming));
            assert_eq!(world.goes(&packet), REDIRECT);
        }
        // A pod that has gone, and its address with it.
        let near = match world.of_tunnels() == world.a.v4 {
            true => world.b.v4,
            false => world.b.v6,
        };
        let [coming, _] = of_flow(4000, far(near), near);
        world.is_delivered_often(&coming);
        let addresses = world.b.addresses();
        world
            .datapath
            .detach_pod(world.b.ifindex, &world.b.link, &addresses)
            .unwrap();
        world.to_the_device(&world.comes(&coming), "nobody's");
    });
}

/// Of the same ends and by another link, from another node, in another overlay, to another device, too large.
#[test]
fn what_only_looks_like_a_flow_is_judged() {
    direct(|world| {
        for near in world.delivered_to() {
            let [leaving, _] = of_flow(4000, near, far(near));
            world.goes_often(&leaving);
            let of_other = packet::eth(HOST_MAC, world.b.mac, leaving.kind(), &leaving.bytes());
            let before = kit::dropped(&world.datapath, SourceAddr);
            let ran = world.programs.run("pod_out", world.b.ifindex, &of_other);
            assert_eq!(ran.0, DROP);
            assert_eq!(kit::dropped(&world.datapath, SourceAddr), before + 1);
            let large = packet::udp((near, 4000), (far(near), 80), &[7; MTU as usize]);
            world.to_the_stack(&large, "too large");

            let [coming, _] = of_flow(4000, far(near), near);
            world.is_delivered_often(&coming);
            let outer = || world.outer(&world.inner(&coming));
            let mut of_third = outer();
            of_third.src = world.underlay[2];
            world.dropped(
                "uplink_in",
                &in_a_frame(&of_third),
                TunnelInner,
                "another node's",
            );
            let mut of_nobody = outer();
            of_nobody.payload[8 + 6] = 9;
            world.passes("uplink_in", &in_a_frame(&of_nobody), "another overlay's");
            let mut to_another = world.inner(&coming);
            to_another[5] ^= 1;
            let to_another = in_a_frame(&world.outer(&to_another));
            world.to_the_device(&to_another, "another device's");
            let mut others = outer();
            others.dst = ip(if near.is_ipv4() {
                "192.0.2.99"
            } else {
                "2001:db8:1::99"
            });
            if others.dst.is_ipv4() == others.src.is_ipv4() {
                world.passes("uplink_in", &in_a_frame(&others), "another machine's");
            }
            assert!(world.is_delivered(&coming));
        }
    });
}

/// What was in a tunnel says nothing of what comes without one, and the other way round.
#[test]
fn flows_in_tunnels_and_without_are_not_the_same() {
    native(|world| {
        for near in world.out_of_tunnels() {
            let [packet, _] = of_flow(4000, far(near), near);
            let (in_tunnel, natively) = (world.comes(&packet), on_the_wire(&packet));
            world.take(true);
            for frame in [&in_tunnel, &natively, &in_tunnel, &natively] {
                for _ in 0..=ENOUGH {
                    assert_eq!(world.run("uplink_in", 0, frame).0, REDIRECT);
                }
            }
            world.take(false);
            world.dropped("uplink_in", &natively, PodSource, "none is taken");
        }
    });
}

/// A connection may have its record in the other programs' table.
#[test]
fn nothing_is_remembered_while_programs_of_two_layouts_run() {
    by_both_ways(|world| {
        let config =
            || -> Array<MapData, NodeConfig> { Map::Array(pinned("CONFIG")).try_into().unwrap() };
        let near = world.a.v4;
        let [packet, _] = of_flow(4000, near, far(near));
        world.goes_often(&packet);
        let before = config().get(&0, 0).unwrap();
        let flags = before.flags | FLAG_MIXED;
        config().set(0, NodeConfig { flags, ..before }, 0).unwrap();
        assert_eq!(world.goes(&packet), PASS);
        config().set(0, before, 0).unwrap();
        assert_eq!(world.goes(&packet), REDIRECT);
    });
}

#[test]
fn a_syn_by_the_ports_of_a_known_flow_is_looked_at() {
    by_both_ways(|world| {
        for near in world.delivered_to() {
            for (src, dst) in [(near, far(near)), (far(near), near)] {
                let begins = syn(src, dst);
                let goes_on = packet::tcp((src, 4000), (dst, 80), ACK, b"hello");
                let (sent, headers) = match src == near {
                    true => {
                        world.goes_often(&goes_on);
                        let (sent, _) = world.wrapped(&begins);
                        let in_tunnel = sent.len() > 14 + begins.bytes().len();
                        (sent, if in_tunnel { world.room() } else { 0 })
                    }
                    false => {
                        world.is_delivered_often(&goes_on);
                        (world.run("uplink_in", 0, &world.sent_here(&begins)).1, 0)
                    }
                };
                assert_eq!(allowed(&sent[headers..]), MTU);
            }
        }
    });
}

/// It comes once, so that to look for it would cost more than it saves.
#[test]
fn what_ends_a_connection_is_looked_up() {
    direct(|world| {
        let (near, far) = (world.a.v4, far(world.a.v4));
        let with = |flags| packet::tcp((near, 4000), (far, 81), flags, b"hello");
        world.goes_often(&with(ACK));
        next_hops().remove(&Addr::from(world.underlay[1])).unwrap();
        for flags in [ACK | FIN, ACK | RST, RST] {
            assert_eq!(world.goes(&with(flags)), PASS, "{flags:#x}");
        }
        assert_eq!(world.goes(&with(ACK)), REDIRECT);
    });
}

/// Datagrams to a port of the node, which the stack gives to a pod that has a conversation with the same client.
#[test]
fn what_the_stack_has_translated_keeps_to_it_by_the_ports_of_a_known_flow() {
    direct(|world| {
        for near in [world.a.v4, world.a.v6] {
            let [answer, _] = of_flow(4000, near, far(near));
            world.goes_often(&answer);
            let question = packet::udp((far(near), 80), (near, 4000), b"hello");
            let arrived = packet::eth(world.a.mac, HOST_MAC, question.kind(), &question.bytes());
            let uplink = kit::leads_out(world.b.ifindex);
            world.datapath.set_uplinks(&[uplink]).unwrap();
            assert_eq!(world.run("pod_in", uplink.0, &arrived).0, PASS);
            world.to_the_stack(&answer, "an answer");
        }
    });
}

/// Of a client that asks an endpoint itself, and then its Service by the same port. Also if both are on this node.
#[test]
fn an_answer_is_the_services_by_the_ports_of_a_known_flow() {
    direct(|world| {
        let pods = [
            (1, world.a.v4, far(world.a.v4)),
            (2, world.a.v6, far(world.a.v6)),
            (3, world.a.v4, world.b.v4),
            (4, world.a.v6, world.b.v6),
        ];
        let out_of_tunnels = world.out_of_tunnels();
        for (number, near, endpoint) in pods {
            let is_here = number > 2;
            if !is_here && !out_of_tunnels.contains(&near) {
                continue;
            }
            let port = 4000 + number as u16;
            let [question, _] = of_flow(port, near, endpoint);
            let answer = packet::udp((endpoint, 80), (near, port), b"hello");
            let answered_by = || {
                let out = match is_here {
                    true => {
                        let frame =
                            packet::eth(HOST_MAC, world.b.mac, answer.kind(), &answer.bytes());
                        world.programs.run("pod_out", world.b.ifindex, &frame).1
                    }
                    false => world.run("uplink_in", 0, &world.comes(&answer)).1,
                };
                packet::see(&out).src
            };
            let often = |expected: IpAddr| {
                for _ in 0..=2 * ENOUGH {
                    assert_eq!(answered_by(), expected);
                }
            };
            world.goes_often(&question);
            often(endpoint);
            let (_, at) = publish(&world.datapath, number, packet::UDP, &[(endpoint, 80)]);
            let to_service = packet::udp((near, port), at, b"hello");
            world.goes_often(&to_service);
            often(at.0);
        }
    });
}
