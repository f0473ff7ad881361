//! Between pods and what is outside of the cluster without the stack: `pod_out` sends by the uplink, `uplink_in` delivers.

use crate::{
    kit::{self, NODE, NODE6, OUTSIDE, Outside, Pod},
    packet::{self, ACK, ICMP, Ip, SCTP, SYN, TCP, UDP, in_parts, see},
    run::{PASS, Programs, REDIRECT},
};
use sinabro_agent::datapath::{Datapath, Translation, Tunnels};
use sinabro_common::{abi::uplink::Uplink, names::HOST_MAC};
use sinabro_lab::Place;
use std::{collections::BTreeMap, net::IpAddr};

const MTU: u32 = 1450;
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const ROUTER6: &str = "2001:db8::9";
const FAR: [&str; 2] = ["203.0.113.7", "2001:db8:ffff::7"];
const CLIENT_PORT: u16 = 4000;
const SERVER_PORT: u16 = 443;

struct World {
    datapath: Datapath,
    programs: Programs,
    pod: Pod,
    outside: Outside,
    node: Place,
}

/// On a node that knows its tunnels, as any does once its agent has looked around.
fn world(test: impl FnOnce(&World) + Send) {
    world_before_tunnels(|world| {
        let own = BTreeMap::from([(NODE.into(), NODE.into())]);
        let ranges = ["10.1.0.0/24", "fd00:1::/64"].map(|net| (net.parse().unwrap(), NODE.into()));
        let tunnels = Tunnels {
            local: NODE.into(),
            port: 8472,
            vni: 1,
            gateways: &[],
            nodes: &own,
            ranges: &BTreeMap::from(ranges),
        };
        world.datapath.set_tunnels(&tunnels).unwrap();
        test(world);
    });
}

fn world_before_tunnels(test: impl FnOnce(&World) + Send) {
    kit::fresh(|| {
        let datapath = kit::load();
        let pod = Pod::silent(&datapath, 5);
        let outside = Outside::new(&datapath);
        let uplink = Uplink {
            v4: IpAddr::from(NODE).into(),
            v6: IpAddr::from(NODE6).into(),
            header_len: 14,
            pad: 0,
        };
        datapath.set_uplinks(&[(outside.uplink, uplink)]).unwrap();
        kit::all_carry(&datapath, MTU);
        datapath.set_services(true).unwrap();
        datapath.set_forwarding(true).unwrap();
        let world = World {
            programs: Programs::of(&datapath),
            datapath,
            pod,
            outside,
            node: kit::this_place(),
        };
        let mac = "02:00:00:00:00:09";
        let router = OUTSIDE.to_string();
        for command in [
            &format!("addr add {NODE6}/64 dev uplink nodad")[..],
            &format!("neigh replace {router} lladdr {mac} dev uplink nud permanent"),
            &format!("neigh replace {ROUTER6} lladdr {mac} dev uplink nud permanent"),
            &format!("route add default via {router}"),
            &format!("-6 route add default via {ROUTER6} dev uplink"),
        ] {
            world.ip(command);
        }
        test(&world);
    });
}

impl World {
    /// Runs `ip` on the node.
    fn ip(&self, arguments: &str) {
        kit::ip(&self.node, arguments);
    }

    /// Pod, node and a host outside, of either family.
    fn families(&self) -> [[IpAddr; 3]; 2] {
        let far = FAR.map(|text| text.parse().unwrap());
        [
            [self.pod.v4, NODE.into(), far[0]],
            [self.pod.v6, NODE6.into(), far[1]],
        ]
    }

    /// As the pod sends it.
    fn of_pod(&self, ip: &Ip) -> Vec<u8> {
        packet::eth(HOST_MAC, self.pod.mac, ip.kind(), &ip.bytes())
    }

    fn leaves(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        self.programs.run("pod_out", self.pod.ifindex, frame)
    }

    /// It goes past the stack as the node's, one hop less, and the uplink knows it by its mark.
    fn goes_as(&self, ip: &Ip, src: IpAddr, port: u16) {
        let frame = self.of_pod(ip);
        let ran = self
            .programs
            .run_marked("pod_out", self.pod.ifindex, 0, 0, &frame);
        let (action, out, mark) = ran.unwrap();
        assert_eq!(action, REDIRECT, "{ip:?}");
        assert_ne!(mark, 0);
        let seen = see(&out);
        let before = see(&frame);
        let expected = packet::Seen {
            src,
            ttl: before.ttl - 1,
            ports: (port, seen.ports.1),
            ..before.clone()
        };
        assert_eq!(seen, expected);
        let (uplink, pod) = (self.outside.uplink, self.pod.ifindex);
        let ran = self
            .programs
            .run_marked("uplink_out", uplink, pod, mark, &out);
        assert_eq!(ran.unwrap(), (PASS, out, 0));
    }

