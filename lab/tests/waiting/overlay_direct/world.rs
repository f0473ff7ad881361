//! Nodes with a pod each, what they say and count of each other, and what their pods exchange.

use super::*;

/// Nodes with a pod each.
pub struct World<const NODES: usize = 2> {
    pub lab: Lab,
    pub pods: [Pod; NODES],
}

impl<const NODES: usize> World<NODES> {
    pub fn new(flags: [&[&str]; NODES]) -> Self {
        Self::on(|_| {}, flags)
    }

    /// On nodes that are made ready before their agents come.
    pub fn on(prepare: impl Fn(&Lab), flags: [&[&str]; NODES]) -> Self {
        let lab = Lab::new(Binaries::find().unwrap(), NODES, Lifetime::Process).unwrap();
        prepare(&lab);
        Self::start(lab, flags)
    }

    /// On nodes that are ready.
    pub fn start(lab: Lab, flags: [&[&str]; NODES]) -> Self {
        for (node, flags) in lab.nodes().iter().zip(flags) {
            let prepared = node.ctl(&["prepare"]).unwrap();
            assert!(prepared.status.success(), "{prepared:?}");
            node.write_services("{kind: List, items: []}\n").unwrap();
            start(node, flags);
        }
        for node in lab.nodes() {
            node.wait_ready().unwrap();
        }
        let pods = from_fn(|at| {
            let number = at + 1;
            lab.node(number).add_pod(&format!("pod{number}")).unwrap()
        });
        Self { lab, pods }
    }
}

impl World {
    /// What each node's VXLAN device has received and sent.
    pub fn by_device(&self) -> [[u64; 2]; 2] {
        [1, 2].map(|number| counts(self.lab.node(number)))
    }

    /// What each node has counted of the other. Its agent may ask the other something at any time, which counts.
    pub fn counted(&self) -> [PathCounts; 2] {
        [1, 2].map(|number| {
            let node = self.lab.node(number);
            let [before, packets, after] = [
                in_metrics(node),
                other(node).packets.unwrap(),
                in_metrics(node),
            ];
            for ((before, packets), after) in each(before).zip(each(packets)).zip(each(after)) {
                assert!(
                    (before..=after).contains(&packets),
                    "{before} {packets} {after}"
                );
            }
            packets
        })
    }

    /// What it counted of something.
    pub fn counts_of(&self, what: impl FnOnce()) -> [PathCounts; 2] {
        let before = self.counted();
        what();
        let after = self.counted();
        let less = |a: PathPackets, b: PathPackets| PathPackets {
            sent: a.sent - b.sent,
            received: a.received - b.received,
        };
        [0, 1].map(|node| PathCounts {
            direct: less(after[node].direct, before[node].direct),
            native: less(after[node].native, before[node].native),
            kernel: less(after[node].kernel, before[node].kernel),
        })
    }

    /// What its devices carried of something.
    pub fn carried(&self, what: impl FnOnce()) -> [[u64; 2]; 2] {
        let before = self.by_device();
        what();
        let after = self.by_device();
        [0, 1].map(|node| [0, 1].map(|way| after[node][way] - before[node][way]))
    }
}

pub fn start(node: &Node, flags: &[&str]) {
    // Probes go by the device, and say who answers by another way.
    let asks = flags.iter().any(|flag| [AUTO, ASKS].contains(flag));
    let probe: &[&str] = if asks { &[] } else { &[ASKS_NOBODY] };
    let flags = [&FLAGS, flags, probe].concat();
    node.start_confined_agent(&flags, &confinement::AGENT)
        .unwrap();
}

/// What a node's metrics say of all others.
fn in_metrics(node: &Node) -> PathCounts {
    match node.ask(Ask::Metrics).unwrap() {
        Response::Metrics(metrics) => metrics.overlay_packets.unwrap(),
        answer => panic!("{answer:?}"),
    }
}

fn each(counts: PathCounts) -> impl Iterator<Item = u64> {
    let PathCounts {
        direct,
        native,
        kernel,
    } = counts;
    [direct, native, kernel]
        .into_iter()
        .flat_map(|PathPackets { sent, received }| [sent, received])
}

/// What a node says of the other one.
pub fn other(node: &Node) -> NodeReport {
    said_of(node, |said| !said.local)
}

/// What a node says of one that is asked for.
pub fn said_of(node: &Node, is_it: impl Fn(&NodeReport) -> bool) -> NodeReport {
    let nodes = match node.ask(Ask::Nodes { after: None }).unwrap() {
        Response::Nodes(nodes) => nodes,
        answer => panic!("{answer:?}"),
    };
    nodes.into_iter().find(is_it).unwrap()
}

/// Why a node reaches the other one by the stack.
pub fn why(node: &Node) -> String {
    match other(node).path {
        Some(PeerPath::Kernel { why }) => why,
        path => panic!("{path:?}"),
    }
}

pub fn goes_direct(node: &Node) -> bool {
    other(node).path == Some(PeerPath::Direct { why: None })
}

pub const NOTHING: PathPackets = PathPackets {
    sent: 0,
    received: 0,
};

pub fn is_both_ways(packets: PathPackets) -> bool {
    packets.sent > 0 && packets.received > 0
}

pub fn shown(node: &Node, command: &str) -> String {
    String::from_utf8(node.ctl(&[command]).unwrap().stdout).unwrap()
}

fn counts(node: &Node) -> [u64; 2] {
    let counts = device::counts(node.place(), names::VXLAN_LINK).unwrap();
    [counts.received.packets, counts.sent.packets]
}

pub fn exchange(world: &World) {
    let [one, two] = &world.pods;
    exchange_between(one, two);
}

pub fn exchange_between(one: &Pod, two: &Pod) {
    for (from, to) in [(one, two), (two, one)] {
        for address in to.addresses() {
            icmp::ping(from.place(), address, PATIENCE).unwrap();
            udp::echo(from.place(), to.place(), address, 1000, true).unwrap();
            let path = Path::new("stream", from.place(), to.place(), address);
            Stream::open(&path)
                .unwrap()
                .carry(16 << 20, 128 << 10)
                .unwrap();
        }
    }
}
