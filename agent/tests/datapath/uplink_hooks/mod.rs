//! `uplink_out` and `uplink_in` on single packets.

use crate::{
    kit::{self, NODE, OUTSIDE, PORT_MAX, PORT_MIN, Pod},
    logs,
    packet::{self, ACK, FIN, ICMP, Ip, SYN, Seen, TCP, UDP, see},
    run::{DROP, PASS, Programs},
};
use aya::maps::{HashMap, Map, MapData};
use sinabro_agent::datapath::{Datapath, DatapathConfig, monotonic_ns};
use sinabro_common::{
    abi::{
        Addr,
        drop::DropReason,
        nat::{KIND_FORWARD, KIND_INBOUND, KIND_REVERSE, NatEntry, NatKey},
    },
    names,
};
use std::{collections::HashSet, net::IpAddr, time::Instant};

pub const NODE_IP: IpAddr = IpAddr::V4(NODE);
pub const FAR: IpAddr = IpAddr::V4(OUTSIDE);
const SECOND: u64 = 1_000_000_000;

pub struct World {
    pub datapath: Datapath,
    pub programs: Programs,
    pub a: Pod,
    pub b: Pod,
}

pub fn world<T: Send>(test: impl FnOnce(World) -> T + Send) -> T {
    world_with(&kit::config(), test)
}

pub fn world_with<T: Send>(config: &DatapathConfig, test: impl FnOnce(World) -> T + Send) -> T {
    let config = config.clone();
    kit::fresh(move || {
        let datapath = kit::load_with(&config);
        let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
        test(World {
            programs: Programs::of(&datapath),
            datapath,
            a,
            b,
        })
    })
}

/// The masquerade table, as it is pinned.
pub fn table() -> std::collections::HashMap<NatKey, NatEntry> {
    let data = MapData::from_pin(format!("{}/NAT", names::BPF_DIR)).unwrap();
    let map: HashMap<_, NatKey, NatEntry> = Map::HashMap(data).try_into().unwrap();
    map.iter().collect::<Result<_, _>>().unwrap()
}

pub fn insert(key: NatKey, entry: NatEntry) {
    let data = MapData::from_pin(format!("{}/NAT", names::BPF_DIR)).unwrap();
    let mut map: HashMap<_, NatKey, NatEntry> = Map::HashMap(data).try_into().unwrap();
    map.insert(key, entry, 0).unwrap();
}

impl World {
    fn frame(ip: &Ip) -> Vec<u8> {
        packet::eth(
            [2, 0, 0, 0, 0, 9],
            [2, 0, 0, 0, 0, 1],
            ip.kind(),
            &ip.bytes(),
        )
    }

    /// What the uplink sends for a packet of the node's side.
    pub fn out(&self, ip: &Ip) -> (i32, Vec<u8>) {
        self.programs
            .run("uplink_out", self.a.ifindex, &Self::frame(ip))
    }

    /// What the node takes a packet from outside for.
    fn come(&self, ip: &Ip) -> (i32, Vec<u8>) {
        self.programs
            .run("uplink_in", self.a.ifindex, &Self::frame(ip))
    }

    pub fn sent(&self, ip: &Ip) -> Seen {
        let (verdict, out) = self.out(ip);
        assert_eq!(verdict, PASS, "{:?}", self.datapath.drops());
        see(&out)
    }

    fn received(&self, ip: &Ip) -> Seen {
        let (verdict, out) = self.come(ip);
        assert_eq!(verdict, PASS, "{:?}", self.datapath.drops());
        see(&out)
    }

    fn leaves_alone(&self, ip: &Ip, what: &str) {
        let frame = Self::frame(ip);
        for program in ["uplink_out", "uplink_in"] {
            let (verdict, out) = self.programs.run(program, self.a.ifindex, &frame);
            assert_eq!((verdict, &out), (PASS, &frame), "{program}: {what}");
        }
    }

    fn dropped(&self, program: &str, ip: &Ip, reason: DropReason) {
        let before = kit::dropped(&self.datapath, reason);
        let (verdict, _) = self.programs.run(program, self.a.ifindex, &Self::frame(ip));
        assert_eq!(verdict, DROP, "{:?}", self.datapath.drops());
        assert_eq!(kit::dropped(&self.datapath, reason) - before, 1);
    }

    fn sweep_at(&self, seconds: u64) -> u64 {
        self.datapath
            .sweep(monotonic_ns() + seconds * SECOND)
            .unwrap()
    }
}

