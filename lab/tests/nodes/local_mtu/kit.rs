//! Pods of two nodes, what their agents say of them, and the addresses that all these tests use.

use sinabro_common::api::{PathPackets, Request, Response};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    checks::{Scene, service},
    lab::UNDERLAY_MTU,
    node::{KERNEL_FLAG, pod_cidrs},
    traffic::{
        packet::{Interface, interface},
        sizes::Sizes,
        snmp,
    },
};
use std::net::IpAddr;

pub const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];

/// IP and TCP, without options.
pub const TCP_HEADERS: [usize; 2] = [20 + 20, 40 + 20];
/// IP and UDP.
pub const UDP_HEADERS: [usize; 2] = [20 + 8, 40 + 8];

/// Packets go between the nodes, and to the outside, by the kernel's way.
pub fn scene() -> Scene {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.start_agent_with(&[KERNEL_FLAG]).unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
    }
    Scene::new(lab).unwrap()
}

/// They go past the stack.
fn direct() -> Scene {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    service::start(&lab).unwrap();
    for node in lab.nodes() {
        node.wait_for_direct_overlay().unwrap();
        node.wait_for_way("direct").unwrap();
    }
    Scene::new(lab).unwrap()
}

/// The kernel's way, and whether it is ours past the stack.
pub fn scenes() -> impl Iterator<Item = (bool, Scene)> {
    let scenes: [(bool, fn() -> Scene); 2] = [(false, scene), (true, direct)];
    scenes.into_iter().map(|(is_direct, scene)| {
        println!("past the stack: {is_direct}");
        (is_direct, scene())
    })
}

/// What has something sent between the nodes has it sent by the kernel's way, and past the stack.
pub fn by_both_ways(test: impl Fn(&Scene)) {
    for (is_direct, scene) in scenes() {
        test(&scene);
        for node in scene.lab().nodes() {
            let PathPackets { sent, received } = sent_directly(node);
            let both = [sent, received].map(|packets| packets > 0);
            assert_eq!(both, [is_direct; 2], "{}", node.name());
        }
    }
}

/// Packets of pods that a node has sent to the other, and taken from it, past its stack.
fn sent_directly(node: &Node) -> PathPackets {
    match node.ask(Request::Metrics).unwrap() {
        Response::Metrics(metrics) => metrics.overlay_packets.unwrap().direct,
        answer => panic!("{answer:?}"),
    }
}

/// MTU of what leaves the node, and of the pod's link.
pub fn mtus(node: &Node, pod: &Pod) -> (usize, usize) {
    let endpoint = node.endpoint(pod).unwrap().unwrap();
    let way = endpoint.mtu.unwrap();
    let link = endpoint.local_mtu.map_or(way, |local| local.mtu);
    (way as usize, link as usize)
}

/// The node's end of a pod's link.
pub fn host_side(node: &Node, pod: &Pod) -> Interface {
    let endpoint = node.endpoint(pod).unwrap().unwrap();
    interface(node.place(), &endpoint.link).unwrap()
}

pub fn eth0(place: &Place) -> Interface {
    interface(place, "eth0").unwrap()
}

/// The addresses by which a node's overlay speaks to its pods and to other nodes.
pub fn overlay_gateways(number: u8) -> [IpAddr; 2] {
    let first = |net: ipnet::IpNet| net.hosts().find(|a| *a != net.network()).unwrap();
    let ranges = pod_cidrs(number);
    [first(ranges[0]), first(ranges[1])]
}

/// What the kernel of a place said of packets that did not fit.
pub fn misfits(place: &Place) -> u64 {
    snmp::misfits(place).unwrap()
}

/// A port that nothing of another way or try uses.
pub fn next_port() -> u16 {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Uplinks of both nodes and of the outside, which send packets as they are on the wire.
pub fn wires(scene: &Scene) -> Vec<Sizes> {
    let lab = scene.lab();
    let nodes = lab.nodes().iter().map(|node| node.place());
    let places = nodes.chain([lab.outside().place()]);
    let wire = |place: &Place| Sizes::cut(place, "eth0", UNDERLAY_MTU as usize).unwrap();
    places.map(wire).collect()
}

/// Full packets since the last time; none that may not be.
pub fn full_packets(wire: &Sizes, what: &str) -> u32 {
    wire.full()
        .unwrap_or_else(|error| panic!("{what}: {error:#}"))
}
