//! What who sends to nobody hears.

use super::*;
use crate::packet::{see_error, with_numbers};
use sinabro_common::abi::config::FLAG_CARRYING;

impl World {
    /// What comes back for a packet of pod a, to pod a.
    pub fn refused(&self, ip: &Ip, reason: DropReason) -> Vec<u8> {
        let before = kit::dropped(&self.datapath, reason);
        let (verdict, out) = self.sent_by(&self.a, ip);
        assert_eq!(verdict, REDIRECT, "{:?}", self.datapath.drops());
        assert_eq!(kit::dropped(&self.datapath, reason) - before, 1);
        assert_eq!((&out[..6], &out[6..12]), (&self.a.mac[..], &HOST_MAC[..]));
        // As it comes it gets in.
        let back = self.programs.run("pod_in", self.a.ifindex, &out);
        assert_eq!(back, (PASS, out.clone()));
        out
    }
}

/// Sequence and acknowledgement number, length of the header and flags.
fn of_tcp(frame: &[u8]) -> (u32, u32, u8, u8) {
    let at = frame.len() - 20;
    let number = |at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().unwrap());
    (
        number(at + 4),
        number(at + 8),
        frame[at + 12],
        frame[at + 13],
    )
}

#[test]
fn tcp_is_reset_by_whom_it_sent_to() {
    world(|w| {
        for (number, client) in (1..).zip(w.clients()) {
            let (service, at) = w.publish(number, TCP, &endpoints(client, 1));
            service.set(Kind::Refuse, 0);
            let unused = (at.0, 81);
            let from = (client, 2000);
            let (sequence, acknowledged) = (0x0102_0304, 0x0506_0708);
            for (to, flags, data, reason, expected) in [
                (
                    at,
                    SYN,
                    0,
                    DropReason::ServiceNoEndpoint,
                    (0, sequence + 1, RST | ACK),
                ),
                // Data that comes with it counts (RFC 7413 has a use for that).
                (
                    unused,
                    SYN,
                    7,
                    DropReason::ServiceNoPort,
                    (0, sequence + 8, RST | ACK),
                ),
                (
                    unused,
                    FIN,
                    0,
                    DropReason::ServiceNoPort,
                    (0, sequence + 1, RST | ACK),
                ),
                (
                    unused,
                    0,
                    1300,
                    DropReason::ServiceNoPort,
                    (0, sequence + 1300, RST | ACK),
                ),
                (
                    at,
                    ACK,
                    100,
                    DropReason::ServiceNoPort,
                    (acknowledged, 0, RST),
                ),
                (
                    at,
                    SYN | ACK,
                    0,
                    DropReason::ServiceNoPort,
                    (acknowledged, 0, RST),
                ),
            ] {
                let sent = packet::tcp(from, to, flags, &vec![7; data]);
                let sent = with_numbers(sent, sequence, acknowledged);
                let out = w.refused(&sent, reason);
                let seen = see(&out);
                assert_eq!(
                    (seen.src, seen.dst, seen.ports),
                    (to.0, client, (to.1, 2000))
                );
                assert_eq!((seen.ttl, seen.data.len()), (64, 0));
                let (seq, ack, header, flags) = of_tcp(&out);
                assert_eq!((seq, ack, flags), expected);
                assert_eq!(header, 0x50);
                assert_eq!(out.len(), 14 + if client.is_ipv4() { 40 } else { 60 });
            }
            // Options are not repeated.
            let sent = packet::tcp_with(from, unused, SYN, &[2, 4, 5, 0xb4]);
            let sent = with_numbers(sent, sequence, acknowledged);
            let out = w.refused(&sent, DropReason::ServiceNoPort);
            assert_eq!(of_tcp(&out), (0, sequence + 1, 0x50, RST | ACK));
            see(&out);
            // Nobody resets a reset.
            for flags in [RST, RST | ACK] {
                let sent = packet::tcp(from, at, flags, b"");
                w.dropped(&sent, DropReason::ServiceNoPort);
            }
        }
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn others_hear_that_the_port_is_unreachable() {
    world(|w| {
        for (number, proto) in (1..).zip([UDP, SCTP]) {
            for client in w.clients() {
                let number = number * 2 + u32::from(client.is_ipv6());
                let (service, at) = w.publish(number, proto, &endpoints(client, 1));
                service.set(Kind::Refuse, 0);
                for (to, reason) in [
                    (at, DropReason::ServiceNoEndpoint),
                    ((at.0, 81), DropReason::ServiceNoPort),
                ] {
                    for data in [0, 3, 1300] {
                        let sent = match proto {
                            UDP => packet::udp((client, 2000), to, &vec![7; data]),
                            _ => packet::sctp((client, 2000), to, &vec![7; data]),
                        };
                        let out = w.refused(&sent, reason);
                        let seen = see_error(&out);
                        assert_eq!((seen.src, seen.dst), (at.0, client));
                        let (at, header, kind) = match client {
                            IpAddr::V4(_) => (34, 20, [3, 3]),
                            IpAddr::V6(_) => (54, 40, [1, 4]),
                        };
                        assert_eq!(out[at..at + 2], kind);
                        assert_eq!(out[at + 4..at + 8], [0; 4]);
                        assert_eq!(seen.quoted, sent.bytes()[..header + 8]);
                    }
                }
            }
        }
        assert!(table().is_empty() && aliases().is_empty());
    });
}

#[test]
fn a_connection_on_its_way_to_another_layout_is_not_reset() {
    world(|w| {
        let (_, at) = w.publish(1, TCP, &endpoints(w.a.v4, 1));
        let mut config = kit::node_config();
        config.flags |= FLAG_CARRYING;
        w.datapath.set_node_config(config).unwrap();
        let sent = make(TCP, (w.a.v4, 2000), at, ACK);
        w.dropped(&sent, DropReason::NatCarried);
        assert_eq!(w.goes_to(&make(TCP, (w.a.v4, 2000), at, SYN)).1, 8001);
    });
}

#[test]
fn what_cannot_be_answered_is_dropped() {
    world(|w| {
        for (number, client) in (1..).zip(w.clients()) {
            let (service, at) = w.publish(number, UDP, &endpoints(client, 1));
            service.set(Kind::Refuse, 0);
            let sent = packet::udp((client, 2000), at, &[7; 64]);
            let first = if client.is_ipv4() { 0x2000 } else { 0x0001 };
            let part = Ip {
                fragment: first,
                ..sent.clone()
            };
            w.dropped(&part, DropReason::ServiceNoEndpoint);
            let with_options = Ip {
                options: vec![1; 8],
                ..sent
            };
            w.dropped(&with_options, DropReason::ServiceNoEndpoint);
        }
    });
}
