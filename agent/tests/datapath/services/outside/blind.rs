//! A stranger who knows a connection's ends, and not its sequence numbers, resets or closes it (RFC 5961 §1.1).

use super::*;
use crate::packet::{NUMBER, with_numbers};
use sinabro_common::algo::lifetime::{Stage, stage};
use std::{collections::HashMap, thread, time::Duration};

/// The window that each end announces, without a shift.
const WINDOW: u32 = 0xffff;
/// Sequence numbers outside of it.
const OUTSIDE: [u32; 4] = [
    NUMBER - 1,
    NUMBER + WINDOW + 1,
    NUMBER ^ 1 << 31,
    NUMBER - WINDOW,
];

/// An established connection of one of the kinds that have a record.
struct Target<'a> {
    what: String,
    key: ConnectionKey,
    /// A segment without data that has the end's address which a stranger can forge.
    forge: Box<dyn Fn(u8, u32) + 'a>,
    /// The other end acknowledges what it has.
    answer: Box<dyn Fn() + 'a>,
}

impl Target<'_> {
    fn record(&self) -> Connection {
        table()[&self.key]
    }

    fn stage(&self) -> Stage {
        stage_of(&self.key)
    }
}

fn stage_of(key: &ConnectionKey) -> Stage {
    let (client, server) = table()[key].client_and_server();
    stage(TCP, client, server, 0)
}

/// The connection that has a record since.
fn new(known: &HashMap<ConnectionKey, Connection>) -> ConnectionKey {
    let mut keys = table().into_keys();
    keys.find(|key| !known.contains_key(key)).unwrap()
}

fn without_data(src: At, dst: At, flags: u8, sequence: u32) -> Ip {
    with_numbers(packet::tcp(src, dst, flags, b""), sequence, NUMBER)
}

impl Edge {
    fn passes(&self, program: &str, from: u32, ip: &Ip) -> Vec<u8> {
        let (verdict, out) = self.run(program, from, &framed(ip));
        assert_eq!(verdict, PASS, "{:?}", self.w.datapath.drops());
        out
    }

    /// What the endpoint of a Service answers to a client outside.
    fn answers(&self, place: Place, to: At, near: u16, ip: &Ip) {
        let from = match place {
            Place::Pod => {
                self.w.leaves_as(ip, ip);
                self.w.a.ifindex
            }
            Place::Node => 0,
            Place::OtherNodesPod | Place::Elsewhere => {
                let near = (self.near(place, to.0), near);
                self.returns_as(place, &without_data(to, near, ACK, NUMBER), ip);
                self.w.a.ifindex
            }
        };
        self.passes("uplink_out", from, ip);
    }

