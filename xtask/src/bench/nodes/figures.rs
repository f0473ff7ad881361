//! What was measured, as rows.

use super::{
    storm::Storm,
    subject::{Measured, Start},
};
use crate::{
    bench::{number, stats},
    report::Machine,
    ui,
};
use serde::Serialize;
use std::collections::BTreeMap;

const MB: f64 = 1e6;

/// A figure for one size and one subject: the median over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub nodes: usize,
    pub metric: &'static str,
    pub unit: &'static str,
    /// By subject.
    pub values: BTreeMap<String, f64>,
    /// Against an earlier commit: median, smallest and largest of the rounds' own ratios.
    pub ratio: Option<[f64; 3]>,
}

/// The JSON file.
#[derive(Serialize)]
pub struct Report {
    pub machine: Machine,
    pub kubernetes: &'static str,
    pub node_bytes: usize,
    pub rounds: u32,
    pub rows: Vec<Row>,
    pub storms: Vec<Storm>,
}

/// Name and unit of each figure of a measurement, in the order of [`values`].
const METRICS: [(&str, &str); 22] = [
    ("first start: ready after", "s"),
    ("first start: CPU", "s"),
    ("first start: received", "MB"),
    ("first start: memory, peak", "MB"),
    ("start after a kill: ready after", "s"),
    ("start after a kill: CPU", "s"),
    ("start after a kill: memory, peak", "MB"),
    ("at rest: heartbeats", "/min"),
    ("at rest: CPU", "s/min"),
    ("at rest: received", "MB/min"),
    ("at rest: memory", "MB"),
    ("a node came, until the kernel knows: median", "ms"),
    ("a node came: slowest", "ms"),
    ("a node moved: median", "ms"),
    ("a node moved: slowest", "ms"),
    ("a node went: median", "ms"),
    ("a node went: slowest", "ms"),
    ("a change: CPU", "ms"),
    ("a pod's ADD: median", "ms"),
    ("a pod's ADD: slowest", "ms"),
    ("a pod's ADD to DEL: the agent's CPU", "ms"),
    ("memory, peak at the end", "MB"),
];

fn values(m: &Measured) -> [f64; METRICS.len()] {
    let Start {
        seconds,
        cpu,
        received,
        peak,
    } = m.first;
    let worst = |sample: &[f64]| stats::extent(sample)[1];
    [
        seconds,
        cpu,
        received / MB,
        peak / MB,
        m.again.seconds,
        m.again.cpu,
        m.again.peak / MB,
        m.heartbeats,
        m.rest_cpu,
        m.rest_received / MB,
        m.resident / MB,
        stats::median(&m.changes.came),
        worst(&m.changes.came),
        stats::median(&m.changes.moved),
        worst(&m.changes.moved),
        stats::median(&m.changes.went),
        worst(&m.changes.went),
        m.change_cpu,
        stats::median(&m.adds),
        worst(&m.adds),
        m.pod_cpu,
        m.peak / MB,
    ]
}

pub struct Figures {
    subjects: Vec<String>,
    /// By size and subject, one for each round.
    rounds: BTreeMap<(usize, usize), Vec<[f64; METRICS.len()]>>,
    pub storms: Vec<Storm>,
}

impl Figures {
    pub fn new(subjects: Vec<String>) -> Self {
        Self {
            subjects,
            rounds: BTreeMap::new(),
            storms: Vec::new(),
        }
    }

    pub fn add(&mut self, size: usize, subject: usize, measured: &Measured) {
        let rounds = self.rounds.entry((size, subject)).or_default();
        rounds.push(values(measured));
    }

    fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<_> = self.rounds.keys().map(|(size, _)| *size).collect();
        sizes.dedup();
        sizes
    }

    fn of(&self, size: usize, subject: usize, metric: usize) -> Vec<f64> {
        let rounds = self.rounds.get(&(size, subject)).into_iter().flatten();
        rounds.map(|round| round[metric]).collect()
    }

    fn row(&self, size: usize, metric: usize) -> Row {
        let of = |subject: usize| self.of(size, subject, metric);
        let subjects = self.subjects.iter().enumerate();
        let values = subjects.map(|(number, name)| (name.clone(), stats::median(&of(number))));
        let ratio = (self.subjects.len() > 1).then(|| {
            let rounds = of(0).into_iter().zip(of(1));
            let ratios: Vec<f64> = rounds.map(|(ours, theirs)| ours / theirs).collect();
            let [least, most] = stats::extent(&ratios);
            [stats::median(&ratios), least, most]
        });
        Row {
            nodes: size,
            metric: METRICS[metric].0,
            unit: METRICS[metric].1,
            values: values.collect(),
            ratio,
        }
    }

    pub fn rows(&self) -> Vec<Row> {
        let sizes = self.sizes().into_iter();
        sizes
            .flat_map(|size| (0..METRICS.len()).map(move |metric| self.row(size, metric)))
            .collect()
    }

    pub fn print(&self) {
        println!();
        let sizes = self.sizes();
        let mut heading = vec![String::new(), String::new()];
        for size in &sizes {
            match &self.subjects[..] {
                [_] => heading.push(format!("{size} nodes")),
                names => {
                    heading.extend(names.iter().map(|name| format!("{size}: {name}")));
                    heading.push("ratio".into());
                }
            }
        }
        let mut table = vec![heading];
        for (place, (metric, unit)) in METRICS.iter().enumerate() {
            let mut line = vec![(*metric).to_owned(), (*unit).to_owned()];
            for size in &sizes {
                let row = self.row(*size, place);
                let values = self.subjects.iter().map(|name| row.values[name]);
                line.extend(values.map(number));
                line.extend(
                    row.ratio
                        .map(|[ratio, least, most]| format!("{ratio:.2} ({least:.2}–{most:.2})")),
                );
            }
            table.push(line);
        }
        ui::table(&table);
        println!(
            "\n  {} lists of all Nodes at once, and the API server\n",
            super::storm::AGENTS
        );
        let heading = [
            "nodes",
            "how",
            "MB each",
            "all done, s",
            "CPU each, s",
            "more memory, MB",
            "etcd asked",
        ];
        let mut table = vec![heading.map(String::from).to_vec()];
        for storm in &self.storms {
            let asked = storm.etcd_requests.iter();
            let asked: Vec<_> = asked.map(|(op, n)| format!("{op} {n}")).collect();
            table.push(vec![
                storm.nodes.to_string(),
                storm.way.into(),
                number(storm.megabytes_each),
                number(storm.seconds),
                format!("{:.3}", storm.cpu_seconds_each),
                number(storm.more_memory_megabytes),
                match asked.is_empty() {
                    true => "nothing".into(),
                    false => asked.join(", "),
                },
            ]);
        }
        ui::table(&table);
    }
}
