use crate::{MAC_B, pair, vxlan};
use sinabro_netlink::addr::Addr;
use sinabro_netlink::fdb::Fdb;
use sinabro_netlink::neigh::Neigh;
use sinabro_netlink::netns::in_fresh;
use sinabro_netlink::route::Route;
use sinabro_netlink::{Conn, Event, Monitor, NetNs, bridge, link};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// A monitor with the events that no test has asked for yet.
struct Watch {
    monitor: Monitor,
    ahead: VecDeque<Event>,
}

impl Watch {
    fn new(monitor: Monitor) -> Watch {
        Watch {
            monitor,
            ahead: VecDeque::new(),
        }
    }

    /// Reads up to the first event that is the one looked for.
    fn until(&mut self, wanted: impl Fn(&Event) -> bool) {
        let mut passed = Vec::new();
        loop {
            while let Some(event) = self.ahead.pop_front() {
                if wanted(&event) {
                    return;
                }
                passed.push(event);
            }
            self.ahead
                .extend(self.monitor.wait(Duration::from_secs(10)).unwrap());
            assert!(!self.ahead.is_empty(), "only saw {passed:#?}");
        }
    }
}

#[test]
fn every_kind_of_change_is_seen_coming_and_going() {
    in_fresh(|| {
        let mut watch = Watch::new(Monitor::new().unwrap());
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        watch.until(|event| {
            matches!(event, Event::Link { index, name, up: true, removed: false }
                if *index == a && name == "a")
        });
        for (own, dst, gateway) in [
            ("10.0.0.1/24", "10.9.0.0/16", "10.0.0.7"),
            ("fd00::1/64", "fd09::/48", "fd00::7"),
        ] {
            let addr = Addr::new(a, own.parse().unwrap()).nodad();
            let neigh = Neigh::new(a, gateway.parse().unwrap(), MAC_B);
            let route = Route::to(dst.parse().unwrap())
                .via(neigh.address)
                .dev(a)
                .protocol(0x5b)
                .table(300);
            for (request, removed) in [(addr.add(), false), (addr.delete(), true)] {
                conn.execute(request).unwrap();
                let address = addr.net.addr();
                watch.until(|event| {
                    *event
                        == Event::Addr {
                            link: a,
                            address,
                            removed,
                        }
                });
            }
            conn.execute(addr.add()).unwrap();
            for (request, removed) in [(neigh.add(), false), (neigh.delete(), true)] {
                conn.execute(request).unwrap();
                // What is taken away is shown without its MAC address.
                watch.until(|event| match event {
                    Event::Neigh { neigh: shown, .. } if removed => shown.address == neigh.address,
                    event => {
                        let neigh = neigh.clone();
                        *event == Event::Neigh { neigh, removed }
                    }
                });
            }
            for (request, removed) in [(route.add(), false), (route.delete(), true)] {
                conn.execute(request).unwrap();
                watch.until(|event| match event {
                    Event::Route {
                        route: shown,
                        removed: gone,
                    } => {
                        let key = |r: &Route| (r.dst, r.gateway, r.oif, r.protocol, r.table);
                        (key(shown), *gone) == (key(&route), removed)
                    }
                    _ => false,
                });
            }
        }
        conn.execute(link::delete(a)).unwrap();
        watch.until(
            |event| matches!(event, Event::Link { index, removed: true, .. } if *index == a),
        );
    });
}

#[test]
fn forwarding_entries_are_events_of_their_own() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let vx = vxlan(&mut conn, "192.0.2.1");
        let mut watch = Watch::new(Monitor::new().unwrap());
        let entry = Fdb {
            link: vx,
            mac: MAC_B,
            dst: "192.0.2.2".parse().unwrap(),
        };
        for (request, removed) in [(entry.add(), false), (entry.delete(), true)] {
            conn.execute(request).unwrap();
            let expected = Event::Fdb {
                link: vx,
                entry: Some(entry.clone()),
                removed,
            };
            watch.until(|event| *event == expected);
        }
    });
}

#[test]
fn a_port_that_leaves_its_bridge_is_not_a_link_that_is_gone() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let a = pair(&mut conn);
        conn.execute(bridge::create("br0")).unwrap();
        let br0 = conn.link_by_name("br0").unwrap().index;
        conn.execute(link::set_master(a, Some(br0))).unwrap();
        let mut monitor = Monitor::new().unwrap();
        conn.execute(link::set_master(a, None)).unwrap();
        // The last thing to happen, so that all before it has been read.
        conn.execute(link::set_alias(br0, "end")).unwrap();
        let mut seen = Vec::new();
        let ended = |seen: &[Event]| {
            seen.iter()
                .any(|event| matches!(event, Event::Link { index, .. } if *index == br0))
        };
        while !ended(&seen) {
            let events = monitor.wait(Duration::from_secs(10)).unwrap();
            assert!(!events.is_empty(), "{seen:#?}");
            seen.extend(events);
        }
        seen.extend(monitor.read().unwrap());
        let of_a = |event: &&Event| matches!(event, Event::Link { index, .. } if *index == a);
        assert!(seen.iter().any(|event| of_a(&event)), "{seen:#?}");
        assert!(
            !seen
                .iter()
                .any(|event| matches!(event, Event::Link { removed: true, .. })),
            "{seen:#?}"
        );
    });
}

#[test]
fn another_namespace_is_watched_from_outside_and_only_it() {
    in_fresh(|| {
        let other = NetNs::create().unwrap();
        let mut monitor = Monitor::in_netns(&other).unwrap();
        pair(&mut Conn::new().unwrap());
        assert_eq!(monitor.read().unwrap(), []);
        Conn::in_netns(&other)
            .unwrap()
            .execute(link::set_up(1))
            .unwrap();
        Watch::new(monitor)
            .until(|event| matches!(event, Event::Link { name, up: true, .. } if name == "lo"));
    });
}

#[test]
fn nothing_happening_is_no_event_and_its_descriptor_says_when_to_read() {
    in_fresh(|| {
        let mut monitor = Monitor::new().unwrap();
        while !monitor.read().unwrap().is_empty() {}
        let readable = |monitor: &Monitor| {
            let mut polled = libc::pollfd {
                fd: monitor.as_fd().as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one valid pollfd; no waiting.
            unsafe { libc::poll(&mut polled, 1, 0) == 1 }
        };
        assert!(!readable(&monitor));
        assert_eq!(monitor.wait(Duration::from_millis(1)).unwrap(), []);
        Conn::new().unwrap().execute(bridge::create("br0")).unwrap();
        assert!(readable(&monitor));
        assert!(!monitor.read().unwrap().is_empty());
    });
}
