use crate::{MAC_A, MAC_B, ip, net, pair, to_pod};
use ipnet::IpNet;
use sinabro_lab::wait::eventually;
use sinabro_netlink::{
    Conn, Error, Family, NetNs, ResultExt,
    addr::Addr,
    link,
    neigh::Neigh,
    netns::in_fresh,
    route::{Route, RouteFilter, TABLE_MAIN},
    rule::Rule,
};

fn routes_to(conn: &mut Conn, dst: IpNet) -> Vec<Route> {
    let mut routes = conn.routes(&RouteFilter::default()).unwrap();
    routes.retain(|route| route.dst == dst);
    routes
}

#[test]
fn routes_are_added_listed_replaced_and_deleted() {
    for (own, dst, gateway, other) in [
        ("10.0.0.1/24", "10.9.0.0/16", "10.0.0.7", "10.0.0.8"),
        ("fd00::1/64", "fd09::/48", "fd00::7", "fd00::8"),
    ] {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let a = pair(&mut conn);
            let own = net(own);
            conn.execute(Addr::new(a, own).nodad().add()).unwrap();
            let mut route = Route::to(net(dst))
                .via(ip(gateway))
                .dev(a)
                .src(own.addr())
                .protocol(0x5b)
                .metric(77)
                .mtu(1350);
            conn.execute(route.add()).unwrap();
            assert_eq!(routes_to(&mut conn, route.dst), [route.clone()]);
            let error = conn.execute(route.add()).unwrap_err();
            assert!(error.is_exists(), "{error}");
            assert_eq!(conn.execute(route.add()).ignore_exists().unwrap(), None);

            route.gateway = Some(ip(other));
            route.mtu = None;
            conn.execute(route.replace()).unwrap();
            assert_eq!(routes_to(&mut conn, route.dst), [route.clone()]);

            // Another protocol's route is not ours to delete.
            let foreign = route.clone().protocol(libc::RTPROT_STATIC);
            assert!(conn.execute(foreign.delete()).unwrap_err().is_not_found());
            conn.execute(route.delete()).unwrap();
            assert_eq!(routes_to(&mut conn, route.dst), []);
            let error = conn.execute(route.delete()).unwrap_err();
            assert!(error.is_not_found(), "{error}");
            assert!(error.to_string().contains(dst), "{error}");
        });
    }
}

#[test]
fn a_pod_s_onlink_default_routes_work_through_link_local_gateways() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        for (own, gateway, far) in [
            ("10.244.1.5/32", "169.254.1.1", "198.51.100.1"),
            ("fd00::5/128", "fe80::5342:1", "2001:db8::1"),
        ] {
            let own = net(own);
            let family = Family::of(own.addr());
            assert_eq!(conn.default_route(family).unwrap(), None);
            let error = conn.route_get(ip(far)).unwrap_err();
            assert!(matches!(error, Error::Unreachable(_)), "{error}");

            let default = Route::default_of(family).via(ip(gateway)).dev(a).onlink();
            conn.execute_all([
                Addr::new(a, own).nodad().add(),
                Neigh::new(a, ip(gateway), MAC_B).add(),
                default.add(),
            ])
            .unwrap();
            let found = conn.default_route(family).unwrap().unwrap();
            assert_eq!((found.gateway, found.oif), (Some(ip(gateway)), Some(a)));
            assert!(found.onlink);
            let taken = conn.route_get(ip(far)).unwrap();
            assert_eq!(
                (taken.dst, taken.gateway, taken.oif, taken.src),
                (
                    IpNet::from(ip(far)),
                    Some(ip(gateway)),
                    Some(a),
                    Some(own.addr())
                )
            );
            assert_eq!(taken.table, TABLE_MAIN);
        }
    });
}

#[test]
fn a_local_route_makes_an_address_the_host_s_own_until_it_expires() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let address = ip("fd00::5");
        let route = Route::to_host(address).dev(a).local();
        // Replaced as long as both are there: prefix, table and metric are the same.
        conn.execute_all([route.add(), route.clone().lifetime(1).replace()])
            .unwrap();
        assert_eq!(conn.route_get(address).unwrap().kind, libc::RTN_LOCAL);
        eventually("the route to expire", || conn.route_get(address).is_err());
    });
}

#[test]
fn a_delete_need_not_know_the_scope_or_the_gateway() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let host = Route::to_host(ip("10.244.1.5")).dev(a);
        let far = Route::to(net("10.9.0.0/16"));
        conn.execute_all([
            host.clone().scope_link().add(),
            far.clone().via(ip("10.0.0.1")).dev(a).onlink().add(),
        ])
        .unwrap();
        conn.execute_all([host.delete(), far.delete()]).unwrap();
        assert_eq!(routes_to(&mut conn, host.dst), []);
        assert_eq!(routes_to(&mut conn, far.dst), []);
    });
}

