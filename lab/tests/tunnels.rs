//! Nobody but nodes speaks in tunnels, by whatever way a packet reaches the tunnel port.
#![allow(clippy::unwrap_used)]

use sinabro_common::{abi::drop::DropReason, names};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Namespace, Node,
    checks::{
        Scene,
        spoof::{await_drops, drops},
        tunnel::{Ear, send},
    },
    place::Place,
};
use sinabro_netlink::{Conn, addr::Addr, link, veth::Veth};
use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
};

const FORGED: &[u8] = b"forged";

fn scene(v6: bool) -> Scene {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    if v6 {
        // The first address is the one that tunnels use.
        lab.nodes().iter().for_each(Node::lead_with_ipv6);
        lab.publish().unwrap();
    }
    // Who is attacked takes tunnels past the stack where that is possible, the other one sends by the kernel's device.
    lab.node(1).start_agent().unwrap();
    lab.node(2)
        .write_services("{kind: List, items: []}\n")
        .unwrap();
    let services = [
        "--service-proxy=on",
        "--services-file=/run/lab/services.yaml",
    ];
    lab.node(2).start_agent_with(&services).unwrap();
    for node in lab.nodes() {
        node.wait_ready().unwrap();
    }
    Scene::new(lab).unwrap()
}

/// One forged packet is sent; it is dropped on that node for that reason and not heard.
fn stopped(
    scene: &Scene,
    from: &Place,
    to: SocketAddr,
    source: IpAddr,
    more: &[u8],
    counted: (&Node, DropReason),
) {
    let ear = Ear::new(scene.node(2), scene.pod(2, 1), source.is_ipv4()).unwrap();
    let before = drops(counted.0, counted.1).unwrap();
    let payload = ear.forgery(source, &[FORGED, more].concat()).unwrap();
    send(from, to, &payload).unwrap();
    ear.hears_only(scene.pod(1, 1).place()).unwrap();
    await_drops(counted.0, counted.1, before, 1)
        .unwrap_or_else(|error| panic!("{error:#}: from {} to {to}", from.name()));
}

fn nft(node: &Node, rules: &str) {
    let mut nft = Command::new("nft");
    nft.arg(format!("table ip lab {{\n{rules}\n}}"));
    let status = node.namespace().spawn(nft).unwrap().wait().unwrap();
    assert!(status.success());
}

fn tunnel_port(node: &Node) -> SocketAddr {
    SocketAddr::new(node.addresses()[0], names::VXLAN_PORT)
}

fn every_way(v6: bool) {
    let scene = scene(v6);
    let (n1, n2) = (scene.node(1), scene.node(2));
    let (to_n1, to_n2) = (tunnel_port(n1), tunnel_port(n2));
    assert_eq!(to_n2.is_ipv6(), v6);
    let pods = [scene.pod(2, 3), scene.pod(1, 3)];
    for source in pods.iter().flat_map(|pod| pod.addresses()) {
        use DropReason::{EncapProhibited, TunnelFragment, TunnelInner, TunnelSource};
        // A pod: to the other node, to its own, in fragments.
        let (remote, local) = (scene.pod(1, 1).place(), scene.pod(2, 2).place());
        stopped(&scene, remote, to_n2, source, b"", (n1, EncapProhibited));
        stopped(&scene, remote, to_n1, source, b"", (n1, EncapProhibited));
        stopped(&scene, local, to_n2, source, b"", (n2, EncapProhibited));
        stopped(
            &scene,
            remote,
            to_n2,
            source,
            &[0; 3000],
            (n1, EncapProhibited),
        );
        // A host outside: from an address that is no node's, in fragments too.
        let outside = scene.lab().outside().place();
        stopped(&scene, outside, to_n2, source, b"", (n2, TunnelSource));
        stopped(
            &scene,
            outside,
            to_n2,
            source,
            &[0; 3000],
            (n2, TunnelSource),
        );
        // A process of the node, that speaks for no pod of its node, or in fragments.
        if scene.pod(2, 3).addresses().contains(&source) {
            stopped(&scene, n1.place(), to_n2, source, b"", (n2, TunnelInner));
        } else {
            stopped(
                &scene,
                n1.place(),
                to_n2,
                source,
                &[0; 3000],
                (n2, TunnelFragment),
            );
        }
    }
}

#[test]
fn every_way_over_ipv4() {
    every_way(false);
}