    /// It goes past the stack, one hop less.
    fn goes(&self, ip: &Ip) {
        let (action, out) = self.leaves(&self.of_pod(ip));
        assert_eq!(action, REDIRECT, "{ip:?}");
        assert_eq!(out, self.of_pod(&less_a_hop(ip)));
    }

    fn is_left(&self, ip: &Ip, what: &str) {
        let frame = self.of_pod(ip);
        assert_eq!(self.leaves(&frame), (PASS, frame), "{what}");
    }

    /// What the uplink sends of it, by whichever way it came there.
    fn sent(&self, ip: &Ip) -> packet::Seen {
        let frame = packet::eth(ROUTER_MAC, UPLINK_MAC, ip.kind(), &ip.bytes());
        let (uplink, pod) = (self.outside.uplink, self.pod.ifindex);
        let ran = self.programs.run_from("uplink_out", uplink, pod, &frame);
        let (action, out) = ran.unwrap();
        assert_eq!(action, PASS, "{:?}", self.datapath.drops());
        see(&out)
    }

    fn comes(&self, ip: &Ip) -> (i32, Vec<u8>) {
        let frame = packet::eth(UPLINK_MAC, ROUTER_MAC, ip.kind(), &ip.bytes());
        self.programs.run("uplink_in", self.outside.uplink, &frame)
    }

    fn counted(&self) -> [u64; 2] {
        let counters = self.datapath.pod_counters(self.pod.ifindex);
        let counters = counters.unwrap().unwrap();
        [counters.tx_packets, counters.rx_packets]
    }
}

fn less_a_hop(ip: &Ip) -> Ip {
    Ip {
        ttl: ip.ttl - 1,
        ..ip.clone()
    }
}

/// The first packet of a connection, one that follows, and an answer to `seen`, which is what the other end sees of the client.
fn exchange(proto: u8, pod: IpAddr, far: IpAddr) -> [Ip; 2] {
    let (from, to) = ((pod, CLIENT_PORT), (far, SERVER_PORT));
    match proto {
        TCP => [SYN, ACK].map(|flags| packet::tcp(from, to, flags, b"")),
        UDP => [&b"hello"[..], b"again"].map(|data| packet::udp(from, to, data)),
        SCTP => [&b"hello"[..], b"again"].map(|data| packet::sctp(from, to, data)),
        _ => {
            let request = if pod.is_ipv4() { 8 } else { 128 };
            [
                packet::icmp(pod, far, request, CLIENT_PORT),
                packet::icmp(pod, far, request, CLIENT_PORT),
            ]
        }
    }
}

fn answer(proto: u8, far: IpAddr, to: (IpAddr, u16)) -> Ip {
    let from = (far, SERVER_PORT);
    match proto {
        TCP => packet::tcp(from, to, ACK, b"welcome"),
        UDP => packet::udp(from, to, b"welcome"),
        SCTP => packet::sctp(from, to, b"welcome"),
        _ => {
            let reply = if far.is_ipv4() { 0 } else { 129 };
            packet::icmp(far, to.0, reply, to.1)
        }
    }
}

#[test]
fn what_is_masqueraded_goes_past_the_stack_both_ways() {
    world(|w| {
        for [pod, node, far] in w.families() {
            for proto in [TCP, UDP, SCTP, ICMP] {
                let [first, next] = exchange(proto, pod, far);
                w.goes(&first);
                let seen = w.sent(&less_a_hop(&first));
                assert_eq!((seen.src, seen.dst), (node, far));
                let [sent, received] = w.counted();
                w.goes_as(&next, node, seen.ports.0);
                let (action, out) = w.comes(&answer(proto, far, (node, seen.ports.0)));
                assert_eq!(action, REDIRECT, "{proto}: {:?}", w.datapath.drops());
                let expected = less_a_hop(&answer(proto, far, (pod, CLIENT_PORT)));
                let bytes = expected.bytes();
                assert_eq!(
                    out,
                    packet::eth(w.pod.mac, HOST_MAC, expected.kind(), &bytes)
                );
                assert_eq!(w.counted(), [sent + 1, received + 1]);
            }
        }
    });
}

#[test]
fn without_a_mark_to_give_the_uplink_translates() {
    world_before_tunnels(|w| {
        for [pod, node, far] in w.families() {
            let [first, next] = exchange(UDP, pod, far);
            w.sent(&less_a_hop(&first));
            w.goes(&next);
            assert_eq!(w.sent(&less_a_hop(&next)).src, node);
        }
    });
}

