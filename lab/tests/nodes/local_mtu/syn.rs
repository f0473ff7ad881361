//! What a pod announces with a SYN of any make: lowered where the connection may leave the node, as it
//! was where it stays.
//!
//! The segments are made by hand, as a stack of the application's own does that knows the link's MTU
//! alone.

use super::kit::{
    FAMILIES, TCP_HEADERS, by_both_ways, eth0, host_side, mtus, next_port, overlay_gateways, scene,
};
use sinabro_common::names;
use sinabro_lab::{
    Place, Pod,
    checks::Scene,
    datapath::deliver_by_stack,
    traffic::{
        packet::{inject, interface},
        segment::{Ear, SYN, SYN_ACK, Seen, Segment},
    },
};
use std::net::{IpAddr, SocketAddr, TcpListener};

/// Options of a header and what they become where they are lowered.
struct Case {
    name: &'static str,
    options: Vec<u8>,
    lowered: Vec<u8>,
    words: Option<u8>,
}

/// Every option before the one that is looked for, and that one with these two bytes.
fn mss(before: &[u8], size: u16) -> Vec<u8> {
    [before, &[2, 4], &size.to_be_bytes()].concat()
}

fn cases(most: u16) -> Vec<Case> {
    const LARGE: u16 = 65_495;
    const NOP: [u8; 8] = [1; 8];
    // SACK permitted, timestamps, window scale: an odd number of bytes.
    let common = [&[4, 2, 8, 10][..], &[0; 8], &[3, 3, 7]].concat();
    let lowered = |name, before: &[u8]| Case {
        name,
        options: mss(before, LARGE),
        lowered: mss(before, most),
        words: None,
    };
    let kept = |name, options: Vec<u8>| Case {
        name,
        lowered: options.clone(),
        options,
        words: None,
    };
    let large = mss(&[], LARGE);
    vec![
        lowered("alone", &[]),
        lowered("behind one NOP", &NOP[..1]),
        lowered("behind two NOPs", &NOP[..2]),
        lowered("behind three NOPs", &NOP[..3]),
        lowered("behind seven NOPs", &NOP[..7]),
        lowered("behind the usual ones", &common),
        lowered("behind an unknown one", &[99, 5, 1, 2, 3]),
        Case {
            name: "one byte more than the most",
            options: mss(&[], most + 1),
            ..lowered("", &[])
        },
        kept("the most", mss(&[], most)),
        kept("a small one", mss(&NOP[..1], 536)),
        kept("none at all", Vec::new()),
        kept("others only", common.clone()),
        kept("behind the end", [&[0], &large[..]].concat()),
        kept("behind one of no length", [&[99, 0], &large[..]].concat()),
        kept("behind one of length one", [&[99, 1], &large[..]].concat()),
        kept(
            "behind one longer than all",
            [&[99, 255], &large[..]].concat(),
        ),
        kept("of a wrong length", vec![2, 3, 0xff, 0xd7]),
        kept("cut off", vec![1, 1, 1, 1, 1, 2, 4, 0xff]),
        Case {
            words: Some(5),
            ..kept("behind the header", large.clone())
        },
    ]
}

/// What takes the segments, and where they are heard, behind the programs.
struct Way {
    name: &'static str,
    dst: IpAddr,
    /// A listener's, if there is one.
    port: Option<u16>,
    ear: Ear,
    is_lowered: bool,
}

fn options(seen: &Seen, len: usize) -> &[u8] {
    &seen.options[..len.min(seen.options.len())]
}

/// Who sends: from where, by which next hop, as whom.
struct Sender<'a> {
    place: &'a Place,
    next_hop: [u8; 6],
    address: IpAddr,
}

fn sent_as(from: &Sender<'_>, way: &Way, flags: u8, most: u16) {
    let place = from.place;
    let interface = eth0(place);
    let family = usize::from(from.address.is_ipv6());
    let cases = cases(most);
    let mut ends = Vec::new();
    // All at once: the kernel takes its time to close the socket that they are sent by.
    let frames: Vec<_> = cases
        .iter()
        .map(|case| {
            let src = SocketAddr::new(from.address, next_port());
            let dst = SocketAddr::new(way.dst, way.port.unwrap_or_else(next_port));
            ends.push((src, dst));
            let segment = Segment {
                src_mac: interface.mac,
                dst_mac: from.next_hop,
                src,
                dst,
                sequence: 1,
                flags,
                options: &case.options,
                words: case.words,
            };
            segment.frame().unwrap()
        })
        .collect();
    inject(place, interface, &frames).unwrap();
    for (case, (src, dst)) in cases.iter().zip(ends) {
        let what = format!("{}, {}, MSS {}", way.name, FAMILIES[family], case.name);
        let is_it = |seen: &Seen| {
            // The source's port may have been translated.
            let port = way.port.is_none() || seen.src.port() == src.port();
            seen.dst == dst && port && seen.flags == flags
        };
        let heard = way.ear.hear(family == 0, is_it);
        let seen = heard.unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let expected = if way.is_lowered {
            &case.lowered
        } else {
            &case.options
        };
        assert_eq!(options(&seen, expected.len()), expected, "{what}");
        assert!(seen.checksum_is_right, "{what}: {seen:?}");
    }
}