#[test]
fn every_way_over_ipv6() {
    every_way(true);
}

#[test]
fn a_translated_port_is_no_way_in() {
    let scene = scene(false);
    let (n1, n2) = (scene.node(1), scene.node(2));
    let nat =
        |rules: &str| format!("chain pre {{ type nat hook prerouting priority dstnat\n{rules}\n}}");
    // As a Service does whose endpoint is a node's tunnel port: another's, its own.
    let (a, b) = (n1.addresses()[0], n2.addresses()[0]);
    let port = names::VXLAN_PORT;
    nft(
        n1,
        &nat(&format!(
            "ip daddr 10.96.0.77 udp dport 4000 dnat to {b}:{port}
             ip daddr 10.96.0.77 udp dport 4001 dnat to {a}:{port}
             ip daddr 10.96.0.77 udp dport 4002 meta mark set 0x4000 dnat to {b}:{port}"
        )),
    );
    nft(
        n1,
        "chain post { type nat hook postrouting priority srcnat\nmeta mark 0x4000 masquerade\n}",
    );
    // As a host port does.
    nft(n2, &nat(&format!("udp dport 4003 redirect to :{port}")));

    let pod = scene.pod(1, 1).place();
    let service: IpAddr = "10.96.0.77".parse().unwrap();
    for source in [scene.pod(2, 3).v4(), scene.pod(1, 3).v4()] {
        use DropReason::{EncapProhibited, TunnelUnchecked};
        for (to, more) in [(4000, &[][..]), (4002, &[]), (4000, &[0; 3000])] {
            let to = SocketAddr::new(service, to);
            stopped(&scene, pod, to, source, more, (n1, EncapProhibited));
        }
        let host_port = SocketAddr::new(b, 4003);
        stopped(&scene, pod, host_port, source, b"", (n2, TunnelUnchecked));
        let outside = scene.lab().outside().place();
        stopped(
            &scene,
            outside,
            host_port,
            source,
            b"",
            (n2, TunnelUnchecked),
        );
        // The node itself is where this one ends: nothing of it is for a pod of n2.
        let before = drops(n1, TunnelUnchecked).unwrap();
        let ear = Ear::new(n1, scene.pod(1, 2), true).unwrap();
        let payload = ear.forgery(source, FORGED).unwrap();
        send(pod, SocketAddr::new(service, 4001), &payload).unwrap();
        ear.hears_only(scene.pod(2, 1).place()).unwrap();
        await_drops(n1, TunnelUnchecked, before, 1).unwrap();
    }
}

#[test]
fn another_link_is_no_way_in() {
    let scene = scene(false);
    let node = scene.node(2);
    let stranger = Namespace::new("stranger", Lifetime::Process).unwrap();
    let mut conn = node.netlink().unwrap();
    conn.create_veth(&Veth {
        name: "side",
        mac: [2, 0, 0, 0, 7, 1],
        mtu: 1500,
        peer_name: "eth0",
        peer_mac: [2, 0, 0, 0, 7, 2],
        peer_netns: Some(stranger.place().net()),
    })
    .unwrap();
    // It even has the address of the other node, over there.
    let theirs = scene.node(1).addresses()[0];
    let add = |conn: &mut Conn, name: &str, net: &str| {
        let index = conn.link_by_name(name).unwrap().index;
        let address = Addr::new(index, net.parse().unwrap());
        conn.execute_all([link::set_up(index), address.add()])
            .unwrap();
    };
    add(&mut conn, "side", "198.18.0.1/24");
    let mut beyond = Conn::in_netns(stranger.place().net()).unwrap();
    add(&mut beyond, "eth0", "198.18.0.2/24");
    for source in [scene.pod(2, 3).v4(), scene.pod(1, 3).v4()] {
        let to = SocketAddr::new("198.18.0.1".parse().unwrap(), names::VXLAN_PORT);
        let counted = (node, DropReason::TunnelUnchecked);
        stopped(&scene, stranger.place(), to, source, b"", counted);
    }
    add(&mut beyond, "eth0", &format!("{theirs}/32"));
    for source in [scene.pod(2, 3).v4(), scene.pod(1, 3).v4()] {
        let to = SocketAddr::new("198.18.0.1".parse().unwrap(), names::VXLAN_PORT);
        let counted = (node, DropReason::TunnelUnchecked);
        stopped(&scene, stranger.place(), to, source, b"", counted);
    }
}
