//! A pod is no router: not to a node that listens to routers everywhere.

use sinabro_common::{abi::drop::DropReason, names};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    checks::spoof::{await_drops, drops},
    cni::IFNAME,
    traffic::packet::{checksum, inject, interface},
    wait::eventually,
};
use sinabro_netlink::{Family, route::RouteFilter, sysctl};
use std::{net::Ipv6Addr, process::Command};

/// linux/rtnetlink.h: learnt from router advertisements.
const RTPROT_RA: u8 = 9;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// A router advertisement (RFC 4861 §4.2) for half an hour, with a prefix to make addresses from
/// (§4.6.2).
fn advertisement(mac: [u8; 6]) -> Vec<u8> {
    let [a, b, c, d, e, f] = mac;
    let source: [u8; 16] = [
        0xfe,
        0x80,
        0,
        0,
        0,
        0,
        0,
        0,
        a ^ 2,
        b,
        c,
        0xff,
        0xfe,
        d,
        e,
        f,
    ];
    let mut message = vec![134, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0];
    message.extend([
        3, 4, 64, 0xc0, 0, 0, 0x07, 0x08, 0, 0, 0x07, 0x08, 0, 0, 0, 0,
    ]);
    message.extend([
        0x20, 0x01, 0x0d, 0xb8, 0xba, 0xd0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ]);
    let addresses = [source, ALL_NODES.octets()].concat();
    let sum = checksum(&[
        &addresses,
        &[0, 0, 0, message.len() as u8, 0, 0, 0, 58],
        &message,
    ]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let header = [0x60, 0, 0, 0, 0, message.len() as u8, 58, 255];
    let ethernet = [&[0x33, 0x33, 0, 0, 0, 1][..], &mac, &[0x86, 0xdd]].concat();
    [&ethernet[..], &header, &addresses, &message].concat()
}

/// Whether the node learnt a route by a link from a router.
fn learnt_by(node: &Node, link: &str) -> bool {
    let mut conn = node.netlink().unwrap();
    let filter = RouteFilter {
        family: Some(Family::V6),
        protocol: Some(RTPROT_RA),
        oif: Some(conn.link_by_name(link).unwrap().index),
        ..RouteFilter::default()
    };
    !conn.routes(&filter).unwrap().is_empty()
}

fn set(node: &Node, link: &str, value: &str) {
    let name = ["net", "ipv6", "conf", link, "accept_ra"];
    node.namespace()
        .run(|| Ok(sysctl::write(&name, value)?))
        .unwrap();
}

#[test]
fn a_node_takes_no_route_from_a_pod() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    // As on nodes whose uplinks configure themselves.
    for conf in ["all", "default"] {
        set(node, conf, "2");
    }
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let pod = node.add_pod("router").unwrap();
    let link = names::pod_link(pod.id(), IFNAME);
    let inside = interface(pod.place(), IFNAME).unwrap();
    let advertise = || inject(pod.place(), inside, &[advertisement(inside.mac)]).unwrap();

    let before = drops(node, DropReason::RouterMessage).unwrap();
    advertise();
    await_drops(node, DropReason::RouterMessage, before, 1).unwrap();
    assert!(!learnt_by(node, &link));

    // Without the program the settings of the link are left. An agent would put it back.
    node.kill_agent().unwrap();
    let mut tc = Command::new("tc");
    tc.args(["qdisc", "del", "dev", &link, "clsact"]);
    assert!(
        node.namespace()
            .spawn(tc)
            .unwrap()
            .wait()
            .unwrap()
            .success()
    );
    let read = |family: &str, setting: &str| {
        let name = ["net", family, "conf", &link, setting];
        node.namespace().run(|| Ok(sysctl::read(&name)?)).unwrap()
    };
    for (family, setting) in [
        ("ipv6", "accept_ra"),
        ("ipv6", "accept_redirects"),
        ("ipv6", "autoconf"),
        ("ipv4", "accept_redirects"),
        ("ipv4", "send_redirects"),
        ("ipv4", "accept_source_route"),
    ] {
        assert_eq!(read(family, setting), "0", "{setting}");
    }
    advertise();
    advertise();
    assert!(!learnt_by(node, &link));

    // And without those it is what the kernel takes: the advertisement is a good one.
    set(node, &link, "2");
    eventually("a route by way of the pod", || {
        advertise();
        learnt_by(node, &link)
    });
}
