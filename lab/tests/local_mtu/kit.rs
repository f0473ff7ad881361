//! Pods of two nodes, what their agents say of them, and the addresses that all these tests use.

use sinabro_lab::{
    Lab, Node, Place, Pod,
    checks::Scene,
    node::pod_cidrs,
    traffic::{
        packet::{Interface, interface},
        snmp,
    },
};
use std::net::IpAddr;

pub const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];

/// IP and TCP, without options.
pub const TCP_HEADERS: [usize; 2] = [20 + 20, 40 + 20];
/// IP and UDP.
pub const UDP_HEADERS: [usize; 2] = [20 + 8, 40 + 8];

pub fn scene() -> Scene {
    Scene::new(Lab::for_test(2).unwrap()).unwrap()
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
