//! An agent that is killed or stopped, and the next one: what was there is found and put right.

use crate::support::{Node, Plugin, eventually, owner};
use nix::sys::signal::Signal;
use sinabro_common::{
    api::{Attachment, ErrorCode},
    names,
};
use sinabro_netlink::{
    neigh::Neigh,
    route::{Route, RouteFilter},
};
use std::fs;

#[test]
fn endpoints_outlive_a_killed_agent() {
    let mut node = Node::new();
    node.start();
    let pods: Vec<_> = ["a", "b", "c"].iter().map(|id| node.add(id)).collect();
    node.kill();
    assert!(Plugin::try_connect(node.state(names::SOCKET)).is_none());
    // One pod dies meanwhile; one ADD was under way.
    node.delete_link(&pods[2].link);
    node.start();
    assert_eq!(node.check("a").unwrap(), pods[0]);
    assert_eq!(node.check("b").unwrap(), pods[1]);
    assert_eq!(node.check("c").unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(node.links().len(), 2);
    assert_eq!(
        node.leases(),
        ["10.9.0.2", "10.9.0.3", "fd09::2", "fd09::3"]
    );
}

#[test]
fn an_add_cut_off_by_a_killed_agent_leaves_nothing() {
    let mut node = Node::new();
    node.start();
    let mut plugin = node.connect();
    let attachment = plugin.allocate("a").unwrap();
    node.add_link(&attachment);
    node.kill();
    assert!(plugin.is_closed());
    assert_eq!(node.leases().len(), 2);
    node.start();
    assert!(node.leases().is_empty() && node.links().is_empty());
}

#[test]
fn queued_deletes_are_carried_out_before_anything_is_served() {
    let mut node = Node::new();
    node.start();
    let (gone, kept) = (node.add("a"), node.add("b"));
    node.kill();
    let queue = node.state(names::DELETES_DIR);
    fs::create_dir_all(&queue).unwrap();
    let file = queue.join(format!("{}.json", gone.link));
    fs::write(&file, serde_json::to_vec(&owner("a")).unwrap()).unwrap();
    fs::write(queue.join("snb000000000000.json"), "garbage").unwrap();
    node.start_with(&[]);
    assert!(!file.exists());
    assert_eq!(node.links(), [kept.link]);
    assert_eq!(node.leases(), ["10.9.0.3", "fd09::3"]);
}

#[test]
fn a_stopped_agent_leaves_pods_alone_and_lets_an_add_finish() {
    let mut node = Node::new();
    node.start();
    let pod = node.add("a");
    let mut plugin = node.connect();
    let attachment = plugin.allocate("b").unwrap();
    let ifindex = node.add_link(&attachment);
    node.signal(Signal::SIGTERM);
    eventually("the socket is gone", || !node.state(names::SOCKET).exists());
    plugin.activate("b", ifindex).unwrap();
    drop(plugin);
    assert!(node.stop());
    assert_eq!(node.links().len(), 2);
    assert_eq!(node.leases().len(), 4);
    node.start();
    assert_eq!(node.check("a").unwrap(), pod);
    assert_eq!(node.check("b").unwrap(), attachment);
}

#[test]
fn a_bad_lease_file_costs_its_address_and_is_named() {
    let mut node = Node::new();
    let file = node.state("leases/10.9.0.2");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, [0xff, 0, b'{']).unwrap();
    node.start();
    assert_eq!(node.add("a").addresses[0].to_string(), "10.9.0.3");
    let problems = node.ipam().problems;
    assert!(
        problems.len() == 1 && problems[0].contains("/run/sinabro/leases/10.9.0.2 "),
        "{problems:?}"
    );
    let conditions = node.status().unwrap().conditions;
    let leases = conditions.iter().find(|c| c.name == "leases").unwrap();
    assert!(
        leases.ok && leases.detail.contains("10.9.0.2"),
        "{leases:?}"
    );
    assert!(file.exists());
}

#[test]
fn a_corrupt_record_costs_nothing() {
    let mut node = Node::new();
    node.start();
    let attachment = node.add("a");
    node.kill();
    let file = node.state(&format!("endpoints/{}.json", attachment.link));
    fs::write(&file, b"{\"owner\": 7}").unwrap();
    node.start();
    // What its routes have, nothing else knows.
    let known = Attachment {
        local: None,
        ..attachment.clone()
    };
    assert_eq!(node.check("a").unwrap(), known);
    assert!(
        node.state(&format!("endpoints/{}.json.bad", attachment.link))
            .exists()
    );
}

/// Whether each side's program is pinned.
fn pins(node: &Node, link: &str) -> [bool; 2] {
    let dir = node.bpf(names::BPF_LINKS_DIR);
    ["in", "out"].map(|side| dir.join(format!("{link}-{side}")).exists())
}

#[test]
fn programs_follow_the_pods_through_kill_and_restart() {
    let mut node = Node::new();
    let tcx = ["--attach=tcx"];
    node.start_with(&tcx);
    node.wait_ready();
    let (dead, live) = (node.add("a"), node.add("b"));
    assert_eq!(
        [pins(&node, &dead.link), pins(&node, &live.link)],
        [[true; 2]; 2]
    );
    node.kill();
    assert_eq!(
        [pins(&node, &dead.link), pins(&node, &live.link)],
        [[true; 2]; 2]
    );
    node.delete_link(&dead.link);
    node.start_with(&tcx);
    assert_eq!(
        [pins(&node, &dead.link), pins(&node, &live.link)],
        [[false; 2], [true; 2]]
    );
    node.connect().release("b").unwrap();
    eventually("the pins are gone", || {
        pins(&node, &live.link) == [false; 2]
    });
}

#[test]
fn routes_and_neighbours_of_live_pods_are_put_back_after_a_restart() {
    let mut node = Node::new();
    node.start();
    let pod = node.add("a");
    let ifindex = node.conn().link_by_name(&pod.link).unwrap().index;
    let complete = |node: &Node| {
        let filter = RouteFilter {
            oif: Some(ifindex),
            ..RouteFilter::default()
        };
        let routes = node.conn().routes(&filter).unwrap();
        let neighs = node.conn().neighs(ifindex).unwrap();
        pod.addresses.iter().all(|address| {
            routes
                .iter()
                .any(|r| r.dst == (*address).into() && r.protocol == names::ROUTE_PROTOCOL)
                && neighs
                    .iter()
                    .any(|n| n.address == *address && n.mac == Some(pod.mac.0) && n.is_permanent())
        })
    };
    let mut conn = node.conn();
    for &address in &pod.addresses {
        let route = Route::to_host(address).dev(ifindex).scope_link();
        conn.execute_all([
            route.protocol(names::ROUTE_PROTOCOL).add(),
            Neigh::new(ifindex, address, pod.mac.0).replace(),
        ])
        .unwrap();
    }
    assert!(complete(&node));
    node.kill();
    for route in conn
        .routes(&RouteFilter {
            oif: Some(ifindex),
            protocol: Some(names::ROUTE_PROTOCOL),
            ..RouteFilter::default()
        })
        .unwrap()
    {
        conn.execute(route.delete()).unwrap();
    }
    for &address in &pod.addresses {
        conn.execute(Neigh::new(ifindex, address, pod.mac.0).delete())
            .unwrap();
    }
    assert!(!complete(&node));
    node.start();
    eventually("they are put back", || complete(&node));
}
