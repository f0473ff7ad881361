//! Clients outside of the cluster, from an uplink to an endpoint and back, wherever that is.

mod across;
mod before;
mod blind;
mod closed;
mod consistent;
mod overlay;
mod owners;

use super::{
    unallocated::{RANGES, nobody, set},
    *,
};
use crate::{
    packet::{IcmpError, icmp_error, in_parts, see_error},
    uplink_hooks::open,
};
use aya::maps::{Array, Map, MapData, lpm_trie};
use sinabro_agent::datapath::{ConnectionLimits, Tunnels, handover::Theirs};
use sinabro_common::{
    abi::{
        connection::{Connection, ConnectionKey, is_outside},
        node::Overlay,
        service::{FRONTEND_EXTERNAL, FRONTEND_GUARDED, FRONTEND_OF_NODE, SourceKey},
    },
    names::{self, VXLAN_PORT, VXLAN_VNI},
};
use std::collections::{BTreeMap, HashSet};

/// The router at the other end of the uplink.
const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xfe];

/// A world whose uplink is pod b's link, and whose VXLAN device is pod a's: programs are run, not attached.
pub(super) struct Edge {
    pub(super) w: World,
    stamp: [u8; 6],
}

pub(super) fn edge<T: Send>(test: impl FnOnce(Edge) -> T + Send) -> T {
    edge_with(&kit::config(), test)
}

fn edge_with<T: Send>(config: &DatapathConfig, test: impl FnOnce(Edge) -> T + Send) -> T {
    world_with(config, |w| {
        set_source(w.b.ifindex, kit::NODE.into(), kit::NODE6.into());
        let (local, other) = (kit::NODE.into(), "192.0.2.2".parse().unwrap());
        let nodes = BTreeMap::from([(local, local), (other, other)]);
        let range = |text: &str| text.parse().unwrap();
        let ranges = BTreeMap::from([
            (range("10.1.0.0/24"), local),
            (range("fd00:1::/64"), local),
            (range("10.1.7.0/24"), other),
            (range("fd00:1:7::/64"), other),
        ]);
        let gateways = [gateway(w.a.v4), gateway(w.a.v6)];
        w.datapath
            .set_tunnels(&Tunnels {
                local,
                port: VXLAN_PORT,
                vni: VXLAN_VNI,
                gateways: &gateways,
                nodes: &nodes,
                ranges: &ranges,
            })
            .unwrap();
        let stamp = overlay().stamp;
        test(Edge { w, stamp })
    })
}

fn overlay() -> Overlay {
    let data = MapData::from_pin(format!("{}/OVERLAY", names::BPF_DIR)).unwrap();
    let map: Array<MapData, Overlay> = Map::Array(data).try_into().unwrap();
    map.get(&0, 0).unwrap()
}

/// Lets these use a guarded Service.
fn allow(service: u32, clients: IpAddr, bits: u32) {
    let data = MapData::from_pin(format!("{}/v2/SOURCE_RANGES", names::BPF_DIR)).unwrap();
    let map = Map::LpmTrie(data);
    let mut map: lpm_trie::LpmTrie<MapData, SourceKey, u8> = map.try_into().unwrap();
    let client = clients.into();
    let bits = SourceKey::bits_of(bits + if clients.is_ipv4() { 96 } else { 0 });
    let key = lpm_trie::Key::new(bits, SourceKey { service, client });
    map.insert(&key, 1, 0).unwrap();
}

fn gateway(like: IpAddr) -> IpAddr {
    address(like, "10.1.0.1", "fd00:1::1")
}

fn node(like: IpAddr) -> IpAddr {
    address(like, &kit::NODE.to_string(), &kit::NODE6.to_string())
}

fn client(like: IpAddr) -> At {
    (address(like, "203.0.113.77", "2001:db8:77::7"), 40_000)
}

/// As it comes in by the uplink.
fn framed(ip: &Ip) -> Vec<u8> {
    packet::eth(HOST_MAC, ROUTER_MAC, ip.kind(), &ip.bytes())
}

/// Where an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Pod,
    Node,
    OtherNodesPod,
    Elsewhere,
}

const PLACES: [Place; 4] = [
    Place::Pod,
    Place::Node,
    Place::OtherNodesPod,
    Place::Elsewhere,
];

