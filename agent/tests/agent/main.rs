//! The real agent on the real kernel, spoken to as the CNI plugin speaks to it.

// A step that fails is a test that fails.
#![allow(clippy::unwrap_used)]

mod acceleration;
mod support;

use nix::sys::signal::Signal;
use sinabro_common::{
    api::{ErrorCode, Request, Response, frame},
    atomic_file::AtomicFile,
    names,
};
use sinabro_netlink::{
    link,
    neigh::Neigh,
    route::{Route, RouteFilter},
};
use std::{
    collections::{BTreeSet, HashMap},
    fs,
    io::{Read, Write},
    net::{IpAddr, Shutdown},
    os::unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    process::{Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use support::{DEADLINE, Node, Plugin, allocate, eventually, owner};

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
fn endpoints_outlive_a_killed_agent() {
    let mut node = Node::new();
    node.start();
    let pods: Vec<_> = ["a", "b", "c"].iter().map(|id| node.add(id)).collect();
    node.kill();
    assert!(node.connect_refused());
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
fn garbage_gets_an_error_and_hurts_nobody() {
    let mut node = Node::new();
    node.start();
    let mut working = node.connect();
    working.allocate("a").unwrap();
    let framed = |body: &str| [&(body.len() as u32).to_be_bytes(), body.as_bytes()].concat();
    for (bytes, code, part) in [
        (
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            ErrorCode::Invalid,
            "longer than",
        ),
        (vec![0xff; 64], ErrorCode::Invalid, "longer than"),
        (framed("{"), ErrorCode::Invalid, "not valid"),
        (framed(""), ErrorCode::Invalid, "not valid"),
        (
            framed("{\"version\":2,\"request\":{\"call\":\"x\"}}"),
            ErrorCode::Version,
            "version 1",
        ),
        (
            framed("{\"version\":1,\"request\":{\"call\":\"x\"}}"),
            ErrorCode::Invalid,
            "unknown variant",
        ),
    ] {
        let mut plugin = node.connect();
        plugin.0.write_all(&bytes).unwrap();
        let error = plugin.reply().unwrap_err();
        assert!(
            error.code == code && error.message.contains(part),
            "{error:?}"
        );
        plugin.0.shutdown(Shutdown::Write).unwrap();
        assert!(plugin.is_closed());
    }
    // A frame that never ends, in pieces.
    for cut in [1, 3, 4, 20] {
        let mut plugin = node.connect();
        let whole = frame::encode(&allocate("b")).unwrap();
        plugin.0.write_all(&whole[..cut]).unwrap();
        plugin.0.shutdown(Shutdown::Write).unwrap();
        assert!(plugin.is_closed());
    }
    // Garbage after a good request takes the ADD back.
    let mut plugin = node.connect();
    plugin.allocate("c").unwrap();
    plugin.0.write_all(&framed("nonsense")).unwrap();
    assert_eq!(plugin.reply().unwrap_err().code, ErrorCode::Invalid);
    assert!(node.connect().release("c").is_ok());
    eventually("the other's leases are free", || node.leases().len() == 2);
    working.release("a").unwrap();
}

#[test]
fn requests_that_contradict_their_connection_are_refused() {
    let mut node = Node::new();
    node.start();
    let mut plugin = node.connect();
    let error = plugin.activate("a", 1).unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid);
    let attachment = plugin.allocate("a").unwrap();
    assert_eq!(plugin.allocate("b").unwrap_err().code, ErrorCode::Invalid);
    assert_eq!(
        plugin.activate("b", 1).unwrap_err().code,
        ErrorCode::Invalid
    );
    // The wrong link, then the right one.
    let error = plugin.activate("a", 1).unwrap_err();
    assert!(
        error.code == ErrorCode::Invalid && error.message.contains("its name is lo"),
        "{error}"
    );
    let ifindex = node.add_link(&attachment);
    plugin.activate("a", ifindex).unwrap();
    // Owners that no runtime has.
    for id in ["", "a b", "a\n", &"x".repeat(300)] {
        assert_eq!(plugin.allocate(id).unwrap_err().code, ErrorCode::Invalid);
        assert_eq!(plugin.release(id).unwrap_err().code, ErrorCode::Invalid);
    }
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
    let addresses: std::collections::BTreeSet<_> = all.iter().flat_map(|a| &a.addresses).collect();
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
fn other_users_are_refused_whatever_the_sockets_mode() {
    let mut node = Node::new();
    node.start();
    let socket = node.state(names::SOCKET);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(&node.state("")), 0o700);
    let open = |path: &std::path::Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap()
    };
    open(&socket, 0o666);
    open(&node.state(""), 0o755);
    open(&node.path(""), 0o755);
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "child_talks_to_the_agent",
            "--ignored",
            "--nocapture",
        ])
        .env("SOCKET", &socket)
        .uid(65534)
        .gid(65534)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("user 65534 may not talk to the agent"),
        "{output:?}"
    );
    assert!(node.status().is_some());
}

