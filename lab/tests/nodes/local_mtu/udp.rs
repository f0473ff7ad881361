//! Datagrams: whole on the node, told of or cut where they do not fit.

use super::kit::{
    FAMILIES, UDP_HEADERS, by_both_ways, eth0, full_packets, misfits, mtus, scene, wires,
};
use sinabro_common::names;
use sinabro_lab::{
    Node, Pod,
    checks::Scene,
    lab::UNDERLAY_MTU,
    traffic::{
        PATIENCE, any,
        packet::{Datagram, inject},
        path::Path,
        readable,
        stream::Stream,
        tally::{Kind, Tally},
        too_big, udp,
    },
};
use std::{
    net::{IpAddr, UdpSocket},
    time::Instant,
};

const SIZES: [usize; 2] = [8 << 10, 60_000];

#[test]
fn datagrams_between_pods_of_a_node_are_one_packet_each() {
    let scene = scene();
    let (pod, near) = (scene.pod(1, 1), scene.pod(1, 2));
    for (family, headers) in UDP_HEADERS.into_iter().enumerate() {
        for size in SIZES {
            let tally = |kind| Tally::start(near.place(), eth0(near.place()), kind).unwrap();
            let (whole, fragments) = (
                tally(Kind::AsLargeAs(size + headers)),
                tally(Kind::Fragment),
            );
            let address = near.addresses()[family];
            // By a socket as applications have it, which may cut what it sends.
            udp::echo(pod.place(), near.place(), address, size, false).unwrap();
            assert!(
                whole.count().unwrap() >= 2,
                "{}, {size} bytes",
                FAMILIES[family]
            );
            assert_eq!(
                fragments.count().unwrap(),
                0,
                "{}, {size} bytes",
                FAMILIES[family]
            );
        }
    }
}

fn wishing_off(node: &Node) -> Pod {
    let pod = node
        .add_pod_with("small", &[("SINABRO_LOCAL_MTU", "off")])
        .unwrap();
    let (way, link) = mtus(node, &pod);
    assert_eq!(
        (way, link),
        (way, way),
        "of a pod that wishes no larger link"
    );
    pod
}

/// A datagram that does not fit into the receiver's link is told of once, and all after it are cut by
/// their sender.
#[test]
fn pods_with_links_of_different_sizes_reach_each_other() {
    let scene = scene();
    let node = scene.node(1);
    let large = scene.pod(1, 1);
    let small = wishing_off(node);
    node.stop_agent().unwrap();
    node.start_agent_with(&["--local-mtu=9000"]).unwrap();
    node.wait_ready().unwrap();
    let middle = node.add_pod("middle").unwrap();
    assert_eq!(mtus(node, &middle).1, 9000);
    let pods = [large, &middle, &small];
    for (family, in_family) in FAMILIES.iter().enumerate() {
        for (from, to) in pods.iter().flat_map(|from| pods.map(|to| (*from, to))) {
            if from.id() == to.id() {
                continue;
            }
            let address = to.addresses()[family];
            let name = format!("{} to {}, {in_family}", from.id(), to.id());
            let before = misfits(node.place());
            let stream = Stream::open(&Path::new(&name, from.place(), to.place(), address));
            stream.unwrap().carry(1 << 20, 16 << 10).unwrap();
            assert_eq!(misfits(node.place()), before, "{name}: TCP has to know");
            for size in SIZES {
                udp::echo(from.place(), to.place(), address, size, false).unwrap();
            }
            let is_told = mtus(node, from).1 > mtus(node, to).1;
            assert_eq!(misfits(node.place()) > before, is_told, "{name}");
        }
    }
}

fn raw<'a>(from: &Pod, dst: IpAddr, port: u16, payload: &'a [u8]) -> Datagram<'a> {
    let [v4, v6] = from.addresses();
    Datagram {
        src_mac: eth0(from.place()).mac,
        dst_mac: names::HOST_MAC,
        src: if dst.is_ipv4() { v4 } else { v6 },
        dst,
        dst_port: port,
        payload,
        may_be_cut: false,
    }
}