impl Edge {
    fn endpoint(&self, like: IpAddr, place: Place) -> At {
        let at = match place {
            Place::Pod if like.is_ipv4() => self.w.a.v4,
            Place::Pod => self.w.a.v6,
            Place::Node => node(like),
            Place::OtherNodesPod => far(like, 9),
            Place::Elsewhere => address(like, "198.51.100.8", "2001:db8:8::8"),
        };
        (at, 8080)
    }

    fn run(&self, program: &str, from: u32, frame: &[u8]) -> (i32, Vec<u8>) {
        let at = match program {
            "overlay_in" | "overlay_out" => self.w.a.ifindex,
            _ => self.w.b.ifindex,
        };
        self.w.programs.run_from(program, at, from, frame).unwrap()
    }

    /// What comes in by the uplink goes on as this.
    fn enters_as(&self, sent: &Ip, expected: &Ip) {
        let (verdict, out) = self.run("uplink_in", 0, &framed(sent));
        assert_eq!(verdict, PASS, "{:?}", self.w.datapath.drops());
        assert_eq!(out, framed(expected));
    }

    /// What the stack sends by the uplink leaves as this.
    fn exits_as(&self, from: u32, sent: &Ip, expected: &Ip) {
        let (verdict, out) = self.run("uplink_out", from, &framed(sent));
        assert_eq!(verdict, PASS, "{:?}", self.w.datapath.drops());
        assert_eq!(
            out,
            framed(expected),
            "\n{:?}\n{:?}",
            see(&out),
            see(&framed(expected))
        );
    }

    /// What the stack sends into a tunnel, or by the uplink if that is the way, for what came in by the uplink.
    fn forwarded(&self, place: Place, sent: &Ip) -> Vec<u8> {
        let program = match place {
            Place::Elsewhere => "uplink_out",
            _ => "overlay_out",
        };
        let (verdict, out) = self.run(program, self.w.b.ifindex, &framed(sent));
        assert_eq!(verdict, PASS, "{:?}", self.w.datapath.drops());
        out
    }

    /// What comes back from there gets in as this.
    fn returns_as(&self, place: Place, sent: &Ip, expected: &Ip) {
        let frame = |ip: &Ip| match place {
            Place::OtherNodesPod => packet::eth(HOST_MAC, self.stamp, ip.kind(), &ip.bytes()),
            _ => framed(ip),
        };
        let program = match place {
            Place::OtherNodesPod => "overlay_in",
            _ => "uplink_in",
        };
        let (verdict, out) = self.run(program, 0, &frame(sent));
        assert_eq!(verdict, PASS, "{:?}", self.w.datapath.drops());
        assert_eq!(out, frame(expected));
    }

    /// Where the source of what is sent on from this node is.
    fn near(&self, place: Place, like: IpAddr) -> IpAddr {
        match place {
            Place::OtherNodesPod => gateway(like),
            _ => node(like),
        }
    }

    /// A packet there and the answer: all that anybody sees of them.
    fn round(&self, place: Place, proto: u8, from: At, at: At, flags: u8) {
        let to = self.endpoint(from.0, place);
        let between = make(proto, from, to, flags);
        self.enters_as(&make(proto, from, at, flags), &between);
        let answer = make(proto, to, from, flags | ACK);
        let leaves = make(proto, at, from, flags | ACK);
        match place {
            Place::Pod => {
                let pod = &self.w.a;
                assert_eq!(
                    self.w.to_pod(pod, &between),
                    (PASS, frame_to(pod, &between))
                );
                self.w.leaves_as(&answer, &answer);
                self.exits_as(pod.ifindex, &answer, &leaves);
            }
            Place::Node => self.exits_as(0, &answer, &leaves),
            Place::OtherNodesPod | Place::Elsewhere => {
                let out = self.forwarded(place, &between);
                let port = see(&out).ports.0;
                assert!((kit::PORT_MIN..=kit::PORT_MAX).contains(&port));
                let near = (self.near(place, from.0), port);
                assert_eq!(out, framed(&make(proto, near, to, flags)));
                let back = make(proto, to, near, flags | ACK);
                self.returns_as(place, &back, &answer);
                self.exits_as(self.w.a.ifindex, &answer, &leaves);
            }
        }
    }