/// A packet of a protocol from one end to another.
pub fn make(proto: u8, src: (IpAddr, u16), dst: (IpAddr, u16)) -> Ip {
    match proto {
        TCP => packet::tcp(src, dst, SYN, b"hello"),
        UDP => packet::udp(src, dst, b"hello"),
        _ => packet::icmp(src.0, dst.0, 8, src.1),
    }
}

/// The reply to a packet as it was seen.
fn reply_to(seen: &Seen) -> Ip {
    let (src, dst) = ((seen.dst, seen.ports.1), (seen.src, seen.ports.0));
    match seen.proto {
        TCP => packet::tcp(src, dst, SYN | ACK, b"hi"),
        UDP => packet::udp(src, dst, b"hi"),
        _ => packet::icmp(src.0, dst.0, 0, seen.ports.0),
    }
}

#[test]
fn pods_leave_as_the_node_and_get_their_replies() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            for port in [4000, 65000] {
                let ip = make(proto, (w.a.v4, port), (FAR, 443));
                let original = see(&World::frame(&ip));
                let sent = w.sent(&ip);
                assert_eq!(sent.src, NODE_IP);
                assert!((PORT_MIN..=PORT_MAX).contains(&sent.ports.0), "{sent:?}");
                if port == 65000 {
                    assert_eq!(sent.ports.0, port, "a port in the range is kept");
                }
                assert_eq!((sent.dst, sent.ttl), (FAR, original.ttl));
                assert_eq!(sent.data, original.data);

                assert_eq!(w.sent(&ip), sent, "the same flow, the same port");

                let reply = reply_to(&sent);
                let received = w.received(&reply);
                assert_eq!(received.dst, w.a.v4);
                assert_eq!(received.src, FAR);
                let expected = if proto == ICMP {
                    (port, port)
                } else {
                    (443, port)
                };
                assert_eq!(received.ports, expected);
            }
        }
        assert_eq!(table().len(), 12);
    });
}

#[test]
fn options_are_no_obstacle() {
    world(|w| {
        let mut ip = make(UDP, (w.a.v4, 4000), (FAR, 53));
        ip.options = vec![1; 12];
        let sent = w.sent(&ip);
        assert_eq!((sent.src, sent.data), (NODE_IP, b"hello".to_vec()));
    });
}

#[test]
fn a_udp_packet_without_checksum_stays_so() {
    world(|w| {
        let mut ip = make(UDP, (w.a.v4, 4000), (FAR, 53));
        ip.payload[6..8].copy_from_slice(&[0, 0]);
        let (_, out) = w.out(&ip);
        assert_eq!(see(&out).src, NODE_IP);
        assert_eq!(out[14 + 20 + 6..][..2], [0, 0]);
    });
}

#[test]
fn two_pods_with_the_same_source_port_are_told_apart() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            let a = w.sent(&make(proto, (w.a.v4, 62000), (FAR, 443)));
            let b = w.sent(&make(proto, (w.b.v4, 62000), (FAR, 443)));
            assert_ne!(a.ports.0, b.ports.0);
            assert_eq!(w.received(&reply_to(&a)).dst, w.a.v4);
            assert_eq!(w.received(&reply_to(&b)).dst, w.b.v4);
        }
    });
}

#[test]
fn what_is_not_a_pods_passes_untouched() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            w.leaves_alone(&make(proto, (NODE_IP, 4000), (FAR, 443)), "the node's own");
            w.leaves_alone(&make(proto, (FAR, 443), (NODE_IP, 4000)), "to the node");
            let other = "10.2.0.1".parse().unwrap();
            w.leaves_alone(&make(proto, (other, 1), (FAR, 443)), "another node's pod");
        }
        let far6 = "2001:db8::1".parse().unwrap();
        w.leaves_alone(&packet::udp((w.a.v6, 1), (far6, 2), b""), "IPv6");
        w.leaves_alone(&packet::other(NODE_IP, FAR, 132), "SCTP of the node");
        let mut fragment = make(UDP, (NODE_IP, 4000), (FAR, 443));
        fragment.fragment = 5;
        w.leaves_alone(&fragment, "a fragment of the node's");

        w.datapath
            .set_non_masquerade(&["192.0.2.0/28".parse().unwrap(), "fd00::/8".parse().unwrap()])
            .unwrap();
        let ip = make(UDP, (w.a.v4, 4000), (FAR, 443));
        w.leaves_alone(&ip, "a destination that knows pods");
        let mut fragment = ip.clone();
        fragment.fragment = 5;
        w.leaves_alone(&fragment, "a fragment to there");
        w.leaves_alone(&packet::other(w.a.v4, FAR, 132), "SCTP to there");
        let beyond = make(UDP, (w.a.v4, 4000), ("192.0.2.16".parse().unwrap(), 443));
        assert_eq!(w.sent(&beyond).src, NODE_IP);

        w.datapath.set_non_masquerade(&[]).unwrap();
        assert_eq!(w.sent(&ip).src, NODE_IP);
        assert!(table().values().all(|entry| entry.kind != KIND_INBOUND));

        let mut config = kit::node_config();
        config.flags = 0;
        w.datapath.set_node_config(config).unwrap();
        w.leaves_alone(&ip, "masquerade is off");
    });
}

