//! Random packets, through the real programs and through a table of plain Rust that knows nothing of theirs: what it
//! says comes out byte for byte. Only the choice of an endpoint is left open, and it has to be one that may be chosen.

use super::*;
use crate::uplink_hooks::open;
use proptest::{prelude::*, test_runner::TestRunner};
use sinabro_common::abi::connection::{Connection, ConnectionKey};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A port of the client's sends to one of the Services, or goes on to.
    Send {
        tcp: bool,
        v6: bool,
        port: u16,
        vip: u16,
        begins: bool,
    },
    /// An endpoint sends to a port of the client's.
    Answer {
        tcp: bool,
        v6: bool,
        port: u16,
        endpoint: usize,
    },
    /// A Service has other endpoints: a bit for each.
    Change {
        tcp: bool,
        v6: bool,
        vip: u16,
        ready: u8,
    },
    /// Nobody sends for longer than any connection lives.
    Away,
}

const ENDPOINTS: u8 = 3;
const VIPS: u16 = 3;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (port, vip) = (2000..2004u16, 0..VIPS);
    let send = (
        any::<bool>(),
        any::<bool>(),
        port.clone(),
        vip.clone(),
        any::<bool>(),
    );
    let answer = (
        any::<bool>(),
        any::<bool>(),
        port,
        0..usize::from(ENDPOINTS),
    );
    let change = (any::<bool>(), any::<bool>(), vip, 0..1u8 << ENDPOINTS);
    let op = prop_oneof![
        20 => send.prop_map(|(tcp, v6, port, vip, begins)| Op::Send { tcp, v6, port, vip, begins }),
        20 => answer.prop_map(|(tcp, v6, port, endpoint)| Op::Answer { tcp, v6, port, endpoint }),
        4 => change.prop_map(|(tcp, v6, vip, ready)| Op::Change { tcp, v6, vip, ready }),
        1 => Just(Op::Away),
    ];
    prop::collection::vec(op, 1..120)
}

/// Who has what: by protocol, family, the client's port and the Service, or the endpoint.
#[derive(Default)]
struct Model {
    ready: BTreeMap<(bool, bool, u16), u8>,
    chosen: BTreeMap<(bool, bool, u16, u16), usize>,
    /// Of those, which have heard from their endpoint.
    answered: BTreeSet<(bool, bool, u16, u16)>,
}

impl Model {
    /// The Service by which a port talks to an endpoint.
    fn by(&self, of: (bool, bool, u16), endpoint: usize) -> Option<u16> {
        let mut chosen = self.chosen.iter();
        chosen.find_map(|(&(tcp, v6, port, vip), &has)| {
            ((tcp, v6, port) == of && has == endpoint).then_some(vip)
        })
    }

    /// Whether a port of datagrams that talks to an endpoint may begin anew with it.
    fn makes_way(&self, of: (bool, bool, u16), endpoint: usize) -> bool {
        let (tcp, v6, port) = of;
        let by = self.by(of, endpoint);
        !tcp && by.is_some_and(|vip| self.answered.contains(&(tcp, v6, port, vip)))
    }
}

fn number(tcp: bool, v6: bool, vip: u16) -> u32 {
    1 + u32::from(vip) * 4 + u32::from(tcp) * 2 + u32::from(v6)
}

