//! Whether other nodes answer through their tunnels: a tunnel that is cut, a link on the way that
//! takes less, an agent that is away, a pod that answers for another.

use ipnet::IpNet;
use sinabro_common::{
    abi::drop::DropReason,
    api::{NodeReport, PeerProbe, PeersReport, Request, Response, StatusReport},
    names,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, NodeEntry,
    checks::spoof::drops,
    cni::IFNAME,
    confinement,
    node::SERVICES_FLAGS,
    traffic::{
        icmp,
        packet::{self, checksum, inject, interface},
        tally::{Kind, Tally},
    },
    wait::{eventually, eventually_some},
};
use sinabro_netlink::sysctl;
use std::{io::Read as _, process::Command, time::Duration};

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
    node.status().unwrap()
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

/// As a firewall that nobody asked to let the tunnels pass.
fn cut_tunnels(node: &Node) {
    let rules =
        "table inet cut { chain in { type filter hook input priority 0; udp dport 8472 drop; }; }";
    node.command(&["nft", rules]).unwrap();
}

fn mend_tunnels(node: &Node) {
    node.command(&["nft", "delete table inet cut"]).unwrap();
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

#[test]
fn a_link_on_the_way_that_takes_less_is_named_with_what_it_takes() {
    let lab = lab(3);
    start(&lab);
    all_answer(&lab);
    let (n1, n2, n3) = (lab.node(1), lab.node(2), lab.node(3));
    // A bridge drops what is too large for a port, and says nothing.
    let set = |mtu| {
        lab.router().place().set_mtu("to-n2", mtu).unwrap();
    };
    set(1400);
    // At the next look at full size, which every start begins with.
    for node in [n1, n2, n3] {
        node.kill_agent().unwrap();
        node.start_agent().unwrap();
        node.wait_ready().unwrap();
    }
    eventually("the size that passes", || {
        let narrow = seen_by(n1, n2).probe;
        matches!(
            narrow,
            Some(PeerProbe::SmallOnly {
                largest: Some(1343..=1350),
                ..
            })
        )
    });
    let text = told(n1, "PeerPathMtu");
    assert!(text.contains("packets of 1450 bytes"), "{text}");
    assert!(
        text.contains("n2 (172.30.0.12)") && !text.contains("n3"),
        "{text}"
    );
    assert!(
        text.contains("`mtu: 134") || text.contains("`mtu: 1350"),
        "{text}"
    );
    assert!(shown(n1, &["nodes"]).contains("up to 13"));
    eventually("n2 names n1", || {
        trouble(n2, "PeerPathMtu").is_some_and(|text| text.contains("n1"))
    });
    assert_eq!(trouble(n1, "PeerSilent"), None);
    set(1500);
    over(n1, "PeerPathMtu");
    over(n2, "PeerPathMtu");
}

/// Nodes that send each other packets without a tunnel are asked without one, so that a network that drops pods' addresses is noticed.
#[test]
fn without_tunnels_peers_are_asked_without() {
    let lab = lab(2);
    for node in lab.nodes() {
        let mut entry = node.entry();
        entry.native = true;
        node.set_entry(entry);
    }
    lab.publish().unwrap();
    let (n1, n2) = (lab.node(1), lab.node(2));
    // Who is no neighbour yet is asked in a tunnel.
    icmp::ping(n1.place(), n2.addresses()[0], Duration::from_secs(5)).unwrap();
    let eth0 = interface(n1.place(), "eth0").unwrap();
    let tally = |kind| Tally::start(n1.place(), eth0, kind).unwrap();
    let (full, tunnels) = (Kind::AsLargeAs(1450), Kind::ToUdpPort(names::VXLAN_PORT));
    let (full, tunnels) = (tally(full), tally(tunnels));
    for node in lab.nodes() {
        node.write_services("{kind: List, items: []}\n").unwrap();
        let flags = [&SERVICES_FLAGS[..], &["--routing=native"]].concat();
        node.start_agent_with(&flags).unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
    }
    all_answer(&lab);
    // Though pods' packets are larger.
    eventually("a look at the tunnels' full size", || {
        full.count().unwrap() > 0
    });
    assert_eq!(status(n1).mtu, 1500);
    let before = answered(n1);
    tunnels.count().unwrap();
    eventually("more answers", || answered(n1) > before + 2);
    assert_eq!(tunnels.count().unwrap(), 0);
    assert_eq!(trouble(n1, "PeerPathMtu"), None);

    let fabric = lab.router().place();
    let mut nft = Command::new("nft");
    fabric.put(nft.arg(
        "table bridge fabric { chain f { type filter hook forward priority 0; ip saddr 10.244.0.0/16 drop; }; }",
    ));
    assert!(nft.status().unwrap().success());
    for node in [n1, n2] {
        let reasons = ["PeerSilent", "OverlaySilent"];
        let text = eventually_some("silence", || {
            reasons.iter().find_map(|reason| trouble(node, reason))
        });
        assert!(
            text.contains("what pods send by their own addresses"),
            "{text}"
        );
    }
}

/// The number of answers that the agent counted.
fn answered(node: &Node) -> u64 {
    let text = node
        .place()
        .run(|| {
            let mut stream = std::net::TcpStream::connect(names::METRICS_ADDR)?;
            std::io::Write::write_all(
                &mut stream,
                b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            )?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
        .unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("sinabro_peer_probes_answered_total "));
    line.unwrap().parse().unwrap()
}

#[test]
fn an_agent_that_is_away_is_no_silence() {
    let lab = lab(2);
    start(&lab);
    all_answer(&lab);
    let (n1, n2) = (lab.node(1), lab.node(2));
    n2.kill_agent().unwrap();
    let before = answered(n1);
    eventually("further answers", || answered(n1) >= before + 3);
    assert!(matches!(
        seen_by(n1, n2).probe,
        Some(PeerProbe::Answers { .. })
    ));
    assert_eq!(trouble(n1, "PeerSilent"), None);
}

/// The next IPv4 echo request that leaves by a link of the node, Ethernet header included.
fn overhear(node: &Node, name: &str) -> Vec<u8> {
    let link = interface(node.place(), name).unwrap();
    let mut socket = packet::socket(node.place(), link, libc::ETH_P_ALL as u16).unwrap();
    let patience = Some(Duration::from_secs(60));
    socket.set_read_timeout(patience).unwrap();
    let mut frame = [0; 2048];
    loop {
        let length = socket.read(&mut frame).unwrap();
        // IPv4 without options, ICMP, echo request.
        if length >= 42 && frame[14] == 0x45 && frame[23] == 1 && frame[34] == 8 {
            return frame[..length].to_vec();
        }
    }
}

/// The answer to an echo request, from this MAC address to that.
fn answer(request: &[u8], from: [u8; 6], to: [u8; 6]) -> Vec<u8> {
    let mut frame = request.to_vec();
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[26..30].copy_from_slice(&request[30..34]);
    frame[30..34].copy_from_slice(&request[26..30]);
    frame[34] = 0;
    frame[36..38].fill(0);
    let sum = checksum(&[&frame[34..]]);
    frame[36..38].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// The pod even knows the request, as nobody can who does not listen on the node itself.
#[test]
fn a_pod_cannot_answer_for_a_node() {
    let lab = lab(2);
    start(&lab);
    all_answer(&lab);
    let (n1, n2) = (lab.node(1), lab.node(2));
    let pod = n1.add_pod("liar").unwrap();
    let eth0 = interface(pod.place(), IFNAME).unwrap();
    cut_tunnels(n2);
    told(n1, "PeerSilent");
    let before = drops(n1, DropReason::SourceAddr).unwrap();
    for _ in 0..3 {
        let request = overhear(n1, names::VXLAN_LINK);
        let forged = answer(&request, eth0.mac, names::HOST_MAC);
        inject(pod.place(), eth0, &[forged]).unwrap();
    }
    eventually("forged answers are dropped", || {
        drops(n1, DropReason::SourceAddr).unwrap() >= before + 3
    });
    assert!(matches!(
        seen_by(n1, n2).probe,
        Some(PeerProbe::Silent { .. })
    ));

    // The same bytes count if they come from where they should.
    let [vxlan1, vxlan2] = [n1, n2].map(|node| interface(node.place(), names::VXLAN_LINK).unwrap());
    eventually("the node's own answer counts", || {
        let request = overhear(n1, names::VXLAN_LINK);
        let honest = answer(&request, vxlan2.mac, vxlan1.mac);
        inject(n2.place(), vxlan2, &[honest]).unwrap();
        // Taken at once, if at all; with the next loss it is not over yet.
        (0..50).any(|_| matches!(seen_by(n1, n2).probe, Some(PeerProbe::Answers { .. })))
    });
}

const PING_GROUPS: [&str; 3] = ["net", "ipv4", "ping_group_range"];

fn ping_groups(node: &Node) -> String {
    let read = || Ok(sysctl::read(&PING_GROUPS)?);
    let text = node.place().run(read).unwrap();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn where_ping_sockets_are_forbidden_status_says_so_until_they_are_not() {
    let lab = lab(2);
    for node in lab.nodes() {
        assert_eq!(ping_groups(node), "1 0");
        assert!(node.ctl(&["prepare"]).unwrap().status.success());
        assert_eq!(ping_groups(node), "0 0");
    }
    let (n1, n2) = (lab.node(1), lab.node(2));
    let set = |value: &'static str| {
        let write = || Ok(sysctl::write(&PING_GROUPS, value)?);
        n1.place().run(write).unwrap();
    };
    // Somebody's decision, which stays.
    set("1000 2000");
    assert!(n1.ctl(&["prepare"]).unwrap().status.success());
    assert_eq!(ping_groups(n1), "1000 2000");
    for node in [n1, n2] {
        node.start_confined_agent(&[], &confinement::AGENT).unwrap();
        node.wait_ready().unwrap();
    }
    eventually("the reason", || {
        let problem = peers(n1).problem;
        problem.is_some_and(|why| why.contains("ping_group_range"))
    });
    assert!(shown(n1, &["status"]).contains("not probed: net.ipv4.ping_group_range"));
    assert_eq!(seen_by(n1, n2).probe, None);
    eventually("n1 answers n2", || peers(n2).answering == 1);
    set("0 2000");
    eventually("n2 answers n1", || peers(n1).answering == 1);
    assert_eq!(peers(n1).problem, None);
}

#[test]
fn nobody_is_asked_if_that_is_off() {
    let lab = lab(2);
    for node in lab.nodes() {
        node.start_agent_with(&["--peer-probe", "false"]).unwrap();
    }
    for node in lab.nodes() {
        node.wait_ready().unwrap();
        assert_eq!(ping_groups(node), "1 0");
        let why = peers(node).problem.unwrap();
        assert!(why.contains("peerProbe"), "{why}");
    }
    assert_eq!(seen_by(lab.node(1), lab.node(2)).probe, None);
}