#[test]
fn what_cannot_be_translated_is_dropped_and_counted() {
    world(|w| {
        for fragment in [0x2000, 0x2005, 0x0005] {
            for proto in [TCP, UDP, ICMP] {
                let mut ip = make(proto, (w.a.v4, 4000), (FAR, 443));
                ip.fragment = fragment;
                w.dropped("uplink_out", &ip, DropReason::NatFragment);
            }
        }
        for proto in [47, 50, 132] {
            w.dropped(
                "uplink_out",
                &packet::other(w.a.v4, FAR, proto),
                DropReason::NatProtocol,
            );
        }
        let unreachable = packet::icmp(w.a.v4, FAR, 3, 0);
        w.dropped("uplink_out", &unreachable, DropReason::NatProtocol);
        assert!(table().is_empty());

        let sent = w.sent(&make(UDP, (w.a.v4, 4000), (FAR, 53)));
        let mut reply = reply_to(&sent);
        reply.fragment = 0x2000;
        w.dropped("uplink_in", &reply, DropReason::NatFragment);
    });
}

#[test]
fn icmp_that_is_no_echo_request_never_meets_a_flow() {
    world(|w| {
        // Messages without an id, and a reply by chance with the same one.
        for id in [0, 7] {
            w.sent(&make(ICMP, (w.a.v4, id), (FAR, 0)));
        }
        let unreachable = packet::icmp(w.a.v4, FAR, 3, 0);
        w.dropped("uplink_out", &unreachable, DropReason::NatProtocol);
        let reply = packet::icmp(w.a.v4, FAR, 0, 7);
        assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));
    });
}

#[test]
fn every_truncation_of_a_pods_packet_is_dropped_and_of_others_passes() {
    world(|w| {
        for proto in [TCP, UDP, ICMP] {
            let mut ip = make(proto, (w.a.v4, 4000), (FAR, 443));
            ip.options = vec![1; 4];
            let sent = w.sent(&ip);
            let whole = World::frame(&ip);
            // Whether the header tells the truth about a packet that is too short...
            for len in 34..whole.len() {
                let verdict = w.programs.run("uplink_out", w.a.ifindex, &whole[..len]);
                assert_eq!(verdict, (PASS, whole[..len].to_vec()), "{len} bytes");
            }
            // ...or the packet ends where its header says, in the middle of the next one.
            for len in 0..if proto == TCP { 20 } else { 8 } {
                let mut ip = ip.clone();
                ip.payload.truncate(len);
                w.dropped("uplink_out", &ip, DropReason::Malformed);
            }
            let reply = World::frame(&reply_to(&sent));
            for len in 34..reply.len() {
                let verdict = w.programs.run("uplink_in", w.a.ifindex, &reply[..len]);
                assert_eq!(verdict, (PASS, reply[..len].to_vec()), "{len} bytes");
            }
        }
    });
}

#[test]
fn only_replies_are_reversed() {
    world(|w| {
        let tcp = w.sent(&make(TCP, (w.a.v4, 4000), (FAR, 443)));
        let echo = w.sent(&make(ICMP, (w.a.v4, 7), (FAR, 0)));
        let strange: IpAddr = "192.0.2.77".parse().unwrap();
        for ip in [
            packet::tcp((strange, 443), (NODE_IP, tcp.ports.0), ACK, b""),
            packet::tcp((FAR, 444), (NODE_IP, tcp.ports.0), ACK, b""),
            packet::tcp((FAR, 443), (NODE_IP, tcp.ports.0 ^ 1), ACK, b""),
            packet::udp((FAR, 443), (NODE_IP, tcp.ports.0), b""),
            // A request to the node itself, by chance with the same id.
            packet::icmp(FAR, NODE_IP, 8, echo.ports.0),
            packet::icmp(strange, NODE_IP, 0, echo.ports.0),
            packet::icmp(FAR, NODE_IP, 3, echo.ports.0),
        ] {
            let frame = World::frame(&ip);
            assert_eq!(w.come(&ip), (PASS, frame));
        }
        assert_eq!(table().len(), 4);
    });
}

