//! What a Service comes to, row by row and for any facts.

use super::{
    facts::{Condition, Exclusion, External, Place, ServicePort, SlicePort},
    *,
};
use proptest::{collection::vec, prelude::*, sample::subsequence};

const VIP4: &str = "10.96.0.10";
const VIP6: &str = "fd00:96::10";

fn here() -> Here {
    Here {
        node: "n1".into(),
        zone: "a".into(),
        node_ports_at: ["192.0.2.9", "192.0.2.10", "2001:db8::9"]
            .map(|text| text.parse().unwrap())
            .into(),
        link_addresses: BTreeSet::new(),
        without_external_ips: false,
    }
}

/// A dual-stack Service with port 80 called `http`, node port 30080.
fn service() -> Service {
    Service {
        cluster_v4: Some(VIP4.parse().unwrap()),
        cluster_v6: Some(VIP6.parse().unwrap()),
        ports: [port("http", Protocol::Tcp, 80, 30080)].into(),
        ..Service::default()
    }
}

fn port(name: &str, protocol: Protocol, port: u16, node_port: u16) -> ServicePort {
    ServicePort {
        name: name.into(),
        protocol,
        port,
        node_port,
    }
}

/// With port 8080 called `http`.
fn slice(endpoints: &[Endpoint]) -> Slice {
    Slice {
        ports: [SlicePort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            port: 8080,
        }]
        .into(),
        endpoints: endpoints.into(),
    }
}

/// `at` node: `n1`; `can`: the first letters of its conditions.
fn endpoint(address: &str, node: &str, can: &str) -> Endpoint {
    hinted(address, node, can, &[], &[])
}

fn hinted(address: &str, node: &str, can: &str, zones: &[&str], nodes: &[&str]) -> Endpoint {
    let has = |letter| can.contains(letter);
    let names = |names: &[&str]| names.iter().map(|name| Box::from(*name)).collect();
    let place = Place {
        node: node.into(),
        for_zones: names(zones),
        for_nodes: names(nodes),
    };
    Endpoint {
        address: address.parse().unwrap(),
        condition: Condition::default()
            .with(Condition::READY, has('r'))
            .with(Condition::SERVING, has('s'))
            .with(Condition::TERMINATING, has('t')),
        place: place.into(),
    }
}

fn planned(service: &Service, endpoints: &[Endpoint]) -> [Sets; 2] {
    let plan = plan(service, &[&slice(endpoints)], &here());
    plan.ports["http"].sets.clone()
}

/// What is in a set: the last number of each IPv4 address.
fn numbers(set: &SetPlan) -> Vec<u8> {
    let endpoints = set.endpoints();
    ends(endpoints.unwrap_or_else(|| panic!("{set:?}")))
}

fn ends(set: &BTreeSet<SocketAddr>) -> Vec<u8> {
    let end = |at: &SocketAddr| match at.ip() {
        IpAddr::V4(ip) => ip.octets()[3],
        IpAddr::V6(ip) => ip.octets()[15],
    };
    set.iter().map(end).collect()
}

#[test]
fn what_nobody_is_to_implement_comes_to_nothing() {
    for excluded in [
        Exclusion::Headless,
        Exclusion::ExternalName,
        Exclusion::OtherProxy,
    ] {
        let mut service = service();
        service.excluded = Some(excluded);
        let slice = slice(&[endpoint("10.0.0.1", "n1", "rs")]);
        assert_eq!(
            plan(&service, &[&slice], &here()),
            ServicePlan::default(),
            "{excluded:?}"
        );
    }
}

