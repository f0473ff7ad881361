//! Random packets, through the real programs and through a translator in plain Rust that knows nothing of theirs:
//! byte for byte the same comes out.
//!
//! The model leaves open what the programs may choose, a new connection's port, and asks of the choice what must
//! hold of it. It has no clock: the tests' packets come within the times that matter, and sweeps say what time it is.

use super::*;
use crate::packet::{ICMPV6, IcmpError, icmp, icmp_error, sctp, see_error, tcp, udp};
use proptest::{prelude::*, test_runner::TestRunner};
use sinabro_common::abi::config::FLAG_ENDPOINT_INDEPENDENT;
use std::{
    cell::Cell,
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

/// So few that they run out.
const PORTS: RangeInclusive<u16> = 61000..=61005;
/// Longer than all but connections that both ends keep open may be idle.
const AWAY: u64 = 130;

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A pod sends to somebody outside.
    Out(End, u8),
    /// Of the connections that there are, the server of one sends.
    Answer(usize, u8),
    /// Somebody outside sends to a port of the node's.
    Stray(End, u16),
    /// Somebody outside sends to a pod's own address,
    Come(End),
    /// and the pod answers.
    ComeBack(End),
    /// A router, or the server, refuses the last packet of a connection.
    Refused(usize, bool),
    /// Nothing comes for so long.
    Away,
    /// What UDP's mappings are to be is set to the other.
    Turn,
}

/// Who talks to whom.
#[derive(Clone, Copy, Debug)]
struct End {
    second_pod: bool,
    v6: bool,
    proto: u8,
    port: u16,
    host: u8,
    host_port: u16,
}

fn ends(maps: bool) -> impl Strategy<Value = End> {
    // Few values each, so that connections meet.
    (
        any::<bool>(),
        prop::bool::weighted(0.3),
        prop_oneof![
            3 => Just(TCP),
            if maps { 12 } else { 2 } => Just(UDP),
            1 => Just(SCTP),
            1 => Just(ICMP),
        ],
        prop_oneof![1u16..8, 61000u16..61010],
        0u8..2,
        // No resolver's, which would begin no mapping.
        prop_oneof![4 => Just(54u16), 1 => Just(443)],
    )
        .prop_map(|(second_pod, v6, proto, port, host, host_port)| End {
            second_pod,
            v6,
            proto: if v6 && proto == ICMP { ICMPV6 } else { proto },
            port,
            host,
            host_port: if proto == ICMP { 0 } else { host_port },
        })
}

fn ops(maps: bool) -> impl Strategy<Value = Vec<Op>> {
    let from_client = prop_oneof![
        4 => Just(SYN), 3 => Just(ACK), 2 => Just(FIN | ACK), 1 => Just(RST), 1 => Just(SYN | ACK),
    ];
    let from_server = prop_oneof![
        3 => Just(SYN | ACK), 3 => Just(ACK), 2 => Just(FIN | ACK), 1 => Just(RST | ACK),
    ];
    let op = prop_oneof![
        20 => (ends(maps), from_client).prop_map(|(end, flags)| Op::Out(end, flags)),
        12 => (any::<usize>(), from_server).prop_map(|(at, flags)| Op::Answer(at, flags)),
        2 => (ends(maps), PORTS).prop_map(|(end, port)| Op::Stray(end, port)),
        1 => ends(maps).prop_map(Op::Come),
        1 => ends(maps).prop_map(Op::ComeBack),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(at, router)| Op::Refused(at, router)),
        1 => Just(Op::Away),
        u32::from(maps) * 8 => Just(Op::Turn),
    ];
    prop::collection::vec(op, 1..300)
}

/// Protocol, pod, its port, somebody outside, their port.
type Key = (u8, IpAddr, u16, IpAddr, u16);

/// What one end of a TCP connection has sent.
#[derive(Clone, Copy, Default)]
struct Sent {
    any: bool,
    syn: bool,
    ack: bool,
    fin: bool,
    rst: bool,
}

impl Sent {
    fn add(&mut self, other: &mut Self, flags: u8) {
        self.any = true;
        let has = |flag| flags & flag != 0;
        match has(SYN) {
            true => self.syn = true,
            false => {
                self.ack |= has(ACK);
                self.fin |= has(FIN);
                self.rst |= has(RST);
            }
        }
        // Who goes on has not taken the other's reset.
        other.rst &= has(RST);
    }
}

