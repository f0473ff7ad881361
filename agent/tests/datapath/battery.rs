//! What applications see of accelerated connections, row by row, beside plain ones; and the node's
//! own test of them.

use crate::{
    acceleration::Cgroup,
    kit::{self, Pod},
};
use sinabro_agent::{
    acceleration::self_test::{self, SelfTestError},
    datapath::{Apart, Datapath, DatapathConfig},
};
use sinabro_battery::{self as battery, Between, Class, Outcome, Row, compare};
use sinabro_common::{api::Verdict, names};
use sinabro_lab::Place;
use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    time::{Duration, Instant},
};

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
            let between = Between::new(
                client.place.net().clone(),
                server.place.net().clone(),
                address,
            );
            // The machine may be busy with other tests.
            between.patient(Duration::from_secs(3))
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

/// Compares rows over loopback, of which one is accelerated.
fn on_loopback(rows: &[&'static Row], at_once: usize) -> Vec<Outcome> {
    let [plain, fast] = ["plain", "fast"].map(|name| Place::fresh(name).unwrap());
    let cgroup = Cgroup::enter();
    let directory = Path::new(names::BPF_DIR).join(names::BPF_SELF_TEST_DIR);
    let apart = Apart::load(&directory, Some(&cgroup.path)).unwrap();
    let cookie = fast.conn().unwrap().netns_cookie().unwrap().unwrap();
    apart.accelerate_loopback(cookie).unwrap();
    let connect = |place: &Place| {
        let netns = place.net();
        let between = Between::new(netns.clone(), netns.clone(), Ipv4Addr::LOCALHOST.into());
        between.patient(Duration::from_secs(3))
    };
    let outcomes = compare(rows, &connect(&plain), &connect(&fast), at_once).unwrap();
    let counted = apart.counters().unwrap();
    assert!(counted.redirected_bytes > 1 << 20, "{counted:?}");
    outcomes
}

/// Slow rows that may differ, and the quick one that tells of that.
const TOLD_BY: [(&str, &str); 1] = [("slow-reader-killed", "close-with-unread-data")];

fn is_order_or_pressure(outcome: &Outcome) -> bool {
    outcome.row.class != Class::Behaviour
}

#[test]
fn between_pods_and_over_loopback_the_same_differs_and_neither_order_nor_back_pressure() {
    let quick: Vec<_> = battery::rows().filter(|row| row.quick).collect();
    let on_loopback = kit::fresh(|| (!kit::skipped()).then(|| on_loopback(&quick, 8)));
    let Some(on_loopback) = on_loopback else {
        return;
    };
    let differ = |outcomes: &[Outcome]| {
        let differ = outcomes.iter().filter(|outcome| !outcome.passed());
        for outcome in differ.clone() {
            assert!(!is_order_or_pressure(outcome), "{outcome:?}");
        }
        differ
            .map(|outcome| outcome.row.id)
            .collect::<BTreeSet<_>>()
    };
    let mut expected = differ(&on_loopback);
    for (slow, told_by) in TOLD_BY {
        if expected.contains(told_by) {
            expected.insert(slow);
        }
    }
    let rows: Vec<_> = battery::rows().collect();
    for v6 in [false, true] {
        assert_eq!(differ(&between_pods(&rows, 8, v6)), expected, "v6: {v6}");
    }
}

#[test]
fn the_self_test_judges_this_kernel_and_leaves_nothing() {
    kit::fresh(|| {
        if kit::skipped() {
            return;
        }
        let cgroup = Cgroup::enter();
        let directory = Path::new(names::BPF_DIR).join(names::BPF_SELF_TEST_DIR);
        // What a killed one may have left.
        fs::create_dir_all(directory.join(names::BPF_LINKS_DIR)).unwrap();
        let began = Instant::now();
        let report = self_test::run(Path::new(names::BPF_DIR), Some(&cgroup.path)).unwrap();
        println!(
            "{:?} after {:?}: {}",
            report.verdict,
            began.elapsed(),
            report.reason
        );
        assert_eq!(report.verdict, Verdict::Accelerate, "{}", report.reason);
        assert!(report.tried);
        assert!(!directory.exists());
    });
}

#[test]
fn a_self_test_whose_connections_are_not_accelerated_is_none() {
    kit::fresh(|| {
        if kit::skipped() {
            return;
        }
        let cgroup = Cgroup::enter();
        // One that this process is not in.
        let other = cgroup.path.join("empty");
        fs::create_dir(&other).unwrap();
        let result = self_test::run(Path::new(names::BPF_DIR), Some(&other));
        fs::remove_dir(&other).unwrap();
        let error = result.unwrap_err();
        assert!(
            matches!(error, SelfTestError::NotAccelerated { enrolled: 0, .. }),
            "{error}"
        );
        assert!(
            !Path::new(names::BPF_DIR)
                .join(names::BPF_SELF_TEST_DIR)
                .exists()
        );
    });
}
