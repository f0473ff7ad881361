//! What the node is told and what it has: its entry, its ranges, its settings, its kernel.

use crate::support::{Node, eventually};
use sinabro_common::{api::ErrorCode, names};
use sinabro_netlink::{link, sysctl};
use std::{fs, net::IpAddr};

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
fn forwarding_is_turned_on() {
    let mut node = Node::new();
    node.start();
    let read = |name: &'static [&'static str]| {
        let read = node.place().run(|| Ok(sysctl::read(name)?));
        read.unwrap()
    };
    assert_eq!(read(&["net", "ipv4", "ip_forward"]), "1");
    assert_eq!(read(&["net", "ipv6", "conf", "all", "forwarding"]), "1");
    assert_eq!(read(&["net", "ipv6", "conf", "up0", "accept_ra"]), "2");
    assert_eq!(read(&["net", "ipv6", "conf", "up1", "accept_ra"]), "1");
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
    let (state, aside) = (node.state(""), node.namespace().path("/run/aside"));
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