#[test]
fn slices_merge_and_each_family_has_its_own_endpoints() {
    let slices = [
        slice(&[
            endpoint("10.0.0.1", "n1", "rs"),
            endpoint("10.0.0.2", "n2", "rs"),
        ]),
        slice(&[endpoint("fd00::7", "n2", "rs")]),
        slice(&[endpoint("10.0.0.3", "n3", "rs")]),
    ];
    let plan = plan(&service(), &slices.each_ref(), &here());
    let [v4, v6] = &plan.ports["http"].sets;
    assert_eq!(numbers(&v4.internal), [1, 2, 3]);
    assert_eq!(numbers(&v6.internal), [7]);
    let SetPlan::Balance(set) = &v6.cluster else {
        panic!()
    };
    assert!(set.contains(&"[fd00::7]:8080".parse().unwrap()), "{set:?}");
    let addresses = [VIP4, VIP6].map(|text| text.parse::<IpAddr>().unwrap());
    assert!(plan.addresses.iter().eq(&addresses));
}

#[test]
fn a_family_without_an_address_of_the_service_has_nothing() {
    let mut service = service();
    service.cluster_v6 = None;
    service.external = Some(Box::new(External {
        ips: ["2001:db8::1", "192.0.2.1"]
            .map(|text| text.parse().unwrap())
            .into(),
        ..External::default()
    }));
    let slice = slice(&[
        endpoint("fd00::7", "n2", "rs"),
        endpoint("10.0.0.1", "n2", "rs"),
    ]);
    let plan = plan(&service, &[&slice], &here());
    let port = &plan.ports["http"];
    assert_eq!(port.sets[1], Sets::refusing());
    assert!(port.frontends.iter().all(|frontend| frontend.at.is_ipv4()));
    assert_eq!(port.frontends.len(), 5);
}

#[test]
fn ports_are_matched_by_name_and_protocol_and_never_by_number() {
    let mut service = service();
    service.ports = [
        port("dns", Protocol::Udp, 53, 0),
        port("dns-tcp", Protocol::Tcp, 53, 0),
        port("other", Protocol::Tcp, 8080, 0),
    ]
    .into();
    let named = |name: &str, protocol, port| SlicePort {
        name: name.into(),
        protocol,
        port,
    };
    // Two slices may have different numbers for one name: named target ports.
    let slices = [
        Slice {
            ports: [
                named("dns", Protocol::Udp, 5353),
                named("dns-tcp", Protocol::Tcp, 5354),
            ]
            .into(),
            endpoints: [endpoint("10.0.0.1", "n1", "rs")].into(),
        },
        Slice {
            ports: [
                named("dns", Protocol::Tcp, 1),
                named("dns", Protocol::Udp, 53),
                named("http", Protocol::Tcp, 8080),
            ]
            .into(),
            endpoints: [endpoint("10.0.0.1", "n1", "rs")].into(),
        },
    ];
    let plan = plan(&service, &slices.each_ref(), &here());
    let set = |name: &str| match &plan.ports[name].sets[0].internal {
        SetPlan::Balance(set) => set.iter().map(SocketAddr::port).collect(),
        _ => vec![],
    };
    assert_eq!(set("dns"), [53, 5353]);
    assert_eq!(set("dns-tcp"), [5354]);
    assert_eq!(set("other"), Vec::<u16>::new());
}

#[test]
fn of_two_with_one_address_the_one_that_does_not_terminate_is_believed() {
    let pairs = [
        ("rs", "st", 'r'),
        ("", "st", '-'),
        ("s", "rst", '-'),
        ("st", "t", 's'),
        ("rs", "s", 'r'),
    ];
    for (one, other, outcome) in pairs {
        let [a, b] = [one, other].map(|can| endpoint("10.0.0.1", "n1", can));
        for both in [[a.clone(), b.clone()], [b.clone(), a.clone()]] {
            let sets = &planned(&service(), &both)[0];
            let is = match outcome {
                '-' => sets.internal == SetPlan::Refuse,
                _ => numbers(&sets.internal) == [1] && sets.draining.is_empty(),
            };
            assert!(is, "{one} {other}: {sets:?}");
        }
    }
    // That it is here is believed.
    let [away, at_home] = ["n2", "n1"].map(|node| endpoint("10.0.0.1", node, "rs"));
    let mut local = service();
    local.internal_local = true;
    for both in [[away.clone(), at_home.clone()], [at_home, away]] {
        assert_eq!(numbers(&planned(&local, &both)[0].internal), [1]);
    }
}

