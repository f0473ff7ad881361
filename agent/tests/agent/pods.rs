//! The life of a pod's attachment, alone and beside others.

use crate::support::{Node, eventually, owner};
use sinabro_common::{
    api::{ErrorCode, Request, Response},
    names,
};
use std::{collections::BTreeSet, fs, net::IpAddr};

#[test]
fn an_add_whose_connection_ends_is_taken_back() {
    let mut node = Node::new();
    node.start();
    let mut plugin = node.connect();
    let attachment = plugin.allocate("a").unwrap();
    assert_eq!(node.leases(), ["10.9.0.2", "fd09::2"]);
    node.add_link(&attachment);
    drop(plugin);
    eventually("the leases are gone", || node.leases().is_empty());
    eventually("the link is gone", || node.links().is_empty());
    assert_eq!(node.check("a").unwrap_err().code, ErrorCode::NotFound);
    // The next pod gets others: these were used last.
    assert_eq!(
        node.add("b").addresses,
        ["10.9.0.3", "fd09::3"].map(|a| a.parse::<IpAddr>().unwrap())
    );
}

#[test]
fn a_pod_is_allocated_activated_checked_and_released() {
    let mut node = Node::new();
    node.start();
    let mut plugin = node.connect();
    let attachment = plugin.allocate("a").unwrap();
    assert_eq!(attachment.link, owner("a").link());
    assert_eq!(
        attachment.mac.0,
        names::pod_mac("10.9.0.2".parse().unwrap())
    );
    // Ethernet 1500 less the tunnel's 50.
    assert_eq!(attachment.mtu, 1450);
    assert_eq!(attachment.gateways[0].to_string(), "169.254.1.1");
    assert_eq!(attachment.gateways[1].to_string(), "fe80::5342:1");
    assert!(!node.ipam().leases[0].active);
    let ifindex = node.add_link(&attachment);
    assert_eq!(plugin.activate("a", ifindex).unwrap(), attachment);
    drop(plugin);

    assert_eq!(node.check("a").unwrap(), attachment);
    let report = node.ipam();
    assert!(report.leases.len() == 2 && report.leases.iter().all(|lease| lease.active));
    assert_eq!(node.status().unwrap().endpoints, 1);
    let record = node.state(&format!("endpoints/{}.json", attachment.link));
    assert!(record.exists());

    // As DEL: link first, then Release, which may come twice.
    node.delete_link(&attachment.link);
    for _ in 0..2 {
        assert_eq!(node.connect().release("a").unwrap(), Response::Done);
    }
    eventually("leases and record are gone", || {
        node.leases().is_empty() && !record.exists()
    });
    assert_eq!(node.check("a").unwrap_err().code, ErrorCode::NotFound);
}

#[test]
fn a_release_takes_the_link_too() {
    let mut node = Node::new();
    node.start();
    node.add("a");
    node.connect().release("a").unwrap();
    eventually("the link is gone", || node.links().is_empty());
}

#[test]
fn a_check_right_after_a_release_waits_for_its_end() {
    let mut node = Node::new();
    node.start();
    for _ in 0..10 {
        node.add("a");
        node.connect().release("a").unwrap();
        assert_eq!(node.check("a").unwrap_err().code, ErrorCode::NotFound);
        assert!(node.leases().is_empty() && node.links().is_empty());
    }
}

/// The links go together after the replies; a new pod that needs their addresses waits.
#[test]
fn addresses_of_pods_on_their_way_out_are_waited_for() {
    let mut node = Node::new();
    node.write_nodes("[{name: n1, addresses: [192.0.2.1], podCIDRs: [10.7.0.0/29]}]");
    node.start();
    // Eight addresses without network, node and broadcast.
    let ids = ["a", "b", "c", "d", "e"];
    for _ in 0..5 {
        for id in ids {
            node.add(id);
        }
        let full = node.connect().allocate("f").unwrap_err();
        assert_eq!(full.code, ErrorCode::RangeFull);
        for id in ids {
            node.connect().release(id).unwrap();
        }
        // The same attachment again, at once, gets its turn too.
        for id in ["f", "a"] {
            node.connect().allocate(id).unwrap();
        }
        eventually("all is free", || node.leases().is_empty());
    }
    assert!(node.links().is_empty());
}

