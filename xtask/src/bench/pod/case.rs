//! What is measured, and how long.

use super::scene::{Scene, Subject, Way};
use crate::bench::processor::busy;
use anyhow::Result;
use sinabro_lab::traffic::{
    brief::brief,
    datagrams::datagrams,
    one_way::streams,
    round_trips::{latency, round_trips},
    seat::Measured,
};
use std::{fmt, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// TCP connections that are filled.
    Streams(usize),
    /// A request and a response at a time, over one connection.
    RoundTrips,
    /// A connection for each request and response.
    Connections,
    /// UDP packets of so many bytes, one way.
    Packets(usize),
    /// Each round trip by itself.
    Latency,
}

const KINDS: [Kind; 7] = [
    Kind::Streams(1),
    Kind::Streams(8),
    Kind::RoundTrips,
    Kind::Connections,
    Kind::Packets(64),
    Kind::Packets(1400),
    Kind::Latency,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub way: Way,
    pub ipv6: bool,
    pub kind: Kind,
}

pub fn cases(way: Way) -> impl Iterator<Item = Case> {
    let both = [false, true].into_iter();
    both.flat_map(move |ipv6| KINDS.map(|kind| Case { way, ipv6, kind }))
}

impl Case {
    /// What is common to all kinds.
    pub fn place(&self) -> String {
        let family = if self.ipv6 { "IPv6" } else { "IPv4" };
        format!("{}, {family}", self.way)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.place())?;
        match self.kind {
            Kind::Streams(1) => f.write_str("one stream"),
            Kind::Streams(count) => write!(f, "{count} streams"),
            Kind::RoundTrips => f.write_str("request/response"),
            Kind::Connections => f.write_str("connect/request/response"),
            Kind::Packets(size) => write!(f, "UDP packets of {size} B"),
            Kind::Latency => f.write_str("round trip of 1 B"),
        }
    }
}

/// As many bytes as a bulk sender passes to the kernel at once.
const MESSAGE: usize = 1 << 17;
/// Bytes of a request, and of a response.
const REQUEST: usize = 64;
/// Threads at each end of short connections.
const THREADS: usize = 4;

/// One value of one case.
pub struct Figure {
    pub metric: &'static str,
    pub unit: &'static str,
    pub value: f64,
}

/// What one round shows of one subject.
#[derive(Default)]
pub struct Outcome {
    pub figures: Vec<Figure>,
    /// Percent and microseconds.
    pub curve: Vec<[f64; 2]>,
}

/// Of which the curve is made.
const PERCENT: [f64; 11] = [
    1.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
];
/// Which are figures.
const NAMED: [(&str, f64); 4] = [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9)];

pub struct Bench {
    time: Duration,
    rounds: usize,
}

impl Bench {
    pub fn new(short: bool) -> Self {
        Self {
            time: Duration::from_millis(if short { 120 } else { 300 }),
            rounds: if short { 2_000 } else { 5_000 },
        }
    }

    pub fn measure(&self, case: &Case, scene: &Scene, subject: &Subject) -> Result<Outcome> {
        let ends = scene.ends(subject, case.ipv6);
        let before = busy()?;
        // What is counted, and of how many of them CPU time is told.
        let (metric, unit, measured, scale) = match case.kind {
            Kind::Streams(connections) => {
                let listener = ends.listen(0)?;
                let measured = streams(ends, &listener, connections, MESSAGE, self.time)?;
                ("throughput", "Gbit/s", measured, 1e9)
            }
            Kind::RoundTrips => {
                let listener = ends.listen(0)?;
                let measured = round_trips(ends, &listener, REQUEST, 1, self.time)?;
                ("requests", "1/s", measured, 1.0)
            }
            Kind::Connections => {
                let listener = ends.listen(0)?;
                let measured = brief(ends, &listener, THREADS, 0, self.time)?;
                ("requests", "1/s", measured, 1.0)
            }
            Kind::Packets(size) => {
                let measured = datagrams(ends, size, self.time)?.received;
                ("received", "1/s", measured, 1.0)
            }
            Kind::Latency => {
                let latency = latency(ends, self.rounds)?;
                let at = |percent| latency.percentile(percent).as_secs_f64() * 1e6;
                let figure = |(metric, percent)| Figure {
                    metric,
                    unit: "µs",
                    value: at(percent),
                };
                return Ok(Outcome {
                    figures: NAMED.map(figure).into(),
                    curve: PERCENT.map(|percent| [percent, at(percent)]).into(),
                });
            }
        };
        let machine = busy()?.saturating_sub(before);
        let figures = figures(metric, unit, &measured, machine, scale);
        Ok(Outcome {
            figures,
            curve: Vec::new(),
        })
    }
}

fn figures(
    metric: &'static str,
    unit: &'static str,
    measured: &Measured,
    machine: Duration,
    scale: f64,
) -> Vec<Figure> {
    let per = measured.count.max(1) as f64 / scale;
    let (value, cpu_unit, in_unit) = match unit {
        "Gbit/s" => (measured.per_second() * 8.0 / 1e9, "ms/GB", 1e3),
        _ => (measured.per_second(), "µs", 1e6),
    };
    let cpu = |metric, time: Duration| Figure {
        metric,
        unit: cpu_unit,
        value: time.as_secs_f64() * in_unit / per,
    };
    vec![
        Figure {
            metric,
            unit,
            value,
        },
        cpu("CPU", measured.cpu),
        cpu("machine CPU", machine),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_unit_that_they_name() {
        let measured = Measured {
            count: 2_000_000_000,
            time: Duration::from_secs(2),
            cpu: Duration::from_millis(500),
        };
        let found = figures(
            "throughput",
            "Gbit/s",
            &measured,
            Duration::from_secs(1),
            1e9,
        );
        let values: Vec<_> = found.iter().map(|f| (f.value, f.unit)).collect();
        assert_eq!(
            values,
            [(8.0, "Gbit/s"), (250.0, "ms/GB"), (500.0, "ms/GB")]
        );
        let measured = Measured {
            count: 1000,
            ..measured
        };
        let found = figures("requests", "1/s", &measured, Duration::from_secs(1), 1.0);
        let values: Vec<_> = found.iter().map(|f| (f.value, f.unit)).collect();
        assert_eq!(values, [(500.0, "1/s"), (500.0, "µs"), (1000.0, "µs")]);
    }

    #[test]
    fn every_kind_is_of_both_families_and_has_a_name_of_its_own() {
        let mut names: Vec<_> = [Way::SameNode, Way::Across]
            .into_iter()
            .flat_map(cases)
            .map(|case| case.to_string())
            .collect();
        assert_eq!(names.len(), 28);
        assert!(names.contains(&"across nodes, IPv6: UDP packets of 1400 B".into()));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 28);
    }
}
