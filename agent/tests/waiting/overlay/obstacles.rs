//! What stands in the way on a node: said, and of no more weight than it has.

use super::net::{Net, Underlay, entry, index, peer_problem, until};
use sinabro_common::names::{VXLAN_LINK, VXLAN_PORT, VXLAN_VNI};
use sinabro_netlink::{
    bridge, link,
    route::{Route, RouteFilter},
    vxlan::{Vxlan, VxlanSettings},
};

#[test]
fn somebody_elses_device_is_left_alone_and_named() {
    let u = Underlay::V4;
    let net = Net::without_facts(2);
    let mut first = net.machine(1).conn();
    first.execute(bridge::create(VXLAN_LINK)).unwrap();
    let mut second = net.machine(2).conn();
    let other = Vxlan {
        name: "theirs",
        mac: [2, 0, 0, 0, 0, 7],
        mtu: 1400,
        settings: VxlanSettings::new(VXLAN_VNI, VXLAN_PORT, "192.168.7.2".parse().unwrap()),
    };
    second.execute(other.create()).unwrap();
    net.tell([entry(1, 1, u), entry(2, 2, u)]);

    let says = |machine: u8, text: &str| {
        until(text, || {
            net.machine(machine)
                .status()
                .problems
                .iter()
                .any(|p| p.contains(text))
        });
        assert!(!net.machine(machine).status().ok());
    };
    says(1, "link sinabro_vxlan is not a VXLAN device but bridge");
    says(2, "VXLAN device theirs already uses VNI 1 and port 8472");
    assert_eq!(
        net.machine(1).device().unwrap().kind.as_deref(),
        Some("bridge")
    );

    first.execute(link::delete_by_name(VXLAN_LINK)).unwrap();
    second.execute(link::delete_by_name("theirs")).unwrap();
    net.crosses((1, 1), (2, 2));
    until("the status is good", || {
        net.machine(1).status().ok() && net.machine(2).status().ok()
    });
}

#[test]
fn a_route_in_the_way_costs_its_peer_alone() {
    let u = Underlay::V4;
    let net = Net::without_facts(3);
    let machine = net.machine(1);
    let mut conn = machine.conn();
    let eth0 = index(&mut conn, "eth0");
    let foreign = Route::to("10.244.2.0/24".parse().unwrap())
        .via("192.168.7.200".parse().unwrap())
        .dev(eth0);
    conn.execute(foreign.add()).unwrap();
    net.tell((1..=3).map(|n| entry(n, n, u)));

    net.crosses((1, 1), (3, 3));
    until("the peer has a problem", || {
        let problem = peer_problem(machine, "n2");
        problem.is_some_and(|p| p.contains("route to 10.244.2.0/24 is in the way"))
    });
    assert_eq!(peer_problem(machine, "n3"), None);
    assert!(machine.status().ok(), "a peer's problem is not the node's");
    let there = conn.routes(&RouteFilter::default()).unwrap();
    assert!(
        there
            .iter()
            .any(|r| r.dst == foreign.dst && r.oif == Some(eth0))
    );

    conn.execute(foreign.delete()).unwrap();
    net.crosses((1, 1), (2, 2));
    until("the problem is gone", || {
        peer_problem(machine, "n2").is_none()
    });
}

#[test]
fn the_uplinks_mtu_is_followed() {
    let net = Net::new(1, Underlay::V4);
    let machine = net.machine(1);
    until("the device is there", || {
        machine.device().is_some_and(|d| d.mtu == 1450)
    });
    let mut conn = machine.conn();
    let eth0 = index(&mut conn, "eth0");
    conn.execute(link::set_mtu(eth0, 1400)).unwrap();
    until("the device followed", || {
        machine.device().unwrap().mtu == 1350
    });
    conn.execute(link::set_mtu(eth0, 1500)).unwrap();
    until("and back", || machine.device().unwrap().mtu == 1450);
    // Too small for IPv6 in the tunnel: said, and the device stays.
    conn.execute(link::set_mtu(eth0, 1300)).unwrap();
    until("it is said", || {
        machine
            .status()
            .problems
            .iter()
            .any(|p| p.contains("MTU of 1250"))
    });
    assert_eq!(machine.device().unwrap().mtu, 1450);
}
