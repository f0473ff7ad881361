use crate::{MAC_A, MAC_B, pair, to_pod, vxlan};
use sinabro_lab::wait::eventually;
use sinabro_netlink::link::{self, check_name};
use sinabro_netlink::netns::in_fresh;
use sinabro_netlink::veth::Veth;
use sinabro_netlink::vxlan::{Vxlan, VxlanSettings};
use sinabro_netlink::{Conn, Error, NetNs, Request, ResultExt, bridge};
use std::net::IpAddr;

#[test]
fn a_link_is_seen_by_its_whole_name() {
    in_fresh(|| {
        assert!(link::is_here("lo").unwrap());
        pair(&mut Conn::new().unwrap());
        let links = Conn::new().unwrap().links().unwrap();
        assert!(links.len() >= 3, "{links:?}");
        for found in links {
            assert!(link::is_here(&found.name).unwrap(), "{found:?}");
            assert!(!link::is_here(&format!("{}x", found.name)).unwrap());
            assert!(!link::is_here(&found.name[1..]).unwrap());
        }
        assert!(!link::is_here("").unwrap());
    });
}

#[test]
fn a_veth_is_made_whole_by_one_request_with_its_peer_in_another_namespace() {
    in_fresh(|| {
        let mut host = Conn::new().unwrap();
        let pod_netns = NetNs::create().unwrap();
        let link = host
            .create_veth(&to_pod("snb0123456789ab", &pod_netns))
            .unwrap();
        assert_eq!(link.name, "snb0123456789ab");
        assert_eq!((link.mac, link.mtu), (Some(MAC_A), 1400));
        assert!(link.up && link.peer_netns.is_some() && !link.loopback && !link.operational);
        assert_eq!(link.kind.as_deref(), Some("veth"));
        assert_eq!(host.link_by_index(link.index).unwrap(), link);

        let mut pod = Conn::in_netns(&pod_netns).unwrap();
        let peer = pod.link_by_name("eth0").unwrap();
        assert_eq!(Some(peer.index), link.peer);
        assert_eq!((peer.mac, peer.mtu), (Some(MAC_B), 1400));
        pod.execute(link::set_up(peer.index)).unwrap();
        assert!(pod.link_by_name("eth0").unwrap().carrier);
        assert!(host.link_by_index(link.index).unwrap().carrier);
        // At once from Linux 6.8 on, a little later before that.
        eventually("the link's queue to be set to work", || {
            host.link_by_index(link.index).unwrap().operational
        });
        assert!(host.link_by_name("eth0").unwrap_err().is_not_found());

        host.execute(link::delete(link.index)).unwrap();
        assert!(pod.link_by_name("eth0").unwrap_err().is_not_found());
    });
}

#[test]
fn a_second_veth_of_the_same_name_exists_and_the_first_is_untouched() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let first = pair(&mut conn);
        let again = Veth {
            name: "a",
            mac: MAC_B,
            mtu: 1300,
            peer_name: "c",
            peer_mac: MAC_B,
            peer_netns: None,
        };
        let error = conn.create_veth(&again).unwrap_err();
        assert!(matches!(error, Error::Exists(_)), "{error}");
        assert!(error.to_string().starts_with("create veth a with peer c: "));
        let a = conn.link_by_name("a").unwrap();
        assert_eq!((a.index, a.mtu), (first, 1500));
        assert!(conn.link_by_name("c").unwrap_err().is_not_found());
    });
}

#[test]
fn a_peer_name_that_is_taken_leaves_no_half_pair() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let pod_netns = NetNs::create().unwrap();
        conn.create_veth(&to_pod("one", &pod_netns)).unwrap();
        let error = conn.create_veth(&to_pod("two", &pod_netns)).unwrap_err();
        assert!(error.is_exists(), "{error}");
        assert!(conn.link_by_name("two").unwrap_err().is_not_found());
    });
}

#[test]
fn a_request_keeps_the_namespace_it_names_open() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let pod_netns = NetNs::create().unwrap();
        let mut pod = Conn::in_netns(&pod_netns).unwrap();
        let request = to_pod("a", &pod_netns).create();
        drop(pod_netns);
        // Would take the freed descriptor number.
        let _other = NetNs::create().unwrap();
        conn.execute(request).unwrap();
        pod.link_by_name("eth0").unwrap();
    });
}