struct Flow {
    /// Outside.
    port: u16,
    client: Sent,
    server: Sent,
    /// The client's last packet, inside and outside.
    last: (Vec<u8>, Vec<u8>),
}

impl Flow {
    fn is_closed(&self) -> bool {
        self.client.rst || self.server.rst || (self.client.fin && self.server.fin)
    }

    /// Whether it is there when nothing came for [`AWAY`] seconds.
    fn stays(&self, proto: u8) -> bool {
        let is_open = self.server.any && (self.client.ack || !self.server.syn);
        match proto {
            TCP => !self.is_closed() && (is_open || self.client.fin || self.server.fin),
            SCTP => self.server.any,
            _ => false,
        }
    }
}

struct Model<'a> {
    w: &'a World,
    flows: BTreeMap<Key, Flow>,
    /// Whether UDP has endpoint-independent mappings,
    maps: bool,
    /// and those that there are: by pod and its port the one outside.
    mappings: BTreeMap<(IpAddr, u16), u16>,
    /// Connections that got another port than their mapping's,
    apart: usize,
    /// and those that got one of another mapping although others were left: ports are tried at random.
    unlucky: usize,
}

impl Model<'_> {
    fn far(end: End) -> IpAddr {
        match end.v6 {
            false => Ipv4Addr::new(203, 0, 113, end.host + 1).into(),
            true => Ipv6Addr::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, end.host.into()).into(),
        }
    }

    fn node(v6: bool) -> IpAddr {
        match v6 {
            false => NODE_IP,
            true => NODE_IP6.parse().unwrap(),
        }
    }

    fn pod(&self, end: End) -> IpAddr {
        let pod = if end.second_pod { &self.w.b } else { &self.w.a };
        if end.v6 { pod.v6 } else { pod.v4 }
    }

    fn key(&self, end: End) -> Key {
        let far = Self::far(end);
        (end.proto, self.pod(end), end.port, far, end.host_port)
    }

    fn packet(proto: u8, flags: u8, request: bool, src: (IpAddr, u16), dst: (IpAddr, u16)) -> Ip {
        match (proto, request) {
            (TCP, _) => tcp(src, dst, flags, b"some data"),
            (UDP, _) => udp(src, dst, b"some data"),
            (SCTP, _) => sctp(src, dst, b"some data"),
            // The id is the port of who asks.
            (ICMP, true) => icmp(src.0, dst.0, 8, src.1),
            (ICMP, false) => icmp(src.0, dst.0, 0, dst.1),
            (_, true) => icmp(src.0, dst.0, 128, src.1),
            (_, false) => icmp(src.0, dst.0, 129, dst.1),
        }
    }

    fn step(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Out(end, flags) => self.out(end, flags),
            Op::Answer(at, flags) => self.answer(at, flags),
            Op::Stray(end, port) => self.stray(end, port),
            Op::Come(end) => self.come(end),
            Op::ComeBack(end) => self.come_back(end),
            Op::Refused(at, by_router) => self.refused(at, by_router),
            Op::Away => {
                self.w.sweep_at(AWAY);
                self.flows.retain(|key, flow| flow.stays(key.0));
                self.mappings.clear();
                Ok(())
            }
            Op::Turn => {
                self.maps = !self.maps;
                set_config(self.w, self.maps);
                Ok(())
            }
        }
    }

    /// Who has a port outside towards that end.
    fn holder(&self, key: &Key, port: u16) -> Option<Key> {
        let same = |(other, flow): &(&Key, &Flow)| {
            (other.0, other.3, other.4, flow.port) == (key.0, key.3, key.4, port)
        };
        self.flows.iter().find(same).map(|(other, _)| *other)
    }

    /// Whether a connection may get a port that is no mapping's of its own.
    fn is_free(&self, key: &Key, port: u16) -> bool {
        let v6 = key.1.is_ipv6();
        let mut mapped = self.mappings.iter().filter(|(of, _)| of.0.is_ipv6() == v6);
        let is_mapped = self.maps && key.0 == UDP && mapped.any(|(_, mapped)| *mapped == port);
        self.holder(key, port).is_none() && !is_mapped
    }

    fn out(&mut self, end: End, flags: u8) -> Result<(), TestCaseError> {
        let key = self.key(end);
        let (proto, pod, port, far, far_port) = key;
        let inside = Self::packet(proto, flags, true, (pod, port), (far, far_port));
        let (verdict, frame) = self.w.out(&inside);
        let begins = proto != TCP || flags == SYN;
        if proto == TCP && !self.flows.contains_key(&key) && matches!(flags, RST | 0x12) {
            prop_assert_eq!((verdict, frame), (PASS, World::frame(&inside)));
            return Ok(());
        }
        let known = self.flows.get(&key);
        let renewed = proto == TCP && begins && known.is_some_and(Flow::is_closed);
        let maps = self.maps && proto == UDP && known.is_none();
        let mapped = self.mappings.get(&(pod, port)).copied();
        let mapped = mapped.filter(|_| maps);
        let has_mapped = mapped.filter(|port| self.holder(&key, *port).is_none());
        if verdict == DROP {
            prop_assert!(known.is_none() || renewed, "{key:?} had a port");
            prop_assert_eq!(has_mapped, None, "for {:?}", key);
            let free = PORTS.into_iter().find(|port| self.is_free(&key, *port));
            prop_assert_eq!(free, None, "for {:?}", key);
            self.flows.remove(&key);
            return Ok(());
        }
        prop_assert_eq!(verdict, PASS);
        let given = see(&frame).ports.0;
        let expected = Self::packet(
            proto,
            flags,
            true,
            (Self::node(end.v6), given),
            (far, far_port),
        );
        prop_assert_eq!(&frame, &World::frame(&expected));
        let mut starts = false;
        match known {
            // Closed and begun again, it may keep what it had.
            Some(flow) if renewed && given == flow.port => {}
            Some(flow) if !renewed => prop_assert_eq!(given, flow.port),
            _ if has_mapped.is_some() => prop_assert_eq!(Some(given), has_mapped),
            _ => {
                prop_assert!(PORTS.contains(&given));
                let is_left = PORTS.into_iter().any(|port| self.is_free(&key, port));
                let is_free = self.is_free(&key, given);
                self.unlucky += usize::from(maps && is_left && !is_free);
                starts = mapped.is_none() && is_free;
                if PORTS.contains(&port) && self.is_free(&key, port) {
                    prop_assert_eq!(given, port, "its own is free");
                }
            }
        }
        match self.holder(&key, given) {
            Some(other) if other != key => {
                prop_assert!(self.flows[&other].is_closed(), "{other:?} has {given}");
                self.flows.remove(&other);
            }
            _ => {}
        }
        if renewed {
            self.flows.remove(&key);
        }
        if maps {
            self.apart += usize::from(mapped.is_some_and(|mapped| mapped != given));
            if starts {
                self.mappings.insert((pod, port), given);
            }
        }
        let flow = self.flows.entry(key).or_insert(Flow {
            port: given,
            client: Sent::default(),
            server: Sent::default(),
            last: Default::default(),
        });
        flow.client.add(&mut flow.server, flags);
        flow.last = (inside.bytes(), frame[14..].to_vec());
        Ok(())
    }

    fn some(&self, at: usize) -> Option<Key> {
        let at = at.checked_rem(self.flows.len())?;
        self.flows.keys().nth(at).copied()
    }

    fn answer(&mut self, at: usize, flags: u8) -> Result<(), TestCaseError> {
        let Some(key) = self.some(at) else {
            return Ok(());
        };
        let (proto, pod, port, far, far_port) = key;
        let flow = self.flows.get_mut(&key).unwrap();
        let node = Self::node(pod.is_ipv6());
        let make = |to| Self::packet(proto, flags, false, (far, far_port), to);
        let (verdict, frame) = self.w.come(&make((node, flow.port)));
        prop_assert_eq!((verdict, frame), (PASS, World::frame(&make((pod, port)))));
        flow.server.add(&mut flow.client, flags);
        Ok(())
    }

    /// Nobody's, unless somebody has that port.
    fn stray(&mut self, end: End, port: u16) -> Result<(), TestCaseError> {
        if self.holder(&self.key(end), port).is_some() {
            return Ok(());
        }
        let from = (Self::far(end), end.host_port);
        let packet = Self::packet(end.proto, SYN, false, from, (Self::node(end.v6), port));
        prop_assert_eq!(self.w.come(&packet), (PASS, World::frame(&packet)));
        Ok(())
    }

    fn come(&mut self, end: End) -> Result<(), TestCaseError> {
        let (_, pod, port, far, far_port) = self.key(Self::of_server(end));
        let packet = tcp((far, far_port), (pod, port), SYN, b"");
        prop_assert_eq!(self.w.come(&packet), (PASS, World::frame(&packet)));
        Ok(())
    }

    /// Outside nobody knows the connection under another address.
    fn come_back(&mut self, end: End) -> Result<(), TestCaseError> {
        let (_, pod, port, far, far_port) = self.key(Self::of_server(end));
        let begin = tcp((far, far_port), (pod, port), SYN, b"");
        prop_assert_eq!(self.w.come(&begin), (PASS, World::frame(&begin)));
        for flags in [SYN | ACK, ACK] {
            let packet = tcp((pod, port), (far, far_port), flags, b"");
            prop_assert_eq!(self.w.out(&packet), (PASS, World::frame(&packet)));
        }
        Ok(())
    }

    /// The same with the pod's end a port that it listens at, and a client's port outside.
    fn of_server(end: End) -> End {
        End {
            proto: TCP,
            port: 8080,
            host_port: 40000 + end.port % 8,
            ..end
        }
    }

    fn refused(&mut self, at: usize, by_router: bool) -> Result<(), TestCaseError> {
        let Some(key) = self.some(at) else {
            return Ok(());
        };
        let (_, pod, _, far, _) = key;
        let v6 = pod.is_ipv6();
        let (error, from) = match by_router {
            true => (
                IcmpError::TooBig(1300),
                Self::far(End {
                    host: 77,
                    ..of_family(v6)
                }),
            ),
            false => (IcmpError::NoPort, far),
        };
        let (inside, outside) = &self.flows[&key].last;
        let (verdict, frame) = self
            .w
            .come(&icmp_error(from, Self::node(v6), error, outside));
        prop_assert_eq!(verdict, PASS);
        let mut seen = see_error(&frame);
        prop_assert_eq!((seen.src, seen.dst), (from, pod));
        if key.0 == SCTP {
            // What is quoted of a packet has its checksum as it was outside.
            let at = inside.len()
                - Self::packet(SCTP, 0, true, (pod, 0), (far, 0))
                    .payload
                    .len()
                + 8;
            seen.quoted[at..at + 4].copy_from_slice(&inside[at..at + 4]);
        }
        prop_assert_eq!(&seen.quoted, inside);
        Ok(())
    }
}

