use super::{
    conflicts::{contests, usable},
    facts::first_host,
    overlay::node_reports,
    *,
};
use ipnet::IpNet;
use proptest::{collection::vec, prelude::*};
use sinabro_common::{api::Mac, names};
use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

fn node(name: &str, addresses: &[&str], cidrs: &[&str]) -> Node {
    Node {
        name: name.into(),
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        pod_cidrs: cidrs.iter().map(|c| c.parse().unwrap()).collect(),
        ..Node::default()
    }
}

fn settings(own: &str) -> OverlaySettings {
    OverlaySettings {
        node: own.into(),
        device: "sinabro_vxlan".into(),
        vni: 1,
        port: 8472,
        uplink_mtu: 1500,
        mtu: None,
        routing: Routing::Tunnel,
        reached: Reached::default(),
    }
}

/// A peer is sent to natively if both say so, whatever is wrong with others.
#[test]
fn who_is_sent_to_natively_says_so_and_so_does_this_node() {
    let says = |name: &str, addresses: &[&str], native| Node {
        native,
        ..node(name, addresses, &[])
    };
    let facts = |own_native| {
        Facts::new([
            Node {
                native: own_native,
                ..own()
            },
            says("a", &["192.168.0.2", "fd00::2"], true),
            says("b", &["192.168.0.3"], false),
            says("c", &["127.0.0.1"], true),
        ])
    };
    let plan = |routing, own_native| {
        let settings = OverlaySettings {
            routing,
            ..settings("own")
        };
        OverlayPlan::new(&facts(own_native), &settings).unwrap()
    };
    for own_native in [false, true] {
        let native = plan(Routing::Native, own_native);
        assert!(native.takes_native);
        let a = ["192.168.0.2", "fd00::2"].map(|address| address.parse().unwrap());
        let of_a = |is_tried| {
            [(
                a[0],
                Native {
                    v6: Some(a[1]),
                    is_tried,
                },
            )]
            .into()
        };
        assert_eq!(native.native, of_a(false));
        // Where it depends on who answers, all that say so are asked.
        for (reached, is_tried) in [
            (vec![], true),
            (vec!["192.168.0.3"], true),
            (vec!["192.168.0.2"], false),
        ] {
            let natively = reached.iter().map(|node| node.parse().unwrap()).collect();
            let reach = Reach {
                natively,
                ..Reach::default()
            };
            let settings = OverlaySettings {
                routing: Routing::Auto,
                reached: Arc::new(reach),
                ..settings("own")
            };
            let auto = OverlayPlan::new(&facts(own_native), &settings).unwrap();
            assert_eq!((auto.takes_native, auto.native), (true, of_a(is_tried)));
        }
        // Others send it until they hear that it is over.
        let tunnel = plan(Routing::Tunnel, own_native);
        assert_eq!(tunnel.takes_native, own_native);
        assert!(tunnel.native.is_empty());
    }
}

fn own() -> Node {
    let cidrs = ["10.244.1.0/24", "fd00:244:1::/64"];
    node("own", &["192.168.0.1", "fd00::1"], &cidrs)
}

fn plan(nodes: impl IntoIterator<Item = Node>) -> OverlayPlan {
    OverlayPlan::new(&Facts::new(nodes), &settings("own")).unwrap()
}

fn problem(plan: &OverlayPlan, peer: &str) -> String {
    let peer = &plan.peers[peer];
    assert_eq!(peer.tunnel, None);
    peer.problem().unwrap()
}

#[test]
fn a_peer_gets_a_route_and_a_neighbour_per_range_and_one_fdb_entry() {
    let cidrs = ["10.244.2.0/24", "fd00:244:2::/64"];
    let peer = node("peer", &["192.168.0.2", "fd00::2"], &cidrs);
    let plan = plan([own(), peer]);
    let mac = Mac(names::vxlan_mac("192.168.0.2".parse().unwrap()));

    assert_eq!(plan.device.mtu, 1450);
    assert_eq!(plan.device.local.to_string(), "192.168.0.1");
    let addresses: Vec<_> = plan.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.244.1.1", "fd00:244:1::1"]);
    let routes: Vec<_> = plan
        .routes
        .iter()
        .map(|(to, r)| format!("{to} {} {}", r.gateway, r.source))
        .collect();
    assert_eq!(
        routes,
        [
            "10.244.2.0/24 10.244.2.1 10.244.1.1",
            "fd00:244:2::/64 fd00:244:2::1 fd00:244:1::1"
        ]
    );
    let gateways = ["10.244.2.1", "fd00:244:2::1"].map(|a| (a.parse::<IpAddr>().unwrap(), mac));
    assert_eq!(plan.neighbours, gateways.into());
    assert_eq!(plan.fdb, [(mac, "192.168.0.2".parse().unwrap())].into());
}