#[test]
fn who_sends_too_large_a_packet_is_told_what_fits() {
    by_both_ways(is_told_what_fits);
}

fn is_told_what_fits(scene: &Scene) {
    let (pod, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let (mtu, _) = mtus(scene.node(1), pod);
    let outside = scene.lab().outside_addresses().unwrap();
    let small = wishing_off(scene.node(1));
    let ear = too_big::Ear::in_place(pod.place(), "eth0").unwrap();
    let wires = wires(scene);
    for (family, in_family) in FAMILIES.iter().enumerate() {
        // What just fits gets there.
        let (address, full) = (far.addresses()[family], mtu - UDP_HEADERS[family]);
        udp::echo(pod.place(), far.place(), address, full, true).unwrap();
        for (name, dst, fits) in [
            ("another node's pod", far.addresses()[family], mtu),
            ("the outside", outside[family], UNDERLAY_MTU as usize),
            ("a small link", small.addresses()[family], mtu),
        ] {
            let what = format!("{name}, {in_family}");
            for size in [fits - UDP_HEADERS[family] + 1, 8 << 10, 60_000] {
                let payload = vec![7; size];
                let frame = raw(pod, dst, 9, &payload).frame().unwrap();
                inject(pod.place(), eth0(pod.place()), &[frame]).unwrap();
                let heard = ear
                    .hear(dst)
                    .unwrap_or_else(|error| panic!("{what}: {error:#}"));
                assert_eq!(heard.mtu as usize, fits, "{what}");
                assert_eq!(heard.src, pod.addresses()[family], "{what}");
            }
            wires.iter().for_each(|wire| {
                full_packets(wire, &what);
            });
        }
    }
}

#[test]
fn what_may_be_cut_is_cut_and_arrives() {
    let scene = scene();
    let (pod, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let small = wishing_off(scene.node(1));
    for (name, place, dst) in [
        ("another node's pod", far.place(), far.v4()),
        ("a small link", small.place(), small.v4()),
    ] {
        let bound = place.run(|| Ok(UdpSocket::bind((any(dst), 0))?));
        let receiver = bound.unwrap();
        let port = receiver.local_addr().unwrap().port();
        for size in SIZES {
            let payload: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
            let datagram = raw(pod, dst, port, &payload);
            let datagram = Datagram {
                may_be_cut: true,
                ..datagram
            };
            inject(pod.place(), eth0(pod.place()), &[datagram.frame().unwrap()]).unwrap();
            let what = format!("{name}, {size} bytes");
            assert!(
                readable(&receiver, Instant::now() + PATIENCE).unwrap(),
                "{what}"
            );
            let mut buffer = vec![0; size + 1];
            let (len, _) = receiver.recv_from(&mut buffer).unwrap();
            assert!(buffer[..len] == payload, "{what}");
        }
    }
}

/// Sockets as applications have them, to where it is far: they cut what they send, IPv6 too.
#[test]
fn large_datagrams_leave_the_node_in_parts() {
    let scene = scene();
    scene.lab().route_pods_from_outside().unwrap();
    let (pod, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let outside = scene.lab().outside();
    for (family, address) in scene
        .lab()
        .outside_addresses()
        .unwrap()
        .into_iter()
        .enumerate()
    {
        let before = misfits(scene.node(1).place());
        for size in SIZES {
            udp::echo(
                pod.place(),
                far.place(),
                far.addresses()[family],
                size,
                false,
            )
            .unwrap();
            // What is masqueraded may not be in parts.
            if address.is_ipv6() {
                udp::echo(pod.place(), outside.place(), address, size, false).unwrap();
            }
        }
        assert_eq!(
            misfits(scene.node(1).place()),
            before,
            "{}",
            FAMILIES[family]
        );
    }
}