#[test]
fn connections_from_outside_keep_the_pods_address() {
    world(|w| {
        for proto in [TCP, UDP] {
            let ip = make(proto, (FAR, 4000), (w.a.v4, 80));
            assert_eq!(w.come(&ip), (PASS, World::frame(&ip)));
            let reply = reply_to(&see(&World::frame(&ip)));
            assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));
            // What the pod begins itself is masqueraded as ever.
            let own = make(proto, (w.a.v4, 81), (FAR, 4000));
            assert_eq!(w.sent(&own).src, NODE_IP);
        }
        let inbound = |entry: &&NatEntry| entry.kind == KIND_INBOUND;
        assert_eq!(table().values().filter(inbound).count(), 2);

        // An answer to an echo request needs no memory.
        let reply = packet::icmp(w.a.v4, FAR, 0, 9);
        assert_eq!(w.out(&reply), (PASS, World::frame(&reply)));

        // A reset to nobody, and peers that know pods, leave no trace.
        let before = table().len();
        w.come(&packet::tcp((FAR, 4001), (w.a.v4, 80), 0x04, b""));
        let near = "192.0.2.200".parse().unwrap();
        w.datapath
            .set_non_masquerade(&["192.0.2.192/26".parse().unwrap()])
            .unwrap();
        w.come(&packet::tcp((near, 4001), (w.a.v4, 80), SYN, b""));
        assert_eq!(table().len(), before);
    });
}

#[test]
fn ports_run_out_for_one_destination_and_not_for_another() {
    world(|w| {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (61000, 61001);
        w.datapath.set_node_config(config).unwrap();

        let to = |port| (FAR, port);
        let first = w.sent(&make(UDP, (w.a.v4, 1), to(53)));
        let second = w.sent(&make(UDP, (w.b.v4, 1), to(53)));
        assert_eq!(
            HashSet::from([first.ports.0, second.ports.0]),
            HashSet::from([61000, 61001])
        );
        let third = make(UDP, (w.a.v4, 2), to(53));
        w.dropped("uplink_out", &third, DropReason::NatPortsExhausted);
        w.sent(&make(UDP, (w.a.v4, 2), to(54)));
        assert_eq!(table().len(), 6);

        assert_eq!(w.sweep_at(31), 3);
        w.sent(&third);
    });
}

#[test]
fn a_full_table_drops_new_flows_and_keeps_old_ones() {
    let config = DatapathConfig {
        nat_entries: Some(4),
        ..kit::config()
    };
    world_with(&config, |w| {
        let old = make(UDP, (w.a.v4, 1), (FAR, 53));
        let sent = w.sent(&old);
        // The kernel keeps a few entries per CPU beyond the limit out of everyone's reach, or
        // gives a few more: fill up to where it refuses.
        let mut refused = None;
        let began = Instant::now();
        for port in 2..200 {
            let ip = make(UDP, (w.a.v4, port), (FAR, 53));
            if w.out(&ip).0 == DROP {
                refused = Some(ip);
                break;
            }
        }
        let refused = refused.unwrap();
        let entries = table();
        assert!(entries.len() <= 4);
        for _ in 0..20 {
            assert_eq!(w.out(&refused).0, DROP);
        }
        logs::assert_said_rarely(
            &w.datapath,
            began,
            "WARN masquerade table is full, new flows are dropped until others end object=\"uplink\"",
        );
        // Half a flow was taken back: none leads nowhere.
        let kind = |kind| entries.values().filter(|entry| entry.kind == kind).count();
        assert_eq!(kind(KIND_FORWARD), kind(KIND_REVERSE));
        w.dropped("uplink_out", &refused, DropReason::NatTableFull);
        let inbound = make(UDP, (FAR, 9), (w.b.v4, 80));
        if entries.len() == 4 {
            w.dropped("uplink_in", &inbound, DropReason::NatTableFull);
        }
        assert_eq!(w.sent(&old), sent);
        assert_eq!(w.received(&reply_to(&sent)).dst, w.a.v4);
        assert_eq!(w.datapath.nat_usage().capacity, 2);
    });
}

