//! The overlay is put back when somebody breaks it, and follows the list of nodes while traffic
//! flows.

use ipnet::IpNet;
use sinabro_common::{
    api::{NodeReport, Request},
    names,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, NodeEntry, Pod,
    checks::Scene,
    traffic::{icmp, load::Stream, tcp},
    wait::{self, wait_within},
};
use sinabro_netlink::{
    addr::Addr,
    link,
    route::{Route, RouteFilter},
};
use std::{net::IpAddr, time::Duration};

/// The overlay must be whole again by an event: the agent looks by itself only every 30 s.
const SOON: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(2);

fn scene() -> Scene {
    Scene::new(Lab::for_test(2).unwrap()).unwrap()
}

/// Pods reach each other across nodes, both ways and families, within [`SOON`].
fn must_reach(lab: &Lab, from: &Pod, to: &Pod) {
    for (from, to) in [(from, to), (to, from)] {
        for address in to.addresses() {
            if let Err(error) = icmp::ping(from.place(), address, SOON) {
                let logs = lab
                    .nodes()
                    .iter()
                    .map(|node| format!("{}:\n{}", node.name(), node.log()));
                panic!("{error:#}\n{}", logs.collect::<String>());
            }
        }
    }
}

fn vxlan(node: &Node) -> Option<u32> {
    node.netlink()
        .unwrap()
        .link_by_name(names::VXLAN_LINK)
        .ok()
        .map(|link| link.index)
}

fn overlay_routes(node: &Node) -> Vec<Route> {
    let Some(oif) = vxlan(node) else {
        return Vec::new();
    };
    let filter = RouteFilter {
        oif: Some(oif),
        protocol: Some(names::ROUTE_PROTOCOL),
        ..RouteFilter::default()
    };
    node.netlink().unwrap().routes(&filter).unwrap()
}

fn eventually(what: &str, node: &Node, holds: impl Fn() -> bool) {
    let whole = wait_within(SOON, what, || Ok(holds().then_some(())));
    whole.unwrap_or_else(|error| {
        panic!(
            "{error:#}\nFDB {:?}\nthe agent says {:?}\n{}",
            vxlan(node).map(|index| node.netlink().unwrap().fdb(index).unwrap()),
            node.ask(Request::Nodes { after: None }),
            node.log()
        )
    });
}

#[test]
fn nodes_that_list_their_addresses_in_another_order_reach_each_others_pods() {
    let lab = Lab::new(Binaries::find().unwrap(), 2, Lifetime::Process).unwrap();
    lab.node(1).lead_with_ipv6();
    lab.publish().unwrap();
    for node in lab.nodes() {
        node.start_agent().unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
    }
    let pods = [1, 2].map(|number| lab.node(number).add_pod("p").unwrap());
    must_reach(&lab, &pods[0], &pods[1]);
}

#[test]
fn five_thousand_nodes_are_listed() {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    let node = lab.node(1);
    let other = |n: u32| NodeEntry {
        name: format!(
            "ip-10-0-{}-{}.eu-central-1.compute.internal",
            n >> 8,
            n & 255
        ),
        addresses: vec![IpAddr::from((0x0a00_0000 + n).to_be_bytes())],
        pod_cidrs: vec![
            format!("100.{}.{}.0/24", 64 + (n >> 8), n & 255)
                .parse()
                .unwrap(),
        ],
        native: false,
        zero_checksum: false,
    };
    let mut entries: Vec<_> = (1..5000).map(other).collect();
    entries.push(node.entry());
    lab.publish_entries(&entries).unwrap();
    node.start_agent().unwrap();
    node.wait_ready().unwrap();
    let output = node.ctl(&["nodes", "-o", "json"]).unwrap();
    let listed: Vec<NodeReport> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(listed.len(), entries.len());
    assert!(listed.is_sorted_by(|a, b| a.name < b.name));
}

