use super::*;
use crate::{node::NodeState, plan::Facts};
use sinabro_netlink::netns::in_fresh;
use std::process::Command;

/// Two cables of which the node has these ends: u0, u1.
const CABLES: [&str; 4] = [
    "link add u0 type veth peer name far0",
    "link add u1 type veth peer name far1",
    "link set far0 up",
    "link set far1 up",
];
const BOTH: [&str; 4] = [
    "addr add 192.0.2.1/24 dev u0",
    "addr add 198.51.100.1/24 dev u1",
    "link set u0 up",
    "link set u1 up",
];
const BOTH_V6: [&str; 2] = [
    "addr add 2001:db8:a::1/64 dev u0 nodad",
    "addr add 2001:db8:b::1/64 dev u1 nodad",
];

fn ip(commands: &[&str]) {
    for command in commands {
        let run = Command::new("ip").args(command.split_whitespace()).output();
        let run = run.unwrap();
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "ip {command}: {said}");
    }
}

/// What is found after these commands, with a list of nodes that has this one.
fn find(commands: &[&str], addresses: &[&str], args: &[&str]) -> Result<NodeState, NodeError> {
    in_fresh(|| {
        ip(&CABLES);
        ip(commands);
        find_here(addresses, args)
    })
}

fn find_here(addresses: &[&str], args: &[&str]) -> Result<NodeState, NodeError> {
    let pods = ["10.9.0.0/24", "fd00:9::/64"];
    let entry = Node {
        name: "n1".into(),
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        pod_cidrs: pods.map(|cidr| cidr.parse().unwrap()).into(),
        ..Node::default()
    };
    let args = ["sinabro-agent", "--node-name=n1", "--nodes=/n"]
        .iter()
        .chain(args);
    let settings = Settings::load(args.copied()).unwrap();
    NodeState::find(&settings, &Facts::new([entry]))
}

/// Pods' packets are as large as the uplink's where theirs need no tunnel.
#[test]
fn pods_have_the_mtu_of_what_they_are_in() {
    let native = [
        "--service-proxy=on",
        "--services-file=/s",
        "--routing=native",
    ];
    let mtus = |args: &[&str]| {
        let state = find(&BOTH, &["192.0.2.1"], args).unwrap();
        (state.mtu, state.tunnel_mtu)
    };
    assert_eq!(mtus(&[]), (1450, 1450));
    assert_eq!(mtus(&native), (1500, 1450));
    for (more, expected) in [
        // All is in tunnels all the same.
        ("--data-path=kernel", 1450),
        // Set by hand, both.
        ("--mtu=1400", 1400),
    ] {
        let args = [&native[..], &[more]].concat();
        assert_eq!(mtus(&args), (expected, expected), "{more}");
    }
    assert_eq!(mtus(&native[2..]), (1450, 1450));
}

/// Each uplink with the addresses of what is masqueraded there.
fn uplinks(state: &NodeState) -> Vec<String> {
    let in_words = |uplink: &Uplink| {
        let sources = uplink.sources().map(|a| a.to_string());
        let words: Vec<String> = [uplink.name.clone()].into_iter().chain(sources).collect();
        words.join(" ")
    };
    state.uplinks.iter().map(in_words).collect()
}

fn warnings(state: &NodeState) -> Vec<&str> {
    let all = state.warnings.iter();
    all.map(|warning| warning.text.as_str()).collect()
}

#[test]
fn the_link_with_the_nodes_address_comes_first_and_that_of_the_default_route_is_an_uplink_too() {
    let default = [
        &BOTH[..],
        &BOTH_V6,
        &["route add default via 192.0.2.254"],
        &["-6 route add default via 2001:db8:a::fe"],
    ]
    .concat();
    let state = find(&default, &["198.51.100.1"], &[]).unwrap();
    assert_eq!(
        uplinks(&state),
        [
            "u1 198.51.100.1 2001:db8:b::1",
            "u0 192.0.2.1 2001:db8:a::1"
        ]
    );
    assert_eq!(warnings(&state), [""; 0]);
    // What programs of before know.
    let first = state.config((1, 2)).masquerade_v4;
    assert_eq!(IpAddr::from(first).to_string(), "198.51.100.1");
    // No default route at all: the uplink is known all the same.
    let state = find(&BOTH, &["198.51.100.1"], &[]).unwrap();
    assert_eq!(uplinks(&state), ["u1 198.51.100.1"]);
    assert_eq!(warnings(&state), [""; 0]);
    // Of each family on another.
    let state = find(
        &[&BOTH[..], &BOTH_V6].concat(),
        &["198.51.100.1", "2001:db8:a::1"],
        &[],
    );
    assert_eq!(
        uplinks(&state.unwrap()),
        [
            "u1 198.51.100.1 2001:db8:b::1",
            "u0 192.0.2.1 2001:db8:a::1"
        ]
    );
}

