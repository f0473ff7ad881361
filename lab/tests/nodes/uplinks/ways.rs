//! Cables: an InternalIP on another device, several next hops, a bridge, a VLAN.

use super::kit::{Way, ip, lab, leave_by, seen, seen_at, start, wait_for, works, works_from_any};
use sinabro_lab::{
    Place, Pod,
    traffic::{icmp, path::Path, stream::Stream},
    wait::eventually,
};
use std::{collections::BTreeSet, net::IpAddr};

#[test]
fn an_internal_ip_that_is_on_another_device_than_the_default_route() {
    let lab = lab();
    let (node, outside, router) = (lab.node(1), lab.outside().place(), lab.router().place());
    let way = Way::cable("wan0", 1, &lab);
    leave_by(node, &[&way]);
    let pod = start(node, &["eth0", "wan0"], &[]);
    for family in [0, 1] {
        let address = lab.outside_addresses().unwrap()[family];
        works(&pod, outside, address, way.near[family]);
        // What is behind the other device answers to that one's address.
        let gateway = ["172.30.0.1", "fd00:172:30::1"][family].parse().unwrap();
        works(&pod, router, gateway, node.addresses()[family]);
    }
    // The overlay stays where the node's address is.
    let mut conn = node.netlink().unwrap();
    let vxlan = conn.link_by_name("sinabro_vxlan").unwrap().vxlan.unwrap();
    assert_eq!(vxlan.local, Some(node.addresses()[0]));
}

#[test]
fn two_uplinks_that_are_named_have_their_own_addresses() {
    let lab = lab();
    let (node, outside) = (lab.node(1), lab.outside().place());
    let way = Way::cable("wan0", 1, &lab);
    let pod = start(node, &["eth0", "wan0"], &["--uplinks=eth0,wan0"]);
    for family in [0, 1] {
        let by_router = lab.outside_addresses().unwrap()[family];
        works(&pod, outside, by_router, node.addresses()[family]);
        works(&pod, outside, way.far[family], way.near[family]);
    }
}

#[test]
fn each_next_hop_has_its_own_address() {
    const HOSTS: usize = 12;
    let lab = lab();
    let (node, outside) = (lab.node(1), lab.outside().place());
    let ways = [Way::cable("wan0", 1, &lab), Way::cable("wan1", 2, &lab)];
    leave_by(node, &[&ways[0], &ways[1]]);
    // The way is chosen by the addresses.
    let hosts = |family: usize| {
        (1..=HOSTS).map(move |host| match family {
            0 => format!("203.0.113.{host}"),
            _ => format!("2001:db8:113::{host:x}"),
        })
    };
    let add = |host: String| format!("addr add {host} dev lo");
    let all: Vec<String> = [0, 1].into_iter().flat_map(hosts).map(add).collect();
    ip(outside, &all);
    let pod = start(node, &["eth0", "wan0", "wan1"], &[]);
    for family in [0, 1] {
        let mut first_by: [Option<IpAddr>; 2] = [None; 2];
        for host in hosts(family) {
            let address = host.parse().unwrap();
            let source = seen_at(&pod, outside, address);
            let by = ways.iter().position(|way| way.near[family] == source);
            let by = by.unwrap_or_else(|| panic!("{address} saw {source}"));
            first_by[by].get_or_insert(address);
        }
        for (way, address) in ways.iter().zip(first_by) {
            let address = address.unwrap_or_else(|| panic!("nothing left by {}", way.link));
            // IPv6 has the protocol in what the way is chosen by (`rt6_multipath_hash`).
            let any = ways.each_ref().map(|way| way.near[family]);
            works_from_any(&pod, outside, address, &any);
        }
    }
}

#[test]
fn routes_and_addresses_may_change_while_connections_go_on() {
    let lab = lab();
    let (node, outside) = (lab.node(1), lab.outside().place());
    let pod = start(node, &["eth0"], &[]);
    let hosts = lab.outside_addresses().unwrap();
    let open = |family: usize| {
        let path = Path::new("out", pod.place(), outside, hosts[family]);
        Stream::open(&path).unwrap()
    };
    let streams = [0, 1].map(open);
    for family in [0, 1] {
        assert_eq!(seen(&streams[family]), node.addresses()[family]);
    }
    // Another device comes, and the routes lead there.
    let way = Way::cable("wan0", 1, &lab);
    leave_by(node, &[&way]);
    wait_for(node, &["eth0", "wan0"]);
    for family in [0, 1] {
        works(&pod, outside, hosts[family], way.near[family]);
        // Those of before keep the address that they have.
        streams[family].carry(64 << 10, 4096).unwrap();
    }
    // That one's addresses change.
    let moved = Way::new("wan0", 3);
    ip(
        node.place(),
        &[
            "addr flush dev wan0 scope global".into(),
            "addr add 198.18.3.2/24 dev wan0".into(),
            "addr add 2001:db8:18:3::2/64 dev wan0 nodad".into(),
        ],
    );
    ip(
        outside,
        &[
            "addr add 198.18.3.1/24 dev wan0".into(),
            "addr add 2001:db8:18:3::1/64 dev wan0 nodad".into(),
        ],
    );
    // The routes went with the addresses.
    ip(
        node.place(),
        &[
            "-4 route replace default via 198.18.3.1 dev wan0".into(),
            "-6 route replace default via 2001:db8:18:3::1 dev wan0".into(),
        ],
    );
    let taken: BTreeSet<_> = moved.near.into();
    eventually("the new addresses to be taken", || {
        let sources = hosts.map(|host| try_seen(&pod, outside, host));
        sources.into_iter().flatten().collect::<BTreeSet<_>>() == taken
    });
    for family in [0, 1] {
        works(&pod, outside, hosts[family], moved.near[family]);
    }
}

/// As [`seen_at`], while it may fail.
fn try_seen(pod: &Pod, outside: &Place, address: IpAddr) -> Option<IpAddr> {
    icmp::ping_seen(pod.place(), outside, address).ok()
}

#[test]
fn a_bridge_and_a_vlan_lead_out() {
    let lab = lab();
    let (node, outside) = (lab.node(1), lab.outside().place());
    // A bridge with the cable as a port.
    let mac = |end| [2, 0x18, 0, 0, 5, end];
    node.place()
        .cable(("port0", mac(2)), 1500, outside, ("br0", mac(1)))
        .unwrap();
    ip(
        node.place(),
        &[
            "link add br0 type bridge".into(),
            "link set port0 master br0 up".into(),
        ],
    );
    let bridge = Way::new("br0", 5);
    bridge.set_up(node, outside);
    leave_by(node, &[&bridge]);
    let pod = start(node, &["eth0", "br0"], &[]);
    let hosts = lab.outside_addresses().unwrap();
    for family in [0, 1] {
        works(&pod, outside, hosts[family], bridge.near[family]);
    }

    let tagged = |place: &Place, below: &str| {
        place.run(|| {
            let mut ip = std::process::Command::new("ip");
            let add = format!("link add link {below} name vlan7 type vlan id 7");
            Ok(ip.args(add.split_whitespace()).output()?.status.success())
        })
    };
    if !tagged(node.place(), "br0").unwrap() {
        println!("skipped: this kernel has no VLAN devices");
        return;
    }
    assert!(tagged(outside, "br0").unwrap());
    let vlan = Way::new("vlan7", 7);
    vlan.set_up(node, outside);
    leave_by(node, &[&vlan]);
    wait_for(node, &["eth0", "vlan7"]);
    for family in [0, 1] {
        works(&pod, outside, hosts[family], vlan.near[family]);
    }
}