#[test]
fn without_ready_endpoints_those_that_serve_while_they_terminate_are_used() {
    let all = [
        endpoint("10.0.0.1", "n1", "st"),
        endpoint("10.0.0.2", "n2", "t"),
        endpoint("10.0.0.3", "n2", "s"),
        endpoint("10.0.0.4", "n2", "st"),
        endpoint("10.0.0.5", "n2", ""),
    ];
    let sets = &planned(&service(), &all)[0];
    assert_eq!(numbers(&sets.internal), [1, 4]);
    assert_eq!(ends(&sets.draining), [3]);
    // One that is ready changes that for all.
    let mut more = all.to_vec();
    more.push(endpoint("10.0.0.6", "n3", "rs"));
    let sets = &planned(&service(), &more)[0];
    assert_eq!(numbers(&sets.internal), [6]);
    assert_eq!(ends(&sets.draining), [1, 3, 4]);
}

#[test]
fn a_set_of_this_node_alone_has_its_own_last_resort() {
    let mut service = service();
    service.internal_local = true;
    let mut all = vec![
        endpoint("10.0.0.1", "n1", "st"),
        endpoint("10.0.0.2", "n2", "rs"),
    ];
    let sets = &planned(&service, &all)[0];
    assert_eq!(numbers(&sets.internal), [1]);
    assert_eq!(
        numbers(&sets.cluster),
        [2],
        "pods and nodes at a node port know no policy"
    );
    assert!(sets.draining.is_empty());
    all.push(endpoint("10.0.0.3", "n1", "rs"));
    assert_eq!(numbers(&planned(&service, &all)[0].internal), [3]);
}

#[test]
fn nobody_anywhere_refuses_and_nobody_here_drops() {
    let mut service = service();
    assert_eq!(planned(&service, &[])[0], Sets::refusing());
    // Serving alone is no endpoint for a new connection.
    let sets = &planned(&service, &[endpoint("10.0.0.3", "n1", "s")])[0];
    assert_eq!(sets.internal, SetPlan::Refuse);
    assert_eq!(ends(&sets.draining), [3]);

    let away = [
        endpoint("10.0.0.2", "n2", "rs"),
        endpoint("10.0.0.3", "", "rs"),
    ];
    for (internal, external) in [(true, false), (false, true), (true, true)] {
        service.internal_local = internal;
        service.external_local = external;
        let sets = &planned(&service, &away)[0];
        let is = |set: &SetPlan, local| match local {
            true => *set == SetPlan::Drop,
            false => numbers(set) == [2, 3],
        };
        assert!(
            is(&sets.internal, internal)
                && is(&sets.external, external)
                && is(&sets.cluster, false),
            "{sets:?}"
        );
        assert_eq!(
            planned(&service, &[])[0],
            Sets::refusing(),
            "nobody anywhere"
        );
        let last = &planned(&service, &[endpoint("10.0.0.2", "n2", "st")])[0];
        assert_eq!(last.external == SetPlan::Drop, external, "{last:?}");
    }
    // A node that does not know its name is nobody's, not everybody's whose node is not known.
    let nameless = Here::default();
    let plan = plan(&service, &[&slice(&away)], &nameless);
    assert_eq!(plan.ports["http"].sets[0].internal, SetPlan::Drop);
}