#[test]
fn an_address_that_no_link_has_is_no_source_and_is_told() {
    let with_route = [&BOTH[..], &["route add default via 192.0.2.254"]].concat();
    let state = find(&with_route, &["203.0.113.7"], &[]).unwrap();
    assert_eq!(uplinks(&state), ["u0 192.0.2.1"]);
    let told = warnings(&state);
    assert!(
        told.len() == 1 && told[0].contains("203.0.113.7"),
        "{told:?}"
    );
    let error = find(&BOTH, &["203.0.113.7"], &[]).unwrap_err();
    assert!(error.to_string().contains("--uplinks"), "{error}");
}

#[test]
fn a_way_out_beside_uplinks_that_are_named_is_told() {
    let with_route = [&BOTH[..], &["route add default via 192.0.2.254"]].concat();
    let found = |args: &[&str]| find(&with_route, &["198.51.100.1"], args).unwrap();
    let state = found(&["--uplinks=u1"]);
    let told = warnings(&state);
    assert!(
        told.len() == 1 && told[0].contains("leaves by u0, which is not an uplink"),
        "{told:?}"
    );
    let state = found(&["--uplinks=u1,u0"]);
    assert_eq!(uplinks(&state), ["u1 198.51.100.1", "u0 192.0.2.1"]);
    assert_eq!(warnings(&state), [""; 0]);
    let state = found(&["--uplinks=u1", "--masquerade=false"]);
    assert_eq!(uplinks(&state), ["u1"]);
    assert_eq!(warnings(&state), [""; 0]);
}

#[test]
fn every_next_hop_of_the_default_route_is_an_uplink() {
    let hops = [
        "route add default nexthop via 192.0.2.254 nexthop via 198.51.100.254",
        "-6 route add default nexthop via 2001:db8:a::fe nexthop via 2001:db8:b::fe",
    ];
    let all = [&BOTH[..], &BOTH_V6, &hops].concat();
    let state = find(&all, &["192.0.2.1"], &[]).unwrap();
    assert_eq!(
        uplinks(&state),
        [
            "u0 192.0.2.1 2001:db8:a::1",
            "u1 198.51.100.1 2001:db8:b::1"
        ]
    );
    // Two routers that advertise themselves are two routes.
    let routes = [
        "-6 route add default via 2001:db8:a::fe metric 1024",
        "-6 route append default via 2001:db8:b::fe metric 1024",
    ];
    let all = [&BOTH[..], &BOTH_V6, &routes].concat();
    let state = find(&all, &["192.0.2.1"], &[]).unwrap();
    assert_eq!(state.uplinks.len(), 2);
}

#[test]
fn what_comes_before_the_default_route_leads_out() {
    for routes in [
        // As VPN clients do.
        &["route add 0.0.0.0/1 dev u1", "route add 128.0.0.0/1 dev u1"][..],
        &[
            "route add default dev u1 table 51820",
            "rule add not fwmark 51820 table 51820",
        ],
    ] {
        let via = "route add default via 192.0.2.254";
        let all = [&BOTH[..], &[via], routes].concat();
        let state = find(&all, &["192.0.2.1"], &[]).unwrap();
        assert_eq!(uplinks(&state), ["u0 192.0.2.1", "u1 198.51.100.1"]);
    }
}