#[test]
fn a_look_up_follows_the_rules_and_names_the_table() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let b = conn.link_by_name("b").unwrap().index;
        for far in ["198.51.100.1", "2001:db8::1"] {
            let family = Family::of(ip(far));
            let rule = Rule {
                dst: Some(IpNet::from(ip(far))),
                ..Rule::new(family, 100, 300)
            };
            conn.execute_all([
                Route::default_of(family).dev(a).add(),
                Route::default_of(family).dev(b).table(300).add(),
                rule.add(),
            ])
            .unwrap();
            let taken = conn.route_get(ip(far)).unwrap();
            assert_eq!((taken.table, taken.oif), (300, Some(b)));
        }
    });
}

#[test]
fn an_ipv4_gateway_off_the_link_is_unreachable_without_onlink() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let route = Route::default_of(Family::V4).via(ip("169.254.1.1")).dev(a);
        let error = conn.execute(route.add()).unwrap_err();
        assert!(matches!(error, Error::Unreachable(_)), "{error}");
    });
}

#[test]
fn the_default_route_with_the_lowest_metric_counts() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let b = conn.link_by_name("b").unwrap().index;
        for (family, gateway) in [(Family::V4, "192.0.2.1"), (Family::V6, "fe80::1")] {
            let default = Route::default_of(family).via(ip(gateway)).onlink();
            conn.execute_all([
                default.clone().dev(a).metric(2000).add(),
                default.clone().dev(b).metric(500).add(),
                default.clone().dev(a).metric(1).table(100).add(),
            ])
            .unwrap();
            let found = conn.default_route(family).unwrap().unwrap();
            assert_eq!((found.oif, found.metric), (Some(b), 500));
        }
    });
}

#[test]
fn an_ipv4_route_may_have_an_ipv6_gateway() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let route = Route::to(net("10.9.0.0/16")).via(ip("fe80::1")).dev(a);
        conn.execute(route.add()).unwrap();
        assert_eq!(routes_to(&mut conn, route.dst), [route]);
    });
}

#[test]
fn host_routes_and_large_tables_read_back() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        for address in ["10.244.1.5", "fd00::5"] {
            let mut route = Route::to_host(ip(address))
                .dev(a)
                .protocol(0x5b)
                .table(100_000);
            if address.contains('.') {
                route = route.scope_link();
            }
            conn.execute(route.add()).unwrap();
            let filter = RouteFilter {
                table: Some(100_000),
                ..RouteFilter::default()
            };
            let found = conn.routes(&filter).unwrap();
            let found: Vec<_> = found
                .iter()
                .filter(|found| found.dst == route.dst)
                .collect();
            assert_eq!(found.len(), 1);
            assert_eq!((found[0].oif, found[0].table), (Some(a), 100_000));
            assert_eq!((found[0].scope, found[0].protocol), (route.scope, 0x5b));
            conn.execute(route.delete()).unwrap();
        }
    });
}

#[test]
fn route_filters_hold_back_all_else() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let b = conn.link_by_name("b").unwrap().index;
        let v4 = |third: u8| net(&format!("10.9.{third}.0/24"));
        conn.execute_all([
            Route::to(v4(1)).dev(a).protocol(0x5b).add(),
            Route::to(v4(2)).dev(b).protocol(0x5b).add(),
            Route::to(v4(3)).dev(a).protocol(0x77).add(),
            Route::to(v4(4)).dev(a).protocol(0x5b).table(200).add(),
            Route::to(net("fd09::/64")).dev(a).protocol(0x5b).add(),
        ])
        .unwrap();
        let mut list = |filter: RouteFilter| {
            let mut dsts: Vec<_> = conn
                .routes(&filter)
                .unwrap()
                .into_iter()
                .map(|route| route.dst)
                .collect();
            dsts.sort();
            dsts
        };
        let ours = RouteFilter {
            protocol: Some(0x5b),
            ..RouteFilter::default()
        };
        assert_eq!(list(ours.clone()), [v4(1), v4(2), v4(4), net("fd09::/64")]);
        assert_eq!(
            list(RouteFilter {
                oif: Some(a),
                family: Some(Family::V4),
                ..ours.clone()
            }),
            [v4(1), v4(4)]
        );
        assert_eq!(
            list(RouteFilter {
                table: Some(TABLE_MAIN),
                oif: Some(a),
                ..ours.clone()
            }),
            [v4(1), net("fd09::/64")]
        );
        for family in [None, Some(Family::V4), Some(Family::V6)] {
            assert_eq!(
                list(RouteFilter {
                    family,
                    table: Some(4000),
                    ..ours.clone()
                }),
                []
            );
        }
        let missing = RouteFilter {
            oif: Some(4711),
            ..ours
        };
        assert!(conn.routes(&missing).unwrap_err().is_not_found());
    });
}