#[test]
fn hints_choose_for_the_cluster_alone_and_only_where_all_ready_endpoints_have_some() {
    let cases: [(&str, &[Endpoint], &[u8]); 7] = [
        (
            "this node",
            &[
                hinted("10.0.0.1", "n1", "rs", &["b"], &["n1"]),
                hinted("10.0.0.2", "n2", "rs", &["a"], &["n2", "n3"]),
            ],
            &[1],
        ),
        (
            "no node's hint is this one's: the zone",
            &[
                hinted("10.0.0.1", "n3", "rs", &["b"], &["n3"]),
                hinted("10.0.0.2", "n2", "rs", &["a", "c"], &["n2"]),
            ],
            &[2],
        ),
        (
            "one has no hint for a node: the zone",
            &[
                hinted("10.0.0.1", "n1", "rs", &["b"], &["n1"]),
                hinted("10.0.0.2", "n2", "rs", &["a"], &[]),
            ],
            &[2],
        ),
        (
            "one has no hint",
            &[
                hinted("10.0.0.1", "n1", "rs", &["a"], &[]),
                hinted("10.0.0.2", "n2", "rs", &[], &[]),
            ],
            &[1, 2],
        ),
        (
            "another zone",
            &[
                hinted("10.0.0.1", "n1", "rs", &["b"], &[]),
                hinted("10.0.0.2", "n2", "rs", &["c"], &[]),
            ],
            &[1, 2],
        ),
        (
            "who is not ready has no say",
            &[
                hinted("10.0.0.1", "n1", "rs", &["a"], &[]),
                hinted("10.0.0.2", "n2", "rs", &["b"], &[]),
                hinted("10.0.0.3", "n2", "st", &[], &[]),
            ],
            &[1],
        ),
        (
            "nor is the last resort chosen by hints",
            &[
                hinted("10.0.0.1", "n1", "st", &["a"], &["n1"]),
                hinted("10.0.0.2", "n2", "st", &["b"], &["n2"]),
            ],
            &[1, 2],
        ),
    ];
    for (what, endpoints, chosen) in cases {
        let sets = &planned(&service(), endpoints)[0];
        for set in [&sets.internal, &sets.cluster, &sets.external] {
            assert_eq!(numbers(set), chosen, "{what}");
        }
        let mut local = service();
        local.external_local = true;
        let sets = &planned(&local, endpoints)[0];
        match endpoints
            .iter()
            .any(|endpoint| &*endpoint.place.node == "n1")
        {
            true => assert_eq!(numbers(&sets.external), [1], "{what}"),
            false => assert_eq!(sets.external, SetPlan::Drop, "{what}"),
        }
    }
}

#[test]
fn by_maglev_clients_outside_have_the_same_endpoints_of_all_nodes() {
    let endpoints = [
        hinted("10.0.0.1", "n1", "rs", &["a"], &["n1"]),
        hinted("10.0.0.2", "n2", "rs", &["b"], &["n2"]),
    ];
    let mut service = service();
    service.external_consistent = true;
    let sets = &planned(&service, &endpoints)[0];
    assert!(matches!(sets.external, SetPlan::Consistent(_)));
    let all = [&sets.internal, &sets.cluster, &sets.external].map(numbers);
    assert_eq!(
        all,
        [vec![1], vec![1], vec![1, 2]],
        "hints are not for them"
    );
    assert!(matches!(sets.cluster, SetPlan::Balance(_)));
    assert_eq!(ends(&sets.draining), [0u8; 0]);
    // Local stays Local.
    service.external_local = true;
    let sets = &planned(&service, &endpoints)[0];
    assert!(matches!(sets.external, SetPlan::Consistent(_)));
    assert_eq!(numbers(&sets.external), [1]);
    let sets = &planned(&service, &endpoints[1..])[0];
    assert_eq!(sets.external, SetPlan::Drop);
    assert_eq!(planned(&service, &[])[0].external, SetPlan::Refuse);

    // Where there is no room for it.
    let plan = plan(&service, &[&slice(&endpoints)], &here());
    service.external_consistent = false;
    let without = super::plan(&service, &[&slice(&endpoints)], &here());
    assert_eq!(plan.by_chance(), Some(without.clone()));
    assert_eq!(without.by_chance(), None);
}