#[test]
fn what_has_no_record_is_the_stacks() {
    world(|w| {
        for [pod, _, far] in w.families() {
            let (from, to) = ((pod, 80), (far, 5000));
            // An answer to somebody who came by a port of the node that the stack leads to the pod.
            w.is_left(&packet::tcp(from, to, SYN | ACK, b""), "an answer");
            w.is_left(&packet::tcp(from, to, ACK, b"data"), "data");
            w.is_left(&answer(ICMP, pod, (far, 7)), "an answer to an echo request");
        }
        // To whom a pod has its own address.
        let [v4, v6] = w.families();
        for ([pod, ..], dst, net) in [
            (v4, FAR[0], "203.0.113.0/24"),
            (v6, FAR[1], "2001:db8:ffff::/48"),
        ] {
            let begins = packet::tcp((pod, 1), (dst.parse().unwrap(), 2), SYN, b"");
            w.goes(&begins);
            w.datapath
                .set_non_masquerade(&[net.parse().unwrap()])
                .unwrap();
            w.is_left(&begins, "not masqueraded");
            w.datapath.set_non_masquerade(&[]).unwrap();
        }
    });
}

#[test]
fn who_came_to_a_pods_own_address_is_answered_by_the_stack() {
    world(|w| {
        for [pod, _, far] in w.families() {
            let (client, own) = ((far, 5000), (pod, 80));
            for (came, answer) in [
                (
                    packet::tcp(client, own, SYN, b""),
                    packet::tcp(own, client, ACK, b""),
                ),
                (
                    packet::udp(client, own, b"hello"),
                    packet::udp(own, client, b"welcome"),
                ),
                (
                    packet::sctp(client, own, b"hello"),
                    packet::sctp(own, client, b"welcome"),
                ),
            ] {
                assert_eq!(w.comes(&came).0, PASS);
                w.is_left(&answer, "an answer");
            }
        }
    });
}

/// A datagram without a record may be an answer to somebody who came by a port of the node that the stack leads to the pod. An echo request is
/// none, and TCP says itself what begins a connection.
#[test]
fn of_a_pod_with_host_ports_the_first_datagram_is_the_stacks() {
    world(|w| {
        w.pod.attach_with_host_ports(&w.datapath);
        for [pod, node, far] in w.families() {
            for proto in [UDP, SCTP] {
                let [first, next] = exchange(proto, pod, far);
                w.is_left(&first, "a first packet");
                let seen = w.sent(&less_a_hop(&first));
                w.goes_as(&next, node, seen.ports.0);
            }
            for proto in [TCP, ICMP] {
                w.goes(&exchange(proto, pod, far)[0]);
            }
        }
    });
}

#[test]
fn a_router_has_its_part() {
    world(|w| {
        for [pod, node, far] in w.families() {
            let [first, next] = exchange(UDP, pod, far);
            let seen = w.sent(&less_a_hop(&first));
            let goes = |ip: &Ip| w.goes_as(ip, node, seen.ports.0);
            goes(&next);
            let headers = if pod.is_ipv4() { 28 } else { 48 };
            let large = |len: u32| {
                packet::udp(
                    (pod, CLIENT_PORT),
                    (far, SERVER_PORT),
                    &vec![7; (len - headers) as usize],
                )
            };
            goes(&large(MTU));
            w.is_left(&large(MTU + 1), "too large");
            for (what, there) in for_a_router(&next) {
                w.is_left(&there, what);
            }
            let back = answer(UDP, far, (node, seen.ports.0));
            for (what, back) in for_a_router(&back) {
                let (action, out) = w.comes(&back);
                assert_eq!(action, PASS, "{what}");
                assert_eq!(see_dst(&out, &back), pod, "{what}");
            }
            // On a link where this machine hears what is for another.
            let bytes = back.bytes();
            let frame = packet::eth([2, 0, 0, 0, 0, 2], ROUTER_MAC, back.kind(), &bytes);
            let ran = w.programs.run("uplink_in", w.outside.uplink, &frame);
            assert_eq!(ran.0, PASS);
            let mut frame = w.of_pod(&next);
            frame[5] ^= 1;
            assert_eq!(w.leaves(&frame).0, PASS);
        }
    });
}

/// What no router may just hand on.
fn for_a_router(whole: &Ip) -> Vec<(&'static str, Ip)> {
    let with = |change: &dyn Fn(&mut Ip)| {
        let mut changed = whole.clone();
        change(&mut changed);
        changed
    };
    vec![
        ("a last hop", with(&|ip| ip.ttl = 1)),
        ("options", with(&|ip| ip.options = vec![1; 8])),
        (
            "a first part",
            in_parts(with(&|ip| ip.payload.extend([7; 64])))[0].clone(),
        ),
    ]
}

