//! What the MTU of the pods' links is to be worth: much where segments are what costs, and nothing less
//! anywhere than one MTU for everything. And what is to be left across nodes of what these reach by themselves.

use super::{
    local_mtu::{LOOPBACK, OFF},
    pair::{DIRECT, NATIVE},
    scene::TRACKED,
};
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
/// With and without tunnels, of nodes that track connections, as a cluster's do.
const BESIDE_NODES: [(&str, f64); 6] = [
    ("one stream", 0.9),
    ("request/response", 0.95),
    ("request/response, 16 connections", 0.95),
    ("http 36 B 50 connections", 0.95),
    ("connect/request/response", 0.95),
    ("UDP packets of 64 B", 0.85),
];
/// What noise of medians may take from everything else, and from what tunnels have where there are none.
const NOTHING_LESS: f64 = 0.97;
const MEMORY: f64 = 1.1;

/// What is compared with one MTU for everything, with loopback, and past the stack with nodes only.
pub fn aims(rows: &[Row]) -> Vec<Aim> {
    let aim = |row: &Row| {
        let subject = match &*row.subject {
            subject @ (DIRECT | NATIVE) => format!("{subject}, "),
            _ => String::new(),
        };
        let what = format!("{subject}{}, {}, to {}", row.case, row.metric, row.against);
        Some(Aim::new(what, row.ratio, row.spread, bound(row)?))
    };
    rows.iter().filter_map(aim).collect()
}

fn bound(row: &Row) -> Option<Bound> {
    let case = row.case.strip_suffix(", IPv6").unwrap_or(&row.case);
    let case = case.split_once(": ").map_or(case, |(_, case)| case);
    let of = |aims: &[(&str, f64)]| {
        let mut aims = aims.iter();
        aims.find(|(name, _)| *name == case)
            .map(|(_, least)| *least)
    };
    let is_rate = ["throughput", "requests", "received"].contains(&&*row.metric);
    match (&*row.metric, &*row.subject, &*row.against) {
        (_, _, OFF) if is_rate => Some(Bound::AtLeast(of(&BESIDE_OFF).unwrap_or(NOTHING_LESS))),
        ("throughput", _, LOOPBACK) => of(&BESIDE_LOOPBACK).map(Bound::AtLeast),
        ("memory", _, OFF) => Some(Bound::AtMost(MEMORY)),
        (_, DIRECT | NATIVE, TRACKED) if is_rate => of(&BESIDE_NODES).map(Bound::AtLeast),
        (_, NATIVE, DIRECT) if is_rate => Some(Bound::AtLeast(NOTHING_LESS)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{
        figures::OURS,
        pod::{case, scene::Way},
    };

    fn row(case: &str, metric: &str, subject: &str, against: &str) -> Row {
        Row::new(case, metric, "", (subject, &[1.0]), (against, &[1.0])).unwrap()
    }

    const fn least(least: f64) -> Option<Bound> {
        Some(Bound::AtLeast(least))
    }

    #[test]
    fn bounds_are_of_both_families_and_of_what_counts() {
        let bound = |case: &str, metric, against| bound(&row(case, metric, OURS, against));
        for family in ["", ", IPv6"] {
            let of = |case: &str| format!("{case}{family}");
            let (stream, http) = (of("stream 1 KB"), of("http 64 KB 50 connections"));
            let rr = of("rr 4 KB, CPUs awake");
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
    fn past_the_stack_nodes_that_track_are_the_measure() {
        for family in ["IPv4", "IPv6"] {
            let bound = |case: &str, metric, subject, against| {
                let case = format!("across nodes, {family}: {case}");
                bound(&row(&case, metric, subject, against))
            };
            for subject in [DIRECT, NATIVE] {
                let stream = bound("one stream", "throughput", subject, TRACKED);
                assert_eq!(stream, least(0.9));
                let cpu = bound("one stream", "CPU", subject, TRACKED);
                assert_eq!(cpu, None);
                let small = bound("UDP packets of 64 B", "received", subject, TRACKED);
                assert_eq!(small, least(0.85));
            }
            let by_the_stack = bound("one stream", "throughput", OURS, TRACKED);
            assert_eq!(by_the_stack, None);
            let native = bound("8 streams", "throughput", NATIVE, DIRECT);
            assert_eq!(native, least(NOTHING_LESS));
        }
    }

    #[test]
    fn every_aim_is_of_a_case_that_there_is() {
        let names = |way| -> Vec<&str> { case::cases(way, false).map(|case| case.name).collect() };
        let by_link = names(Way::LocalMtu);
        for (name, _) in BESIDE_OFF.iter().chain(&BESIDE_LOOPBACK) {
            assert!(by_link.contains(name), "{name}");
        }
        let across = names(Way::Across);
        for (name, _) in BESIDE_NODES {
            assert!(across.contains(&name), "{name}");
        }
    }
}