#[test]
fn frontends_of_every_kind() {
    let mut service = service();
    service.affinity_seconds = 10_800;
    service.external = Some(Box::new(External {
        ips: ["192.0.2.1".parse().unwrap()].into(),
        load_balancer: ["198.51.100.1", "2001:db8::1"]
            .map(|text| text.parse().unwrap())
            .into(),
        source_ranges: ["203.0.113.0/24".parse().unwrap()].into(),
        health_check_node_port: 0,
    }));
    let plan = plan(&service, &[], &here());
    let port = &plan.ports["http"];
    let all: Vec<_> = port
        .frontends
        .iter()
        .map(|frontend| (frontend.kind, frontend.at.to_string()))
        .collect();
    let expected = [
        (FrontendKind::ClusterIp, "10.96.0.10:80"),
        (FrontendKind::ClusterIp, "[fd00:96::10]:80"),
        (FrontendKind::NodePort, "127.0.0.1:30080"),
        (FrontendKind::NodePort, "192.0.2.9:30080"),
        (FrontendKind::NodePort, "192.0.2.10:30080"),
        (FrontendKind::NodePort, "[::1]:30080"),
        (FrontendKind::NodePort, "[2001:db8::9]:30080"),
        (FrontendKind::ExternalIp, "192.0.2.1:80"),
        (FrontendKind::LoadBalancer, "198.51.100.1:80"),
        (FrontendKind::LoadBalancer, "[2001:db8::1]:80"),
    ];
    assert_eq!(all, expected.map(|(kind, at)| (kind, at.to_owned())));
    assert_eq!(port.affinity_seconds, 10_800);
    assert_eq!(plan.source_ranges.len(), 1);
    let of_node = port.frontends.iter().filter(|of| of.is_of_node());
    assert!(of_node.map(|of| of.at.ip()).all(|at| at.is_loopback()));
    // Until it is known where, node ports are at loopback alone.
    let nowhere = Here {
        node_ports_at: BTreeSet::new(),
        ..here()
    };
    let frontends = &super::plan(&service, &[], &nowhere).ports["http"].frontends;
    assert_eq!(frontends.len(), all.len() - 3);
    // A link of this node has the cluster address of one family, which answers for itself.
    let held = Here {
        link_addresses: [VIP4.parse().unwrap()].into(),
        ..here()
    };
    let with_link = super::plan(&service, &[], &held);
    let left = &with_link.ports["http"].frontends;
    let clusters = left.iter().filter(|of| of.kind == FrontendKind::ClusterIp);
    let clusters: Vec<_> = clusters.map(|of| of.at.ip().to_string()).collect();
    assert_eq!(
        (clusters, left.len()),
        (vec![VIP6.to_owned()], all.len() - 1)
    );
    assert_eq!(with_link.addresses, [VIP6.parse().unwrap()].into());
    let without = Here {
        without_external_ips: true,
        ..here()
    };
    let left = &super::plan(&service, &[], &without).ports["http"].frontends;
    let is_external = |of: &&FrontendPlan| of.kind == FrontendKind::ExternalIp;
    assert_eq!(left.iter().filter(is_external).count(), 0);
    assert_eq!(left.len(), all.len() - 1);
    let whys = unused(&service, &[], &without);
    let why = whys.iter().find(|why| why.at.to_string() == "192.0.2.1:80");
    assert!(why.unwrap().why.contains("serviceExternalIPs"), "{whys:?}");
    assert_eq!(unused(&service, &[], &here()), []);
    // What a frontend leads to is by its kind.
    let mut sets = Sets::refusing();
    sets.internal = SetPlan::Drop;
    assert_eq!(sets.of(FrontendKind::ClusterIp), [&SetPlan::Drop; 2]);
    sets.external = SetPlan::Drop;
    for (kind, _) in &expected[2..] {
        assert_eq!(sets.of(*kind), [&SetPlan::Refuse, &SetPlan::Drop]);
    }
}

#[test]
fn load_balancers_hear_of_ready_endpoints_of_this_node() {
    let mut service = service();
    let all = [
        endpoint("10.0.0.1", "n1", "rs"),
        endpoint("10.0.0.2", "n1", "rs"),
        endpoint("10.0.0.2", "n1", "rs"),
        endpoint("10.0.0.3", "n1", "st"),
        endpoint("10.0.0.4", "n2", "rs"),
        endpoint("fd00::1", "n1", "rs"),
    ];
    let check = |service: &Service| plan(service, &[&slice(&all)], &here()).health_check;
    assert_eq!(check(&service), None);
    let external = External {
        health_check_node_port: 32_000,
        ..External::default()
    };
    service.external = Some(Box::new(external));
    let expected = HealthCheck {
        port: 32_000,
        local_endpoints: 2,
    };
    assert_eq!(check(&service), Some(expected));
}

