//! The overlay on the real kernel: machines in namespaces of their own, real traffic.
#![allow(clippy::unwrap_used)]

mod net;

use ipnet::IpNet;
use net::{Machine, Net, Underlay, entry, eventually, index, pod, until};
use sinabro_agent::{
    apply::PodRoute,
    plan::{Facts, Node, OverlayPlan, OverlaySettings},
};
use sinabro_common::{
    api::Mac,
    names::{ROUTE_PROTOCOL, VXLAN_LINK, VXLAN_PORT, VXLAN_VNI},
};
use sinabro_netlink::{
    bridge,
    fdb::Fdb,
    link,
    neigh::Neigh,
    route::{Route, RouteFilter, TABLE_MAIN},
    veth::Veth,
    vxlan::{Vxlan, VxlanSettings},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

/// Sinabro's routes on the device, without the rest.
fn routes(machine: &Machine) -> Vec<Route> {
    let Some(device) = machine.device() else {
        return Vec::new();
    };
    let filter = RouteFilter {
        oif: Some(device.index),
        protocol: Some(ROUTE_PROTOCOL),
        table: Some(TABLE_MAIN),
        ..RouteFilter::default()
    };
    machine.conn().routes(&filter).unwrap()
}

fn neighbours(machine: &Machine) -> Vec<Neigh> {
    let Some(device) = machine.device() else {
        return Vec::new();
    };
    let all = machine.conn().neighs(device.index).unwrap();
    all.into_iter().filter(Neigh::is_permanent).collect()
}

fn fdb(machine: &Machine) -> Vec<Fdb> {
    match machine.device() {
        Some(device) => machine.conn().fdb(device.index).unwrap(),
        None => Vec::new(),
    }
}

fn peer_problem(machine: &Machine, peer: &str) -> Option<String> {
    let status = machine.status();
    let node = status.nodes.iter().find(|node| node.name == peer)?.clone();
    node.problem
}

#[test]
fn traffic_crosses_between_nodes_in_both_families() {
    for (underlay, mtu) in [(Underlay::V4, 1450), (Underlay::V6, 1430)] {
        let net = Net::new(3, underlay);
        for (a, b) in [(1, 2), (2, 3), (3, 1)] {
            net.crosses((a, a), (b, b));
        }
        assert_eq!(net.machine(1).device().unwrap().mtu, mtu);
        until("the status is good", || {
            let status = net.machine(1).status();
            status.ok() && status.last_success.is_some() && status.nodes.len() == 3
        });
        assert!(
            net.machine(1)
                .status()
                .nodes
                .iter()
                .all(|node| node.problem.is_none())
        );
    }
}

#[test]
fn what_is_deleted_by_hand_comes_back() {
    let net = Net::new(2, Underlay::V4);
    net.crosses((1, 1), (2, 2));
    let machine = net.machine(1);
    let mut conn = machine.conn();

    conn.execute(link::delete_by_name(VXLAN_LINK)).unwrap();
    net.crosses((1, 1), (2, 2));

    let all = routes(machine);
    assert_eq!(all.len(), 2);
    conn.execute_all(all.iter().map(Route::delete)).unwrap();
    until("routes are back", || routes(machine).len() == 2);

    let all = neighbours(machine);
    assert_eq!(all.len(), 2);
    conn.execute_all(all.iter().map(Neigh::delete)).unwrap();
    until("neighbours are back", || neighbours(machine).len() == 2);

    let all = fdb(machine);
    assert_eq!(all.len(), 1);
    conn.execute(all[0].delete()).unwrap();
    until("the forwarding entry is back", || fdb(machine).len() == 1);

    let device = machine.device().unwrap().index;
    let addresses = |conn: &mut sinabro_netlink::Conn| {
        let all = conn.addrs(Some(device)).unwrap().into_iter();
        let ours = all.filter(|a| a.net.prefix_len() == a.net.max_prefix_len());
        ours.collect::<Vec<_>>()
    };
    let all = addresses(&mut conn);
    assert_eq!(all.len(), 2);
    conn.execute_all(all.iter().map(|a| a.delete())).unwrap();
    until("addresses are back", || addresses(&mut conn).len() == 2);
    until("and routes, which the kernel took with them", || {
        routes(machine).len() == 2
    });
    net.crosses((1, 1), (2, 2));

    conn.execute(link::set_down(device)).unwrap();
    until("the device is up", || {
        machine.device().is_some_and(|d| d.up)
    });
    net.crosses((1, 1), (2, 2));

    // Not deleted but spoilt: wrong MAC, wrong tunnel end, wrong MTU.
    let gateway = neighbours(machine)[0].address;
    conn.execute(Neigh::new(device, gateway, [2, 9, 9, 9, 9, 9]).replace())
        .unwrap();
    let wrong = Fdb {
        dst: "192.168.7.99".parse().unwrap(),
        ..fdb(machine)[0].clone()
    };
    conn.execute(wrong.replace()).unwrap();
    conn.execute(link::set_mtu(device, 1300)).unwrap();
    until("the MTU is right again", || {
        machine.device().unwrap().mtu == 1450
    });
    net.crosses((1, 1), (2, 2));
}

/// A VXLAN device has a socket of one family alone: both ends must choose the same.
#[test]
fn nodes_that_list_their_addresses_in_another_order_reach_each_other() {
    let net = Net::without_facts(3);
    let orders = [Underlay::V6, Underlay::V4, Underlay::V4];
    let entries = || (1..=3).zip(orders).map(|(n, order)| entry(n, n, order));
    net.tell(entries());
    for (a, b) in [(1, 2), (2, 3), (3, 1)] {
        net.crosses((a, a), (b, b));
    }
    // The same where another of them was the first to register.
    net.tell(entries().map(|node| Node {
        registered: if node.name == "n2" { 1 } else { 2 },
        ..node
    }));
    for n in 1..=3 {
        until(&format!("n{n} has IPv4 tunnels"), || {
            let vxlan = net.machine(n).device().and_then(|device| device.vxlan);
            vxlan.is_some_and(|vxlan| vxlan.local.is_some_and(|local| local.is_ipv4()))
        });
    }
    for (a, b) in [(1, 2), (2, 3), (3, 1)] {
        net.crosses((a, a), (b, b));
    }
}

/// The Node object of a machine that is gone still has the address that a new machine got.
#[test]
fn a_stale_node_does_not_take_the_one_that_has_its_address_off_the_network() {
    let net = Net::without_facts(2);
    let stale = Node {
        name: "a-gone".into(),
        registered: 1,
        ..entry(2, 9, Underlay::V4)
    };
    let alive = |n| Node {
        registered: 2,
        ready: true,
        ..entry(n, n, Underlay::V4)
    };
    net.tell([alive(1), alive(2), stale.clone()]);
    net.crosses((1, 1), (2, 2));
    let told = peer_problem(net.machine(1), "a-gone").unwrap();
    assert!(
        told.contains("192.168.7.2 is also that of node n2"),
        "{told}"
    );
    // It registered last, but no kubelet is heard of there.
    let stale = Node {
        registered: 3,
        ..stale
    };
    net.tell([alive(1), alive(2), stale]);
    net.crosses((2, 2), (1, 1));
}

#[test]
fn nodes_change_leave_and_return_while_others_talk() {
    let u = Underlay::V4;
    let net = Net::new(3, u);
    net.crosses((1, 1), (3, 3));
    net.crosses((1, 1), (2, 2));

    // Machines 1 and 3 talk all the while; nothing may get lost between them.
    let stop = Arc::new(AtomicBool::new(false));
    let [from, _] = pod(1);
    let [to, _] = pod(3);
    let (sender, receiver) = (net.machine(1).socket(from), net.machine(3).socket(to));
    let target = receiver.local_addr().unwrap();
    let sending = {
        let stop = stop.clone();
        thread::spawn(move || {
            let mut sent = 0u64;
            while !stop.load(Relaxed) {
                sender.send_to(&sent.to_be_bytes(), target).unwrap();
                sent += 1;
                thread::sleep(Duration::from_millis(1));
            }
            sent
        })
    };
    let receiving = {
        let stop = stop.clone();
        thread::spawn(move || {
            let mut received = 0u64;
            let mut buffer = [0; 8];
            loop {
                match receiver.recv(&mut buffer) {
                    Ok(_) => received += 1,
                    // Nothing for a while after the last one was sent.
                    Err(_) if stop.load(Relaxed) => return received,
                    Err(_) => {}
                }
            }
        })
    };

    // Another range on machine 2.
    net.machine(2).add_pod(42);
    net.tell([entry(1, 1, u), entry(2, 42, u), entry(3, 3, u)]);
    net.crosses((1, 1), (2, 42));
    until("the old range is gone", || {
        routes(net.machine(1)).len() == 4
    });

    // Another address.
    let mut conn = net.machine(2).conn();
    let eth0 = index(&mut conn, "eth0");
    let address = sinabro_netlink::addr::Addr::new(eth0, "192.168.7.77/24".parse().unwrap());
    conn.execute(address.add()).unwrap();
    let mut moved = entry(2, 42, u);
    moved.addresses[0] = "192.168.7.77".parse().unwrap();
    net.tell([entry(1, 1, u), moved.clone(), entry(3, 3, u)]);
    net.crosses((1, 1), (2, 42));
    until("the old tunnel end is gone", || {
        let ends: BTreeSet<_> = fdb(net.machine(1))
            .iter()
            .map(|e| e.dst.to_string())
            .collect();
        ends == BTreeSet::from(["192.168.7.3".into(), "192.168.7.77".into()])
    });

    // Gone, and back.
    net.tell([entry(1, 1, u), entry(3, 3, u)]);
    until("nothing is left of it", || {
        let machine = net.machine(1);
        (
            routes(machine).len(),
            neighbours(machine).len(),
            fdb(machine).len(),
        ) == (2, 2, 1)
    });
    net.tell([entry(1, 1, u), moved, entry(3, 3, u)]);
    net.crosses((1, 1), (2, 42));

    stop.store(true, Relaxed);
    let sent = sending.join().unwrap();
    assert!(sent > 0);
    assert_eq!(receiving.join().unwrap(), sent);
}

#[test]
fn fifty_nodes_are_in_the_kernel_as_planned_and_leave_without_a_trace() {
    for u in [Underlay::V4, Underlay::V6] {
        let net = Net::without_facts(1);
        let machine = net.machine(1);
        let mut conn = machine.conn();
        let eth0 = index(&mut conn, "eth0");
        // Somebody else's routes, also one of a prefix that lies inside a peer's range.
        let foreign = [
            Route::to("10.99.0.0/16".parse().unwrap())
                .via("192.168.7.200".parse().unwrap())
                .dev(eth0),
            Route::to("10.244.7.128/25".parse().unwrap())
                .via("192.168.7.200".parse().unwrap())
                .dev(eth0),
            Route::to("fd99::/64".parse().unwrap())
                .via("fd07::200".parse().unwrap())
                .dev(eth0),
        ];
        conn.execute_all(foreign.iter().map(Route::add)).unwrap();
        let others = |machine: &Machine| {
            let all = machine.conn().routes(&RouteFilter::default()).unwrap();
            all.into_iter()
                // The kernel's own come and go with its link-local address.
                .filter(|r| r.oif == Some(eth0) && r.protocol != libc::RTPROT_KERNEL)
                .filter(|r| r.table == TABLE_MAIN)
                .collect::<Vec<_>>()
        };
        let before = others(machine);

        let nodes: Vec<_> = (1..=50).map(|n| entry(n, n, u)).collect();
        let settings = OverlaySettings {
            node: "n1".into(),
            device: VXLAN_LINK.into(),
            vni: VXLAN_VNI,
            port: VXLAN_PORT,
            uplink_mtu: 1500,
            mtu: None,
        };
        let plan = OverlayPlan::new(&Facts::new(nodes.clone()), &settings).unwrap();
        assert_eq!(
            (plan.routes.len(), plan.neighbours.len(), plan.fdb.len()),
            (98, 98, 49)
        );
        net.tell(nodes);
        until("all is as planned", || {
            let routes: BTreeMap<IpNet, _> = routes(machine)
                .into_iter()
                .map(|r| (r.dst, (r.gateway, r.src)))
                .collect();
            let planned: BTreeMap<_, _> = plan
                .routes
                .iter()
                .map(|(k, r)| (*k, (Some(r.gateway), Some(r.source))))
                .collect();
            let neighbours: BTreeMap<_, _> = neighbours(machine)
                .into_iter()
                .map(|n| (n.address, n.mac.map(Mac).unwrap()))
                .collect();
            let fdb: BTreeMap<_, _> = fdb(machine)
                .into_iter()
                .map(|e| (Mac(e.mac), e.dst))
                .collect();
            routes == planned && neighbours == plan.neighbours && fdb == plan.fdb
        });
        let device = machine.device().unwrap();
        assert_eq!(
            (device.mac, device.mtu),
            (Some(plan.device.mac.0), plan.device.mtu)
        );
        assert_eq!(others(machine), before);

        // Once right, it stays right without another change.
        let settled = eventually("passes come to rest", || {
            let runs = machine.status().runs;
            thread::sleep(Duration::from_millis(500));
            (machine.status().runs == runs).then_some(runs)
        });
        assert!(settled < 20, "{settled} passes for one change");

        net.tell([entry(1, 1, u)]);
        until("nothing is left", || {
            routes(machine).is_empty() && neighbours(machine).is_empty() && fdb(machine).is_empty()
        });
        assert_eq!(others(machine), before);
        assert_eq!(machine.status().failures, 0);
    }
}

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

/// A pass over pods alone was due when the list changed: the change must not wait for the next
/// full pass, which is further away than this test's patience.
#[test]
fn nodes_that_change_while_a_pod_is_looked_at_are_not_missed() {
    let u = Underlay::V4;
    let net = Net::new(1, u);
    let machine = net.machine(1);
    until("the overlay is up", || machine.status().ok());
    let mut conn = machine.conn();
    let pair = Veth {
        name: "snb000000000001",
        mac: [2, 0, 0, 0, 3, 1],
        mtu: 1450,
        peer_name: "peer",
        peer_mac: [2, 0, 0, 0, 3, 2],
        peer_netns: None,
    };
    let ifindex = conn.create_veth(&pair).unwrap().index;
    let peer = conn.link_by_name("peer").unwrap().index;
    conn.execute(link::set_up(peer)).unwrap();
    let address = "10.244.1.9".parse().unwrap();
    machine.pods.send_replace(vec![PodRoute {
        addresses: vec![address],
        ifindex,
        mac: Mac([2, 0, 0, 0, 3, 2]),
    }]);
    let filter = RouteFilter {
        oif: Some(ifindex),
        protocol: Some(ROUTE_PROTOCOL),
        ..RouteFilter::default()
    };
    let mut observer = machine.conn();
    for round in 0..6 {
        eventually("passes come to rest", || {
            let runs = machine.status().runs;
            thread::sleep(Duration::from_millis(200));
            (machine.status().runs == runs).then_some(())
        });
        conn.execute(
            Route::to_host(address)
                .dev(ifindex)
                .protocol(ROUTE_PROTOCOL)
                .replace(),
        )
        .unwrap();
        for route in conn.routes(&filter).unwrap() {
            conn.execute(route.delete()).unwrap();
        }
        // The event has been taken, the pass has not begun.
        thread::sleep(Duration::from_millis(15));
        let peers = 1 + round % 2;
        net.tell((1..=1 + peers).map(|n| entry(n, n, u)));
        until("the peers are as told", || {
            fdb(machine).len() == usize::from(peers)
        });
        until("the pod's route is back", || {
            observer.routes(&filter).unwrap().len() == 1
        });
    }
}

#[test]
fn pods_routes_and_neighbours_come_back_and_nothing_of_theirs_is_removed() {
    let net = Net::new(1, Underlay::V4);
    let machine = net.machine(1);
    until("the overlay is up", || machine.status().ok());
    let mut conn = machine.conn();
    let pair = Veth {
        name: "snb000000000001",
        mac: [2, 0, 0, 0, 3, 1],
        mtu: 1450,
        peer_name: "peer",
        peer_mac: [2, 0, 0, 0, 3, 2],
        peer_netns: None,
    };
    let ifindex = conn.create_veth(&pair).unwrap().index;
    let addresses: Vec<std::net::IpAddr> = ["10.244.1.9", "fd00:244:0:1::9"]
        .map(|a| a.parse().unwrap())
        .into();
    let mac = Mac([2, 0, 0, 0, 3, 2]);
    // An extra route and neighbour on the pod's link are nobody's business.
    let extra = Route::to_host("10.1.1.1".parse().unwrap())
        .dev(ifindex)
        .protocol(ROUTE_PROTOCOL);
    let extra_neighbour = Neigh::new(ifindex, "10.1.1.1".parse().unwrap(), mac.0);
    conn.execute_all([extra.add(), extra_neighbour.add()])
        .unwrap();

    let gone = PodRoute {
        addresses: vec!["10.244.1.10".parse().unwrap()],
        ifindex: 4_000_000,
        mac,
    };
    let pod = PodRoute {
        addresses: addresses.clone(),
        ifindex,
        mac,
    };
    machine.pods.send_replace(vec![pod, gone]);

    let mut observer = machine.conn();
    let mut complete = || {
        let filter = RouteFilter {
            oif: Some(ifindex),
            protocol: Some(ROUTE_PROTOCOL),
            ..RouteFilter::default()
        };
        let routes = observer.routes(&filter).unwrap();
        let neighbours = observer.neighs(ifindex).unwrap();
        addresses.iter().all(|address| {
            routes
                .iter()
                .any(|r| r.dst == IpNet::from(*address) && r.gateway.is_none())
                && neighbours
                    .iter()
                    .any(|n| n.address == *address && n.is_permanent() && n.mac == Some(mac.0))
        })
    };
    // A change on the pod's link makes it be looked at.
    conn.execute(extra_neighbour.replace()).unwrap();
    conn.execute(extra_neighbour.delete()).unwrap();
    until("what was never there is there", &mut complete);

    for address in &addresses {
        let host_route = Route::to_host(*address)
            .dev(ifindex)
            .scope_link()
            .protocol(ROUTE_PROTOCOL);
        conn.execute(host_route.delete()).unwrap();
        until("the host route is back", &mut complete);
        conn.execute(Neigh::new(ifindex, *address, mac.0).delete())
            .unwrap();
        until("the neighbour is back", &mut complete);
        conn.execute(Neigh::new(ifindex, *address, [2, 9, 9, 9, 9, 9]).replace())
            .unwrap();
        until("the neighbour is right", &mut complete);
    }
    conn.execute(link::set_down(ifindex)).unwrap();
    conn.execute(link::set_up(ifindex)).unwrap();
    until("all is back after down and up", &mut complete);
    conn.execute(extra.add()).unwrap();

    machine.pods.send_replace(Vec::new());
    conn.execute(link::set_mtu(index(&mut machine.conn(), "eth0"), 1400))
        .unwrap();
    until("a pass was made", || machine.device().unwrap().mtu == 1350);
    assert!(complete(), "nothing of a pod is removed");
    assert!(
        machine.status().problems.is_empty(),
        "{:?}",
        machine.status().problems
    );
}
