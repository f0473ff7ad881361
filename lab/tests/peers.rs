//! Whether other nodes answer through their tunnels: a tunnel that is cut, a link on the way that
//! takes less, an agent that is away, a pod that answers for another.
#![allow(clippy::unwrap_used)]

use ipnet::IpNet;
use sinabro_common::api::{NodeReport, PeerProbe, PeersReport, Request, Response, StatusReport};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, NodeEntry,
    wait::{eventually, eventually_some},
};
use std::process::Command;

fn lab(nodes: usize) -> Lab {
    Lab::new(Binaries::find().unwrap(), nodes, Lifetime::Process).unwrap()
}

fn start(lab: &Lab) {
    for node in lab.nodes() {
        node.start_agent().unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
    }
}

fn status(node: &Node) -> StatusReport {
    match node.ask(Request::Status).unwrap() {
        Response::Status(status) => *status,
        other => panic!("{other:?}"),
    }
}

fn peers(node: &Node) -> PeersReport {
    status(node).peers.unwrap()
}

fn seen_by(node: &Node, peer: &Node) -> NodeReport {
    let nodes = match node.ask(Request::Nodes { after: None }).unwrap() {
        Response::Nodes(nodes) => nodes,
        other => panic!("{other:?}"),
    };
    nodes.into_iter().find(|n| n.name == peer.name()).unwrap()
}

fn all_answer(lab: &Lab) {
    let others = lab.nodes().len() - 1;
    for node in lab.nodes() {
        eventually("all peers answer", || peers(node).answering == others);
    }
}

fn trouble(node: &Node, reason: &str) -> Option<String> {
    let mut all = status(node).troubles.into_iter();
    all.find(|trouble| trouble.reason == reason)
        .map(|trouble| trouble.text)
}

/// Waits for a trouble, which must not make the node unready.
fn told(node: &Node, reason: &str) -> String {
    let text = eventually_some(reason, || trouble(node, reason));
    assert!(status(node).ready, "{text}");
    text
}

fn over(node: &Node, reason: &str) {
    eventually(&format!("{reason} is over"), || {
        trouble(node, reason).is_none()
    });
}

fn shown(node: &Node, arguments: &[&str]) -> String {
    let output = node.ctl(arguments).unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn run(node: &Node, command: &[&str]) {
    node.place()
        .run(|| {
            let output = Command::new(command[0]).args(&command[1..]).output()?;
            assert!(output.status.success(), "{command:?}: {output:?}");
            Ok(())
        })
        .unwrap();
}

/// As a firewall that nobody asked to let the tunnels pass.
fn cut_tunnels(node: &Node) {
    let rules =
        "table inet cut { chain in { type filter hook input priority 0; udp dport 8472 drop; }; }";
    run(node, &["nft", rules]);
}

fn mend_tunnels(node: &Node) {
    run(node, &["nft", "delete table inet cut"]);
}

fn a_cut_tunnel_is_named(lab: &Lab) {
    start(lab);
    all_answer(lab);
    let (n1, n2, n3) = (lab.node(1), lab.node(2), lab.node(3));
    let nodes = shown(n1, &["nodes"]);
    assert!(
        nodes.contains("ANSWERS") && nodes.contains(" ms"),
        "{nodes}"
    );
    assert!(shown(n1, &["status"]).contains("2 answer\n"));

    cut_tunnels(n3);
    for node in [n1, n2] {
        let text = told(node, "PeerSilent");
        let address = seen_by(node, n3).tunnel.unwrap();
        assert!(text.contains(&format!("n3 ({address})")), "{text}");
        assert!(
            !text.contains("n2") && text.contains("UDP port 8472"),
            "{text}"
        );
        assert_eq!(trouble(node, "OverlaySilent"), None);
        assert!(matches!(
            seen_by(node, n3).probe,
            Some(PeerProbe::Silent { .. })
        ));
    }
    // What nobody answers is its own tunnel.
    let text = told(n3, "OverlaySilent");
    assert!(text.contains("UDP port 8472"), "{text}");
    assert_eq!(trouble(n3, "PeerSilent"), None);
    assert!(shown(n1, &["nodes"]).contains("silent "));
    assert!(shown(n1, &["status"]).contains("1 answer, 1 silent"));

    mend_tunnels(n3);
    for node in lab.nodes() {
        over(node, "PeerSilent");
        over(node, "OverlaySilent");
    }
    all_answer(lab);
}

#[test]
fn a_peer_whose_tunnel_is_cut_is_named_until_it_answers() {
    a_cut_tunnel_is_named(&lab(3));
}

#[test]
fn the_same_where_pods_have_ipv6_alone() {
    let lab = lab(3);
    for node in lab.nodes() {
        let entry = node.entry();
        let is_v6 = |cidr: &IpNet| cidr.addr().is_ipv6();
        let pod_cidrs = entry.pod_cidrs.into_iter().filter(is_v6).collect();
        let addresses = entry
            .addresses
            .into_iter()
            .filter(|a| a.is_ipv6())
            .collect();
        node.set_entry(NodeEntry {
            pod_cidrs,
            addresses,
            ..node.entry()
        });
    }
    lab.publish().unwrap();
    a_cut_tunnel_is_named(&lab);
}
