//! What the MTU of the pods' links is to be worth: much where segments are what costs, and nothing less
//! anywhere than one MTU for everything.

use super::local_mtu::{LOOPBACK, OFF};
use crate::bench::{
    aim::{Aim, Bound},
    row::Row,
};

/// Of a case in both families.
const BESIDE_OFF: [(&str, f64); 4] = [
    ("stream 1 KB", 3.0),
    ("stream 16 KB", 3.0),
    ("http 16 KB 50 connections", 2.0),
    ("http 64 KB 50 connections", 2.0),
];
const BESIDE_LOOPBACK: [(&str, f64); 2] = [("stream 1 KB", 0.7), ("stream 16 KB", 0.7)];
/// What noise of medians may take from everything else.
const NOTHING_LESS: f64 = 0.97;
const MEMORY: f64 = 1.1;

/// What is compared with one MTU for everything and with loopback only.
pub fn aims(rows: &[Row]) -> Vec<Aim> {
    let aim = |row: &Row| {
        let what = format!("{}, {}, to {}", row.case, row.metric, row.against);
        Some(Aim::new(what, row.ratio, row.spread, bound(row)?))
    };
    rows.iter().filter_map(aim).collect()
}

fn bound(row: &Row) -> Option<Bound> {
    let case = row.case.strip_suffix(", IPv6").unwrap_or(&row.case);
    let of = |aims: &[(&str, f64)]| {
        let mut aims = aims.iter();
        aims.find(|(name, _)| *name == case)
            .map(|(_, least)| *least)
    };
    match (&*row.metric, &*row.against) {
        ("throughput" | "requests" | "received", OFF) => {
            Some(Bound::AtLeast(of(&BESIDE_OFF).unwrap_or(NOTHING_LESS)))
        }
        ("throughput", LOOPBACK) => of(&BESIDE_LOOPBACK).map(Bound::AtLeast),
        ("memory", OFF) => Some(Bound::AtMost(MEMORY)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::pod::{case, scene::Way};

    fn row(case: &str, metric: &str, against: &str) -> Row {
        Row::new(case, metric, "", ("a", &[1.0]), (against, &[1.0])).unwrap()
    }

    #[test]
    fn bounds_are_of_both_families_and_of_what_counts() {
        let bound = |case: &str, metric, against| bound(&row(case, metric, against));
        for family in ["", ", IPv6"] {
            let of = |case: &str| format!("{case}{family}");
            let (stream, http) = (of("stream 1 KB"), of("http 64 KB 50 connections"));
            let rr = of("rr 4 KB, CPUs awake");
            let least = |least| Some(Bound::AtLeast(least));
            assert_eq!(bound(&stream, "throughput", OFF), least(3.0));
            assert_eq!(bound(&stream, "throughput", LOOPBACK), least(0.7));
            assert_eq!(bound(&http, "requests", OFF), least(2.0));
            assert_eq!(bound(&http, "requests", LOOPBACK), None);
            assert_eq!(bound(&rr, "requests", OFF), least(NOTHING_LESS));
            let memory = bound(&of("200 slow readers"), "memory", OFF);
            assert_eq!(memory, Some(Bound::AtMost(1.1)));
            assert_eq!(bound(&stream, "CPU", OFF), None);
            assert_eq!(bound(&stream, "throughput", "bridge"), None);
        }
    }

    #[test]
    fn every_aim_is_of_a_case_that_there_is() {
        let names: Vec<String> = case::cases(Way::LocalMtu, true)
            .map(|case| case.to_string())
            .collect();
        for (name, _) in BESIDE_OFF.iter().chain(&BESIDE_LOOPBACK) {
            assert!(names.iter().any(|other| other == name), "{name}");
        }
    }
}