#[test]
fn rules_are_added_listed_and_deleted() {
    for (family, src, dst) in [
        (Family::V4, "10.1.0.0/16", "10.2.0.0/16"),
        (Family::V6, "fd01::/48", "fd02::/48"),
    ] {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let rule = Rule {
                src: Some(net(src)),
                dst: Some(net(dst)),
                fwmark: Some((0x100, 0xf00)),
                iif: Some("lo".into()),
                oif: Some("eth7".into()),
                protocol: 0x5b,
                ..Rule::new(family, 500, 100_000)
            };
            let plain = Rule::new(family, 600, 100);
            conn.execute_all([rule.add(), plain.add()]).unwrap();
            let rules = conn.rules(family).unwrap();
            assert!(rules.contains(&rule), "{rules:#?}");
            assert!(rules.contains(&plain), "{rules:#?}");
            assert!(rules.iter().any(|rule| rule.table == TABLE_MAIN));
            let other = if family == Family::V4 {
                Family::V6
            } else {
                Family::V4
            };
            assert!(
                !conn
                    .rules(other)
                    .unwrap()
                    .iter()
                    .any(|rule| rule.priority == 500)
            );

            let error = conn.execute(rule.add()).unwrap_err();
            assert!(error.is_exists(), "{error}");
            conn.execute(rule.delete()).unwrap();
            assert!(!conn.rules(family).unwrap().contains(&rule));
            let error = conn.execute(rule.delete()).unwrap_err();
            assert!(error.is_not_found(), "{error}");
            let named = Rule {
                iif: Some(String::new()),
                ..plain
            };
            assert!(matches!(conn.execute(named.add()), Err(Error::Name { .. })));
        });
    }
}

#[test]
fn a_pod_made_by_this_crate_alone_can_be_reached() {
    in_fresh(|| {
        let mut host = Conn::new().unwrap();
        let pod_netns = NetNs::create().unwrap();
        let link = host.create_veth(&to_pod("snb0", &pod_netns)).unwrap();
        let lo = host.link_by_name("lo").unwrap().index;
        let mut pod = Conn::in_netns(&pod_netns).unwrap();
        let eth0 = link.peer.unwrap();
        let cases = [
            ("10.244.1.5", "169.254.1.1", "10.244.1.1"),
            ("fd00::5", "fe80::5342:1", "fd00::1"),
        ];
        for (address, gateway, node) in cases {
            let family = Family::of(ip(address));
            pod.execute_all([
                link::set_up(eth0),
                Addr::new(eth0, ip(address).into()).nodad().add(),
                Neigh::new(eth0, ip(gateway), MAC_A).add(),
                Route::default_of(family)
                    .via(ip(gateway))
                    .dev(eth0)
                    .onlink()
                    .add(),
            ])
            .unwrap();
            host.execute_all([
                Addr::new(lo, ip(node).into()).nodad().add(),
                Route::to_host(ip(address))
                    .dev(link.index)
                    .scope_link()
                    .protocol(0x5b)
                    .add(),
                Neigh::new(link.index, ip(address), MAC_B).add(),
            ])
            .unwrap();
            let listener = pod_netns
                .run(|| std::net::TcpListener::bind((ip(address), 0)))
                .unwrap()
                .unwrap();
            let server = listener.local_addr().unwrap();
            let client = std::net::TcpStream::connect(server).unwrap();
            assert_eq!(listener.accept().unwrap().1, client.local_addr().unwrap());
            assert_eq!(client.local_addr().unwrap().ip(), ip(node));
        }
    });
}

#[test]
fn one_entry_is_found_as_it_would_be_listed() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        for (wide, host) in [
            ("198.51.100.0/24", "198.51.100.1"),
            ("2001:db8::/64", "2001:db8::1"),
        ] {
            let (wide, host) = (net(wide), ip(host));
            let error = conn.route_entry(host).unwrap_err();
            assert!(matches!(error, Error::Unreachable(_)), "{error}");
            conn.execute(Route::to(wide).dev(a).protocol(0x5b).add())
                .unwrap();
            assert_eq!(conn.route_entry(host).unwrap().dst, wide);
            let route = Route::to_host(host).dev(a).scope_link().protocol(0x5c);
            conn.execute(route.add()).unwrap();
            let listed = routes_to(&mut conn, route.dst);
            assert_eq!(vec![conn.route_entry(host).unwrap()], listed);
            assert_eq!(listed[0].protocol, 0x5c);

            let neigh = Neigh::new(a, host, MAC_B);
            assert_eq!(conn.neigh(a, host).unwrap(), None);
            conn.execute(neigh.add()).unwrap();
            assert_eq!(conn.neigh(a, host).unwrap(), Some(neigh));
        }
        assert_eq!(conn.neigh(4_000_000, ip("198.51.100.1")).unwrap(), None);
    });
}