#[test]
fn tunnels_are_taken_from_whom_they_lead_to() {
    let peer = node("peer", &["192.168.0.2", "fd00::2"], &["10.244.2.0/24"]);
    // Only in the other family: no tunnel leads there, so none comes from there.
    let other = node("other", &["fd00::3"], &["10.244.3.0/24"]);
    let first = registered(own(), 1, true);
    let plan = plan([first, registered(peer, 2, true), registered(other, 3, true)]);
    let nodes: Vec<_> = plan.nodes.iter().map(|(a, t)| format!("{a} {t}")).collect();
    assert_eq!(
        nodes,
        [
            "192.168.0.1 192.168.0.1",
            "192.168.0.2 192.168.0.2",
            "fd00::1 192.168.0.1",
            "fd00::2 192.168.0.2",
        ]
    );
    let ranges: Vec<_> = plan
        .ranges
        .iter()
        .map(|(r, t)| format!("{r} {t}"))
        .collect();
    assert_eq!(
        ranges,
        [
            "10.244.1.0/24 192.168.0.1",
            "10.244.2.0/24 192.168.0.2",
            "fd00:244:1::/64 192.168.0.1",
        ]
    );
}

fn registered(mut node: Node, registered: u64, ready: bool) -> Node {
    (node.registered, node.ready) = (registered, ready);
    node
}

#[test]
fn both_ends_of_a_tunnel_choose_the_family_of_the_clusters_first_node() {
    let own = || node("own", &["fd00::1", "192.168.0.1"], &["10.244.1.0/24"]);
    let peer = || node("peer", &["192.168.0.2", "fd00::2"], &["10.244.2.0/24"]);
    let v4_only = node("v4", &["192.168.0.3"], &["10.244.3.0/24"]);
    for (when, mtu, own_end, peer_end) in [
        ((1, 2), 1430, "fd00::1", "fd00::2"),
        ((2, 1), 1450, "192.168.0.1", "192.168.0.2"),
    ] {
        let nodes = [
            registered(own(), when.0, true),
            registered(peer(), when.1, false),
        ];
        let facts = Facts::new(
            nodes
                .into_iter()
                .chain([registered(v4_only.clone(), 3, true)]),
        );
        let here = OverlayPlan::new(&facts, &settings("own")).unwrap();
        let there = OverlayPlan::new(&facts, &settings("peer")).unwrap();
        assert_eq!(here.device.mtu, mtu);
        for (plan, local, name, remote) in [
            (&here, own_end, "peer", peer_end),
            (&there, peer_end, "own", own_end),
        ] {
            assert_eq!(plan.device.local.to_string(), local);
            assert_eq!(plan.peers[name].tunnel, Some(remote.parse().unwrap()));
        }
        let v6 = own_end.contains(':');
        assert_eq!(here.peers["v4"].tunnel.is_none(), v6);
        if v6 {
            assert!(problem(&here, "v4").contains("no IPv6 address"));
        }
    }
}