#[test]
fn random_packets_are_translated_as_a_plain_table_says() {
    world(|w| {
        let clients = |v6| w.clients()[usize::from(v6)];
        let at = |v6, number: u16| (vip(clients(v6)), 80 + number);
        let proto = |tcp| if tcp { TCP } else { UDP };
        for (tcp, v6, vip) in all() {
            let service = w.service(number(tcp, v6, vip), proto(tcp));
            service.balance(&endpoints(clients(v6), ENDPOINTS), 1);
            service.frontend(at(v6, vip), 0);
        }
        let mut runner = TestRunner::new(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::with_cases(64)
        });
        let run = |ops: Vec<Op>| {
            w.sweep_at(25 * 3600);
            w.sweep_at(25 * 3600);
            let mut model = Model::default();
            for (tcp, v6, vip) in all() {
                change(&w, tcp, v6, vip, 7);
                model.ready.insert((tcp, v6, vip), 7);
            }
            for op in ops {
                match op {
                    Op::Send {
                        tcp,
                        v6,
                        port,
                        vip,
                        begins,
                    } => {
                        let client = clients(v6);
                        let flags = if begins { SYN } else { ACK };
                        let sent = make(proto(tcp), (client, port), at(v6, vip), flags);
                        let (verdict, out) = w.sent_by(&w.a, &sent);
                        let may: Vec<usize> = (0..usize::from(ENDPOINTS))
                            .filter(|n| model.ready[&(tcp, v6, vip)] >> n & 1 != 0)
                            .collect();
                        let (key, of) = ((tcp, v6, port, vip), (tcp, v6, port));
                        let are_taken = may.iter().all(|n| model.by(of, *n).is_some());
                        let known = model.chosen.get(&key).copied();
                        let expected = match known {
                            Some(_) => PASS,
                            None if tcp && !begins => REDIRECT,
                            None if may.is_empty() => REDIRECT,
                            None if are_taken && !may.iter().any(|n| model.makes_way(of, *n)) => {
                                DROP
                            }
                            None => PASS,
                        };
                        prop_assert_eq!(verdict, expected, "{:?}", op);
                        if verdict != PASS {
                            continue;
                        }
                        let seen = see(&out);
                        let to = (seen.dst, seen.ports.1);
                        let all = endpoints(client, ENDPOINTS);
                        let got = all.iter().position(|at| *at == to).unwrap();
                        match known {
                            Some(known) => prop_assert_eq!(got, known),
                            None => {
                                prop_assert!(may.contains(&got));
                                match model.by(of, got) {
                                    None => {}
                                    Some(before) if are_taken && model.makes_way(of, got) => {
                                        let before = (tcp, v6, port, before);
                                        model.chosen.remove(&before);
                                        model.answered.remove(&before);
                                    }
                                    Some(before) => prop_assert!(false, "{before} was there"),
                                }
                                model.chosen.insert(key, got);
                            }
                        }
                        let translated = make(proto(tcp), (client, port), to, flags);
                        prop_assert_eq!(out, frame_from(&w.a, &translated));
                    }
                    Op::Answer {
                        tcp,
                        v6,
                        port,
                        endpoint,
                    } => {
                        let to = (clients(v6), port);
                        let from = endpoints(to.0, ENDPOINTS)[endpoint];
                        let by = model.by((tcp, v6, port), endpoint);
                        let source = by.map_or(from, |vip| at(v6, vip));
                        model.answered.extend(by.map(|vip| (tcp, v6, port, vip)));
                        let (verdict, out) = w.to_pod(&w.a, &make(proto(tcp), from, to, ACK));
                        let expected = make(proto(tcp), source, to, ACK);
                        prop_assert_eq!((verdict, out), (PASS, frame_to(&w.a, &expected)));
                    }
                    Op::Change {
                        tcp,
                        v6,
                        vip,
                        ready,
                    } => {
                        change(&w, tcp, v6, vip, ready);
                        model.ready.insert((tcp, v6, vip), ready);
                    }
                    Op::Away => {
                        w.sweep_at(25 * 3600);
                        model.chosen.clear();
                        model.answered.clear();
                    }
                }
                check_table();
                hold_time();
                prop_assert_eq!(table().len(), model.chosen.len());
            }
            Ok(())
        };
        runner.run(&ops(), run).unwrap();
    });
}

/// What the programs do is not to depend on how long this takes.
fn hold_time() {
    let mut records = open::<ConnectionKey, Connection>("CONNECTIONS");
    for (key, mut record) in table() {
        record.last_seen_ns = monotonic_ns();
        record.began_ns = record.last_seen_ns;
        records.insert(key, record, 0).unwrap();
    }
}

fn all() -> impl Iterator<Item = (bool, bool, u16)> {
    let both = [false, true];
    both.into_iter().flat_map(move |tcp| {
        both.into_iter()
            .flat_map(move |v6| (0..VIPS).map(move |vip| (tcp, v6, vip)))
    })
}

/// Those that are not chosen from any more go on to serve.
fn change(w: &World, tcp: bool, v6: bool, vip: u16, ready: u8) {
    let service = w.service(number(tcp, v6, vip), if tcp { TCP } else { UDP });
    let ids = (0..u32::from(ENDPOINTS)).filter(|id| ready >> id & 1 != 0);
    let count = service.slots(1, ids);
    let kind = if count == 0 {
        Kind::Refuse
    } else {
        Kind::Balance
    };
    service.set(kind, count);
}
