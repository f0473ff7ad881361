//! What applications see of accelerated connections, row by row, beside plain ones.

use crate::{
    acceleration::Cgroup,
    kit::{self, Pod},
};
use sinabro_agent::{
    acceleration::self_test::{self, SelfTestError},
    datapath::{Datapath, DatapathConfig},
};
use sinabro_battery::{self as battery, Between, Class, Outcome, Row, compare};
use sinabro_common::{api::Verdict, names};
use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
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

/// Rows that are too slow for the self-test and may differ, and the one of it that tells of that.
const TOLD_BY: [(&str, &str); 1] = [("slow-reader-killed", "close-with-unread-data")];

#[test]
fn between_pods_only_what_the_self_test_reports_differs() {
    let rows: Vec<_> = battery::rows().collect();
    let report = kit::fresh(|| {
        if kit::skipped() {
            return None;
        }
        let cgroup = Cgroup::enter();
        Some(self_test::run(Path::new(names::BPF_DIR), Some(&cgroup.path)).unwrap())
    });
    let Some(report) = report else {
        return;
    };
    let reported = report.rows.iter().filter(|row| !row.passed);
    let mut reported: BTreeSet<&str> = reported.map(|row| &*row.id).collect();
    for (slow, told_by) in TOLD_BY {
        if reported.contains(told_by) {
            reported.insert(slow);
        }
    }
    for v6 in [false, true] {
        let outcomes = between_pods(&rows, 8, v6);
        for outcome in &outcomes {
            let may_differ = outcome.row.class == Class::Behaviour;
            assert!(outcome.passed() || may_differ, "{outcome:?}");
        }
        let differ = outcomes.iter().filter(|outcome| !outcome.passed());
        let differ: BTreeSet<_> = differ.map(|outcome| outcome.row.id).collect();
        assert_eq!(differ, reported, "v6: {v6}");
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
        for row in report.rows.iter().filter(|row| !row.passed) {
            println!(
                "{}: {:?}, not {:?}: {}",
                row.id, row.accelerated, row.plain, row.meaning
            );
        }
        assert_ne!(report.verdict, Verdict::Refused, "{}", report.reason);
        let quick = battery::rows().filter(|row| row.quick).count();
        assert_eq!(report.rows.len(), quick);
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