#[test]
fn links_change_in_every_way_that_is_offered() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);

        conn.execute(link::set_down(a)).unwrap();
        assert!(!conn.link_by_index(a).unwrap().up);
        let mac = [0x02, 1, 2, 3, 4, 5];
        conn.execute_all([
            link::set_name(a, "renamed"),
            link::set_mac(a, mac),
            link::set_mtu(a, 1280),
            link::set_alias(a, "default/web-0"),
            link::set_up(a),
        ])
        .unwrap();
        let link = conn.link_by_name("renamed").unwrap();
        assert_eq!((link.index, link.mac, link.mtu), (a, Some(mac), 1280));
        assert_eq!(link.alias.as_deref(), Some("default/web-0"));
        assert!(link.up);

        conn.execute(link::set_alias(a, "")).unwrap();
        assert_eq!(conn.link_by_index(a).unwrap().alias, None);

        let elsewhere = NetNs::create().unwrap();
        conn.execute(link::set_netns(a, &elsewhere)).unwrap();
        assert!(conn.link_by_name("renamed").unwrap_err().is_not_found());
        let mut other = Conn::in_netns(&elsewhere).unwrap();
        other.link_by_name("renamed").unwrap();
        other.execute(link::delete_by_name("renamed")).unwrap();
        assert!(conn.link_by_name("b").unwrap_err().is_not_found());
    });
}

#[test]
fn a_group_is_deleted_as_a_whole_and_nothing_else() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        pair(&mut conn);
        for name in ["br1", "br2", "br3"] {
            conn.execute(bridge::create(name)).unwrap();
        }
        let mut doomed = |name| {
            let index = conn.link_by_name(name).unwrap().index;
            conn.execute(link::set_group(index, 0x5b)).unwrap();
        };
        doomed("br1");
        doomed("br3");
        conn.execute(link::delete_group(0x5b)).unwrap();
        let names: Vec<_> = conn
            .links()
            .unwrap()
            .into_iter()
            .map(|link| link.name)
            .collect();
        assert!(
            names.iter().all(|name| name != "br1" && name != "br3"),
            "{names:?}"
        );
        for name in ["a", "b", "br2", "lo"] {
            assert!(names.iter().any(|found| found == name), "{names:?}");
        }
        let error = conn.execute(link::delete_group(0x5b)).unwrap_err();
        assert!(error.is_not_found(), "{error}");
        let error = conn.execute(link::delete_group(0)).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        conn.link_by_name("br2").unwrap();
    });
}

#[test]
fn links_go_under_a_bridge_and_out_again() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        conn.execute(bridge::create("br0")).unwrap();
        let br0 = conn.link_by_name("br0").unwrap();
        assert_eq!(br0.kind.as_deref(), Some("bridge"));
        assert!(br0.up);
        conn.execute(link::set_master(a, Some(br0.index))).unwrap();
        assert_eq!(conn.link_by_index(a).unwrap().master, Some(br0.index));
        conn.execute(link::set_master(a, None)).unwrap();
        assert_eq!(conn.link_by_index(a).unwrap().master, None);
        assert!(conn.execute(bridge::create("br0")).unwrap_err().is_exists());
    });
}

#[test]
fn a_vxlan_device_reads_back_as_it_was_made() {
    for (local, device, zero_checksum6) in [
        ("192.0.2.1", false, false),
        ("192.0.2.1", true, false),
        ("2001:db8::1", false, false),
        ("2001:db8::1", false, true),
        ("2001:db8::1", true, true),
    ] {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let lower = pair(&mut conn);
            let local: IpAddr = local.parse().unwrap();
            let settings = VxlanSettings {
                device: device.then_some(lower),
                ttl: 64,
                zero_checksum6,
                ..VxlanSettings::new(77, 8472, local)
            };
            let vxlan = Vxlan {
                name: "vx",
                mac: MAC_B,
                mtu: 1400,
                settings: settings.clone(),
            };
            conn.execute(vxlan.create()).unwrap();
            let link = conn.link_by_name("vx").unwrap();
            assert_eq!(link.vxlan.as_ref(), Some(&settings));
            assert_eq!((link.mac, link.mtu), (Some(MAC_B), 1400));
            assert_eq!(link.kind.as_deref(), Some("vxlan"));
            assert!(!link.up);
            conn.execute(link::set_up(link.index)).unwrap();
            assert!(conn.link_by_name("vx").unwrap().up);

            // Another with the same VNI and port cannot be.
            let twin = Vxlan {
                name: "vx2",
                ..vxlan.clone()
            };
            assert!(conn.execute(twin.create()).unwrap_err().is_exists());
        });
    }
}

