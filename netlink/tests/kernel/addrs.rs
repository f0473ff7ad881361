use crate::{net, pair};
use sinabro_netlink::{Conn, Error, addr::Addr, netns::in_fresh, sysctl};

#[test]
fn addresses_are_added_listed_and_deleted() {
    for address in ["10.1.0.5/24", "10.1.0.5/32", "fd00::5/64", "fd00::5/128"] {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let a = pair(&mut conn);
            let addr = Addr::new(a, net(address)).nodad();
            conn.execute(addr.add()).unwrap();
            let found = conn.addrs(Some(a)).unwrap();
            let found: Vec<_> = found.iter().filter(|found| found.net == addr.net).collect();
            assert_eq!(found.len(), 1, "{address}");
            assert_eq!(found[0].link, a);
            assert!(!found[0].is_tentative(), "NODAD was given");

            let error = conn.execute(addr.add()).unwrap_err();
            assert!(error.is_exists(), "{error}");
            conn.execute(addr.replace()).unwrap();
            conn.execute(addr.delete()).unwrap();
            assert!(
                conn.addrs(Some(a))
                    .unwrap()
                    .iter()
                    .all(|found| found.net != addr.net)
            );
            let error = conn.execute(addr.delete()).unwrap_err();
            assert!(error.is_not_found(), "{error}");
        });
    }
}

#[test]
fn without_nodad_an_ipv6_address_is_tentative_at_first() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        // Longer than any test: the state can be seen at leisure.
        sysctl::write(&["net", "ipv6", "conf", "a", "dad_transmits"], "100").unwrap();
        let addr = Addr::new(a, net("fd00::5/64"));
        conn.execute(addr.add()).unwrap();
        let found = conn.addrs(Some(a)).unwrap();
        let found = found.iter().find(|found| found.net == addr.net).unwrap();
        assert!(found.is_tentative());
    });
}

#[test]
fn scope_and_link_of_an_address_are_kept_apart() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let b = conn.link_by_name("b").unwrap().index;
        conn.execute_all([
            Addr::new(a, net("10.0.0.1/32"))
                .scope(libc::RT_SCOPE_LINK)
                .add(),
            Addr::new(b, net("10.0.0.2/32")).add(),
        ])
        .unwrap();
        let on_a = conn.addrs(Some(a)).unwrap();
        let v4: Vec<_> = on_a
            .iter()
            .filter(|addr| addr.net.addr().is_ipv4())
            .collect();
        assert_eq!(v4.len(), 1);
        assert_eq!(
            (v4[0].net, v4[0].scope),
            (net("10.0.0.1/32"), libc::RT_SCOPE_LINK)
        );
        let all = conn.addrs(None).unwrap();
        for address in ["10.0.0.1/32", "10.0.0.2/32", "127.0.0.1/8", "::1/128"] {
            assert!(all.iter().any(|addr| addr.net == net(address)), "{address}");
        }
    });
}

#[test]
fn an_address_on_a_missing_link_is_not_found() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        for address in ["10.0.0.1/32", "fd00::1/128"] {
            let error = conn
                .execute(Addr::new(4711, net(address)).add())
                .unwrap_err();
            assert!(error.is_not_found(), "{error}");
        }
    });
}

#[test]
fn an_ipv6_address_where_ipv6_is_off_is_refused() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        sysctl::write(&["net", "ipv6", "conf", "a", "disable_ipv6"], "1").unwrap();
        let error = conn
            .execute(Addr::new(a, net("fd00::1/64")).add())
            .unwrap_err();
        assert!(matches!(error, Error::Permission(_)), "{error}");
    });
}
