//! What somebody takes away or spoils is put back.

use super::net::{
    Machine, Net, Underlay, entry, eventually, fdb, index, neighbours, routes, until,
};
use ipnet::IpNet;
use sinabro_agent::apply::PodRoute;
use sinabro_common::{
    api::Mac,
    names::{self, ROUTE_PROTOCOL, VXLAN_LINK},
};
use sinabro_netlink::{
    Conn,
    fdb::Fdb,
    link,
    neigh::Neigh,
    route::{Route, RouteFilter},
};
use std::{net::IpAddr, process::Command, thread, time::Duration};

/// A pod's hardware address.
const MAC: [u8; 6] = [2, 0, 0, 0, 3, 2];

/// A pod's link, whose peer is here, too; its index.
fn pod_link(machine: &Machine) -> u32 {
    let near = ("snb000000000001", [2, 0, 0, 0, 3, 1]);
    let place = &machine.place;
    let ifindex = place.cable(near, 1450, place, ("peer", MAC)).unwrap();
    place.set_up("peer", &[]).unwrap();
    ifindex
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
    let addresses = |conn: &mut Conn| {
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

    // Not deleted but spoilt: an entry that the kernel may forget, wrong MAC, wrong tunnel end, wrong MTU.
    let gateway = neighbours(machine)[0].address;
    let mut ip = Command::new("ip");
    let stale = format!("neigh change {gateway} dev {VXLAN_LINK} nud stale");
    machine.place.put(ip.args(stale.split(' ')));
    assert!(ip.status().unwrap().success(), "ip {stale}");
    until("the neighbour is permanent", || {
        neighbours(machine).len() == 2
    });
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

/// How many passes were made, once no more come.
fn rest(machine: &Machine) -> u64 {
    eventually("passes come to rest", || {
        let runs = machine.status().runs;
        thread::sleep(Duration::from_millis(300));
        (machine.status().runs == runs).then_some(runs)
    })
}

#[test]
fn what_may_lead_to_a_peer_another_way_is_looked_at() {
    let net = Net::new(2, Underlay::V4);
    let machine = net.machine(1);
    let change = |what: &str| {
        let before = rest(machine);
        let mut ip = Command::new("ip");
        machine.place.put(ip.args(what.split(' ')));
        assert!(ip.status().unwrap().success(), "{what}");
        before
    };
    for what in [
        "rule add from 192.168.7.1 lookup 77",
        "rule del from 192.168.7.1 lookup 77",
        "-6 rule add from fd07::1 lookup 77",
        "route add unreachable 192.168.7.2",
        "route del unreachable 192.168.7.2",
        "route add 192.168.7.2 dev eth0 table 77",
    ] {
        let before = change(what);
        until(what, || machine.status().runs > before);
    }
    let before = change("route add unreachable 192.168.9.2");
    assert_eq!(rest(machine), before);
}

/// What was just done comes back as events of the kernel. They say what the plan says, so nothing
/// follows from them; what somebody else does is seen all the same.
#[test]
fn a_change_of_the_nodes_is_one_pass_and_a_change_by_hand_is_seen() {
    let u = Underlay::V4;
    let net = Net::new(1, u);
    let machine = net.machine(1);
    until("the overlay is up", || machine.status().ok());
    let rest = || rest(machine);
    // One made because time has passed may come between.
    let passes = (0..4u8).map(|round| {
        let before = rest();
        let peers = 1 + round % 2;
        net.tell((1..=1 + peers).map(|n| entry(n, n, u)));
        until("the peers are as told", || {
            fdb(machine).len() == usize::from(peers)
        });
        rest() - before
    });
    assert_eq!(passes.min(), Some(1));

    let mut conn = machine.conn();
    let device = machine.device().unwrap().index;
    let filter = RouteFilter {
        oif: Some(device),
        protocol: Some(ROUTE_PROTOCOL),
        ..RouteFilter::default()
    };
    let whole = conn.routes(&filter).unwrap();
    assert_eq!(whole.len(), 4);
    for route in &whole {
        conn.execute(route.delete()).unwrap();
    }
    let mut observer = machine.conn();
    until("the routes are back", || {
        observer.routes(&filter).unwrap().len() == whole.len()
    });
    // The same prefix by another way.
    let v4 = whole.iter().find(|route| route.dst.addr().is_ipv4());
    let other = v4.unwrap().clone().via([10, 244, 9, 9].into()).onlink();
    conn.execute(other.replace()).unwrap();
    until("the way is right again", || {
        let there = observer.routes(&filter).unwrap();
        there.iter().all(|r| whole.contains(r)) && there.len() == whole.len()
    });
    let stray = Neigh::new(device, [10, 244, 9, 9].into(), [2, 9, 9, 9, 9, 9]);
    conn.execute(stray.add()).unwrap();
    until("what is in no plan goes", || {
        observer.neigh(device, stray.address).unwrap().is_none()
    });
}

/// A pass over pods alone was due when the list changed: the change must not wait for the next
/// full pass, which does not come here.
#[test]
fn nodes_that_change_while_a_pod_is_looked_at_are_not_missed() {
    let u = Underlay::V4;
    let net = Net::new(1, u);
    let machine = net.machine(1);
    until("the overlay is up", || machine.status().ok());
    let mut conn = machine.conn();
    let ifindex = pod_link(machine);
    let address = "10.244.1.9".parse().unwrap();
    machine.pods.send_replace(vec![PodRoute {
        addresses: vec![address],
        ifindex,
        mac: Mac(MAC),
        mtu: 1450,
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
    let ifindex = pod_link(machine);
    let addresses: Vec<IpAddr> = ["10.244.1.9", "fd00:244:0:1::9"]
        .map(|a| a.parse().unwrap())
        .into();
    let mac = Mac(MAC);
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
        mtu: 1450,
    };
    let pod = PodRoute {
        addresses: addresses.clone(),
        ifindex,
        mac,
        mtu: 1450,
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
    let mut link = machine.conn();
    let mut is_right = || {
        let link = link.link_by_index(ifindex).unwrap();
        (link.mac, link.mtu) == (Some(names::HOST_MAC), 1450)
    };
    until("the link has the address that pods send to", &mut is_right);
    conn.execute(link::set_mac(ifindex, [2, 9, 9, 9, 9, 9]))
        .unwrap();
    until("the link's address is back", &mut is_right);
    conn.execute(link::set_mtu(ifindex, 1280)).unwrap();
    until("the link's MTU is back", &mut is_right);
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