#[test]
fn learning_and_the_kernel_s_ttl_read_back_too() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let settings = VxlanSettings {
            learning: true,
            ..VxlanSettings::new(1, 4789, "192.0.2.1".parse().unwrap())
        };
        let vxlan = Vxlan {
            name: "vx",
            mac: MAC_A,
            mtu: 1450,
            settings: settings.clone(),
        };
        conn.execute(vxlan.create()).unwrap();
        assert_eq!(conn.link_by_name("vx").unwrap().vxlan, Some(settings));
    });
}

#[test]
fn a_taken_udp_port_is_busy() {
    in_fresh(|| {
        let _taken = std::net::UdpSocket::bind("0.0.0.0:8472").unwrap();
        let mut conn = Conn::new().unwrap();
        // It opens its socket only when it is raised.
        vxlan(&mut conn, "127.0.0.1");
        let raised = conn.execute(link::set_up_by_name("vx"));
        let error = raised.unwrap_err();
        assert!(matches!(error, Error::Busy(_)), "{error}");
        assert!(!conn.link_by_name("vx").unwrap().up);
    });
}

#[test]
fn all_links_are_listed() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        pair(&mut conn);
        // Both must have come to rest, or they change between the two looks at them below.
        for name in ["a", "b"] {
            eventually("a link to be set to work", || {
                conn.link_by_name(name).unwrap().operational
            });
        }
        let links = conn.links().unwrap();
        let mut names: Vec<_> = links.iter().map(|link| link.name.as_str()).collect();
        names.sort_unstable();
        // Kernels with tunnel drivers built in add their fallback devices.
        for name in ["a", "b", "lo"] {
            assert!(names.contains(&name), "{names:?}");
        }
        let lo = links.iter().find(|link| link.name == "lo").unwrap();
        assert!(lo.loopback && lo.up && lo.kind.is_none() && lo.peer.is_none());
        for link in &links {
            assert_eq!(&conn.link_by_index(link.index).unwrap(), link);
        }
    });
}

#[test]
fn missing_links_are_not_found() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        for request in [
            link::set_up(4711),
            link::set_mtu(4711, 1400),
            link::delete(4711),
            link::delete_by_name("nothere"),
        ] {
            let what = request.what().to_string();
            let error = conn.execute(request).unwrap_err();
            assert!(error.is_not_found(), "{what}: {error}");
            assert!(error.to_string().starts_with(&what), "{error}");
        }
        let gone = conn.execute(link::delete_by_name("nothere"));
        assert_eq!(gone.ignore_not_found().unwrap(), None);
    });
}

#[test]
fn an_mtu_out_of_range_is_invalid_and_the_kernel_says_why() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let error = conn.execute(link::set_mtu(a, 1)).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        let message = error.refusal().unwrap().message.as_deref();
        assert!(message.is_some_and(|text| !text.is_empty()), "{error:?}");
    });
}

#[test]
fn names_that_no_kernel_takes_are_refused_before_it_is_asked() {
    let long = "abcdefghijklmnop";
    for (name, reason) in [
        ("", "empty"),
        (long, "longer than 15 bytes"),
        ("a/b", "slash"),
        ("a b", "white space"),
        ("a:b", "colon"),
        ("eth%d", "percent"),
        ("..", "not allowed"),
        ("a\u{a0}", "white space"),
    ] {
        let error = check_name(name).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
    check_name(&long[..15]).unwrap();

    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        let veth = Veth {
            name: "ok",
            mac: MAC_A,
            mtu: 1500,
            peer_name: long,
            peer_mac: MAC_B,
            peer_netns: None,
        };
        let settings = VxlanSettings::new(1, 8472, "192.0.2.1".parse().unwrap());
        let requests: [Request; 5] = [
            veth.create(),
            Vxlan {
                name: long,
                mac: MAC_A,
                mtu: 1500,
                settings,
            }
            .create(),
            bridge::create(""),
            link::set_name(a, "eth%d"),
            link::delete_by_name(long),
        ];
        for request in requests {
            let error = conn.execute(request).unwrap_err();
            assert!(matches!(error, Error::Name { .. }), "{error}");
        }
        assert!(matches!(conn.link_by_name(long), Err(Error::Name { .. })));
        assert!(matches!(conn.create_veth(&veth), Err(Error::Name { .. })));
        assert!(conn.link_by_name("ok").unwrap_err().is_not_found());
    });
}