/// The destination in a frame's IP header.
fn see_dst(frame: &[u8], like: &Ip) -> IpAddr {
    match like.src {
        IpAddr::V4(_) => <[u8; 4]>::try_from(&frame[30..34]).unwrap().into(),
        IpAddr::V6(_) => <[u8; 16]>::try_from(&frame[38..54]).unwrap().into(),
    }
}

#[test]
fn routes_are_the_kernels() {
    world(|w| {
        for ([pod, node, far], family) in w.families().into_iter().zip(["-4", "-6"]) {
            let to = |dst| packet::tcp((pod, 1), (dst, 2), SYN, b"");
            let begins = to(far);
            w.goes(&begins);
            w.is_left(&to(node), "to the node itself");
            for route in ["blackhole", "unreachable", "prohibit"] {
                w.ip(&format!("{family} route add {route} {far}"));
                w.is_left(&begins, route);
                w.ip(&format!("{family} route del {route} {far}"));
            }
            w.goes(&begins);
            // By another link than an uplink, and to a neighbour that is yet to be found.
            w.ip(&format!("{family} route add {far} dev {}", w.pod.link));
            w.is_left(&begins, "by another link");
            w.ip(&format!("{family} route replace {far} dev uplink"));
            w.is_left(&begins, "to an unknown neighbour");
            w.ip(&format!(
                "{family} neigh replace {far} lladdr 02:00:00:00:00:77 dev uplink nud permanent"
            ));
            w.goes(&begins);
            w.ip(&format!("{family} route del {far} dev uplink"));
            w.ip(&format!("{family} route del default"));
            w.is_left(&begins, "without a route");
        }
    });
}

/// Of these the stack knows before it asks its routes.
#[test]
fn addresses_that_no_router_hands_on_are_the_stacks() {
    world(|w| {
        let [[v4, ..], [v6, ..]] = w.families();
        let begins = |pod: IpAddr, dst: &str| {
            let dst = dst.parse().unwrap();
            packet::tcp((pod, 1), (dst, 2), SYN, b"")
        };
        for dst in [
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.5",
            "239.1.2.3",
            "240.0.0.1",
            "255.255.255.255",
        ] {
            w.is_left(&begins(v4, dst), dst);
        }
        for dst in ["ff02::1", "ff0e::1", "fe80::1"] {
            w.is_left(&begins(v6, dst), dst);
        }
        for dst in ["1.0.0.1", "126.1.1.1", "128.0.0.1", "223.1.1.1"] {
            w.goes(&begins(v4, dst));
        }
    });
}

#[test]
fn nothing_goes_past_the_stack_unless_it_may() {
    world(|w| {
        let [[pod, node, far], _] = w.families();
        let [first, next] = exchange(TCP, pod, far);
        let seen = w.sent(&less_a_hop(&first));
        let back = answer(TCP, far, (node, seen.ports.0));
        let check = |goes: bool, what: &str| {
            let expected = if goes { REDIRECT } else { PASS };
            for ip in [&first, &next] {
                assert_eq!(w.leaves(&w.of_pod(ip)).0, expected, "{what}");
            }
            assert_eq!(w.comes(&back).0, expected, "{what}");
        };
        check(true, "all is ours");
        for translation in [
            Translation::Off,
            Translation::Handover,
            Translation::Draining,
        ] {
            w.datapath.set_services(translation).unwrap();
            check(false, "others translate");
        }
        w.datapath.set_services(true).unwrap();
        w.datapath.set_forwarding(false).unwrap();
        check(false, "the stack is to do it");
        w.datapath.set_forwarding(true).unwrap();
        // What else the agent says of the node changes nothing of it.
        w.datapath.set_node_config(kit::node_config()).unwrap();
        check(true, "all is ours again");
    });
}

#[test]
fn what_a_syn_announces_is_lowered_on_both_ways() {
    world(|w| {
        for [pod, node, far] in w.families() {
            let announce = |src, dst, flags| packet::tcp_with(src, dst, flags, &[2, 4, 0xff, 0]);
            let most = MTU as u16 - if pod.is_ipv4() { 40 } else { 60 };
            let there = announce((pod, CLIENT_PORT), (far, SERVER_PORT), SYN);
            let (action, out) = w.leaves(&w.of_pod(&there));
            assert_eq!(action, REDIRECT);
            see(&out);
            assert_eq!(out[out.len() - 2..], most.to_be_bytes());
            let seen = w.sent(&less_a_hop(&there));
            let back = announce((far, SERVER_PORT), (node, seen.ports.0), SYN | ACK);
            let (action, out) = w.comes(&back);
            assert_eq!(action, REDIRECT);
            assert_eq!(see(&out).dst, pod);
            assert_eq!(out[out.len() - 2..], most.to_be_bytes());
        }
    });
}