    /// The share of clients outside: connections, and those that nobody answered.
    fn share(&self) -> (u64, u64) {
        let shares = self.w.datapath.connections().shares().unwrap();
        let outside = shares.iter().filter(|(key, _)| is_outside(*key));
        outside.fold((0, 0), |(connections, embryonic), (_, share)| {
            (connections + share.connections, embryonic + share.embryonic)
        })
    }

    fn dropped_at_uplink(&self, ip: &Ip, reason: DropReason) {
        let before = kit::dropped(&self.w.datapath, reason);
        let (verdict, _) = self.run("uplink_in", 0, &framed(ip));
        assert_eq!(verdict, DROP, "{reason:?}");
        assert_eq!(kit::dropped(&self.w.datapath, reason) - before, 1);
    }
}

#[test]
fn every_endpoint_is_reached_and_answers_as_the_service() {
    edge(|e| {
        let mut number = 0;
        for place in PLACES {
            for proto in PROTOCOLS {
                for like in e.w.clients() {
                    number += 1;
                    let service = e.w.service(number, proto);
                    let at = (vip(like), 80 + number as u16);
                    service.balance(&[e.endpoint(like, place)], 1);
                    service.frontend(at, 0);
                    for flags in [SYN, ACK, ACK] {
                        e.round(place, proto, client(like), at, flags);
                    }
                    // Nobody else's from the same port.
                    let (addr, port) = client(like);
                    e.round(place, proto, (addr, port + 1), at, SYN);
                    // One Service after the other: they share endpoints.
                    e.w.sweep_at(25 * 3600);
                    assert!(table().is_empty(), "{place:?}");
                    assert!(aliases().is_empty(), "{place:?}");
                    assert_eq!(e.share(), (0, 0));
                }
            }
        }
    });
}

#[test]
fn connections_are_counted_apart_and_end_with_their_aliases() {
    edge(|e| {
        for (number, place) in (1..).zip(PLACES) {
            let service = e.w.service(number, TCP);
            let at = (vip(e.w.a.v4), 80 + number as u16);
            service.balance(&[e.endpoint(at.0, place)], 1);
            service.frontend(at, 0);
            let from = (client(at.0).0, 40_000 + number as u16);
            e.round(place, TCP, from, at, SYN);
        }
        check_table();
        // Two of them are masqueraded.
        assert_eq!((table().len(), aliases().len()), (4, 6));
        assert_eq!(e.share(), (4, 4));
        for (number, place) in (1..).zip(PLACES) {
            let at = (vip(e.w.a.v4), 80 + number as u16);
            let from = (client(at.0).0, 40_000 + number as u16);
            e.round(place, TCP, from, at, ACK);
        }
        assert_eq!(e.share(), (4, 0));
        // Their clients are no pods, and a sweep does not take them for what is left of one.
        assert_eq!(e.w.sweep_at(0), 0);
        assert_eq!((table().len(), aliases().len()), (4, 6));
        assert_eq!(e.share(), (4, 0));
        assert_eq!(e.w.sweep_at(25 * 3600), 4);
        assert!(table().is_empty() && aliases().is_empty());
        assert_eq!(e.share(), (0, 0));
    });
}

#[test]
fn clients_outside_have_a_set_of_their_own() {
    edge(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let (inside, outside) = (
                e.w.service(2 * number, TCP),
                e.w.service(2 * number + 1, TCP),
            );
            inside.balance(&[(far(like, 1), 8001)], 1);
            outside.balance(&[(e.endpoint(like, Place::Pod).0, 8080)], 1);
            let at = (vip(like), 80);
            let frontend = Frontend {
                inside: 2 * number,
                outside: 2 * number + 1,
                service: number,
                affinity_seconds: 0,
                flags: 0,
            };
            let services = e.w.datapath.services();
            services.put_frontend(inside.key(at), frontend).unwrap();
            e.round(Place::Pod, TCP, client(like), at, SYN);
            let pod = (if like.is_ipv4() { e.w.a.v4 } else { e.w.a.v6 }, 2000);
            assert_eq!(e.w.goes_to(&make(TCP, pod, at, SYN)), (far(like, 1), 8001));
            // None of them here: kubernetes' traffic policy Local.
            outside.set(Kind::Drop, 0);
            let other = (client(like).0, 41_000);
            e.dropped_at_uplink(&make(TCP, other, at, SYN), DropReason::ServiceNotHere);
            // Who has one goes on.
            e.round(Place::Pod, TCP, client(like), at, ACK);
        }
        check_table();
    });
}