#[test]
fn services_without_endpoints_here_are_told_by_policy() {
    let mut service = service();
    let away = slice(&[endpoint("10.0.0.1", "n2", "rs")]);
    let none = |service: &Service| plan(service, &[&away], &here()).has_none_here();
    assert_eq!(none(&service), [false, false]);
    service.internal_local = true;
    assert_eq!(none(&service), [true, false]);
    service.external_local = true;
    assert_eq!(none(&service), [true, true]);
    std::sync::Arc::make_mut(&mut service.ports)[0].node_port = 0;
    assert_eq!(none(&service), [true, false], "nobody outside can ask");
    // Without any endpoint nobody is dropped.
    let nobody = plan(&service, &[], &here()).has_none_here();
    assert_eq!(nobody, [false, false]);
}

#[test]
fn why_an_endpoint_is_not_used_is_said() {
    let mut service = service();
    let all = [
        hinted("10.0.0.1", "n1", "rs", &["a"], &[]),
        hinted("10.0.0.2", "n2", "rs", &["b"], &[]),
        hinted("10.0.0.3", "n2", "rs", &["a"], &[]),
        endpoint("10.0.0.4", "n1", "st"),
        endpoint("10.0.0.5", "n1", "t"),
        endpoint("10.0.0.6", "n1", "s"),
    ];
    let said = |service: &Service, all: &[Endpoint]| -> Vec<(u8, String)> {
        let unused = unused(service, &[&slice(all)], &here());
        let end = |of: &why::Unused| ends(&BTreeSet::from([of.at]))[0];
        unused.iter().map(|of| (end(of), of.why.clone())).collect()
    };
    let of = |said: &[(u8, &str)]| -> Vec<(u8, String)> {
        said.iter()
            .map(|(end, why)| (*end, (*why).to_owned()))
            .collect()
    };
    let gone = [
        (4, "it terminates, and finishes what it has"),
        (5, "it terminates"),
        (6, "it is not ready"),
    ];
    let hints = (2, "it is meant for zones b");
    assert_eq!(said(&service, &all), of(&[&[hints], &gone[..]].concat()));
    service.external_local = true;
    let local = [
        (
            2,
            "it is meant for zones b; externalTrafficPolicy is Local, and it is on n2",
        ),
        (3, "externalTrafficPolicy is Local, and it is on n2"),
    ];
    assert_eq!(said(&service, &all), of(&[&local, &gone[..]].concat()));
    // The last resort is used.
    assert_eq!(said(&service, &all[3..]), of(&gone[1..]));
    service.excluded = Some(Exclusion::Headless);
    assert_eq!(said(&service, &all), []);
}

