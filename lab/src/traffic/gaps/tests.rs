//! The meter catches what it is for: a blackout of 50 ms, with loss and without.
#![allow(clippy::unwrap_used)]

use super::*;
use std::net::IpAddr;

/// Two namespaces whose links meet in a third, which forwards.
struct Bridge {
    middle: NetNs,
    path: Path,
}

impl Bridge {
    fn new() -> Self {
        let middle = NetNs::create().expect("needs root: run `cargo xtask test`");
        let ends = [1, 2].map(|number: u8| {
            let end = NetNs::create().unwrap();
            let mut conn = Conn::in_netns(&middle).unwrap();
            if conn.link_by_name("br0").is_err() {
                conn.execute(sinabro_netlink::bridge::create("br0"))
                    .unwrap();
            }
            let bridge = conn.link_by_name("br0").unwrap().index;
            let port = conn.create_veth(&Veth {
                name: &format!("port{number}"),
                mac: [2, 0x1a, 0xb0, 0, 3, number],
                mtu: 1500,
                peer_name: "eth0",
                peer_mac: [2, 0x1a, 0xb0, 0, 4, number],
                peer_netns: Some(&end),
            });
            let port = port.unwrap().index;
            conn.execute(link::set_master(port, Some(bridge))).unwrap();
            let mut conn = Conn::in_netns(&end).unwrap();
            let eth0 = conn.link_by_name("eth0").unwrap().index;
            let address = format!("198.18.1.{number}/24").parse().unwrap();
            conn.execute_all([link::set_up(eth0), Addr::new(eth0, address).add()])
                .unwrap();
            Place::new(&format!("end{number}"), end)
        });
        let to: IpAddr = "198.18.1.2".parse().unwrap();
        Self {
            middle,
            path: Path::new("over a bridge", &ends[0], &ends[1], to),
        }
    }

    fn set(&self, up: bool) {
        let mut conn = Conn::in_netns(&self.middle).unwrap();
        let port = conn.link_by_name("port2").unwrap().index;
        let request = match up {
            true => link::set_master(port, Some(conn.link_by_name("br0").unwrap().index)),
            false => link::set_master(port, None),
        };
        conn.execute(request).unwrap();
    }
}

fn watch(during: impl FnOnce(&Bridge)) -> Watched {
    let bridge = Bridge::new();
    let meter = Meter::start(std::slice::from_ref(&bridge.path)).unwrap();
    meter.watch(Duration::from_millis(500));
    meter.event("the test began").unwrap();
    during(&bridge);
    meter.watch(Duration::from_millis(300));
    let watched = meter.finish().unwrap();
    for line in watched.table() {
        println!("{line}");
    }
    watched
}

#[test]
fn undisturbed_traffic_has_no_gap() {
    let told = watch(|_| ()).must_hold().unwrap();
    assert!(told.starts_with("0 of "), "{told}");
}

#[test]
fn a_blackout_of_50_ms_is_seen() {
    let watched = watch(|bridge| {
        bridge.set(false);
        thread::sleep(Duration::from_millis(50));
        bridge.set(true);
    });
    let error = format!("{:#}", watched.must_hold().unwrap_err());
    assert!(error.contains("were lost"), "{error}");
    assert!(error.contains("ms after the test began"), "{error}");
    // TCP loses nothing; it must be late.
    let requests = &watched.table()[1];
    assert!(requests.starts_with("TCP, over a bridge"), "{requests}");
    assert!(requests.contains(" 0 lost"), "{requests}");
    assert!(watched.gap("TCP, over a bridge") >= Duration::from_millis(50));
}

#[test]
fn a_stopped_meter_is_not_taken_for_an_outage() {
    assert!(
        Meter::start(&[])
            .unwrap()
            .finish()
            .unwrap()
            .must_hold()
            .is_err()
    );
}