/// Between IPv4 addresses checksums are nobody's question.
#[test]
fn tunnels_over_ipv6_lack_checksums_where_the_peer_says_that_it_takes_that() {
    let says = |name: &str, addresses: &[&str], zero_checksum| Node {
        zero_checksum,
        ..node(name, addresses, &[])
    };
    let facts = |own: Node| {
        Facts::new([
            registered(own, 1, true),
            registered(says("a", &["192.168.0.2", "fd00::2"], true), 2, true),
            registered(says("b", &["fd00::3", "192.168.0.3"], false), 2, true),
            registered(says("c", &["192.168.0.4"], true), 2, true),
        ])
    };
    let taken = |own_addresses: &[&str], own_takes, reached: Option<&[&str]>| {
        let facts = facts(says("own", own_addresses, own_takes));
        let without_checksum =
            reached.map(|reached| reached.iter().map(|node| node.parse().unwrap()).collect());
        let reach = Reach {
            without_checksum,
            ..Reach::default()
        };
        let settings = OverlaySettings {
            reached: Arc::new(reach),
            ..settings("own")
        };
        let plan = OverlayPlan::new(&facts, &settings).unwrap();
        assert_eq!(
            plan.fdb.len(),
            if plan.device.local.is_ipv6() { 2 } else { 3 }
        );
        plan.zero_checksum
    };
    for own_takes in [false, true] {
        // Who is not asked is believed.
        for (reached, gets_there) in [
            (None, true),
            (Some(&[][..]), false),
            (Some(&["fd00::3"]), false),
            (Some(&["fd00::2"]), true),
        ] {
            let over_v6 = taken(&["fd00::1", "192.168.0.1"], own_takes, reached);
            assert_eq!(over_v6, [("fd00::2".parse().unwrap(), gets_there)].into());
            let over_v4 = taken(&["192.168.0.1", "fd00::1"], own_takes, reached);
            assert_eq!(over_v4, [].into());
        }
    }
}

#[test]
fn an_address_is_the_ready_nodes_and_then_the_newest_ones() {
    let old = |ready| {
        let old = node("a-old", &["192.168.0.2", "fd00::2"], &["10.244.2.0/24"]);
        registered(old, 10, ready)
    };
    let new = |ready| registered(node("new", &["192.168.0.2"], &["10.244.3.0/24"]), 20, ready);
    for (old_ready, new_ready, winner) in [
        (false, true, "new"),
        (true, true, "new"),
        (false, false, "new"),
        (true, false, "a-old"),
    ] {
        let plan = plan([own(), old(old_ready), new(new_ready)]);
        let peer = |name: &str| plan.peers[name].tunnel.is_some();
        assert!(peer(winner), "{winner}");
        let loser = if winner == "new" { "a-old" } else { "new" };
        let why = problem(&plan, loser);
        assert!(
            why.contains(&format!("192.168.0.2 is also that of node {winner}")),
            "{why}"
        );
        assert_eq!(plan.routes.len(), 1);
    }
}

#[test]
fn only_what_is_contested_goes() {
    let old = node("old", &["192.168.0.2", "192.168.0.9"], &["10.244.2.0/24"]);
    let ranges = ["10.244.2.128/25", "10.244.3.0/24"];
    let new = node("new", &["192.168.0.2"], &ranges);
    let plan = plan([own(), registered(old, 1, true), registered(new, 2, true)]);
    assert_eq!(
        plan.peers["old"].tunnel,
        Some("192.168.0.9".parse().unwrap())
    );
    assert!(plan.peers["old"].problem().unwrap().contains("192.168.0.2"));
    assert_eq!(
        plan.peers["new"].tunnel,
        Some("192.168.0.2".parse().unwrap())
    );
    assert!(
        plan.peers["new"]
            .problem()
            .unwrap()
            .contains("10.244.2.128/25 overlaps")
    );
    let routes: Vec<_> = plan.routes.keys().map(ToString::to_string).collect();
    assert_eq!(routes, ["10.244.2.0/24", "10.244.3.0/24"]);
}

#[test]
fn a_newcomer_takes_nobodys_range_and_swallows_nobodys_address() {
    let old = registered(
        node("z-old", &["192.168.0.2"], &["10.244.2.0/24"]),
        1,
        false,
    );
    let inside = registered(node("a", &["10.244.2.7", "192.168.0.3"], &[]), 2, true);
    let around = registered(node("b", &["192.168.0.4"], &["192.168.0.0/30"]), 3, true);
    let plan = plan([own(), old, inside, around]);
    assert_eq!(plan.peers["z-old"].problem(), None);
    assert_eq!(plan.routes.len(), 1);
    assert!(
        plan.peers["a"]
            .problem()
            .unwrap()
            .contains("inside pod CIDR")
    );
    assert!(plan.peers["b"].problem().unwrap().contains("holds address"));
    assert!(plan.peers["a"].tunnel.is_some() && plan.peers["b"].tunnel.is_some());
}

