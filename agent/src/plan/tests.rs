use super::{facts::first_host, overlay::node_reports, *};
use ipnet::IpNet;
use proptest::{collection::vec, prelude::*};
use sinabro_common::{api::Mac, names};
use std::{collections::BTreeSet, net::IpAddr};

fn node(name: &str, addresses: &[&str], cidrs: &[&str]) -> Node {
    Node {
        name: name.into(),
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        pod_cidrs: cidrs.iter().map(|c| c.parse().unwrap()).collect(),
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
    peer.problem.as_ref().unwrap().to_string()
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
fn the_first_address_decides_the_underlay_family() {
    let own = node("own", &["fd00::1", "192.168.0.1"], &["10.244.1.0/24"]);
    let peer = node("peer", &["192.168.0.2", "fd00::2"], &["10.244.2.0/24"]);
    let v4_only = node("v4", &["192.168.0.3"], &["10.244.3.0/24"]);
    let plan = plan([own, peer, v4_only]);
    assert_eq!(plan.device.mtu, 1430);
    assert_eq!(plan.peers["peer"].tunnel, Some("fd00::2".parse().unwrap()));
    assert!(problem(&plan, "v4").contains("no IPv6 address"));
    assert_eq!(plan.routes.len(), 1);
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
    assert_eq!(plan.peers["peer"].problem, None);
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
        assert!(
            problem(&plan, "p").contains(text),
            "{}",
            problem(&plan, "p")
        );
        assert_eq!(plan.peers["good"].problem, None);
        assert_eq!((plan.routes.len(), plan.fdb.len()), (1, 1), "{text}");
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
    assert_eq!(plan.peers["a"].problem, None);
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

#[test]
fn masquerade_spares_every_sound_range_and_the_configured_ones() {
    let facts = Facts::new([
        node("a", &[], &["10.244.0.0/24", "fd00::/64"]),
        node("b", &[], &["10.244.1.0/24", "0.0.0.0/0"]),
    ]);
    let configured = ["172.16.3.4/12".parse().unwrap()];
    let prefixes: Vec<_> = non_masquerade(&facts, &configured)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(prefixes, ["10.244.0.0/23", "172.16.0.0/12", "fd00::/64"]);
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
    (0u8..12, vec(address, 0..3), vec(cidr, 0..3)).prop_map(|(i, addresses, pod_cidrs)| Node {
        name: format!("n{i}"),
        addresses,
        pod_cidrs,
    })
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

/// [`Facts::usable`] by asking every node about every other.
fn usable_one_by_one<'a>(facts: &'a Facts, first: &str) -> (Vec<&'a str>, Vec<(&'a str, String)>) {
    let mut usable: Vec<&Node> = Vec::new();
    let mut problems = Vec::new();
    let own = facts.nodes.get(first);
    let others = facts.nodes.values().filter(|node| node.name != first);
    for node in own.into_iter().chain(others) {
        let fit = |()| usable.iter().try_for_each(|other| node.conflict(other));
        match node.check().and_then(fit) {
            Ok(()) => usable.push(node),
            Err(problem) => problems.push((node.name.as_str(), problem.to_string())),
        }
    }
    problems.sort_unstable();
    let names = usable.into_iter().map(|node| node.name.as_str());
    (names.collect(), problems)
}

proptest! {
    #[test]
    fn the_index_of_claims_finds_what_asking_one_by_one_finds(nodes in vec(any_node(), 0..40)) {
        let facts = Facts::new(nodes.into_iter().chain([sound_own()]));
        let (usable, problems) = facts.usable("own");
        let usable: Vec<_> = usable.into_iter().map(|node| node.name.as_str()).collect();
        let problems: Vec<_> = problems.iter().map(|(n, p)| (*n, p.to_string())).collect();
        prop_assert_eq!((usable, problems), usable_one_by_one(&facts, "own"));
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
            prop_assert_ne!(peer.tunnel.is_some(), peer.problem.is_some());
        }
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
        }
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
