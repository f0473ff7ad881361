//! Who translates Services where nothing is set: Sinabro, unless there is a kube-proxy, or was one.

use sinabro_common::names;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    node::{PROGRAMS, SERVICES_FLAGS},
    wait::eventually,
};
use std::{fs, net::TcpListener, path::PathBuf};

/// Services are in a file; who translates them is not set.
const FLAG: &str = SERVICES_FLAGS[1];
const RULES: &str = "table ip kube-proxy { chain services { }; }";
const NO_RULES: &str = "delete table ip kube-proxy";

fn lab(nodes: usize) -> Lab {
    let lab = Lab::new(Binaries::find().unwrap(), nodes, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.write_services("{kind: List, items: []}\n").unwrap();
    }
    lab
}

fn start(node: &Node) {
    node.start_agent_with(&[FLAG]).unwrap();
    node.wait_ready().unwrap();
}

fn says(node: &Node, beginning: &str) {
    node.wait_for_mode("serviceProxy", |text| text.starts_with(beginning))
        .unwrap();
}

fn has_trouble(node: &Node, reason: &str) -> bool {
    let troubles = node.status().unwrap().troubles;
    troubles.iter().any(|one| one.reason == reason)
}

/// What survives reboots.
fn seen(node: &Node) -> PathBuf {
    let directory = node.namespace().path(PROGRAMS.1);
    directory.join(names::KUBE_PROXY_SEEN_FILE)
}

fn nft(node: &Node, rules: &str) {
    node.command(&["nft", rules]).unwrap();
}

/// kube-proxy comes late: to a node that has not seen it, and to one that has, after a boot.
#[test]
fn a_kube_proxy_is_waited_for_where_it_was_seen() {
    let lab = lab(2);
    let [new, booted] = [lab.node(1), lab.node(2)];
    start(new);
    says(new, "auto: on");
    assert!(!seen(new).exists());
    nft(new, RULES);

    fs::create_dir_all(seen(booted).parent().unwrap()).unwrap();
    fs::write(seen(booted), "").unwrap();
    start(booted);
    says(
        booted,
        "auto: off, kube-proxy was here and is waited for: on in 29",
    );
    booted.wait_for_direct_overlay().unwrap();
    nft(booted, RULES);
    says(
        booted,
        "auto: off, kube-proxy's rules are there without it (nftables)",
    );
    let listen = || Ok(TcpListener::bind("0.0.0.0:10256")?);
    let health = booted.place().run(listen).unwrap();
    says(booted, "auto: off, kube-proxy serves");
    booted.kill_agent().unwrap();
    start(booted);
    says(booted, "auto: off, kube-proxy serves");
    // It is replaced, by one of another mode.
    drop(health);
    nft(booted, NO_RULES);
    says(
        booted,
        "auto: off, kube-proxy was here and is waited for: on in 29",
    );

    eventually("the trouble", || has_trouble(new, "KubeProxyCame"));
    says(new, "auto: on, nothing needs kube-proxy's rules any more");
    assert!(seen(new).exists(), "the next boot waits");
    nft(new, NO_RULES);
    eventually("no trouble", || !has_trouble(new, "KubeProxyCame"));
}

#[test]
fn rules_for_node_ports_are_not_bypassed_unasked() {
    let lab = lab(1);
    let node = lab.node(1);
    nft(
        node,
        "table inet fence {
            chain raw { type filter hook prerouting priority raw; tcp dport 30082 drop; };
        }",
    );
    start(node);
    says(node, "auto: off, rules for node ports would be bypassed");
    eventually("the trouble", || has_trouble(node, "NodePortRulesBypassed"));
    nft(node, "delete table inet fence");
    says(node, "auto: on");
}
