//! What applications see of accelerated connections, row by row, beside plain ones.

use crate::{
    acceleration::Cgroup,
    kit::{self, Pod},
};
use sinabro_agent::{
    acceleration::battery::{self, Between, Class, Outcome, Row, compare},
    datapath::{Datapath, DatapathConfig},
};
use std::net::IpAddr;

/// Compares rows between two pods that are accelerated and two that are not.
fn between_pods(rows: &[&'static Row], at_once: usize, v6: bool) -> Vec<Outcome> {
    kit::fresh(|| {
        let cgroup = Cgroup::enter();
        let datapath = Datapath::load(&DatapathConfig {
            acceleration: true,
            cgroup: Some(cgroup.path.clone()),
            ..kit::config()
        })
        .unwrap();
        datapath.set_node_config(kit::node_config()).unwrap();
        let fast = [Pod::live(&datapath, 5), Pod::live(&datapath, 6)];
        let plain = [Pod::new(7), Pod::new(8)];
        for pod in &plain {
            pod.attach_with(&datapath, None);
        }
        let connect = |[client, server]: &[Pod; 2]| {
            let address: IpAddr = if v6 { server.v6 } else { server.v4 };
            Between::new(client.netns.clone(), server.netns.clone(), address)
        };
        let outcomes = compare(rows, &connect(&plain), &connect(&fast), at_once).unwrap();
        println!("{}", battery::table(&outcomes));
        for pod in &fast {
            let counted = datapath
                .acceleration_counters(pod.ifindex)
                .unwrap()
                .unwrap();
            println!("{counted:?}");
            assert!(counted.redirected_bytes > 1 << 20, "{counted:?}");
            assert!(counted.enrolled > 50, "{counted:?}");
        }
        outcomes
    })
}

#[test]
fn accelerated_connections_keep_order_and_hold_senders_back() {
    let rows: Vec<_> = battery::rows().collect();
    for v6 in [false, true] {
        for outcome in between_pods(&rows, 8, v6) {
            let may_differ = outcome.row.class == Class::Behaviour;
            assert!(outcome.passed() || may_differ, "{outcome:?}");
        }
    }
}