#[test]
fn the_source_is_what_the_route_would_choose() {
    let more = [
        "addr add 192.0.2.9/24 dev u0",
        "addr add 203.0.113.1/24 dev u0",
    ];
    for (route, source) in [
        ("route add default via 192.0.2.254", "192.0.2.1"),
        // Beside the gateway's network, and as the route says.
        ("route add default via 203.0.113.254", "203.0.113.1"),
        (
            "route add default via 192.0.2.254 src 192.0.2.9",
            "192.0.2.9",
        ),
    ] {
        let all = [&BOTH[..], &more, &[route]].concat();
        let state = find(&all, &["192.0.2.9"], &[]).unwrap();
        assert_eq!(uplinks(&state), [format!("u0 {source}")], "{route}");
    }
    // Routed to the node, whose uplink has no address of its own.
    let unnumbered = [
        "link set u0 up",
        "link set lo up",
        "addr add 198.51.100.7/32 dev lo",
        "route add default dev u0 src 198.51.100.7",
    ];
    let state = find(&unnumbered, &["198.51.100.7"], &[]).unwrap();
    assert_eq!(uplinks(&state), ["u0 198.51.100.7"]);
}

#[test]
fn addresses_of_ipv6_that_do_not_last_are_no_sources() {
    let route = "-6 route add default via 2001:db8:a::fe";
    let first = "addr add 2001:db8:a::1/64 dev u0 nodad preferred_lft 0";
    let v4 = ["link set u0 up", "addr add 192.0.2.1/24 dev u0"];
    let with = |more: &[&str]| {
        let all = [&v4[..], &[first], more, &[route]].concat();
        uplinks(&find(&all, &["192.0.2.1"], &[]).unwrap())
    };
    let lasting = "addr add 2001:db8:a::2/64 dev u0 nodad";
    assert_eq!(with(&[lasting]), ["u0 192.0.2.1 2001:db8:a::2"]);
    // Better than none.
    assert_eq!(with(&[]), ["u0 192.0.2.1 2001:db8:a::1"]);
    // Without a route, and without an address but the link's own.
    let local = "-6 addr add fe80::77/64 dev u0 nodad";
    let no_route = [&v4[..], &[local]].concat();
    let state = find(&no_route, &["192.0.2.1"], &[]).unwrap();
    assert_eq!(uplinks(&state), ["u0 192.0.2.1"]);
    let no_route = [&v4[..], &[lasting]].concat();
    let state = find(&no_route, &["192.0.2.1"], &[]).unwrap();
    assert_eq!(uplinks(&state), ["u0 192.0.2.1 2001:db8:a::2"]);
}

#[test]
fn an_address_that_changed_is_followed() {
    in_fresh(|| {
        ip(&CABLES);
        ip(&BOTH);
        ip(&["route add default via 192.0.2.254"]);
        let now = || uplinks(&find_here(&["198.51.100.1"], &[]).unwrap());
        assert_eq!(now(), ["u1 198.51.100.1", "u0 192.0.2.1"]);
        ip(&[
            "addr del 192.0.2.1/24 dev u0",
            "addr add 192.0.2.77/24 dev u0",
            "route add default via 192.0.2.254",
        ]);
        assert_eq!(now(), ["u1 198.51.100.1", "u0 192.0.2.77"]);
        ip(&["link del u0"]);
        assert_eq!(now(), ["u1 198.51.100.1"]);
    });
}

#[test]
fn links_without_a_header_are_uplinks_and_those_with_a_strange_one_are_told() {
    assert_eq!(header_len(libc::ARPHRD_ETHER), Some(14));
    assert_eq!(header_len(libc::ARPHRD_INFINIBAND), None);
    let tun = [
        "tuntap add tun0 mode tun",
        "link set tun0 up",
        "addr add 203.0.113.1/30 dev tun0",
        "route add default dev tun0",
    ];
    let state = find(&[&BOTH[..], &tun].concat(), &["192.0.2.1"], &[]).unwrap();
    assert_eq!(uplinks(&state), ["u0 192.0.2.1", "tun0 203.0.113.1"]);
    let lengths: Vec<_> = state.uplinks.iter().map(|u| u.header_len).collect();
    assert_eq!(lengths, [Some(14), Some(0)]);

    let mut unreadable = state.uplinks;
    unreadable[1].header_len = None;
    let masquerade = Masquerade {
        v4: true,
        v6: false,
    };
    let told = in_fresh(|| {
        ip(&CABLES);
        ip(&[&BOTH[..], &tun].concat());
        let mut conn = Conn::new().unwrap();
        unreadable[1].index = conn.link_by_name("tun0").unwrap().index;
        unmasqueraded(&unreadable, masquerade, &mut conn).unwrap()
    });
    assert!(
        told.len() == 1 && told[0].text.contains("tun0, whose packets begin"),
        "{told:?}"
    );
    assert!(unreadable[1].record().is_none());
}
