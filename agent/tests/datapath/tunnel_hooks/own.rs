//! What the node itself sends into a tunnel by another address than it has there: `overlay_out`, and back by
//! `overlay_in`.

use super::*;
use crate::{
    packet::{
        ACK, FIN, ICMP, IcmpError, RST, SCTP, TCP, UDP, icmp_error, in_parts, see, see_error,
    },
    uplink_hooks::{aliases, check_table, table},
};
use sinabro_agent::datapath::{DatapathConfig, monotonic_ns};
use sinabro_common::abi::{
    Addr,
    config::{FLAG_CARRYING, FLAG_MASQUERADE, NodeConfig},
    connection::HOST_SHARE,
};
use std::net::UdpSocket;

type At = (IpAddr, u16);

const PROTOCOLS: [u8; 4] = [TCP, UDP, SCTP, ICMP];
/// A day and an hour, after which every connection is over.
const LONG: u64 = 25 * 3600 * 1_000_000_000;

/// Addresses of one family.
#[derive(Clone, Copy)]
struct Ends {
    node: IpAddr,
    /// The node's inside of the overlay.
    gateway: IpAddr,
    /// A pod of the second node.
    far: IpAddr,
}

fn families() -> [Ends; 2] {
    [
        ["192.0.2.1", "10.1.0.1", "10.2.0.7"],
        ["2001:db8:1::1", "fd00:1::1", "fd00:2::7"],
    ]
    .map(|texts| {
        let [node, gateway, far] = texts.map(ip);
        Ends { node, gateway, far }
    })
}

/// The first packet from one to the other, or the next one there; of ICMP a question, whose id is `src`'s port, or with
/// `flags` its answer, whose id is `dst`'s.
fn make(proto: u8, src: At, dst: At, flags: u8) -> Ip {
    let (asks, answers) = match src.0 {
        IpAddr::V4(_) => (8, 0),
        IpAddr::V6(_) => (128, 129),
    };
    match proto {
        TCP => packet::tcp(src, dst, flags, b"hello"),
        UDP => packet::udp(src, dst, b"hello"),
        SCTP => packet::sctp(src, dst, b"hello"),
        _ if flags & ACK != 0 => packet::icmp(src.0, dst.0, answers, dst.1),
        _ => packet::icmp(src.0, dst.0, asks, src.1),
    }
}

impl World {
    /// What the node's packet goes into the tunnel as.
    fn sent(&self, packet: &Ip) -> Vec<u8> {
        let (action, out) = self.run("overlay_out", 0, &frame(packet));
        assert_eq!(action, PASS, "{:?}", self.datapath.drops());
        out
    }

    /// It goes into the tunnel by the gateway's address and this port, and what answers comes back to where it came
    /// from.
    fn crosses(&self, proto: u8, (from, to): (At, At), near: At, flags: u8) {
        let sent = make(proto, from, to, flags);
        assert_eq!(self.sent(&sent), frame(&make(proto, near, to, flags)));
        let answer = make(proto, to, near, flags | ACK);
        let expected = make(proto, to, from, flags | ACK);
        let mut expected = self.inner(&expected);
        let (action, out) = self.run("overlay_in", 0, &self.stamped(&answer));
        assert_eq!(action, PASS, "{:?}", self.datapath.drops());
        expected[6..12].copy_from_slice(&out[6..12]);
        assert_eq!(out, expected);
    }

    /// The port that the gateway's address has in a packet of the node's.
    fn near(&self, ends: &Ends, proto: u8, from: At, to: At) -> At {
        let seen = see(&self.sent(&make(proto, from, to, SYN)));
        assert_eq!((seen.src, seen.dst), (ends.gateway, to.0));
        (seen.src, seen.ports.0)
    }

    fn unchanged(&self, packet: &Ip, what: &str) {
        self.passes("overlay_out", &frame(packet), what);
    }

    fn of_host(&self) -> u64 {
        let shares = self.datapath.connections().shares().unwrap();
        let of_host = shares.iter().find(|(key, _)| *key == HOST_SHARE);
        of_host.unwrap().1.connections
    }

    fn forget_all(&self) {
        self.datapath.sweep(monotonic_ns() + LONG).unwrap();
        assert!(table().is_empty() && aliases().is_empty());
        assert_eq!(self.of_host(), 0);
    }
}

#[test]
fn what_the_node_sends_by_another_address_has_that_of_the_tunnels() {
    both(|w| {
        for ends in families() {
            for proto in PROTOCOLS {
                let to = (ends.far, 80);
                // A port that connections may have, which is kept, and one that they may not.
                for port in [62_000, 40_000] {
                    let from = (ends.node, port);
                    let near = w.near(&ends, proto, from, to);
                    assert_eq!(near.1 == port, port == 62_000, "{proto}");
                    assert!((kit::PORT_MIN..=kit::PORT_MAX).contains(&near.1));
                    for flags in [SYN, 0, 0] {
                        // Of TCP's later segments each acknowledges.
                        let flags = if proto == TCP && flags == 0 {
                            ACK
                        } else {
                            flags
                        };
                        w.crosses(proto, (from, to), near, flags);
                    }
                }
                check_table();
                assert_eq!((table().len(), w.of_host()), (2, 2));
                // The node is no pod that has gone.
                assert_eq!(w.datapath.sweep(monotonic_ns()).unwrap(), 0);
                w.forget_all();
            }
        }
    });
}