fn of_family(v6: bool) -> End {
    End {
        second_pod: false,
        v6,
        proto: TCP,
        port: 0,
        host: 0,
        host_port: 0,
    }
}

fn set_config(w: &World, maps: bool) {
    let mut config = kit::node_config();
    (config.nat_port_min, config.nat_port_max) = (*PORTS.start(), *PORTS.end());
    if maps {
        config.flags |= FLAG_ENDPOINT_INDEPENDENT;
    }
    w.datapath.set_node_config(config).unwrap();
}

#[test]
fn random_packets_are_translated_as_a_plain_translator_would() {
    random_packets(false);
}

/// While the setting is turned on and off, too.
#[test]
fn random_packets_have_the_mappings_of_a_plain_translator() {
    random_packets(true);
}

fn random_packets(maps: bool) {
    world(|w| {
        let (most, refusals) = (Cell::new(0), Cell::new(0));
        let (apart, unlucky) = (Cell::new(0), Cell::new(0));
        let mut runner = TestRunner::new(ProptestConfig {
            cases: 96,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let result = runner.run(&ops(maps), |ops| {
            // Whatever the one before has left, if it failed.
            while !table().is_empty() || !aliases().is_empty() {
                w.sweep_at(1 << 20);
            }
            set_config(&w, maps);
            let mut model = Model {
                w: &w,
                flows: BTreeMap::new(),
                maps,
                mappings: BTreeMap::new(),
                apart: 0,
                unlucky: 0,
            };
            for op in ops {
                let dropped = kit::dropped(&w.datapath, DropReason::NatPortsExhausted);
                model.step(op).map_err(|error| match error {
                    TestCaseError::Fail(why) => TestCaseError::fail(format!("{op:?}: {why}")),
                    reject => reject,
                })?;
                let after = kit::dropped(&w.datapath, DropReason::NatPortsExhausted);
                refusals.set(refusals.get() + after - dropped);
                most.set(most.get().max(model.flows.len()));
            }
            check_table();
            apart.set(apart.get() + model.apart);
            unlucky.set(unlucky.get() + model.unlucky);
            Ok(())
        });
        result.unwrap();
        println!(
            "{} connections at once, {} refused, {} apart",
            most.get(),
            refusals.get(),
            apart.get()
        );
        assert!(most.get() > 30 && refusals.get() > 0);
        assert_eq!(apart.get() > 0, maps);
        assert!(unlucky.get() <= 1, "{}", unlucky.get());
    });
}