    /// One of each kind, of one family.
    fn targets(&self, like: IpAddr, number: &mut u32) -> Vec<Target<'_>> {
        let mut targets = Vec::new();
        let mut known = table();
        let mut add = |what: String, forge, answer| {
            let key = new(&known);
            known = table();
            targets.push(Target {
                what,
                key,
                forge,
                answer,
            });
        };
        for place in PLACES {
            *number += 1;
            let service = self.w.service(*number, TCP);
            let at = (vip(like), 80 + *number as u16);
            let to = self.endpoint(like, place);
            service.balance(&[to], 1);
            service.frontend(at, 0);
            let from = (client(like).0, 40_000 + *number as u16);
            for flags in [SYN, ACK, ACK] {
                self.round(place, TCP, from, at, flags);
            }
            let near = match place {
                Place::Pod | Place::Node => 0,
                _ => {
                    see(&self.forwarded(place, &make(TCP, from, to, ACK)))
                        .ports
                        .0
                }
            };
            add(
                format!("a client of a Service, {place:?}, {like}"),
                Box::new(move |flags, sequence| {
                    self.passes("uplink_in", 0, &without_data(from, at, flags, sequence));
                }) as Box<dyn Fn(u8, u32)>,
                Box::new(move || {
                    self.answers(place, to, near, &without_data(to, from, ACK, NUMBER));
                }) as Box<dyn Fn()>,
            );
        }
        let (pod, node) = (
            if like.is_ipv4() {
                self.w.a.v4
            } else {
                self.w.a.v6
            },
            node(like),
        );
        let server = (address(like, "198.51.100.9", "2001:db8:9::9"), 443);
        // The node's socket has the port that the pod's connection has got there.
        let mut port = 0;
        for (what, own, from) in [
            ("a pod's", pod, self.w.a.ifindex),
            ("the node's own", node, 0),
        ] {
            let own = (own, if port == 0 { 50_000 } else { port });
            let sent = move |flags| {
                self.passes(
                    "uplink_out",
                    from,
                    &without_data(own, server, flags, NUMBER),
                )
            };
            port = see(&sent(SYN)).ports.0;
            let outside = (node, port);
            let forge = move |flags, sequence| {
                self.passes(
                    "uplink_in",
                    0,
                    &without_data(server, outside, flags, sequence),
                );
            };
            forge(SYN | ACK, NUMBER);
            sent(ACK);
            add(
                format!("the server of {what}, {like}"),
                Box::new(forge),
                Box::new(move || drop(sent(ACK))),
            );
        }
        let (from, to) = ((client(like).0, 45_000), (pod, 8443));
        let forge = move |flags, sequence| {
            self.passes("uplink_in", 0, &without_data(from, to, flags, sequence));
        };
        let answer = move |flags| {
            let out = self.passes(
                "uplink_out",
                self.w.a.ifindex,
                &without_data(to, from, flags, NUMBER),
            );
            assert_eq!(see(&out).src, pod);
        };
        forge(SYN, NUMBER);
        answer(SYN | ACK);
        forge(ACK, NUMBER);
        add(
            format!("who reaches a pod by its own address, {like}"),
            Box::new(forge),
            Box::new(move || answer(ACK)),
        );
        targets
    }
}

fn each_target(test: impl Fn(&Edge, &Target) + Send + Sync) {
    edge(|e| {
        let mut number = 0;
        for like in e.w.clients() {
            for target in e.targets(like, &mut number) {
                assert_eq!(target.stage(), Stage::Established, "{}", target.what);
                test(&e, &target);
            }
        }
    });
}

#[test]
fn what_is_outside_of_the_window_ends_nothing() {
    each_target(|e, target| {
        let began = target.record().began_ns;
        for flags in [RST, RST | ACK, FIN | ACK, FIN | RST] {
            for sequence in OUTSIDE {
                (target.forge)(flags, sequence);
                assert_eq!(
                    target.stage(),
                    Stage::Established,
                    "{}: {flags:#x}",
                    target.what
                );
            }
        }
        // The way that a stranger has to another endpoint.
        (target.forge)(SYN, 77);
        assert_eq!(target.record().began_ns, began, "{}", target.what);
        assert_eq!(target.stage(), Stage::Established, "{}", target.what);
        // A reset connection lives for ten seconds.
        e.w.sweep_at(11);
        assert_eq!(target.stage(), Stage::Established, "{}", target.what);
        // Its own end comes all the same, after what a stranger sent.
        (target.forge)(RST, NUMBER);
        assert_eq!(target.stage(), Stage::Reset, "{}", target.what);
    });
}

#[test]
fn what_is_in_the_window_ends_it_at_once_unless_the_other_end_goes_on() {
    each_target(|_, target| {
        // The first is what is expected, the others what came with data under way.
        for sequence in [NUMBER, NUMBER + 1, NUMBER + 1460, NUMBER + WINDOW] {
            (target.forge)(RST, sequence);
            assert_eq!(target.stage(), Stage::Reset, "{}", target.what);
            // It did not take it, and asks (RFC 5961 §3.2).
            (target.answer)();
            assert_eq!(target.stage(), Stage::Established, "{}", target.what);
        }
        (target.forge)(FIN | ACK, NUMBER);
        assert_eq!(target.stage(), Stage::HalfClosed, "{}", target.what);
    });
}

