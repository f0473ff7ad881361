//! A way that comes to carry less while connections use it.

use super::kit::{FAMILIES, TCP_HEADERS, by_both_ways, full_packets, mtus};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Place,
    checks::Scene,
    traffic::{path::Path, sizes::Sizes, stream::Stream, udp},
    wait::wait_for,
};

const BYTES: usize = 4 << 20;
/// Timestamps, in every segment.
const OPTIONS: usize = 12;

fn has_at_most(stream: &Stream, name: &str, family: usize, mtu: usize) {
    for said in stream.said().unwrap() {
        assert!(
            said.mss <= mtu - TCP_HEADERS[family] - OPTIONS,
            "{name}: {said:?}"
        );
    }
}

/// Routers say so, to the pod itself: what they say of masqueraded packets is not translated.
#[test]
fn a_link_beyond_the_node_becomes_smaller_while_streams_go_on() {
    const SMALLER: usize = 1300;
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let flags = ["--non-masquerade-cidrs=192.0.2.0/24"];
    lab.node(1).start_agent_with(&flags).unwrap();
    lab.node(1).wait_ready().unwrap();
    let scene = Scene::new(lab).unwrap();
    let lab = scene.lab();
    lab.route_pods_from_outside().unwrap();
    let (pod, outside) = (scene.pod(1, 1).place(), lab.outside().place());
    let ways: Vec<Path> = (0..2)
        .map(|family| {
            let address = lab.outside_addresses().unwrap()[family];
            Path::new(FAMILIES[family], pod, outside, address)
        })
        .collect();
    let streams: Vec<_> = ways.iter().map(|way| Stream::open(way).unwrap()).collect();
    streams
        .iter()
        .for_each(|stream| stream.carry(BYTES, 16 << 10).unwrap());
    for link in ["br0", "out0"] {
        lab.router().place().set_mtu(link, SMALLER as u32).unwrap();
    }
    for (family, stream) in streams.iter().enumerate() {
        stream.carry(BYTES, 16 << 10).unwrap();
        has_at_most(stream, FAMILIES[family], family, SMALLER);
    }
    // And what begins now.
    for (family, way) in ways.iter().enumerate() {
        let stream = Stream::open(way).unwrap();
        stream.carry(BYTES, 16 << 10).unwrap();
        has_at_most(&stream, FAMILIES[family], family, SMALLER);
    }
}

/// The node says so, to the pods that it has: their routes are those of before.
#[test]
fn the_uplinks_become_smaller_while_streams_between_nodes_go_on() {
    by_both_ways(the_uplinks_become_smaller);
}

fn the_uplinks_become_smaller(scene: &Scene) {
    const SMALLER: usize = 1400;
    let lab = scene.lab();
    let (pod, far) = (scene.pod(1, 1), scene.pod(2, 1));
    let (before, link) = mtus(scene.node(1), pod);
    let ways: Vec<Path> = far
        .addresses()
        .iter()
        .zip(FAMILIES)
        .map(|(address, name)| Path::new(name, pod.place(), far.place(), *address))
        .collect();
    let streams: Vec<_> = ways.iter().map(|way| Stream::open(way).unwrap()).collect();
    streams
        .iter()
        .for_each(|stream| stream.carry(BYTES, 16 << 10).unwrap());
    for node in lab.nodes() {
        lab.router()
            .place()
            .set_mtu(&format!("to-{}", node.name()), SMALLER as u32)
            .unwrap();
        node.place().set_mtu("eth0", SMALLER as u32).unwrap();
    }
    for node in lab.nodes() {
        wait_for(&format!("{} to know its uplink's MTU", node.name()), || {
            Ok((node.wait_ready()?.mtu < before as u32).then_some(()))
        })
        .unwrap();
    }
    let new = scene.node(1).add_pod("new").unwrap();
    let (smaller, same) = mtus(scene.node(1), &new);
    assert_eq!((before - smaller, same), (1500 - SMALLER, link));
    let wire = |place: &Place| Sizes::cut(place, "eth0", SMALLER).unwrap();
    let wires: Vec<_> = lab.nodes().iter().map(|node| wire(node.place())).collect();
    for (family, stream) in streams.iter().enumerate() {
        stream.carry(BYTES, 16 << 10).unwrap();
        has_at_most(stream, FAMILIES[family], family, smaller);
        let address = far.addresses()[family];
        for from in [pod, &new] {
            let way = Path::new(FAMILIES[family], from.place(), far.place(), address);
            let stream = Stream::open(&way).unwrap();
            stream.carry(BYTES, 16 << 10).unwrap();
            has_at_most(&stream, FAMILIES[family], family, smaller);
            udp::echo(from.place(), far.place(), address, 8 << 10, false).unwrap();
        }
    }
    // Full ones show that the counters see.
    assert!(
        wires
            .iter()
            .all(|wire| full_packets(wire, "smaller uplinks") > 1000)
    );
}