fn listener(place: &Place, address: IpAddr) -> TcpListener {
    let bound = place.run(|| Ok(TcpListener::bind((address, 0))?));
    bound.unwrap()
}

const ANOTHER_NODE: &str = "another node";

fn ways(scene: &Scene, family: usize) -> (Vec<Way>, Vec<TcpListener>) {
    let (near, far) = (scene.pod(1, 2), scene.pod(2, 1));
    let (node, outside) = (scene.node(1), scene.lab().outside().place());
    let at = |place: &Place| Ear::on(place, eth0(place)).unwrap();
    let at_node = || Ear::on(node.place(), host_side(node, scene.pod(1, 1))).unwrap();
    let own = node.addresses()[family];
    let gateway = overlay_gateways(1)[family];
    let listeners = [own, gateway].map(|address| listener(node.place(), address));
    let port = |at: usize| Some(listeners[at].local_addr().unwrap().port());
    let way = |name, dst, port, ear, is_lowered| Way {
        name,
        dst,
        port,
        ear,
        is_lowered,
    };
    let outside_address = scene.lab().outside_addresses().unwrap()[family];
    let far_node = scene.node(2).addresses()[family];
    let ways = vec![
        way(
            "another node's pod",
            far.addresses()[family],
            None,
            at(far.place()),
            true,
        ),
        way("the outside", outside_address, None, at(outside), true),
        way(
            ANOTHER_NODE,
            far_node,
            None,
            at(scene.node(2).place()),
            true,
        ),
        way("the node, to be translated", own, None, at_node(), true),
        way(
            "its gateway, to be translated",
            gateway,
            None,
            at_node(),
            true,
        ),
        way("a listener of the node", own, port(0), at_node(), false),
        way(
            "a listener of its gateway",
            gateway,
            port(1),
            at_node(),
            false,
        ),
        way(
            "a pod of the node",
            near.addresses()[family],
            None,
            at(near.place()),
            false,
        ),
    ];
    (ways, listeners.into())
}

fn sender(pod: &Pod, family: usize) -> Sender<'_> {
    Sender {
        place: pod.place(),
        next_hop: names::HOST_MAC,
        address: pod.addresses()[family],
    }
}

#[test]
fn what_leaves_the_node_announces_no_more_than_the_way_out_carries() {
    by_both_ways(announces_no_more_than_the_way_out_carries);
}

fn announces_no_more_than_the_way_out_carries(scene: &Scene) {
    let pod = scene.pod(1, 1);
    let (mtu, link) = mtus(scene.node(1), pod);
    assert!(mtu < 1500 && link == 65_535, "{mtu}, {link}");
    for (family, headers) in TCP_HEADERS.into_iter().enumerate() {
        let most = (mtu - headers) as u16;
        let from = sender(pod, family);
        let (ways, _listeners) = ways(scene, family);
        for way in &ways {
            sent_as(&from, way, SYN, most);
            // What a server's stack answers, to a pod, to another host. A listener takes no answer
            // for a connection's beginning, so that one is lowered like what goes on.
            // Another node knows pods by their own addresses, and hears their answers by the overlay.
            if way.port.is_none() && way.name != ANOTHER_NODE {
                sent_as(&from, way, SYN_ACK, most);
            }
        }
    }
}

/// The same where the kernel cannot redirect.
#[test]
fn what_stays_on_the_node_keeps_what_it_announces_by_the_stack_too() {
    let scene = scene();
    let (pod, near) = (scene.pod(1, 1), scene.pod(1, 2));
    let (mtu, _) = mtus(scene.node(1), pod);
    deliver_by_stack(scene.node(1)).unwrap();
    for (family, headers) in TCP_HEADERS.into_iter().enumerate() {
        let way = Way {
            name: "a pod of the node, by the stack",
            dst: near.addresses()[family],
            port: None,
            ear: Ear::on(near.place(), eth0(near.place())).unwrap(),
            is_lowered: false,
        };
        for flags in [SYN, SYN_ACK] {
            sent_as(&sender(pod, family), &way, flags, (mtu - headers) as u16);
        }
    }
}

/// Another machine knows its own link, which may be larger than this node's.
#[test]
fn what_comes_in_announces_no_more_than_the_way_back_carries() {
    let scene = scene();
    scene.lab().route_pods_from_outside().unwrap();
    let pod = scene.pod(1, 1);
    let (mtu, _) = mtus(scene.node(1), pod);
    let outside = scene.lab().outside();
    let router = interface(scene.lab().router().place(), "out0").unwrap();
    let from = Sender {
        place: outside.place(),
        next_hop: router.mac,
        address: scene.lab().outside_addresses().unwrap()[1],
    };
    let way = Way {
        name: "from the outside",
        dst: pod.v6(),
        port: None,
        ear: Ear::on(pod.place(), eth0(pod.place())).unwrap(),
        is_lowered: true,
    };
    for flags in [SYN, SYN_ACK] {
        sent_as(&from, &way, flags, (mtu - TCP_HEADERS[1]) as u16);
    }
}
