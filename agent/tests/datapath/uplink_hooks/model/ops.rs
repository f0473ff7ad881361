//! What happens, by chance.

use super::*;

/// In which order the parts of a packet come.
pub type Order = Vec<usize>;

#[derive(Clone, Debug)]
pub enum Op {
    /// A pod sends to somebody outside, or the node does.
    Out(End, u8),
    /// The same in parts.
    OutInParts(End, u8, Order),
    /// Of the connections that there are, the server of one sends.
    Answer(usize, u8),
    /// The servers of two do so in parts: each number is one of a part, those of the second behind those of the first.
    AnswersInParts([usize; 2], u8, Order),
    /// Somebody outside sends to a port of the node's.
    Stray(End, u16),
    /// Somebody outside sends to a pod's own address,
    Come(End),
    /// and the pod answers, at last in parts.
    ComeBack(End, Order),
    /// A router, or the server, refuses the last packet of a connection.
    Refused(usize, bool),
    /// A process of the node closes its socket.
    Close(usize),
    /// Nothing comes for so long.
    Away,
    /// What UDP's mappings are to be is set to the other.
    Turn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Pod,
    SecondPod,
    /// A process of the node.
    Node,
}

/// Who talks to whom.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub who: Who,
    pub v6: bool,
    pub proto: u8,
    pub port: u16,
    pub host: u8,
    pub host_port: u16,
}

impl End {
    /// A pod's end with a port that it listens at, and a client's port outside.
    pub fn of_server(self) -> Self {
        Self {
            who: match self.who {
                Who::SecondPod => Who::SecondPod,
                _ => Who::Pod,
            },
            // Without ports an answer cannot be told from what a pod begins.
            proto: if has_ports(self.proto) {
                self.proto
            } else {
                TCP
            },
            port: 8080,
            host_port: 40000 + self.port % 8,
            ..self
        }
    }
}

fn ends(maps: bool) -> impl Strategy<Value = End> {
    let proto = prop_oneof![
        12 => Just(TCP),
        if maps { 48 } else { 8 } => Just(UDP),
        4 => Just(UDPLITE),
        4 => Just(SCTP),
        4 => Just(ICMP),
        4 => prop_oneof![Just(GRE), Just(ESP), Just(IPIP), Just(IP6_IN_IP)],
    ];
    // Few values each, so that connections meet.
    (
        prop_oneof![4 => Just(Who::Pod), 4 => Just(Who::SecondPod), 2 => Just(Who::Node)],
        prop::bool::weighted(0.3),
        proto,
        prop_oneof![1u16..8, 61000u16..61010],
        0u8..2,
        // No resolver's, which would begin no mapping.
        prop_oneof![4 => Just(54u16), 1 => Just(443)],
    )
        .prop_map(|(who, v6, proto, port, host, host_port)| End {
            who,
            v6,
            proto: if v6 && proto == ICMP { ICMPV6 } else { proto },
            port: if has_ports(proto) { port } else { 0 },
            host,
            host_port: match proto {
                ICMP => 0,
                proto if has_ports(proto) => host_port,
                _ => 0,
            },
        })
}

/// Simpler is more in order.
fn order(parts: usize) -> impl Strategy<Value = Order> {
    Just((0..parts).collect::<Vec<_>>()).prop_shuffle()
}

pub fn ops(maps: bool) -> impl Strategy<Value = Vec<Op>> {
    let from_client = || {
        prop_oneof![
            4 => Just(SYN), 3 => Just(ACK), 2 => Just(FIN | ACK), 1 => Just(RST), 1 => Just(SYN | ACK),
        ]
    };
    let from_server = || {
        prop_oneof![
            3 => Just(SYN | ACK), 3 => Just(ACK), 2 => Just(FIN | ACK), 1 => Just(RST | ACK),
        ]
    };
    let one = order(PARTS);
    let in_parts = (ends(maps), from_client(), one)
        .prop_map(|(end, flags, order)| Op::OutInParts(end, flags, order));
    let two = (any::<[usize; 2]>(), from_server(), order(2 * PARTS));
    let from_outside = prop_oneof![
        2 => (ends(maps), PORTS).prop_map(|(end, port)| Op::Stray(end, port)),
        1 => ends(maps).prop_map(Op::Come),
        1 => (ends(maps), order(PARTS)).prop_map(|(end, order)| Op::ComeBack(end, order)),
    ];
    let op = prop_oneof![
        20 => (ends(maps), from_client()).prop_map(|(end, flags)| Op::Out(end, flags)),
        12 => (any::<usize>(), from_server()).prop_map(|(at, flags)| Op::Answer(at, flags)),
        4 => in_parts,
        4 => two.prop_map(|(at, flags, order)| Op::AnswersInParts(at, flags, order)),
        4 => from_outside,
        2 => (any::<usize>(), any::<bool>()).prop_map(|(at, router)| Op::Refused(at, router)),
        2 => any::<usize>().prop_map(Op::Close),
        1 => Just(Op::Away),
        u32::from(maps) * 8 => Just(Op::Turn),
    ];
    prop::collection::vec(op, 1..300)
}
