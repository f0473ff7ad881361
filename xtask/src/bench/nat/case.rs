//! What is measured.

use crate::{
    bench::{
        figures::{Figures, Grouped},
        row::Row,
    },
    ui,
};
use std::fmt;

/// Of a packet until it is in the receiver's queue.
pub const PACKET_CPU: &str = "CPU per packet";

/// Cases that have the same nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Nodes where netfilter has nothing to do but to translate, if it is what does that.
    Plain,
    /// Nodes with the rules that kube-proxy makes.
    KubeProxy,
    /// The former, with other connections in their tables.
    Flows,
}

impl Part {
    pub const ALL: [Self; 3] = [Self::Plain, Self::KubeProxy, Self::Flows];

    /// As options call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::KubeProxy => "kube-proxy",
            Self::Flows => "flows",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "no other rules",
            Self::KubeProxy => "kube-proxy's rules",
            Self::Flows => "other connections",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One TCP connection that the pod fills.
    StreamOut,
    /// One that the host outside fills.
    StreamIn,
    /// A request and a response at a time on each of so many TCP connections.
    RoundTrips(usize),
    /// The same by UDP.
    Echoes(usize),
    /// The same, each from a socket of its own.
    Questions,
    /// A TCP connection for each request and response.
    Connections,
    /// nginx's answers of few bytes.
    Http,
    /// UDP packets, one way.
    PacketsOut,
    PacketsIn,
}

const KINDS: &[(&str, Kind)] = &[
    ("TCP stream out", Kind::StreamOut),
    ("TCP stream in", Kind::StreamIn),
    ("TCP request/response", Kind::RoundTrips(1)),
    (
        "TCP request/response, 16 connections",
        Kind::RoundTrips(MANY),
    ),
    ("UDP request/response", Kind::Echoes(1)),
    ("UDP request/response, 16 flows", Kind::Echoes(MANY)),
    ("UDP, a socket for each request", Kind::Questions),
    ("connect/request/response", Kind::Connections),
    ("HTTP 36 B, 50 connections", Kind::Http),
    ("UDP packets of 64 B out", Kind::PacketsOut),
    ("UDP packets of 64 B in", Kind::PacketsIn),
];

/// Where what is looked up counts most.
const BY_NUMBER: &[(&str, Kind)] = &[
    ("TCP stream out", Kind::StreamOut),
    ("TCP stream in", Kind::StreamIn),
    (
        "TCP request/response, 16 connections",
        Kind::RoundTrips(MANY),
    ),
    ("UDP request/response, 16 flows", Kind::Echoes(MANY)),
    ("connect/request/response", Kind::Connections),
    ("UDP packets of 64 B out", Kind::PacketsOut),
    ("UDP packets of 64 B in", Kind::PacketsIn),
];

/// Enough that neither end falls idle.
const MANY: usize = 16;

/// How many other connections there are.
pub const NUMBERS: [u32; 3] = [0, 10_000, 500_000];

fn numbers(short: bool) -> impl Iterator<Item = u32> {
    let left_out = move |number: &u32| short && *number == NUMBERS[1];
    NUMBERS.into_iter().filter(move |number| !left_out(number))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub part: Part,
    /// Other connections in the table, of [`Part::Flows`].
    pub flows: u32,
    name: &'static str,
    pub kind: Kind,
}

pub fn cases(part: Part, short: bool) -> impl Iterator<Item = Case> {
    let kinds = match part {
        Part::Plain | Part::KubeProxy => KINDS,
        Part::Flows => BY_NUMBER,
    };
    let numbers = numbers(short).filter(move |number| part == Part::Flows || *number == 0);
    numbers.flat_map(move |flows| {
        kinds.iter().map(move |(name, kind)| Case {
            part,
            flows,
            name,
            kind: *kind,
        })
    })
}

impl Grouped for Case {
    type Group = Part;

    fn group(&self) -> Part {
        self.part
    }

    fn place(&self) -> String {
        self.part.to_string()
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            Part::Plain | Part::KubeProxy => write!(f, "{}, {}", self.part, self.name),
            Part::Flows => write!(f, "{}, beside {} others", self.name, self.flows),
        }
    }
}

/// Each subject beside other connections, and without them.
pub fn growth<'a>(
    figures: &Figures<Part>,
    names: impl Iterator<Item = &'a str> + Clone,
    short: bool,
) -> Vec<Row> {
    let alone = cases(Part::Flows, short).filter(|case| case.flows == 0);
    let mut rows = Vec::new();
    for first in alone {
        for (metric, unit) in [
            ("throughput", "Gbit/s"),
            ("requests", "1/s"),
            ("CPU", "µs"),
            (PACKET_CPU, "µs"),
        ] {
            for name in names.clone() {
                let values = |flows| {
                    let case = Case { flows, ..first }.to_string();
                    figures.values(&case, metric, name)
                };
                rows.extend(numbers(short).skip(1).filter_map(|flows| {
                    let subject = format!("{name}, {flows} others");
                    let alone = format!("{name}, no others");
                    let beside = (&*subject, values(flows)?);
                    Row::new(first.name, metric, unit, beside, (&alone, values(0)?))
                }));
            }
        }
    }
    rows
}

pub fn print_growth(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let heading = ["beside others, to none", "", "", "ratio", "over rounds"];
    let mut table = vec![heading.map(String::from).to_vec()];
    for row in rows {
        table.push(vec![
            row.case.clone(),
            row.metric.clone(),
            row.subject.clone(),
            format!("{:.2}", row.ratio),
            row.spread_text(),
        ]);
    }
    println!();
    ui::table(&table);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::figures::{Figure, OURS};

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let all = |short| {
            Part::ALL
                .into_iter()
                .flat_map(move |part| cases(part, short))
        };
        let mut names: Vec<String> = all(false).map(|case| case.to_string()).collect();
        let count = names.len();
        assert_eq!(count, 2 * KINDS.len() + NUMBERS.len() * BY_NUMBER.len());
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        let long: Vec<Case> = all(false).collect();
        assert!(all(true).all(|case| long.contains(&case)));
    }

    #[test]
    fn growth_is_of_each_subject_with_itself() {
        let mut figures = Figures::default();
        for case in cases(Part::Flows, false) {
            for (name, value) in [(OURS, 10.0), ("iptables", 8.0)] {
                let value = if case.flows == 0 { value } else { value / 2.0 };
                let figure = Figure {
                    metric: "requests",
                    unit: "1/s",
                    value,
                };
                figures.add(&case, name, vec![figure].into());
            }
        }
        let rows = growth(&figures, [OURS, "iptables"].into_iter(), false);
        assert_eq!(rows.len(), BY_NUMBER.len() * 2 * 2, "{rows:?}");
        assert!(rows.iter().all(|row| row.ratio == 0.5));
        assert_eq!(rows[1].subject, "sinabro, 500000 others");
        assert_eq!(rows[1].against, "sinabro, no others");
    }
}
