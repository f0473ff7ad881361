//! A node's ranges change: what pods of before take for local and is not any more.

use super::kit::{FAMILIES, TCP_HEADERS, full_packets, misfits, mtus, wires};
use ipnet::IpNet;
use sinabro_lab::{
    Lab,
    checks::Scene,
    traffic::{path::Path, stream::Stream},
    wait::wait_for,
};

/// Lower and upper half of each range.
fn halves(ranges: &[IpNet]) -> [Vec<IpNet>; 2] {
    [0, 1].map(|half| {
        let of = |range: &IpNet| {
            let mut halves = range.subnets(range.prefix_len() + 1).unwrap();
            halves.nth(half).unwrap()
        };
        ranges.iter().map(of).collect()
    })
}

#[test]
fn a_range_that_moved_to_another_node_is_no_longer_near() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let (lab, old) = (scene.lab(), scene.pod(1, 1));
    let (mtu, link) = mtus(scene.node(1), old);
    let ranges = scene.node(1).entry().pod_cidrs;
    for (node, half) in lab.nodes().iter().zip(halves(&ranges)) {
        let mut entry = node.entry();
        entry.pod_cidrs = half;
        node.set_entry(entry);
    }
    lab.publish().unwrap();
    for node in lab.nodes() {
        let wanted = node.entry().pod_cidrs;
        wait_for(&format!("{} to have {wanted:?}", node.name()), || {
            let status = node.wait_ready()?;
            Ok((status.pod_cidrs == wanted).then_some(()))
        })
        .unwrap();
    }
    let new = scene.node(1).add_pod("new").unwrap();
    let far = scene.node(2).add_pod("far").unwrap();
    let local = |pod| scene.node(1).endpoint(pod).unwrap().unwrap().local_mtu;
    let has = |pod, range| local(pod).unwrap().destinations.contains(range);
    assert!(has(old, &ranges[0]) && !has(&new, &ranges[0]));
    let wires = wires(&scene);
    for (family, headers) in TCP_HEADERS.into_iter().enumerate() {
        let name = FAMILIES[family];
        let far = (far.place(), far.addresses()[family]);
        assert!(ranges[family].contains(&far.1));
        for (pod, size) in [(old, mtu), (&new, mtu)] {
            let before = misfits(scene.node(1).place());
            let way = Path::new(name, pod.place(), far.0, far.1);
            let back = Path::new(name, far.0, pod.place(), pod.addresses()[family]);
            for path in [way, back] {
                let stream = Stream::open(&path).unwrap();
                stream.carry(1 << 20, 64 << 10).unwrap();
                for said in stream.said().unwrap() {
                    assert_eq!(said.mss, size - headers - 12, "{name}");
                }
            }
            assert_eq!(misfits(scene.node(1).place()), before, "{name}");
        }
        for wire in &wires {
            full_packets(wire, name);
        }
        // Old and new pods are near each other as ever.
        let path = Path::new(name, old.place(), new.place(), new.addresses()[family]);
        let stream = Stream::open(&path).unwrap();
        stream.carry(1 << 20, 64 << 10).unwrap();
        for said in stream.said().unwrap() {
            // TCP sends no more at once than half of the other end's window (tcp_bound_to_half_wnd),
            // which is smaller where that end had to wait for a processor.
            let sizes = 16_000..=link - headers - 12;
            assert!(sizes.contains(&said.mss), "{name}: {said:?}");
        }
    }
}