#[test]
fn a_second_add_of_one_pod_waits_for_the_first() {
    let mut node = Node::new();
    node.start();
    let mut first = node.connect();
    let addresses = first.allocate("a").unwrap().addresses;
    let mut second = node.connect();
    let waiting = std::thread::spawn(move || {
        let got = second.allocate("a");
        (second, got)
    });
    // Another pod does not wait.
    node.add("b");
    assert!(!waiting.is_finished());
    drop(first);
    let (second, got) = waiting.join().unwrap();
    // The first was taken back before the second got its own.
    assert_ne!(got.unwrap().addresses, addresses);
    drop(second);
}

#[test]
fn a_repeated_add_that_never_touched_the_link_leaves_the_pod() {
    let mut node = Node::new();
    node.start();
    let attachment = node.add("a");
    let mut plugin = node.connect();
    assert_eq!(plugin.allocate("a").unwrap(), attachment);
    drop(plugin);
    // Its turn comes after the undo.
    let mut plugin = node.connect();
    assert_eq!(plugin.allocate("a").unwrap(), attachment);
    assert!(node.ipam().leases.iter().all(|lease| lease.active));
    // With a link made again the pod moves there, and the old index is forgotten.
    node.delete_link(&attachment.link);
    let ifindex = node.add_link(&attachment);
    plugin.activate("a", ifindex).unwrap();
    drop(plugin);
    assert_eq!(node.check("a").unwrap(), attachment);
    assert_eq!(node.links().len(), 1);
}

#[test]
fn the_runtimes_gc_removes_what_it_does_not_name() {
    let mut node = Node::new();
    node.start();
    let (kept, _stale) = (node.add("a"), node.add("b"));
    // The agent ends an ADD behind the plugin's back: it holds the lock until the reply is written.
    node.check("b").unwrap();
    let mut adding = node.connect();
    adding.allocate("c").unwrap();
    let gc = |network: &str| Request::Gc {
        network: network.into(),
        valid: vec![owner("a")],
    };
    assert_eq!(
        node.connect().call(gc("other")).unwrap(),
        Response::Removed(vec![])
    );
    assert_eq!(
        node.connect().call(gc("pods")).unwrap(),
        Response::Removed(vec![owner("b")])
    );
    assert_eq!(node.links(), [kept.link]);
    // An ADD under way is not the runtime's to list yet.
    assert_eq!(node.leases().len(), 4);
}

#[test]
fn fifty_pods_at_once() {
    let mut node = Node::new();
    node.start();
    let node = &node;
    let ids: Vec<_> = (0..50).map(|n| format!("c{n}")).collect();
    let all: Vec<_> = std::thread::scope(|scope| {
        let adds: Vec<_> = ids
            .iter()
            .map(|id| scope.spawn(move || node.add(id)))
            .collect();
        adds.into_iter().map(|add| add.join().unwrap()).collect()
    });
    let addresses: BTreeSet<_> = all.iter().flat_map(|a| &a.addresses).collect();
    assert_eq!(addresses.len(), 100);
    assert_eq!(node.status().unwrap().endpoints, 50);
    for (id, attachment) in ids.iter().zip(&all) {
        assert_eq!(node.check(id).unwrap(), *attachment);
    }
    let idle = rss_kib(node.agent_pid());
    println!("RSS with 50 pods: {idle} KiB");
    std::thread::scope(|scope| {
        for id in &ids {
            scope.spawn(move || node.connect().release(id).unwrap());
        }
    });
    eventually("everything is gone", || {
        node.leases().is_empty() && node.links().is_empty()
    });
}

fn rss_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
