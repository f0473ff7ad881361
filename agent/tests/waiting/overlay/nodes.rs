//! Traffic between nodes, as they come, change and go.

use super::net::{
    Machine, Net, Underlay, entry, eventually, fdb, index, neighbours, peer_problem, pod, routes,
    until,
};
use ipnet::IpNet;
use sinabro_agent::plan::{Facts, Node, OverlayPlan, OverlaySettings, Reached, Routing};
use sinabro_common::{
    api::Mac,
    names::{VXLAN_LINK, VXLAN_PORT, VXLAN_VNI},
};
use sinabro_netlink::{
    addr::Addr,
    route::{Route, RouteFilter, TABLE_MAIN},
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
    let address = Addr::new(eth0, "192.168.7.77/24".parse().unwrap());
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
            routing: Routing::Tunnel,
            reached: Reached::default(),
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
