use crate::pair;
use sinabro_netlink::netns::in_fresh;
use sinabro_netlink::{Conn, Error, NetNs, bridge, distrust, sysctl};

const FORWARD: [&str; 3] = ["net", "ipv4", "ip_forward"];

#[test]
fn settings_belong_to_the_namespace_of_the_thread() {
    in_fresh(|| {
        let other = NetNs::create().unwrap();
        sysctl::write(&FORWARD, "1").unwrap();
        assert_eq!(sysctl::read(&FORWARD).unwrap(), "1");
        other.run(|| sysctl::write(&FORWARD, "0")).unwrap().unwrap();
        assert_eq!(sysctl::read(&FORWARD).unwrap(), "1");
        assert_eq!(other.run(|| sysctl::read(&FORWARD)).unwrap().unwrap(), "0");
    });
}

#[test]
fn a_setting_is_written_only_if_it_differs() {
    in_fresh(|| {
        sysctl::write(&FORWARD, "0").unwrap();
        assert!(sysctl::ensure(&FORWARD, "1").unwrap());
        assert!(!sysctl::ensure(&FORWARD, "1").unwrap());
        assert_eq!(sysctl::read(&FORWARD).unwrap(), "1");
    });
}

#[test]
fn a_dot_in_a_link_s_name_is_no_separator() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        conn.execute(bridge::create("eth0.100")).unwrap();
        pair(&mut conn);
        let name = ["net", "ipv6", "conf", "eth0.100", "forwarding"];
        sysctl::write(&name, "1").unwrap();
        assert_eq!(sysctl::read(&name).unwrap(), "1");
        let other = ["net", "ipv6", "conf", "a", "forwarding"];
        assert_eq!(sysctl::read(&other).unwrap(), "0");
    });
}

#[test]
fn missing_settings_and_bad_values_are_told_apart() {
    in_fresh(|| {
        let missing = ["net", "ipv4", "conf", "nothere", "forwarding"];
        assert!(sysctl::read(&missing).unwrap_err().is_not_found());
        let error = sysctl::write(&missing, "1").unwrap_err();
        assert!(error.is_not_found(), "{error}");
        assert!(
            error
                .to_string()
                .contains("net/ipv4/conf/nothere/forwarding"),
            "{error}"
        );
        let error = sysctl::write(&FORWARD, "perhaps").unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    });
}

#[test]
fn names_cannot_leave_their_directory() {
    for name in [
        &[][..],
        &["net", ""],
        &["net", ".."],
        &["net", ".", "ipv4"],
        &["net", "../../sysrq-trigger"],
        &["net", "a\0b"],
    ] {
        let error = sysctl::read(name).unwrap_err();
        assert!(matches!(error, Error::Sysctl { .. }), "{error}");
        let error = sysctl::write(name, "1").unwrap_err();
        assert!(matches!(error, Error::Sysctl { .. }), "{error}");
    }
}

#[test]
fn no_router_is_heard_on_a_link_that_is_not_trusted() {
    in_fresh(|| {
        sysctl::write(&["net", "ipv6", "conf", "default", "accept_ra"], "2").unwrap();
        let mut conn = Conn::new().unwrap();
        let index = pair(&mut conn);
        let value = |family: &str, setting: &str| {
            sysctl::read(&["net", family, "conf", "a", setting]).unwrap()
        };
        assert_eq!(value("ipv6", "accept_ra"), "2");
        let settings = [
            ("ipv4", "accept_redirects"),
            ("ipv4", "secure_redirects"),
            ("ipv4", "send_redirects"),
            ("ipv4", "accept_source_route"),
            ("ipv6", "accept_ra"),
            ("ipv6", "accept_redirects"),
            ("ipv6", "autoconf"),
        ];
        distrust::distrust(&mut conn, index, "a").unwrap();
        for (family, setting) in settings {
            assert_eq!(value(family, setting), "0", "{setting}");
        }
        assert_eq!(distrust::repair("a").unwrap(), Vec::<String>::new());
        // The other side is the pod's.
        assert_eq!(
            sysctl::read(&["net", "ipv6", "conf", "b", "accept_ra"]).unwrap(),
            "2"
        );
        for (family, setting) in settings {
            sysctl::write(&["net", family, "conf", "a", setting], "1").unwrap();
        }
        assert_eq!(distrust::repair("a").unwrap().len(), settings.len());
        assert_eq!(distrust::repair("a").unwrap(), Vec::<String>::new());
    });
}