#[test]
fn a_deleted_device_comes_back() {
    let scene = scene();
    let node = scene.node(1);
    must_reach(scene.lab(), scene.pod(1, 1), scene.pod(2, 1));
    let old = vxlan(node).unwrap();
    node.netlink().unwrap().execute(link::delete(old)).unwrap();
    eventually("the VXLAN device", node, || {
        vxlan(node).is_some_and(|new| new != old)
    });
    must_reach(scene.lab(), scene.pod(1, 1), scene.pod(2, 1));
}

#[test]
fn a_device_set_down_comes_up_again() {
    let scene = scene();
    let node = scene.node(1);
    let index = vxlan(node).unwrap();
    node.netlink()
        .unwrap()
        .execute(link::set_down(index))
        .unwrap();
    // The kernel has taken the routes with it.
    eventually("the routes", node, || overlay_routes(node).len() == 2);
    must_reach(scene.lab(), scene.pod(1, 1), scene.pod(2, 1));
}

#[test]
fn deleted_entries_come_back() {
    let scene = scene();
    let node = scene.node(1);
    let index = vxlan(node).unwrap();
    let mut conn = node.netlink().unwrap();

    let routes = overlay_routes(node);
    assert_eq!(
        routes.len(),
        2,
        "a route per family to the only peer: {routes:?}"
    );
    for route in &routes {
        conn.execute(route.delete()).unwrap();
    }
    eventually("the routes", node, || overlay_routes(node).len() == 2);
    must_reach(scene.lab(), scene.pod(1, 1), scene.pod(2, 1));

    let permanent = || {
        let all = node.netlink().unwrap().neighs(index).unwrap();
        all.into_iter()
            .filter(|neigh| neigh.is_permanent() && neigh.mac.is_some())
            .collect::<Vec<_>>()
    };
    let neighbours: Vec<_> = permanent()
        .into_iter()
        .filter(|neigh| !neigh.address.is_multicast())
        .collect();
    assert_eq!(
        neighbours.len(),
        2,
        "a neighbour per family: {neighbours:?}"
    );
    for neighbour in &neighbours {
        conn.execute(neighbour.delete()).unwrap();
    }
    eventually("the neighbours", node, || {
        let now = permanent();
        neighbours.iter().all(|neighbour| now.contains(neighbour))
    });
    must_reach(scene.lab(), scene.pod(1, 1), scene.pod(2, 1));

    let peer = scene.node(2).addresses()[0];
    let to_peer = || {
        let all = node.netlink().unwrap().fdb(index).unwrap();
        all.into_iter()
            .filter(|entry| entry.dst == peer)
            .collect::<Vec<_>>()
    };
    let entries = to_peer();
    assert_eq!(entries.len(), 1, "one entry to the only peer: {entries:?}");
    conn.execute(entries[0].delete()).unwrap();
    eventually("the FDB entry", node, || to_peer().len() == 1);
    must_reach(scene.lab(), scene.pod(1, 1), scene.pod(2, 1));
}

#[test]
fn a_wrong_entry_is_corrected() {
    let scene = scene();
    let node = scene.node(1);
    let index = vxlan(node).unwrap();
    let mut conn = node.netlink().unwrap();
    let mut neighbour = conn
        .neighs(index)
        .unwrap()
        .into_iter()
        .find(|neigh| neigh.is_permanent() && neigh.address.is_ipv4())
        .unwrap();
    let right = neighbour.mac;
    neighbour.mac = Some([2, 0, 0, 0, 0, 1]);
    conn.execute(neighbour.replace()).unwrap();
    eventually("the neighbour's MAC address", node, || {
        let all = node.netlink().unwrap().neighs(index).unwrap();
        all.iter()
            .any(|neigh| neigh.address == neighbour.address && neigh.mac == right)
    });
    must_reach(scene.lab(), scene.pod(1, 1), scene.pod(2, 1));
}