#[test]
fn who_finds_nobody_is_told_by_the_link_that_he_came_by() {
    edge(|e| {
        for (number, proto) in (1..).zip(PROTOCOLS) {
            for like in e.w.clients() {
                let number = number * 2 + u32::from(like.is_ipv6());
                let (service, at) = e.w.publish(number, proto, &endpoints(like, 1));
                service.set(Kind::Refuse, 0);
                let from = client(like);
                for (to, reason) in [
                    (at, DropReason::ServiceNoEndpoint),
                    ((at.0, 81), DropReason::ServiceNoPort),
                ] {
                    let before = kit::dropped(&e.w.datapath, reason);
                    let (verdict, out) =
                        e.run("uplink_in", 0, &framed(&make(proto, from, to, SYN)));
                    assert_eq!(verdict, REDIRECT, "{:?}", e.w.datapath.drops());
                    assert_eq!(kit::dropped(&e.w.datapath, reason) - before, 1);
                    let seen = see(&out);
                    assert_eq!((seen.dst_mac, seen.src_mac), (ROUTER_MAC, HOST_MAC));
                    assert_eq!((seen.src, seen.dst), (at.0, from.0));
                    if proto == TCP {
                        let tcp = out.len() - 20;
                        assert_eq!((seen.ports, out[tcp + 13]), ((to.1, from.1), RST | ACK));
                    }
                    // And it leaves as it is.
                    let left = e.run("uplink_out", e.w.b.ifindex, &out);
                    assert_eq!(left, (PASS, out));
                }
            }
        }
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn what_is_none_of_a_services_stays_the_stacks() {
    edge(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let from = client(like);
            let service = e.w.service(number, TCP);
            service.balance(&[e.endpoint(like, Place::Pod)], 1);
            let (at, port) = ((vip(like), 80), (node(like), 30_080));
            service.frontend(at, 0);
            service.frontend(port, 0);
            let own = FrontendKey::address(port.0.into());
            e.w.datapath.services().remove_frontend(&own).unwrap();
            for ip in [
                // The rest of connections that the stack may have translated.
                make(TCP, from, at, ACK),
                make(TCP, from, port, ACK),
                make(TCP, from, port, RST),
                // The node's own ports.
                make(TCP, from, (port.0, 22), SYN),
                make(UDP, from, (port.0, 30_080), SYN),
                // An echo request, and what is no Service's.
                packet::icmp(from.0, port.0, if like.is_ipv4() { 8 } else { 128 }, 7),
                make(TCP, from, (far(like, 5), 80), SYN),
            ] {
                e.enters_as(&ip, &ip);
            }
            // What is on the link for another machine.
            for to in [at, (at.0, 81)] {
                let ip = make(TCP, from, to, SYN);
                let frame = packet::eth([2, 0, 0, 0, 7, 7], ROUTER_MAC, ip.kind(), &ip.bytes());
                assert_eq!(e.run("uplink_in", 0, &frame), (PASS, frame));
            }
            assert!(aliases().is_empty());
            e.round(Place::Pod, TCP, from, port, SYN);
            e.w.sweep_at(25 * 3600);
            turn(&e.w.datapath, false);
            for to in [at, port] {
                let ip = make(TCP, (from.0, 41_000), to, SYN);
                e.enters_as(&ip, &ip);
            }
            turn(&e.w.datapath, true);
        }
    });
}

#[test]
fn nothing_is_masqueraded_and_services_are_translated_all_the_same() {
    edge(|e| {
        let mut config = kit::node_config();
        config.flags &= !sinabro_common::abi::config::FLAG_MASQUERADE;
        e.w.datapath.set_node_config(config).unwrap();
        turn(&e.w.datapath, true);
        for (number, place) in (1..).zip([Place::Pod, Place::Node, Place::OtherNodesPod]) {
            let service = e.w.service(number, UDP);
            let at = (vip(e.w.a.v6), 80 + number as u16);
            service.balance(&[e.endpoint(at.0, place)], 1);
            service.frontend(at, 0);
            for flags in [SYN, ACK] {
                e.round(place, UDP, client(at.0), at, flags);
            }
            e.w.sweep_at(25 * 3600);
        }
    });
}

#[test]
fn a_guarded_frontend_is_for_its_ranges_alone() {
    edge(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let (service, at) =
                e.w.publish(number, TCP, &[(e.endpoint(like, Place::Pod).0, 8080)]);
            let guarded = Frontend {
                inside: number,
                outside: number,
                service: number,
                affinity_seconds: 0,
                flags: FRONTEND_GUARDED,
            };
            let services = e.w.datapath.services();
            services.put_frontend(service.key(at), guarded).unwrap();
            let reason = DropReason::ServiceSourceRange;
            let pod = (if like.is_ipv4() { e.w.b.v4 } else { e.w.b.v6 }, 2000);
            let of_pod = make(TCP, pod, at, SYN);
            let sent_by_b = || e.w.sent_by(&e.w.b, &of_pod).0;
            e.dropped_at_uplink(&make(TCP, client(like), at, SYN), reason);
            assert_eq!(sent_by_b(), DROP);
            // Another Service's range is none of it.
            allow(number + 100, client(like).0, 24);
            e.dropped_at_uplink(&make(TCP, client(like), at, SYN), reason);
            allow(number, client(like).0, 24);
            e.round(Place::Pod, TCP, client(like), at, SYN);
            let stranger = (address(like, "203.0.114.77", "2001:ec8:77::7"), 40_000);
            e.dropped_at_uplink(&make(TCP, stranger, at, SYN), reason);
            assert_eq!(sent_by_b(), DROP);
            allow(number, pod.0, if like.is_ipv4() { 32 } else { 128 });
            assert_eq!(sent_by_b(), REDIRECT);
            // The node's alone: packets are the stack's.
            let of_node = Frontend {
                flags: FRONTEND_OF_NODE,
                ..guarded
            };
            services.put_frontend(service.key(at), of_node).unwrap();
            let other = make(TCP, (client(like).0, 41_000), at, SYN);
            e.enters_as(&other, &other);
        }
    });
}

