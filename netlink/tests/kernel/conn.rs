use crate::pair;
use sinabro_netlink::addr::Addr;
use sinabro_netlink::netns::in_fresh;
use sinabro_netlink::route::{Route, RouteFilter};
use sinabro_netlink::{Conn, Error, Family, NetNs, Request, link};

fn route(number: u32, oif: u32) -> Route {
    let octets = (0x0a00_0000 + (number << 8)).to_be_bytes();
    Route::to(ipnet::IpNet::new_assert(octets.into(), 24))
        .dev(oif)
        .protocol(0x5b)
}

#[test]
fn a_batch_reports_the_first_request_that_failed_and_does_the_others() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let error = conn
            .execute_all([
                route(1, a).add(),
                route(2, 4711).add(),
                route(1, a).add(),
                route(3, a).add(),
            ])
            .unwrap_err();
        assert!(error.is_not_found(), "{error}");
        assert_eq!(
            error.refusal().unwrap().what,
            "add route 10.0.2.0/24 dev #4711"
        );
        let ours = RouteFilter {
            protocol: Some(0x5b),
            ..RouteFilter::default()
        };
        assert_eq!(conn.routes(&ours).unwrap().len(), 2);
    });
}

#[test]
fn each_request_of_a_batch_has_its_own_outcome() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let outcomes = conn.execute_each([
            route(1, a).add(),
            link::set_name(a, "much too long a name"),
            route(1, a).add(),
            route(9, a).delete(),
            link::set_mtu(a, 1400),
        ]);
        assert!(
            matches!(
                &outcomes[..],
                [
                    Ok(()),
                    Err(Error::Name { .. }),
                    Err(Error::Exists(_)),
                    Err(Error::NotFound(_)),
                    Ok(())
                ]
            ),
            "{outcomes:?}"
        );
        assert_eq!(conn.link_by_index(a).unwrap().mtu, 1400);
    });
}

#[test]
fn an_empty_batch_is_done_at_once() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        conn.execute_all(std::iter::empty::<Request>()).unwrap();
        assert!(conn.execute_each([]).is_empty());
    });
}

#[test]
fn thousands_of_requests_and_a_dump_of_their_outcome() {
    const COUNT: u32 = 3000;
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        conn.execute_all((0..COUNT).map(|number| route(number, a).add()))
            .unwrap();
        let ours = RouteFilter {
            protocol: Some(0x5b),
            ..RouteFilter::default()
        };
        let mut found = conn.routes(&ours).unwrap();
        found.sort_by_key(|route| route.dst);
        let expected: Vec<_> = (0..COUNT).map(|number| route(number, a)).collect();
        assert!(found == expected, "{} found", found.len());

        // All fail: the answers are longest, and all must come.
        let outcomes = conn.execute_each((0..COUNT).map(|number| route(number, a).add()));
        assert_eq!(outcomes.len(), COUNT as usize);
        assert!(
            outcomes
                .iter()
                .all(|outcome| matches!(outcome, Err(Error::Exists(_))))
        );
        let delete = (0..COUNT).map(|number| route(number, a).delete());
        conn.execute_all(delete).unwrap();
        assert_eq!(conn.routes(&ours).unwrap(), []);
    });
}

#[test]
fn dumps_stay_whole_while_the_tables_change() {
    in_fresh(|| {
        let netns = NetNs::current().unwrap();
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let b = conn.link_by_name("b").unwrap().index;
        conn.execute_all((0..1000).map(|number| route(number, a).add()))
            .unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let churn = scope.spawn(|| {
                let mut conn = Conn::in_netns(&netns).unwrap();
                let mut rounds = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    conn.execute_all((2000..2010).map(|number| route(number, b).add()))
                        .unwrap();
                    conn.execute_all((2000..2010).map(|number| route(number, b).delete()))
                        .unwrap();
                    rounds += 1;
                }
                rounds
            });
            let on_a = RouteFilter {
                oif: Some(a),
                family: Some(Family::V4),
                protocol: Some(0x5b),
                ..RouteFilter::default()
            };
            for _ in 0..20 {
                match conn.routes(&on_a) {
                    Ok(found) => assert_eq!(found.len(), 1000),
                    Err(error) => assert!(matches!(error, Error::Interrupted { .. }), "{error}"),
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(churn.join().unwrap() > 0);
        });
        // The connection is still in step.
        assert_eq!(conn.link_by_index(a).unwrap().name, "a");
    });
}

#[test]
fn a_refused_dump_leaves_the_connection_usable() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let missing = RouteFilter {
            oif: Some(4711),
            ..RouteFilter::default()
        };
        for _ in 0..3 {
            assert!(conn.routes(&missing).unwrap_err().is_not_found());
            conn.link_by_name("lo").unwrap();
            assert!(!conn.links().unwrap().is_empty());
        }
    });
}

#[test]
fn eight_connections_work_at_once() {
    in_fresh(|| {
        let netns = NetNs::current().unwrap();
        let a = pair(&mut Conn::new().unwrap());
        std::thread::scope(|scope| {
            for worker in 0..8 {
                let netns = &netns;
                scope.spawn(move || {
                    let mut conn = Conn::in_netns(netns).unwrap();
                    for round in 0..50 {
                        let own = route(worker * 1000 + round, a);
                        conn.execute(own.add()).unwrap();
                        assert!(conn.execute(own.add()).unwrap_err().is_exists());
                        assert_eq!(conn.link_by_name("a").unwrap().index, a);
                    }
                });
            }
        });
        let ours = RouteFilter {
            protocol: Some(0x5b),
            ..RouteFilter::default()
        };
        assert_eq!(Conn::new().unwrap().routes(&ours).unwrap().len(), 400);
    });
}

#[test]
fn a_connection_stays_in_the_namespace_it_was_opened_in() {
    in_fresh(|| {
        let here = NetNs::current().unwrap();
        let other = NetNs::create().unwrap();
        let mut there = Conn::in_netns(&other).unwrap();
        assert!(!there.link_by_name("lo").unwrap().up);
        // Used from a third namespace's thread it still is the same.
        in_fresh(|| {
            let lo = there.link_by_name("lo").unwrap().index;
            there
                .execute(Addr::new(lo, "10.0.0.1/32".parse().unwrap()).add())
                .unwrap();
        });
        assert_eq!(there.addrs(None).unwrap().len(), 1);
        let mut conn = Conn::in_netns(&here).unwrap();
        assert!(conn.link_by_name("lo").unwrap().up);
    });
}