/// A third node comes, moves to another address, changes its range, goes and comes back, while
/// connections between the first two must not notice.
#[test]
fn nodes_come_move_and_go_while_traffic_flows() {
    let mut lab = Lab::for_test(2).unwrap();
    let pods: Vec<Pod> = [1, 2]
        .map(|number| lab.node(number).add_pod("steady").unwrap())
        .into();
    let flow = |from: &Pod, to: &Pod, address: IpAddr| {
        Stream::start(from.place(), to.place(), address, PAUSE).unwrap()
    };
    let steady = [
        flow(&pods[0], &pods[1], pods[1].v4()),
        flow(&pods[1], &pods[0], pods[0].v6()),
    ];
    let must_flow = |when: &str| {
        let before = steady.each_ref().map(Stream::received);
        for (stream, before) in steady.iter().zip(before) {
            let what = format!("{} to move on {when}", stream.name());
            wait::eventually(&what, || stream.received() > before);
        }
    };

    // It comes.
    lab.add_node().unwrap();
    lab.publish().unwrap();
    let n3 = lab.node(3);
    n3.start_agent().unwrap();
    n3.wait_ready().unwrap();
    let pod = n3.add_pod("third").unwrap();
    must_reach(&lab, &pods[0], &pod);
    must_reach(&lab, &pods[1], &pod);
    must_flow("when a node came");

    // It moves to another address.
    let moved_from = n3.addresses()[0];
    let moved_to: IpAddr = "172.30.0.63".parse().unwrap();
    let moved = NodeEntry {
        addresses: vec![moved_to, n3.addresses()[1]],
        ..n3.entry()
    };
    let mut conn = n3.netlink().unwrap();
    let eth0 = conn.link_by_name("eth0").unwrap().index;
    let old = Addr::new(eth0, IpNet::new(moved_from, 24).unwrap());
    let new = Addr::new(eth0, IpNet::new(moved_to, 24).unwrap());
    // In this order: deleting the first address of a prefix takes its second along.
    conn.execute_all([old.delete(), new.add()]).unwrap();
    // The kernel took the default route with the address that it was made for.
    let via = Route::default_of(sinabro_netlink::Family::V4).via("172.30.0.1".parse().unwrap());
    conn.execute(via.dev(eth0).replace()).unwrap();
    n3.set_entry(moved);
    lab.publish().unwrap();
    eventually("the peer's new address", lab.node(1), || {
        let node = lab.node(1);
        let fdb = node.netlink().unwrap().fdb(vxlan(node).unwrap()).unwrap();
        fdb.iter().any(|entry| entry.dst == moved_to)
            && fdb.iter().all(|entry| entry.dst != moved_from)
    });
    must_reach(&lab, &pods[0], &pod);
    must_flow("when a node moved");

    // It changes its range: new pods get addresses of the new one.
    n3.delete_pod(&pod).unwrap();
    n3.set_entry(NodeEntry {
        pod_cidrs: sinabro_lab::node::pod_cidrs(33),
        ..n3.entry()
    });
    lab.publish().unwrap();
    let range = sinabro_lab::node::pod_cidrs(33)[0];
    eventually("the route to the new range", lab.node(1), || {
        overlay_routes(lab.node(1))
            .iter()
            .any(|route| route.dst == range)
    });
    eventually("a pod with an address of the new range", n3, || {
        let probe = n3.add_pod("probe").unwrap();
        n3.delete_pod(&probe).unwrap();
        range.contains(&probe.v4())
    });
    let pod = n3.add_pod("fourth").unwrap();
    assert!(range.contains(&pod.v4()), "{}", pod.v4());
    must_reach(&lab, &pods[0], &pod);
    must_flow("when a node changed its range");

    // It goes.
    lab.publish_entries(&[lab.node(1).entry(), lab.node(2).entry()])
        .unwrap();
    for node in [lab.node(1), lab.node(2)] {
        eventually("the routes of a node that went", node, || {
            overlay_routes(node).len() == 2
        });
    }
    icmp::ping(pods[0].place(), pod.v4(), Duration::from_millis(500)).unwrap_err();
    must_flow("when a node went");

    // It comes back.
    lab.publish().unwrap();
    must_reach(&lab, &pods[0], &pod);
    tcp::transfer(pods[0].place(), pod.place(), pod.v4(), 1 << 20).unwrap();
    must_flow("when a node came back");
    for stream in steady {
        stream.finish().unwrap();
    }
}