/// Of a node's own address, and of a pod's, it is not said, whatever somebody has set.
#[test]
fn what_comes_in_for_an_address_of_nobody_is_not_sent_back() {
    edge(|e| {
        for like in e.w.clients() {
            let sent =
                [TCP, UDP, SCTP].map(|proto| make(proto, client(like), (nobody(like), 80), SYN));
            sent.iter().for_each(|ip| e.enters_as(ip, ip));
            set(&e.w, &RANGES, &[]);
            for ip in &sent {
                e.dropped_at_uplink(ip, DropReason::ServiceUnallocated);
            }
            set(&e.w, &["0.0.0.0/0", "::/0"], &[]);
            // Of the node's addresses this one is known here.
            let to_node = like.is_ipv4().then(|| node(like));
            for to in to_node.into_iter().chain([far(like, 1)]) {
                let ip = make(TCP, client(like), (to, 80), SYN);
                e.enters_as(&ip, &ip);
                let from = if like.is_ipv4() { e.w.a.v4 } else { e.w.a.v6 };
                let ip = make(TCP, (from, 2000), (to, 80), SYN);
                e.w.leaves_as(&ip, &ip);
            }
            set(&e.w, &[], &[]);
        }
    });
}

/// By kube-proxy, for one, when what is sent to Services becomes ours to translate.
#[test]
fn datagrams_that_others_translate_are_left_to_them() {
    edge(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let (from, to) = (client(like), e.endpoint(like, Place::Pod));
            let (_, at) = e.w.publish(number, UDP, &[to]);
            let theirs = Theirs {
                proto: UDP,
                client: from.into(),
                frontend: at.into(),
                endpoint: to.into(),
            };
            e.w.datapath
                .leave_connections([&theirs].into_iter())
                .unwrap();
            let (sent, answer) = (make(UDP, from, at, 0), make(UDP, at, from, 0));
            for _ in 0..3 {
                e.enters_as(&sent, &sent);
                e.exits_as(e.w.a.ifindex, &answer, &answer);
            }
            // They have forgotten it.
            let none = (HashSet::new(), HashSet::new());
            e.w.datapath.take_back(&none.0, &none.1).unwrap();
            assert!(table().is_empty() && aliases().is_empty());
            e.round(Place::Pod, UDP, from, at, 0);
            e.w.sweep_at(25 * 3600);
        }
    });
}