#[test]
fn a_node_knows_who_else_has_its_address_and_whom_the_others_take() {
    let own = registered(own(), 5, true);
    let old = registered(node("old", &["192.168.0.1"], &[]), 1, false);
    let new = registered(node("new", &["fd00::1"], &[]), 9, true);
    let other = node("other", &["192.168.0.3"], &[]);
    let found = contests(&Facts::new([own, old, new, other]), "own");
    let found: Vec<_> = found
        .iter()
        .map(|c| (c.address.to_string(), c.with.as_str(), c.with_ready, c.lost))
        .collect();
    let expected = [
        ("fd00::1", "new", true, true),
        ("192.168.0.1", "old", false, false),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|(a, n, r, l)| (a.to_string(), *n, *r, *l))
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn ranges_of_a_family_the_node_lacks_get_no_route() {
    let own = node("own", &["192.168.0.1"], &["10.244.1.0/24"]);
    let peer = node(
        "peer",
        &["192.168.0.2"],
        &["10.244.2.0/24", "fd00:244:2::/64"],
    );
    let plan = plan([own, peer]);
    assert_eq!(plan.routes.len(), 1);
    assert_eq!(plan.peers["peer"].problem(), None);
}

#[test]
fn a_faulty_peer_is_left_out_and_says_why() {
    let good = node("good", &["192.168.0.9"], &["10.244.9.0/24"]);
    let cases: [(&[&str], &[&str], &str); 13] = [
        (&[], &["10.244.2.0/24"], "no address"),
        (&["fd00::7"], &["10.244.2.0/24"], "no IPv4 address"),
        (&["127.0.0.1"], &[], "loopback"),
        (&["192.168.0.1"], &[], "also that of node own"),
        (&["192.168.0.9"], &[], "also that of node good"),
        (
            &["10.244.9.7"],
            &[],
            "inside pod CIDR 10.244.9.0/24 of node good",
        ),
        (&["192.168.0.2"], &["10.244.2.1/24"], "bits set"),
        (&["192.168.0.2"], &["10.244.2.0/31"], "no room"),
        (&["192.168.0.2"], &["0.0.0.0/0"], "too large"),
        (&["192.168.0.2"], &["10.244.1.128/25"], "of node own"),
        (&["192.168.0.2"], &["10.244.0.0/16"], "overlaps"),
        (
            &["192.168.0.2"],
            &["10.9.0.0/24", "10.9.0.0/25"],
            "same node",
        ),
        (
            &["192.168.0.2"],
            &["192.168.0.0/24"],
            "holds address 192.168.0.2 of node p",
        ),
    ];
    for (addresses, cidrs, text) in cases {
        let plan = plan([own(), good.clone(), node("p", addresses, cidrs)]);
        let why = plan.peers["p"].problem().unwrap();
        assert!(why.contains(text), "{why}");
        // With a range that another has it is still a node, without that range.
        let stays = ["of node own", "overlaps"].contains(&text);
        assert_eq!(plan.peers["p"].tunnel.is_some(), stays, "{text}");
        assert_eq!(plan.peers["good"].problem(), None);
        let fdb = 1 + usize::from(stays);
        assert_eq!((plan.routes.len(), plan.fdb.len()), (1, fdb), "{text}");
    }
}

#[test]
fn peers_whose_derived_macs_collide_are_told() {
    // Birthday search: 32 bits of hash collide among some hundred thousand addresses.
    let mut seen = std::collections::HashMap::new();
    let (a, b) = (0u128..)
        .map(|i| IpAddr::V6(((0xfd00_u128 << 112) + (i << 64) + i * 7 + 1).into()))
        .find_map(|ip| {
            seen.insert(names::vxlan_mac(ip), ip)
                .map(|other| (other, ip))
        })
        .unwrap();
    let own = node("own", &["fd01::1"], &["10.244.1.0/24"]);
    let a = node("a", &[&a.to_string()], &["10.244.2.0/24"]);
    let b = node("b", &[&b.to_string()], &["10.244.3.0/24"]);
    let plan = plan([own, a, b]);
    assert_eq!(plan.peers["a"].problem(), None);
    assert!(problem(&plan, "b").contains("same derived MAC"));
    assert_eq!(plan.routes.len(), 1);
}

#[test]
fn an_unusable_own_entry_is_an_error() {
    let unknown = OverlayPlan::new(&Facts::default(), &settings("own")).unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "this node, own, is not among the known nodes"
    );
    let bad = node("own", &["192.168.0.1"], &["10.244.1.9/24"]);
    let error = OverlayPlan::new(&Facts::new([bad]), &settings("own")).unwrap_err();
    assert!(error.to_string().contains("10.244.1.9/24 has bits set"));

    let small = OverlaySettings {
        uplink_mtu: 1300,
        ..settings("own")
    };
    let error = OverlayPlan::new(&Facts::new([own()]), &small).unwrap_err();
    assert!(
        matches!(
            error,
            PlanError::Mtu {
                mtu: 1250,
                least: 1280,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn reports_name_every_node_even_without_a_plan() {
    let facts = Facts::new([own(), node("p", &[], &[])]);
    let plan = OverlayPlan::new(&facts, &settings("own")).unwrap();
    let reports = node_reports(&facts, "own", Some(&plan));
    assert_eq!(reports.len(), 2);
    assert!(reports[0].local && reports[0].problem.is_none());
    assert!(reports[1].problem.is_some());
    assert_eq!(node_reports(&facts, "own", None).len(), 2);
}

/// Nodes out of a space so small that they often contradict one another.
fn any_node() -> impl Strategy<Value = Node> {
    let v4 = (1u8..14).prop_map(|i| IpAddr::from([192, 168, 0, i]));
    let v6 = (1u16..14).prop_map(|i| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, i]));
    let address = prop_oneof![6 => v4, 2 => v6, 1 => any::<IpAddr>()];
    let v4 = (0u8..24, prop_oneof![9 => Just(24u8), 1 => 0u8..=32])
        .prop_map(|(i, len)| IpNet::new(IpAddr::from([10, 244, i, 0]), len).unwrap());
    let v6 = (0u16..24, prop_oneof![9 => Just(64u8), 1 => 0u8..=128]).prop_map(|(i, len)| {
        IpNet::new(IpAddr::from([0xfd00, 0x244, 0, i, 0, 0, 0, 0]), len).unwrap()
    });
    let cidr = prop_oneof![v4, v6];
    let standing = (0u64..3, any::<bool>(), any::<bool>(), any::<bool>());
    (0u8..12, vec(address, 0..3), vec(cidr, 0..3), standing).prop_map(
        |(i, addresses, pod_cidrs, (registered, ready, native, zero_checksum))| Node {
            name: format!("n{i}"),
            addresses,
            pod_cidrs,
            registered,
            ready,
            native,
            zero_checksum,
        },
    )
}

fn sound_own() -> Node {
    node(
        "own",
        &["192.168.0.20"],
        &["10.244.200.0/24", "fd00:244:200::/64"],
    )
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

proptest! {
    #[test]
    fn nothing_is_left_to_two_nodes_and_nobody_loses_what_nobody_else_claims(
        nodes in vec(any_node(), 0..40),
    ) {
        let facts = Facts::new(nodes.into_iter().chain([sound_own()]));
        let usable = usable(&facts, "own");
        prop_assert_eq!(&usable.nodes[0], &sound_own());
        for (i, a) in usable.nodes.iter().enumerate() {
            for b in &usable.nodes[..i] {
                prop_assert!(!a.addresses.iter().any(|x| b.addresses.contains(x)));
                prop_assert!(!a.pod_cidrs.iter().any(|x| b.pod_cidrs.iter().any(|y| overlap(x, y))));
                for (a, b) in [(a, b), (b, a)] {
                    prop_assert!(!a.pod_cidrs.iter().any(|cidr| b.addresses.iter().any(|x| cidr.contains(x))));
                }
            }
        }
        for node in facts.nodes.values().filter(|node| node.check().is_ok()) {
            let rest = usable.nodes.iter().find(|rest| rest.name == node.name);
            let kept = |address: &IpAddr| rest.is_some_and(|rest| rest.addresses.contains(address));
            let others = || facts.nodes.values().filter(|other| other.name != node.name && other.check().is_ok());
            for address in node.addresses.iter().filter(|address| !kept(address)) {
                prop_assert!(others().any(|other| other.addresses.contains(address)
                    || other.pod_cidrs.iter().any(|cidr| cidr.contains(address))));
                prop_assert!(usable.problems.contains_key(&node.name));
            }
        }
    }

    #[test]
    fn plans_hold_together(nodes in vec(any_node(), 0..14)) {
        let facts = Facts::new(nodes.into_iter().chain([sound_own()]));
        let plan = OverlayPlan::new(&facts, &settings("own")).unwrap();
        let own = &facts.nodes["own"];

        let routes: Vec<_> = plan.routes.keys().collect();
        for (i, a) in routes.iter().enumerate() {
            prop_assert!(routes[..i].iter().all(|b| !overlap(a, b)), "two peers share {a}");
            prop_assert!(own.pod_cidrs.iter().all(|c| !overlap(a, c)), "own range in the tunnel");
        }
        // Nothing that carries the tunnel itself goes into it.
        let underlay = plan.fdb.values().chain([&plan.device.local]);
        for address in underlay {
            prop_assert!(!routes.iter().any(|c| c.contains(address)), "{address}");
        }
        for (cidr, route) in &plan.routes {
            prop_assert_eq!(route.gateway, first_host(*cidr));
            prop_assert!(plan.addresses.contains(&route.source));
            let mac = plan.neighbours[&route.gateway];
            let remote = plan.fdb[&mac];
            let owner = facts.nodes.values().find(|n| n.pod_cidrs.contains(cidr) && n.addresses.contains(&remote));
            prop_assert!(owner.is_some(), "{cidr} goes to {remote}, which is not its node");
        }
        prop_assert_eq!(plan.routes.len(), plan.neighbours.len());
        prop_assert_eq!(plan.peers.len() + 1, facts.nodes.len());
        let tunnels: BTreeSet<_> = plan.peers.values().filter_map(|p| p.tunnel).collect();
        prop_assert_eq!(tunnels.len(), plan.fdb.len());
        for peer in plan.peers.values() {
            prop_assert!(peer.tunnel.is_some() || peer.problem().is_some());
        }
    }

    #[test]
    fn the_device_alone_is_the_plans(nodes in vec(any_node(), 0..14)) {
        let facts = Facts::new(nodes);
        let whole = OverlayPlan::new(&facts, &settings("n1")).map(|plan| plan.device);
        prop_assert_eq!(own_device(&facts, &settings("n1")), whole);
    }

    #[test]
    fn the_order_of_facts_does_not_matter(nodes in vec(any_node(), 0..14), seed: u64) {
        let mut nodes: Vec<_> = Facts::new(nodes.into_iter().chain([sound_own()])).nodes.into_values().collect();
        let one = OverlayPlan::new(&Facts::new(nodes.clone()), &settings("own"));
        let turn = (seed as usize) % nodes.len();
        nodes.rotate_left(turn);
        nodes.reverse();
        prop_assert_eq!(one, OverlayPlan::new(&Facts::new(nodes), &settings("own")));
    }

    #[test]
    fn a_sound_node_that_leaves_takes_exactly_its_entries(count in 1usize..40, leaver in 0usize..40) {
        let leaver = leaver % count;
        let peer = |i: usize| node(
            &format!("p{i}"),
            &[&format!("192.168.1.{i}")],
            &[&format!("10.244.{i}.0/24"), &format!("fd00:244:0:{i:x}::/64")],
        );
        let peers: Vec<_> = (0..count).map(peer).collect();
        let before = plan([sound_own()].into_iter().chain(peers.clone()));
        let mut peers = peers;
        let left = peers.remove(leaver);
        let after = plan([sound_own()].into_iter().chain(peers));

        let mut expected = before;
        expected.peers.remove(&left.name).unwrap();
        for cidr in &left.pod_cidrs {
            expected.routes.remove(cidr).unwrap();
            expected.neighbours.remove(&first_host(*cidr)).unwrap();
            expected.ranges.remove(cidr).unwrap();
        }
        expected.nodes.remove(&left.addresses[0]).unwrap();
        expected.fdb.remove(&Mac(names::vxlan_mac(left.addresses[0]))).unwrap();
        prop_assert_eq!(after, expected);
    }

    #[test]
    fn no_peer_can_spoil_the_node_itself(nodes in vec(any_node(), 0..14)) {
        let with = OverlayPlan::new(&Facts::new(nodes.into_iter().chain([sound_own()])), &settings("own")).unwrap();
        let alone = plan([sound_own()]);
        prop_assert_eq!(with.device, alone.device);
        prop_assert_eq!(with.addresses, alone.addresses);
    }
}
