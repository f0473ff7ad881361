//! Addresses that are translated on the node, as kube-proxy and portmap do it: what a route says of them is
//! not what the packet's way carries in the end.

use super::kit::{FAMILIES, TCP_HEADERS, full_packets, misfits, mtus, next_port, scene, wires};
use sinabro_lab::{
    Node, Place, Pod,
    checks::Scene,
    lab::UNDERLAY_MTU,
    traffic::{path::Path, sizes::Sizes, stream::Stream, udp},
};
use std::net::SocketAddr;

const BYTES: usize = 4 << 20;
/// Addresses of Services, on no machine.
const SERVICE: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];

/// The node sends what is for these addresses to a server; with a mark as kube-proxy's, as if it came from
/// itself.
fn translate(node: &Node, targets: &[SocketAddr], server: SocketAddr, masquerade: bool) {
    let family = if server.is_ipv4() { "ip" } else { "ip6" };
    let mark = if masquerade {
        "meta mark set 0x4000"
    } else {
        ""
    };
    let rules: String = targets
        .iter()
        .map(|target| {
            let (address, port) = (target.ip(), target.port());
            format!(
                "{family} daddr {address} meta l4proto {{ tcp, udp }} th dport {port} {mark} \
                 dnat {family} to {server}\n"
            )
        })
        .collect();
    let table = format!(
        "table inet lab; delete table inet lab; table inet lab {{
            chain pre {{ type nat hook prerouting priority dstnat; {rules} }}
            chain post {{ type nat hook postrouting priority srcnat; meta mark 0x4000 masquerade; }}
        }}"
    );
    node.place().command(&["nft", &table]).unwrap();
}

/// A stream both ways through a translation; none of its packets is too large for its way.
fn streams_through(scene: &Scene, wires: &[Sizes], path: &Path) -> Stream {
    let name = &path.name;
    let nodes = scene.lab().nodes();
    let before: Vec<_> = nodes.iter().map(|node| misfits(node.place())).collect();
    let stream = Stream::open(path).unwrap();
    for write in [700, 64 << 10] {
        stream.carry(BYTES / 2, write).unwrap();
    }
    for wire in wires {
        full_packets(wire, name);
    }
    let after: Vec<_> = nodes.iter().map(|node| misfits(node.place())).collect();
    assert_eq!(after, before, "{name}: a packet did not fit");
    stream
}

fn through(name: String, from: &Place, server: &Pod, at: SocketAddr, target: SocketAddr) -> Path {
    Path::new(&name, from, server.place(), at.ip()).through(target, at.port())
}

#[test]
fn a_server_that_moves_between_nodes_is_reached_again() {
    let scene = scene();
    let (pod, near, far) = (scene.pod(1, 1), scene.pod(1, 2), scene.pod(2, 1));
    let node = scene.node(1);
    let wires = wires(&scene);
    for (family, in_family) in FAMILIES.iter().enumerate() {
        let service = SocketAddr::new(SERVICE[family].parse().unwrap(), next_port());
        let node_port = SocketAddr::new(node.addresses()[family], next_port());
        for (server, masquerade) in [(near, false), (far, false), (near, true), (far, true)] {
            let at = SocketAddr::new(server.addresses()[family], next_port());
            translate(node, &[service, node_port], at, masquerade);
            for (what, target) in [("Service", service), ("node port", node_port)] {
                let name = format!(
                    "{what} at {}, masqueraded: {masquerade}, {in_family}",
                    server.id()
                );
                let path = through(name, pod.place(), server, at, target);
                streams_through(&scene, &wires, &path);
            }
        }
    }
}

/// What a client takes for its own node's address is another node's pod: its datagrams do not fit, which it
/// is told once.
#[test]
fn datagrams_to_a_node_port_are_cut_where_its_server_is_far() {
    let scene = scene();
    let (pod, near, far) = (scene.pod(1, 1), scene.pod(1, 2), scene.pod(2, 1));
    let node = scene.node(1);
    for family in 0..2 {
        let node_port = SocketAddr::new(node.addresses()[family], next_port());
        for server in [near, far, near] {
            let address = server.addresses()[family];
            let at = SocketAddr::new(address, next_port());
            translate(node, &[node_port], at, false);
            let sizes = [8 << 10, 60_000];
            udp::echo_through(pod.place(), server.place(), at, node_port, &sizes).unwrap();
        }
    }
}

#[test]
fn host_ports_and_node_ports_are_reached_from_outside() {
    let scene = scene();
    let (near, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let (node, outside) = (scene.node(1), scene.lab().outside().place());
    let (mtu, _) = mtus(node, near);
    let wires = wires(&scene);
    for (family, headers) in TCP_HEADERS.into_iter().enumerate() {
        let target = SocketAddr::new(node.addresses()[family], next_port());
        for (server, masquerade) in [(near, false), (near, true), (far, true)] {
            let at = SocketAddr::new(server.addresses()[family], next_port());
            translate(node, &[target], at, masquerade);
            let name = format!(
                "from the outside to {}, masqueraded: {masquerade}, {}",
                server.id(),
                FAMILIES[family]
            );
            let path = through(name, outside, server, at, target);
            let stream = streams_through(&scene, &wires, &path);
            for said in stream.said().unwrap() {
                // Timestamps are in every segment.
                assert_eq!(said.mss, mtu - headers - 12, "{}", path.name);
            }
        }
    }
    assert!(mtu < UNDERLAY_MTU as usize);
}