#[test]
fn datagrams_in_parts_get_there_and_back_from_outside() {
    edge(|e| {
        for (number, place) in (1..).zip([Place::Pod, Place::Node, Place::OtherNodesPod]) {
            for like in e.w.clients() {
                let number = 2 * number + u32::from(like.is_ipv6());
                let service = e.w.service(number, UDP);
                let at = (vip(like), 80 + number as u16);
                let to = e.endpoint(like, place);
                service.balance(&[to], 1);
                service.frontend(at, 0);
                let from = client(like);
                let parts = |src: At, dst: At| in_parts(packet::udp(src, dst, &[b'x'; 24]));
                let mut near = from;
                for (number, (sent, expected)) in
                    parts(from, at).iter().zip(parts(from, to)).enumerate()
                {
                    e.enters_as(sent, &expected);
                    if place == Place::OtherNodesPod {
                        let out = e.forwarded(place, &expected);
                        if near == from {
                            let header = if like.is_ipv4() { 34 } else { 62 };
                            let port = u16::from_be_bytes([out[header], out[header + 1]]);
                            near = (gateway(like), port);
                        }
                        assert_eq!(out, framed(&parts(near, to)[number]));
                    }
                }
                for (number, answer) in parts(to, from).iter().enumerate() {
                    // All that the first has left behind is there when the second passes its pod's link.
                    if place == Place::Pod {
                        e.w.leaves_as(answer, answer);
                    }
                    if place == Place::OtherNodesPod {
                        e.returns_as(place, &parts(to, near)[number], answer);
                    }
                    let by = if place == Place::Node {
                        0
                    } else {
                        e.w.a.ifindex
                    };
                    e.exits_as(by, answer, &parts(at, from)[number]);
                }
                e.w.sweep_at(25 * 3600);
            }
        }
    });
}

#[test]
fn errors_speak_of_what_each_end_has_sent() {
    edge(|e| {
        for (number, place) in (1..).zip(PLACES) {
            for like in e.w.clients() {
                let number = 2 * number + u32::from(like.is_ipv6());
                let service = e.w.service(number, UDP);
                let at = (vip(like), 80 + number as u16);
                let (from, to) = (client(like), e.endpoint(like, place));
                service.balance(&[to], 1);
                service.frontend(at, 0);
                e.round(place, UDP, from, at, SYN);
                let quote = |src: At, dst: At| make(UDP, src, dst, 0).bytes();
                let seen = |frame: &[u8]| {
                    let seen = see_error(frame);
                    (seen.src, seen.dst, seen.quoted)
                };
                let near = match place {
                    Place::Pod | Place::Node => from,
                    _ => {
                        let out = e.forwarded(place, &make(UDP, from, to, ACK));
                        (e.near(place, like), see(&out).ports.0)
                    }
                };
                let router = address(like, "192.0.2.254", "2001:db8::fe");
                // The node says that the way to the endpoint is narrow, or the endpoint that nobody is there.
                for (by, error, said_by) in [
                    (node(like), IcmpError::TooBig(1400), node(like)),
                    (to.0, IcmpError::NoPort, at.0),
                ] {
                    let said = icmp_error(by, from.0, error, &quote(from, to));
                    let forwarded = by == to.0 && place != Place::Node;
                    let by = if forwarded { e.w.a.ifindex } else { 0 };
                    let (verdict, out) = e.run("uplink_out", by, &framed(&said));
                    assert_eq!(verdict, PASS);
                    // Of the node's own both are true.
                    let said_by = if to.0 == node(like) { at.0 } else { said_by };
                    assert_eq!(seen(&out), (said_by, from.0, quote(from, at)), "{place:?}");
                }
                // A machine behind says it to this node.
                if near != from {
                    let said =
                        icmp_error(router, near.0, IcmpError::TooBig(1400), &quote(near, to));
                    let expected =
                        icmp_error(router, from.0, IcmpError::TooBig(1400), &quote(from, to));
                    let mac = match place {
                        Place::OtherNodesPod => e.stamp,
                        _ => ROUTER_MAC,
                    };
                    let program = match place {
                        Place::OtherNodesPod => "overlay_in",
                        _ => "uplink_in",
                    };
                    let frame = packet::eth(HOST_MAC, mac, said.kind(), &said.bytes());
                    let (verdict, out) = e.run(program, 0, &frame);
                    assert_eq!(verdict, PASS);
                    let expected = packet::eth(HOST_MAC, mac, said.kind(), &expected.bytes());
                    assert_eq!(seen(&out), seen(&expected));
                }
                // And what the client, or a router before it, says of an answer is about the endpoint's.
                for by in [from.0, router] {
                    let says = icmp_error(by, at.0, IcmpError::TooBig(1300), &quote(at, from));
                    let (verdict, out) = e.run("uplink_in", 0, &framed(&says));
                    assert_eq!(verdict, PASS);
                    assert_eq!(seen(&out), (by, to.0, quote(to, from)));
                    if near != from {
                        let out = e.forwarded(place, &parsed(&out));
                        let by = match place {
                            Place::OtherNodesPod => near.0,
                            _ if by == from.0 => near.0,
                            _ => by,
                        };
                        assert_eq!(seen(&out), (by, to.0, quote(to, near)), "{place:?}");
                    }
                }
                e.w.sweep_at(25 * 3600);
            }
        }
    });
}

