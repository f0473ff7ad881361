use crate::{MAC_A, MAC_B, ip, pair, vxlan};
use sinabro_netlink::{
    Conn,
    fdb::Fdb,
    neigh::Neigh,
    netns::in_fresh,
    vxlan::{Vxlan, VxlanSettings},
};

#[test]
fn neighbours_are_added_listed_replaced_and_deleted() {
    for (address, unused) in [("169.254.1.1", "10.98.0.1"), ("fe80::5342:1", "fe80::98")] {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let a = pair(&mut conn);
            let b = conn.link_by_name("b").unwrap().index;
            let neigh = Neigh::new(a, ip(address), MAC_B);
            conn.execute_all([neigh.add(), Neigh::new(b, ip(address), MAC_B).add()])
                .unwrap();
            let ours = |conn: &mut Conn| {
                let mut found = conn.neighs(a).unwrap();
                found.retain(|found| found.address == ip(address));
                found
            };
            assert_eq!(ours(&mut conn), std::slice::from_ref(&neigh));
            assert!(neigh.is_permanent());
            assert!(conn.execute(neigh.add()).unwrap_err().is_exists());

            let moved = Neigh::new(a, ip(address), MAC_A);
            conn.execute(moved.replace()).unwrap();
            assert_eq!(ours(&mut conn), std::slice::from_ref(&moved));
            conn.execute(moved.delete()).unwrap();
            assert!(ours(&mut conn).iter().all(|found| !found.is_permanent()));
            let missing = Neigh::new(a, ip(unused), MAC_A);
            let error = conn.execute(missing.delete()).unwrap_err();
            assert!(error.is_not_found(), "{error}");
            let nowhere = Neigh::new(4711, ip(address), MAC_A);
            assert!(conn.execute(nowhere.add()).unwrap_err().is_not_found());
        });
    }
}

#[test]
fn who_is_asked_for_is_not_known_before_he_answers() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        for address in ["192.0.2.7", "2001:db8::7"].map(ip) {
            assert_eq!(conn.neigh(a, address).unwrap(), None);
            conn.execute(Neigh::ask(a, address)).unwrap();
            let asked_for = conn.neigh(a, address).unwrap().unwrap();
            assert!(!asked_for.is_valid(), "{asked_for:?}");
            conn.execute(Neigh::new(a, address, MAC_B).replace())
                .unwrap();
            assert!(conn.neigh(a, address).unwrap().unwrap().is_valid());
        }
    });
}

#[test]
fn forwarding_entries_are_added_listed_replaced_and_deleted() {
    for (local, first, second) in [
        ("192.0.2.1", "192.0.2.2", "192.0.2.3"),
        ("2001:db8::1", "2001:db8::2", "2001:db8::3"),
    ] {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let vx = vxlan(&mut conn, local);
            assert_eq!(conn.fdb(vx).unwrap(), []);

            let entry = Fdb {
                link: vx,
                mac: MAC_B,
                dst: ip(first),
            };
            conn.execute(entry.add()).unwrap();
            assert_eq!(conn.fdb(vx).unwrap(), std::slice::from_ref(&entry));
            assert!(conn.execute(entry.add()).unwrap_err().is_exists());

            let moved = Fdb {
                dst: ip(second),
                ..entry
            };
            conn.execute(moved.replace()).unwrap();
            assert_eq!(conn.fdb(vx).unwrap(), std::slice::from_ref(&moved));
            conn.execute(moved.delete()).unwrap();
            assert_eq!(conn.fdb(vx).unwrap(), []);
            let error = conn.execute(moved.delete()).unwrap_err();
            assert!(error.is_not_found(), "{error}");

            let flood = |dst| Fdb {
                link: vx,
                mac: [0; 6],
                dst: ip(dst),
            };
            conn.execute_all([flood(first).append(), flood(second).append()])
                .unwrap();
            let mut found = conn.fdb(vx).unwrap();
            found.sort_by_key(|entry| entry.dst);
            assert_eq!(found, [flood(first), flood(second)]);
        });
    }
}

#[test]
fn forwarding_entries_of_another_device_stay_out_of_the_list() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let mut device = |name, vni| {
            let settings = VxlanSettings::new(vni, 8472, ip("192.0.2.1"));
            let vxlan = Vxlan {
                name,
                mac: MAC_A,
                mtu: 1400,
                settings,
            };
            conn.execute(vxlan.create()).unwrap();
            conn.link_by_name(name).unwrap().index
        };
        let (one, two) = (device("vx1", 1), device("vx2", 2));
        let entry = Fdb {
            link: one,
            mac: MAC_B,
            dst: ip("192.0.2.2"),
        };
        conn.execute(entry.add()).unwrap();
        assert_eq!(conn.fdb(one).unwrap(), [entry]);
        assert_eq!(conn.fdb(two).unwrap(), []);
    });
}