#[test]
fn what_nobody_would_answer_past_the_tunnel_stays_as_it_is() {
    both(|w| {
        // As an agent has it, pods' ranges are among them.
        let pods = ["10.0.0.0/14", "fd00::/14"].map(|net| net.parse().unwrap());
        w.datapath.set_non_masquerade(&pods).unwrap();
        for ends in families() {
            let to = (ends.far, 80);
            let a = if ends.far.is_ipv4() { w.a.v4 } else { w.a.v6 };
            for proto in PROTOCOLS {
                w.unchanged(&make(proto, (ends.gateway, 4000), to, SYN), "by itself");
                w.unchanged(&make(proto, (a, 4000), to, SYN), "by a pod's address");
                let packet = frame(&make(proto, (ends.node, 4000), to, SYN));
                let (action, out) = w.run("overlay_out", w.a.ifindex, &packet);
                assert_eq!((action, out), (PASS, packet), "of somebody else");
            }
            for flags in [ACK, SYN | ACK, RST, RST | ACK, FIN | ACK] {
                let answer = make(TCP, (ends.node, 4000), to, flags);
                w.unchanged(&answer, "TCP that begins nothing");
            }
            w.unchanged(&make(ICMP, (ends.node, 0), (to.0, 7), ACK), "an echo reply");
            w.unchanged(&packet::other(ends.node, to.0, 47), "another protocol");
            w.unchanged(&packet::udplite((ends.node, 1), to, b"x"), "UDP-Lite");
        }
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn the_settings_say_whether_answers_come_past_the_tunnel() {
    both(|w| {
        let (config, [v4, v6]) = (kit::node_config(), families());
        let first = |ends: &Ends, port| make(UDP, (ends.node, port), (ends.far, 80), SYN);
        let set = |config: NodeConfig| w.datapath.set_node_config(config).unwrap();
        set(NodeConfig {
            masquerade_v6: Addr::UNSPECIFIED,
            ..config
        });
        w.unchanged(&first(&v6, 62_000), "pods' IPv6 is not masqueraded");
        w.near(&v4, UDP, (v4.node, 62_000), (v4.far, 80));
        set(NodeConfig {
            flags: config.flags & !FLAG_MASQUERADE,
            ..config
        });
        w.unchanged(&first(&v4, 62_001), "nothing is masqueraded");
        set(config);
        let nets = ["192.0.2.0/24", "2001:db8::/32"].map(|net| net.parse().unwrap());
        w.datapath.set_non_masquerade(&nets).unwrap();
        for ends in [v4, v6] {
            w.unchanged(&first(&ends, 62_002), "pods reach the node untranslated");
        }
        // What is known goes on.
        w.near(&v4, UDP, (v4.node, 62_000), (v4.far, 80));
        assert_eq!(table().len(), 1);
    });
}

#[test]
fn no_two_sockets_of_the_node_have_one_port() {
    both(|w| {
        for ends in families() {
            let to = (ends.far, 80);
            let [bound, other] = [62_000, 62_001].map(|port| (ends.node, port));
            for proto in PROTOCOLS {
                // One that came later, and has the tunnels' address by itself.
                w.crosses(proto, (bound, to), (ends.gateway, bound.1), SYN);
                let unbound = (ends.gateway, bound.1);
                let near = w.sent(&make(proto, unbound, to, SYN));
                let near = (ends.gateway, see(&near).ports.0);
                assert_ne!(near, unbound, "{proto}");
                w.crosses(proto, (unbound, to), near, SYN);
                w.crosses(proto, (bound, to), unbound, SYN);
                check_table();
                w.forget_all();
            }
            // One that was there before.
            let _socket = UdpSocket::bind((ends.gateway, other.1)).unwrap();
            assert_ne!(w.near(&ends, UDP, other, to).1, other.1);
            w.forget_all();
        }
    });
}

#[test]
fn a_port_that_is_used_again_has_its_translation_again() {
    both(|w| {
        for ends in families() {
            let (from, to) = ((ends.node, 40_000), (ends.far, 80));
            let near = w.near(&ends, TCP, from, to);
            w.crosses(TCP, (from, to), near, SYN);
            w.crosses(TCP, (from, to), near, FIN | ACK);
            w.crosses(TCP, (from, to), near, SYN);
            let record = table().into_values().next().unwrap();
            let (client, server) = record.client_and_server();
            let closed = sinabro_common::algo::ct_state::FIN;
            assert_eq!((client | server) & closed, 0, "it has begun again");
            check_table();
            w.forget_all();
        }
    });
}

#[test]
fn the_nodes_datagrams_cross_in_parts() {
    both(|w| {
        for ends in families() {
            let parts = |src: At, dst: At| in_parts(packet::udp(src, dst, &[b'x'; 24]));
            let (from, to, near) = ((ends.node, 62_000), (ends.far, 80), (ends.gateway, 62_000));
            for (sent, expected) in parts(from, to).iter().zip(parts(near, to)) {
                assert_eq!(w.sent(sent), frame(&expected));
            }
            for (answer, expected) in parts(to, near).iter().zip(parts(to, from)) {
                let mut stamped = w.stamped(answer);
                let (action, out) = w.run("overlay_in", 0, &stamped);
                stamped.splice(14.., expected.bytes());
                assert_eq!((action, out), (PASS, stamped));
            }
            assert_eq!(table().len(), 1, "one for all parts");
            w.forget_all();
        }
    });
}

#[test]
fn errors_speak_of_what_the_socket_and_the_pod_have_sent() {
    both(|w| {
        for ends in families() {
            let (from, to, near) = ((ends.node, 62_000), (ends.far, 80), (ends.gateway, 62_000));
            w.crosses(UDP, (from, to), near, SYN);
            let quote = |src: At, dst: At| make(UDP, src, dst, 0).bytes();
            let seen = |frame: &[u8]| {
                let seen = see_error(frame);
                (seen.src, seen.dst, seen.quoted)
            };
            for error in [IcmpError::NoPort, IcmpError::TooBig(1400)] {
                let said = icmp_error(to.0, near.0, error, &quote(near, to));
                let (action, out) = w.run("overlay_in", 0, &w.stamped(&said));
                assert_eq!(action, PASS);
                assert_eq!(seen(&out), (to.0, from.0, quote(from, to)));
                let says = icmp_error(from.0, to.0, error, &quote(to, from));
                let out = w.sent(&says);
                assert_eq!(seen(&out), (near.0, to.0, quote(to, near)));
            }
            // About what nobody has sent.
            let says = icmp_error(from.0, to.0, IcmpError::NoPort, &quote((to.0, 81), from));
            w.unchanged(&says, "an error about something else");
            w.forget_all();
        }
    });
}

/// Of each family by itself: nothing but a whole start of an agent ends it.
fn until_carried(test: impl Fn(&World, Ends, &dyn Fn()) + Sync) {
    for ends in families() {
        both(|w| {
            // So that answers are looked at.
            let other = (ends.node, 61_999);
            w.crosses(UDP, (other, (ends.far, 80)), (ends.gateway, other.1), SYN);
            test(w, ends, &|| {
                let mut config = kit::node_config();
                config.flags |= FLAG_CARRYING;
                w.datapath.set_node_config(config).unwrap();
            });
        });
    }
}

#[test]
fn while_entries_are_carried_what_is_of_none_waits() {
    until_carried(|w, ends, begin| {
        let (from, to, near) = ((ends.node, 62_000), (ends.far, 80), (ends.gateway, 62_000));
        let reset = make(TCP, near, to, RST);
        w.unchanged(&reset, "there is nothing to wait for");
        begin();
        let sent = frame(&make(TCP, from, to, ACK));
        w.dropped("overlay_out", &sent, NatCarried, "of one on its way");
        // The stack has no socket for its answers, and its reset would end it.
        w.dropped("overlay_out", &frame(&reset), NatCarried, "the stack's");
        w.crosses(TCP, (from, to), near, SYN);
    });
}

#[test]
fn while_entries_are_carried_nothing_of_the_nodes_own_connections_is_lost() {
    until_carried(|w, ends, begin| {
        begin();
        let to = (ends.far, 80);
        // By a port that translations may have, and by one that they may not.
        for port in [62_000, 40_000] {
            let near = (ends.gateway, port);
            for flags in [SYN, SYN | ACK, ACK, FIN | ACK, RST | ACK] {
                w.unchanged(&make(TCP, near, to, flags), "by the tunnels' address");
                let answer = w.stamped(&make(TCP, to, near, flags));
                w.passes("overlay_in", &answer, "its answer");
            }
        }
        let kept = ["192.0.2.0/24", "2001:db8::/32"].map(|net| net.parse().unwrap());
        w.datapath.set_non_masquerade(&kept).unwrap();
        for flags in [SYN, SYN | ACK, ACK, FIN | ACK, RST, RST | ACK] {
            let answer = make(TCP, (ends.node, 4000), to, flags);
            w.unchanged(&answer, "to a pod that reaches the node untranslated");
        }
    });
}

#[test]
fn the_nodes_sockets_leave_room_for_pods() {
    let config = DatapathConfig {
        connections: Some(1024),
        ..kit::config()
    };
    with(&config, |w| {
        let [ends, _] = families();
        let first = |port| frame(&make(UDP, (ends.node, port), (ends.far, 80), SYN));
        let taken =
            (20_000..21_000).take_while(|port| w.run("overlay_out", 0, &first(*port)).0 == PASS);
        let count = taken.count();
        assert!((64..=512).contains(&count), "{count}");
        w.dropped("overlay_out", &first(30_000), ConnectionShare, "one more");
        check_table();
    });
}