/// An ICMP error as a packet again.
fn parsed(frame: &[u8]) -> Ip {
    let seen = see(frame);
    let header = if seen.src.is_ipv4() { 34 } else { 54 };
    let mut ip = packet::other(seen.src, seen.dst, seen.proto);
    ip.payload = frame[header..].to_vec();
    ip
}

#[test]
fn a_flood_from_outside_drives_out_itself_alone() {
    let config = DatapathConfig {
        connections: Some(1024),
        connection_limits: ConnectionLimits {
            embryonic_per_pod: 50,
            ..ConnectionLimits::default()
        },
        ..kit::config()
    };
    for place in [Place::Pod, Place::OtherNodesPod] {
        edge_with(&config, |e| {
            let service = e.w.service(1, TCP);
            let at = (vip(e.w.a.v4), 80);
            let to = e.endpoint(at.0, place);
            service.balance(&[to], 1);
            service.frontend(at, 0);
            // One that is there already, and one of a pod that nobody has answered.
            e.round(place, TCP, client(at.0), at, SYN);
            e.round(place, TCP, client(at.0), at, ACK);
            let of_pod = make(TCP, (e.w.b.v4, 2000), at, SYN);
            assert_ne!(e.w.sent_by(&e.w.b, &of_pod).0, DROP);
            let flood = |ports: std::ops::Range<u16>| {
                for port in ports {
                    let from = ("203.0.113.99".parse().unwrap(), port);
                    let between = make(TCP, from, to, SYN);
                    e.enters_as(&make(TCP, from, at, SYN), &between);
                    if place == Place::OtherNodesPod {
                        e.forwarded(place, &between);
                    }
                }
            };
            flood(1..1000);
            // An eighth of the table, and what was there.
            let (connections, embryonic) = e.share();
            assert!((100..=128).contains(&embryonic), "{embryonic}");
            assert_eq!(connections, embryonic + 1);
            assert_eq!(table().len() as u64, connections + 1);
            // Nobody who has begun and is answered in time is driven out.
            for port in 0..20 {
                let from = (client(at.0).0, 50_000 + port);
                e.round(place, TCP, from, at, SYN);
                e.round(place, TCP, from, at, ACK);
                flood(1000 + 100 * port..1100 + 100 * port);
            }
            assert_eq!(e.share().0 - e.share().1, 21);
            for port in 0..20 {
                e.round(place, TCP, (client(at.0).0, 50_000 + port), at, ACK);
            }
            assert_eq!(
                e.w.sent_by(&e.w.b, &make(TCP, (e.w.b.v4, 2000), at, ACK)).0,
                { e.w.sent_by(&e.w.b, &of_pod).0 }
            );
            let of_flood = kit::dropped(&e.w.datapath, DropReason::ConnectionShare);
            assert_eq!(of_flood, 0);
            check_table();
        });
    }
}