/// Long enough for an answer to a reset that somebody guessed.
#[test]
fn a_syn_takes_the_place_of_a_reset_connection_after_a_moment() {
    edge(|e| {
        let mut number = 0;
        for like in e.w.clients() {
            let targets = e.targets(like, &mut number);
            let clients: Vec<_> = targets
                .iter()
                .filter(|target| target.what.starts_with("a client"))
                .collect();
            let began: Vec<u64> = clients
                .iter()
                .map(|target| target.record().began_ns)
                .collect();
            for target in &clients {
                (target.forge)(RST, NUMBER);
                (target.forge)(SYN, 77);
            }
            for (target, began) in clients.iter().zip(&began) {
                assert_eq!(target.record().began_ns, *began, "{}", target.what);
            }
            thread::sleep(Duration::from_millis(1100));
            for (target, began) in clients.iter().zip(&began) {
                (target.forge)(SYN, 77);
                assert!(target.record().began_ns > *began, "{}", target.what);
            }
        }
    });
}

/// Of an end whose SYN says how its windows are to be read (RFC 7323 §2.2).
#[test]
fn windows_are_as_large_as_their_ends_say() {
    const SHIFT: u8 = 7;
    edge(|e| {
        for like in e.w.clients() {
            // As stacks order them, behind others and at the header's end.
            for options in [
                &[
                    2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, SHIFT,
                ][..],
                &[3, 3, SHIFT, 0],
                &[2, 4, 5, 0xb4, 1, 3, 3, SHIFT, 1, 1, 4, 2],
            ] {
                let known = table();
                let (from, to) = (
                    (client(like).0, 46_000 + options.len() as u16),
                    (e.endpoint(like, Place::Pod).0, 8443),
                );
                let comes = |ip: &Ip| drop(e.passes("uplink_in", 0, ip));
                let answers = |ip: &Ip| drop(e.passes("uplink_out", e.w.a.ifindex, ip));
                comes(&without_data(from, to, SYN, NUMBER));
                answers(&packet::tcp_with(to, from, SYN | ACK, options));
                comes(&without_data(from, to, ACK, NUMBER));
                answers(&without_data(to, from, ACK, NUMBER));
                let reset = |sequence| {
                    comes(&without_data(from, to, RST, sequence));
                    stage_of(&new(&known))
                };
                let size = WINDOW << SHIFT;
                assert_eq!(reset(NUMBER + size + 1), Stage::Established, "{options:?}");
                assert_eq!(reset(NUMBER + size), Stage::Reset, "{options:?}");
            }
        }
    });
}

/// Both have forgotten the connection: the pod begins another by its port, and the server refuses that by numbers of its own.
#[test]
fn a_pod_that_begins_again_may_be_refused() {
    edge(|e| {
        for like in e.w.clients() {
            let known = table();
            let own = (e.endpoint(like, Place::Pod).0, 50_001);
            let server = (address(like, "198.51.100.9", "2001:db8:9::9"), 443);
            let sent = |flags, sequence| {
                let sent = without_data(own, server, flags, sequence);
                see(&e.passes("uplink_out", e.w.a.ifindex, &sent)).ports.0
            };
            let outside = (node(like), sent(SYN, NUMBER));
            let comes = |flags, sequence| {
                e.passes(
                    "uplink_in",
                    0,
                    &without_data(server, outside, flags, sequence),
                );
            };
            comes(SYN | ACK, NUMBER);
            sent(ACK, NUMBER);
            let key = new(&known);
            comes(RST | ACK, 0);
            assert_eq!(stage_of(&key), Stage::Established);
            sent(SYN, 77);
            comes(RST | ACK, 0);
            assert_eq!(stage_of(&key), Stage::Reset);
        }
    });
}