fn any_endpoint() -> impl Strategy<Value = Endpoint> {
    let names = |all: [&'static str; 3]| subsequence(all.to_vec(), 0..=2);
    let address = prop_oneof![
        (1u8..6).prop_map(|n| format!("10.0.0.{n}")),
        (1u8..4).prop_map(|n| format!("fd00::{n}")),
    ];
    (
        address,
        prop_oneof![Just("n1"), Just("n2"), Just("")],
        subsequence(vec!["r", "s", "t"], 0..=3),
        names(["a", "b", "c"]),
        names(["n1", "n2", "n3"]),
    )
        .prop_map(|(address, node, can, zones, nodes)| {
            hinted(&address, node, &can.concat(), &zones, &nodes)
        })
}

fn any_slice() -> impl Strategy<Value = Slice> {
    let ports = vec(
        (prop_oneof![Just("http"), Just("dns")], 8080u16..8082),
        0..3,
    );
    (ports, vec(any_endpoint(), 0..6)).prop_map(|(ports, endpoints)| Slice {
        ports: ports
            .into_iter()
            .map(|(name, port)| SlicePort {
                name: name.into(),
                protocol: Protocol::Tcp,
                port,
            })
            .collect(),
        endpoints: endpoints.into(),
    })
}

fn any_service() -> impl Strategy<Value = Service> {
    any::<[bool; 4]>().prop_map(|[internal_local, external_local, is_dual, is_consistent]| {
        let mut service = service();
        service.external_consistent = is_consistent;
        service.internal_local = internal_local;
        service.external_local = external_local;
        service.cluster_v6 = service.cluster_v6.filter(|_| is_dual);
        service
    })
}

#[test]
fn names_are_in_the_order_of_their_namespaces() {
    let [one, other] = [("a", "z"), ("a-b", "x")].map(|(of, name)| ServiceName::new(of, name));
    assert!(one < other, "{one} comes before {other}");
    assert_eq!((other.namespace(), other.name()), ("a-b", "x"));
    assert_eq!(other.to_string(), "a-b/x");
}

proptest! {
    #[test]
    fn neither_order_nor_repetition_shows(
        service in any_service(),
        (slices, shuffled) in vec(any_slice(), 0..5)
            .prop_flat_map(|slices| (Just(slices.clone()), Just(slices).prop_shuffle())),
        repeated in any::<proptest::sample::Index>(),
    ) {
        let mut other: Vec<Slice> = shuffled
            .into_iter()
            .map(|mut slice| {
                slice.endpoints.reverse();
                std::sync::Arc::make_mut(&mut slice.ports).reverse();
                slice
            })
            .collect();
        if !other.is_empty() {
            other.push(other[repeated.index(other.len())].clone());
        }
        let [one, other] = [&slices, &other].map(|slices| {
            plan(&service, &slices.iter().collect::<Vec<_>>(), &here())
        });
        prop_assert_eq!(one, other);
    }

    #[test]
    fn who_is_chosen_can_serve_and_who_can_is_somewhere(
        service in any_service(),
        slices in vec(any_slice(), 0..5),
    ) {
        let plan = plan(&service, &slices.iter().collect::<Vec<_>>(), &here());
        let of = |at: &SocketAddr| -> Vec<&Endpoint> {
            let fits = |slice: &&Slice| {
                let mut ports = slice.ports.iter();
                ports.any(|port| &*port.name == "http" && port.port == at.port())
            };
            let endpoints = slices.iter().filter(fits).flat_map(|slice| slice.endpoints.iter());
            endpoints.filter(|endpoint| endpoint.address == at.ip()).collect()
        };
        for sets in &plan.ports["http"].sets {
            let all = [&sets.internal, &sets.cluster, &sets.external];
            let balanced = all.map(|set| {
                let endpoints = set.endpoints();
                assert!(endpoints.is_none_or(|set| !set.is_empty()));
                endpoints.cloned().unwrap_or_default()
            });
            for at in balanced.iter().flatten() {
                let is_usable = |endpoint: &&Endpoint| {
                    endpoint.condition.is(Condition::READY) || endpoint.condition.is_last_resort()
                };
                prop_assert!(of(at).iter().any(is_usable), "{at}");
                prop_assert!(!sets.draining.contains(at));
            }
            for (set, is_local) in [
                (&balanced[0], service.internal_local),
                (&balanced[2], service.external_local),
            ] {
                for at in set.iter().filter(|_| is_local) {
                    prop_assert!(of(at).iter().any(|endpoint| &*endpoint.place.node == "n1"), "{at}");
                }
            }
            for at in &sets.draining {
                let serves = |endpoint: &&Endpoint| endpoint.condition.is(Condition::SERVING);
                prop_assert!(of(at).iter().any(serves), "{at}");
            }
            // Nobody is refused where anybody is, and all are where nobody is.
            let refuses = all.map(|set| *set == SetPlan::Refuse);
            prop_assert!(refuses == [true; 3] || refuses == [false; 3], "{sets:?}");
            prop_assert!(sets.cluster != SetPlan::Drop);
        }
    }
}