/// What tells a client that there is no endpoint begins nothing: with one there the client is served, also from the same port.
#[test]
fn a_refusal_leaves_nothing_behind() {
    edge(|e| {
        let mut number = 0;
        for like in e.w.clients() {
            for proto in PROTOCOLS {
                number += 1;
                let service = e.w.service(number, proto);
                let at = (
                    if like.is_ipv4() {
                        kit::NODE.into()
                    } else {
                        kit::NODE6.into()
                    },
                    30_080,
                );
                service.set(Kind::Refuse, 0);
                service.frontend(at, 0);
                for _ in 0..3 {
                    let asks = make(proto, client(like), at, SYN);
                    let (verdict, refusal) = e.run("uplink_in", 0, &framed(&asks));
                    assert_eq!(verdict, REDIRECT, "{:?}", e.w.datapath.drops());
                    let uplink = e.w.b.ifindex;
                    let sent = e.run("uplink_out", uplink, &refusal);
                    assert_eq!(sent, (PASS, refusal));
                }
                assert_eq!((table().len(), aliases().len()), (0, 0), "{proto} {like}");
                service.balance(&[e.endpoint(like, Place::Pod)], 1);
                e.round(Place::Pod, proto, client(like), at, SYN);
                e.w.sweep_at(25 * 3600);
            }
        }
    });
}

/// Of backends that answer whatever comes: such a connection looks like any other.
#[test]
fn datagrams_in_others_names_keep_no_client_out() {
    const ROOM: u64 = 1024;
    let config = DatapathConfig {
        connections: Some(ROOM as u32),
        ..kit::config()
    };
    for (proto, place) in [
        (UDP, Place::Pod),
        (SCTP, Place::Pod),
        (UDP, Place::OtherNodesPod),
    ] {
        edge_with(&config, |e| {
            let here = e.w.a.v4;
            let (at, at_tcp) = ((vip(here), 80), (vip(here), 81));
            for (number, (proto, at)) in (1..).zip([(proto, at), (TCP, at_tcp)]) {
                let service = e.w.service(number, proto);
                service.balance(&[e.endpoint(here, place)], 1);
                service.frontend(at, 0);
            }
            let both = |proto, from, at| {
                e.round(place, proto, from, at, SYN);
                e.round(place, proto, from, at, ACK);
            };
            both(TCP, client(here), at_tcp);
            let flood =
                |number: u16| both(proto, ("203.0.113.99".parse().unwrap(), 1000 + number), at);
            (0..2000).for_each(flood);
            let (connections, _) = e.share();
            assert!(
                (ROOM / 4..=ROOM / 3 + 2).contains(&connections),
                "{connections}"
            );
            for number in 0..200 {
                both(TCP, (client(here).0, 20_000 + number), at_tcp);
                flood(2000 + 7 * number);
                // A client whose connection had to go goes on by the same endpoint.
                flood(number);
            }
            for number in 0..200 {
                e.round(place, TCP, (client(here).0, 20_000 + number), at_tcp, ACK);
            }
            e.round(place, TCP, client(here), at_tcp, ACK);
            assert_eq!(kit::dropped(&e.w.datapath, DropReason::ConnectionShare), 0);
            check_table();
        });
    }
}

#[test]
fn an_alias_without_a_record_keeps_nobody_out() {
    edge(|e| {
        for (number, proto) in (1..).zip(PROTOCOLS) {
            let (service, at) = e.w.publish(number, proto, &endpoints(e.w.a.v4, 1));
            service.balance(&[e.endpoint(at.0, Place::Pod)], 1);
            let from = client(at.0);
            e.round(Place::Pod, proto, from, at, SYN);
            for key in table().keys() {
                open::<ConnectionKey, Connection>("CONNECTIONS")
                    .remove(key)
                    .unwrap();
            }
            e.round(Place::Pod, proto, from, at, SYN);
            check_table();
            e.w.sweep_at(25 * 3600);
        }
    });
}