#[test]
#[ignore = "run as another user by other_users_are_refused_whatever_the_sockets_mode"]
fn child_talks_to_the_agent() {
    let socket = std::env::var("SOCKET").unwrap();
    let mut plugin = Plugin(UnixStream::connect(socket).unwrap());
    println!("{:?}", plugin.call(Request::Status));
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
fn a_bad_lease_file_costs_its_address_and_is_named() {
    let mut node = Node::new();
    let file = node.state("leases/10.9.0.2");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, [0xff, 0, b'{']).unwrap();
    node.start();
    assert_eq!(node.add("a").addresses[0].to_string(), "10.9.0.3");
    let problems = node.ipam().problems;
    assert!(
        problems.len() == 1 && problems[0].contains(file.to_str().unwrap()),
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
    assert_eq!(node.check("a").unwrap(), attachment);
    assert!(
        node.state(&format!("endpoints/{}.json.bad", attachment.link))
            .exists()
    );
}

#[test]
fn the_runtimes_gc_removes_what_it_does_not_name() {
    let mut node = Node::new();
    node.start();
    let (kept, _stale) = (node.add("a"), node.add("b"));
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
fn until_the_node_is_known_there_is_status_but_no_address() {
    let mut node = Node::new();
    node.write_nodes("[{name: other, addresses: [192.0.2.9], podCIDRs: [10.8.0.0/24]}]");
    node.start_with(&[]);
    eventually("the facts are read", || {
        node.status().is_some_and(|s| s.nodes == 1)
    });
    let error = node.connect().allocate("a").unwrap_err();
    assert_eq!(error.code, ErrorCode::NotReady);
    eventually("the reason is said", || {
        let error = node.connect().allocate("a").unwrap_err();
        error.message.contains("n1 is not among the known nodes")
    });
    assert!(!node.status().unwrap().ready);
    // Releases are served all the same.
    node.connect().release("a").unwrap();
    node.write_nodes("[{name: n1, addresses: [192.0.2.1], podCIDRs: [10.7.0.0/24]}]");
    eventually("the node is known", || node.connect().allocate("a").is_ok());
}

#[test]
fn new_pod_ranges_are_taken_up_live_and_old_pods_stay() {
    let mut node = Node::new();
    node.start();
    let old = node.add("a");
    node.write_nodes("[{name: n1, addresses: [192.0.2.1], podCIDRs: [10.7.0.0/24]}]");
    eventually("the range is taken up", || {
        node.status().unwrap().pod_cidrs == ["10.7.0.0/24".parse().unwrap()]
    });
    assert_eq!(
        node.add("b").addresses,
        ["10.7.0.2".parse::<IpAddr>().unwrap()]
    );
    assert_eq!(node.check("a").unwrap(), old);
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
fn two_agents_do_not_share_a_state_directory() {
    let mut node = Node::new();
    node.start();
    let output = node.command().output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let pid = node.agent_pid().to_string();
    assert!(
        text.contains("an agent (process") && text.contains(&pid),
        "{text}"
    );
    // The first was not disturbed.
    assert!(node.state(names::SOCKET).exists());
    node.add("a");
}

#[test]
fn two_agents_do_not_share_pins() {
    let mut node = Node::new();
    node.start();
    // The lock with it: nothing there tells of the first agent.
    let (state, aside) = (node.path("state"), node.path("aside"));
    fs::rename(&state, &aside).unwrap();
    let output = node.command().output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        text.contains("an agent uses") && text.contains("--bpf-dir"),
        "{text}"
    );
    fs::remove_dir_all(&state).unwrap();
    fs::rename(&aside, &state).unwrap();
    // The first was not disturbed.
    node.add("a");
}

#[test]
fn wrong_settings_are_told_in_one_line() {
    let node = Node::new();
    for (args, part) in [
        (&["--mtu=900"][..], "mtu = `900`"),
        (&["--config=/no/such/file"], "/no/such/file"),
        (&["--no-such-flag"], "--no-such-flag"),
    ] {
        let output = node.command().args(args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(part), "{text}");
    }
    let output = node.command().arg("--help").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success());
    for part in [
        "--state-dir",
        "SINABRO_STATE_DIR",
        names::STATE_DIR,
        "stateDir",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn forwarding_is_turned_on() {
    let mut node = Node::new();
    node.start();
    let read = |name: &'static [&'static str]| {
        node.net
            .run(|| sinabro_netlink::sysctl::read(name))
            .unwrap()
            .unwrap()
    };
    assert_eq!(read(&["net", "ipv4", "ip_forward"]), "1");
    assert_eq!(read(&["net", "ipv6", "conf", "all", "forwarding"]), "1");
    assert_eq!(read(&["net", "ipv6", "conf", "up0", "accept_ra"]), "2");
    assert_eq!(read(&["net", "ipv6", "conf", "up1", "accept_ra"]), "1");
}

impl Node {
    fn connect_refused(&self) -> bool {
        Plugin::try_connect(self.state(names::SOCKET)).is_none()
    }
}

#[test]
fn a_slow_frame_does_not_hold_up_others() {
    let mut node = Node::new();
    node.start();
    let slow: Vec<_> = (0..20)
        .map(|_| {
            let mut plugin = node.connect();
            plugin.0.write_all(&[0, 0, 1]).unwrap();
            plugin
        })
        .collect();
    let started = Instant::now();
    node.add("a");
    assert!(started.elapsed() < DEADLINE);
    // Each is answered that its time is up.
    for mut plugin in slow {
        let error = plugin.reply().unwrap_err();
        assert!(error.message.contains("in time"), "{error}");
        let mut rest = Vec::new();
        plugin.0.shutdown(Shutdown::Write).unwrap();
        plugin.0.read_to_end(&mut rest).unwrap();
    }
}

/// Whether each side's program is pinned.
fn pins(node: &Node, link: &str) -> [bool; 2] {
    let dir = node.bpf("sinabro/links");
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

#[test]
fn texts_that_a_lease_file_cannot_hold_are_refused() {
    let mut node = Node::new();
    node.start();
    let Request::Allocate {
        owner,
        network,
        pod,
        addresses,
        mac,
        acceleration,
        ..
    } = allocate("a")
    else {
        unreachable!()
    };
    let request = |netns: String| Request::Allocate {
        owner: owner.clone(),
        network: network.clone(),
        netns,
        pod: pod.clone(),
        addresses: addresses.clone(),
        mac,
        acceleration,
        warnings: Vec::new(),
    };
    let error = node
        .connect()
        .call(request("x".repeat(100_000)))
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid);
    assert!(node.leases().is_empty());
    // The longest that is taken, in the form that grows most, is read back at start.
    node.connect().call(request("\0".repeat(1024))).unwrap();
    let mut plugin = node.connect();
    plugin.call(request("\u{1}".repeat(1024))).unwrap();
    node.kill();
    node.start();
    assert!(node.ipam().problems.is_empty());
}

#[test]
fn pods_that_the_tunnel_leaves_no_room_for_are_not_served() {
    let mut node = Node::new();
    let up = node.conn().link_by_name("up0").unwrap().index;
    node.conn().execute(link::set_mtu(up, 1300)).unwrap();
    node.start_with(&[]);
    eventually("the reason is said", || {
        let error = node.connect().allocate("a").unwrap_err();
        error.code == ErrorCode::NotReady && error.message.contains("the uplink's MTU is 1300")
    });
}

#[test]
fn a_deeply_nested_nodes_file_is_an_error_not_a_crash() {
    let mut node = Node::new();
    node.start();
    node.write_nodes(&"[".repeat(200_000));
    eventually("it is refused", || {
        let conditions = node.status().unwrap().conditions;
        conditions
            .iter()
            .any(|c| c.name == "facts" && c.detail.contains("nodes.yaml"))
    });
    node.add("a");
}

/// kill -9 at any moment of a storm of ADDs and DELs: no address is given twice, none is lost,
/// and every pod whose ADD succeeded is there.
#[test]
fn kills_in_a_storm_neither_double_nor_leak_addresses() {
    const ROUNDS: usize = 6;
    const WORKERS: usize = 8;
    let mut node = Node::new();
    node.start();
    let live = Mutex::new(HashMap::<String, Vec<IpAddr>>::new());
    for round in 0..ROUNDS {
        let stop = AtomicBool::new(false);
        let (shared, live, stop) = (&node, &live, &stop);
        std::thread::scope(|scope| {
            for worker in 0..WORKERS {
                scope.spawn(move || storm(shared, &format!("{round}-{worker}"), live, stop));
            }
            // Not a wait for anything: the kill is to come at a moment that nobody chose.
            std::thread::sleep(Duration::from_millis(40 + 37 * round as u64));
            shared.signal(Signal::SIGKILL);
            stop.store(true, Ordering::Relaxed);
        });
        node.kill();
        node.start();
    }
    let live = live.into_inner().unwrap();
    assert!(!live.is_empty());
    let expected: BTreeSet<_> = live.values().flatten().map(ToString::to_string).collect();
    // What the ADDs cut off last had is freed with their connections.
    eventually("only live pods have leases", || {
        node.leases().into_iter().collect::<BTreeSet<_>>() == expected
    });
    assert_eq!(node.links().len(), live.len());
    for (id, addresses) in &live {
        assert_eq!(node.check(id).unwrap().addresses, *addresses);
    }
}

/// One plugin after another, until the agent is gone.
fn storm(node: &Node, name: &str, live: &Mutex<HashMap<String, Vec<IpAddr>>>, stop: &AtomicBool) {
    for n in 0.. {
        let id = format!("{name}-{n}");
        let Some(mut plugin) = Plugin::try_connect(node.state(names::SOCKET)) else {
            return;
        };
        let Ok(attachment) = plugin.allocate(&id) else {
            return;
        };
        let ifindex = node.add_link(&attachment);
        if plugin.activate(&id, ifindex).is_err() {
            // As the plugin undoes itself.
            let _ = node.conn().execute(link::delete_by_name(&attachment.link));
            return;
        }
        {
            let mut live = live.lock().unwrap();
            for (other, addresses) in live.iter() {
                let double = addresses.iter().find(|a| attachment.addresses.contains(a));
                assert_eq!(double, None, "of {other} and {id}");
            }
            live.insert(id.clone(), attachment.addresses.clone());
        }
        if n % 3 != 0 {
            live.lock().unwrap().remove(&id);
            node.delete_link(&attachment.link);
            let released =
                Plugin::try_connect(node.state(names::SOCKET)).map(|mut p| p.release(&id));
            if !matches!(released, Some(Ok(_))) {
                let queue = node.state(names::DELETES_DIR);
                fs::create_dir_all(&queue).unwrap();
                let file = queue.join(format!("{}.json", attachment.link));
                let delete = serde_json::to_vec(&owner(&id)).unwrap();
                AtomicFile::new(&file).replace(&delete).unwrap();
            }
        }
        if stop.load(Ordering::Relaxed) {
            return;
        }
    }
}
