//! Masquerade under many random flows, and under two processors at once.

use crate::{
    kit,
    packet::{ICMP, TCP, UDP, see},
    run::{DROP, PASS},
    uplink_hooks::{FAR, NODE_IP, World, check_table, make, table, world, world_with},
};
use proptest::{prelude::*, test_runner::TestRunner};
use sinabro_agent::datapath::DatapathConfig;
use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, Ipv4Addr},
    sync::Barrier,
};

/// Pod, protocol, the pod's port, destination, its port.
type Flow = (bool, u8, u16, u8, u16);

/// What must be unique among packets outside.
type Outside = (u8, IpAddr, u16, u16);

fn flows() -> impl Strategy<Value = Vec<Flow>> {
    // Few values each, so that flows meet.
    let flow = (
        any::<bool>(),
        prop_oneof![Just(TCP), Just(UDP), Just(ICMP)],
        prop_oneof![1u16..6, 61000u16..61010],
        0u8..2,
        prop_oneof![Just(53u16), Just(443)],
    );
    prop::collection::vec(flow, 1..60)
}

fn packet(w: &World, flow: Flow) -> crate::packet::Ip {
    let (second, proto, port, host, dst_port) = flow;
    let src = if second { w.b.v4 } else { w.a.v4 };
    make(proto, (src, port), (far(host), dst_port))
}

fn far(host: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, host + 1).into()
}

#[test]
fn no_two_flows_ever_share_a_translation() {
    world(|w| {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (61000, 61015);
        w.datapath.set_node_config(config).unwrap();

        let given: std::cell::RefCell<HashMap<_, u16>> = Default::default();
        let taken: std::cell::RefCell<HashSet<Outside>> = Default::default();
        let mut runner = TestRunner::new(ProptestConfig::with_cases(48));
        let result = runner.run(&flows(), |flows| {
            for flow in flows {
                let ip = packet(&w, flow);
                // An echo flow has no destination port.
                let flow = match flow {
                    (pod, ICMP, id, host, _) => (pod, ICMP, id, host, 0),
                    other => other,
                };
                let (verdict, out) = w.out(&ip);
                if verdict == DROP {
                    // All ports of this destination are tried at random; some may be left.
                    prop_assert!(!given.borrow().contains_key(&flow));
                    continue;
                }
                prop_assert_eq!(verdict, PASS);
                let seen = see(&out);
                prop_assert_eq!(seen.src, NODE_IP);
                let port = seen.ports.0;
                prop_assert!((61000..=61015).contains(&port));
                match given.borrow_mut().insert(flow, port) {
                    Some(before) => prop_assert_eq!(before, port),
                    None => {
                        let outside = (flow.1, seen.dst, flow.4, port);
                        prop_assert!(taken.borrow_mut().insert(outside), "{:?}", outside);
                    }
                }
            }
            Ok(())
        });
        result.unwrap();
        check_table();
        assert!(given.borrow().len() > 50);
    });
}

#[test]
fn two_processors_agree_on_every_flow() {
    world_with(&DatapathConfig::default(), |w| {
        const FLOWS: u16 = 3000;
        let barrier = Barrier::new(2);
        let run = || -> Vec<(i32, u16)> {
            (1..=FLOWS)
                .map(|port| {
                    let ip = make(UDP, (w.a.v4, port), (FAR, 53));
                    // Side by side through every flow: both find it new.
                    barrier.wait();
                    let (verdict, out) = w.out(&ip);
                    (verdict, see(&out).ports.0)
                })
                .collect()
        };
        let (one, other) = std::thread::scope(|scope| {
            let one = scope.spawn(run);
            let other = scope.spawn(run);
            (one.join().unwrap(), other.join().unwrap())
        });
        assert_eq!(one, other);
        assert!(one.iter().all(|(verdict, _)| *verdict == PASS));
        assert_eq!(one.iter().collect::<HashSet<_>>().len(), usize::from(FLOWS));
        check_table();
        assert_eq!(table().len(), usize::from(FLOWS));
    });
}