#[test]
fn flows_end_when_both_directions_are_idle() {
    world(|w| {
        let udp = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        let answered = w.sent(&make(UDP, (w.a.v4, 2), (FAR, 53)));
        w.received(&reply_to(&answered));
        w.sent(&make(ICMP, (w.a.v4, 3), (FAR, 0)));
        let tcp = w.sent(&make(TCP, (w.a.v4, 4), (FAR, 80)));
        w.received(&reply_to(&tcp));
        w.sent(&make(TCP, (w.a.v4, 5), (FAR, 80)));
        w.come(&make(UDP, (FAR, 6), (w.a.v4, 80)));
        assert_eq!(table().len(), 11);

        assert_eq!(w.sweep_at(0), 0);
        assert_eq!(w.datapath.nat_usage().flows, 6);
        assert_eq!(w.sweep_at(29), 0);
        assert_eq!(w.sweep_at(31), 3, "unanswered UDP both ways, echo");
        assert_eq!(w.received(&reply_to(&answered)).dst, w.a.v4);
        assert_eq!(w.come(&reply_to(&udp)).1, World::frame(&reply_to(&udp)));
        assert_eq!(w.sweep_at(119), 0);
        assert_eq!(w.sweep_at(125), 2, "answered UDP, unanswered SYN");
        assert_eq!(w.sweep_at(23 * 3600), 0, "an open connection");
        assert_eq!(w.datapath.nat_usage().flows, 1);

        // Both ends say goodbye.
        w.sent(&packet::tcp((w.a.v4, 4), (FAR, 80), FIN | ACK, b""));
        assert_eq!(w.sweep_at(3500), 0, "half closed");
        let goodbye = packet::tcp((FAR, 80), (NODE_IP, tcp.ports.0), FIN | ACK, b"");
        assert_eq!(w.received(&goodbye).dst, w.a.v4);
        assert_eq!(w.sweep_at(119), 0);
        assert_eq!(w.sweep_at(125), 1);
        assert!(table().is_empty());
    });
}

#[test]
fn flows_of_pods_that_are_gone_end_at_once() {
    world(|w| {
        w.sent(&make(TCP, (w.a.v4, 1), (FAR, 53)));
        w.come(&make(TCP, (FAR, 1), (w.a.v4, 80)));
        let kept = w.sent(&make(TCP, (w.b.v4, 1), (FAR, 53)));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        assert_eq!(w.sweep_at(0), 2);
        assert_eq!(table().len(), 2);
        assert_eq!(w.received(&reply_to(&kept)).dst, w.b.v4);
    });
}

#[test]
fn an_address_that_is_given_again_comes_without_the_flows_of_its_last_pod() {
    world(|w| {
        let old = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        w.come(&make(TCP, (FAR, 1), (w.a.v4, 80)));
        let kept = w.sent(&make(UDP, (w.b.v4, 1), (FAR, 53)));
        w.datapath
            .detach_pod(w.a.ifindex, &w.a.link, &w.a.addresses())
            .unwrap();
        w.a.attach(&w.datapath);
        let late = reply_to(&old);
        assert_eq!(w.come(&late), (PASS, World::frame(&late)));
        assert_eq!(table().len(), 2);
        assert_eq!(w.received(&reply_to(&kept)).dst, w.b.v4);
        // Attached again without having left, as after a restart, it keeps its flows.
        let own = w.sent(&make(UDP, (w.a.v4, 2), (FAR, 53)));
        w.a.attach(&w.datapath);
        assert_eq!(w.received(&reply_to(&own)).dst, w.a.v4);
    });
}

#[test]
fn flows_end_when_the_node_changes_its_address() {
    world(|w| {
        let ip = make(UDP, (w.a.v4, 1), (FAR, 53));
        w.sent(&ip);
        w.come(&make(UDP, (FAR, 1), (w.a.v4, 80)));
        let mut config = kit::node_config();
        config.masquerade_v4 = Addr::v4([192, 0, 2, 2]);
        w.datapath.set_node_config(config).unwrap();
        assert_eq!(w.sweep_at(0), 1);
        let new: IpAddr = "192.0.2.2".parse().unwrap();
        assert_eq!(w.sent(&ip).src, new);
    });
}

#[test]
fn reverse_entries_that_lead_nowhere_go_at_the_second_sweep() {
    world(|w| {
        let kept = w.sent(&make(UDP, (w.a.v4, 1), (FAR, 53)));
        let flow = NatKey {
            src: w.a.v4.into(),
            dst: FAR.into(),
            src_port: [0, 2],
            dst_port: [0, 53],
            proto: UDP,
            pad: [0; 3],
        };
        let entry = NatEntry {
            addr: flow.src,
            port: flow.src_port,
            kind: KIND_REVERSE,
            state: 0,
            peer_state: 0,
            pad: [0; 3],
            last_seen_ns: monotonic_ns(),
        };
        insert(flow.reply_to(NODE_IP.into(), [0xff, 1]), entry);
        assert_eq!(table().len(), 3);
        assert_eq!(w.sweep_at(0), 0, "it may be a flow in the making");
        assert_eq!(w.sweep_at(0), 1);
        assert_eq!(table().len(), 2);
        assert_eq!(w.received(&reply_to(&kept)).dst, w.a.v4);
    });
}
