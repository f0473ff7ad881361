//! How it is measured, and how long.

use super::{
    case::{Case, Kind},
    scene::{Scene, Subject, Way},
};
use crate::{
    bench::{
        http::{nginx, wrk},
        memory,
        processor::busy,
    },
    workspace::which,
};
use anyhow::{Context as _, Result};
use sinabro_lab::{
    Node,
    traffic::{
        awake::awake,
        brief::brief,
        datagrams::{datagrams, headers},
        held::Held,
        one_way::streams,
        round_trips::{latency, round_trips},
        seat::{Ends, Measured},
    },
};
use std::time::Duration;

/// Threads at each end of short connections.
const THREADS: usize = 4;
const HTTP_CONNECTIONS: usize = 50;

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

impl From<Vec<Figure>> for Outcome {
    fn from(figures: Vec<Figure>) -> Self {
        let curve = Vec::new();
        Self { figures, curve }
    }
}

/// Of which the curve is made.
const PERCENT: [f64; 11] = [
    1.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
];
/// Which are figures.
const NAMED: [(&str, f64); 4] = [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9)];

pub struct Bench {
    time: Duration,
    /// Of what is measured by the link: that has more cases.
    time_by_link: Duration,
    rounds: usize,
}

impl Bench {
    pub fn new(short: bool) -> Self {
        let of = |long, short_time| Duration::from_millis(if short { short_time } else { long });
        Self {
            time: of(300, 120),
            time_by_link: of(150, 100),
            rounds: if short { 2_000 } else { 5_000 },
        }
    }

    pub fn measure(&self, case: &Case, scene: &Scene, subject: &Subject) -> Result<Outcome> {
        let ends = scene.ends(subject, case.ipv6);
        let time = match case.way {
            Way::SameNode | Way::Across => self.time,
            Way::LocalMtu => self.time_by_link,
        };
        let before = busy()?;
        // What is counted, and of how many of them CPU time is told.
        let (metric, unit, measured, scale) = match case.kind {
            Kind::Streams {
                connections,
                message,
            } => {
                let listener = ends.listen(0)?;
                let measured = streams(ends, &listener, connections, message, time)?;
                ("throughput", "Gbit/s", measured, 1e9)
            }
            Kind::RoundTrips(size) => {
                let listener = ends.listen(0)?;
                let measured = round_trips(ends, &listener, size, 1, time)?;
                ("requests", "1/s", measured, 1.0)
            }
            Kind::RoundTripsAwake(size) => {
                let listener = ends.listen(0)?;
                let measure = || round_trips(ends, &listener, size, 1, time);
                let measured = awake(&scene.cpus(), measure)?;
                let mut figures = figures("requests", "1/s", &measured, Duration::ZERO, 1.0);
                // The machine was never idle.
                figures.retain(|figure| figure.metric != MACHINE_CPU);
                return Ok(figures.into());
            }
            Kind::Connections => {
                let listener = ends.listen(0)?;
                let measured = brief(ends, &listener, THREADS, 0, time)?;
                ("requests", "1/s", measured, 1.0)
            }
            Kind::Http { body, nopush } => {
                let figures = http_load(ends, scene.node(subject)?, body, nopush)?;
                return Ok(figures.into());
            }
            Kind::Packets(size) => {
                let measured = datagrams(ends, size, time)?.received;
                ("received", "1/s", measured, 1.0)
            }
            Kind::Datagrams(size) => {
                let measured = datagrams(ends, size + headers(ends.address), time)?.received;
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
            Kind::Idle(connections) => return Ok(idle(ends, connections)?.into()),
            Kind::SlowReaders(connections) => return Ok(slow_readers(ends, connections)?.into()),
        };
        let machine = busy()?.saturating_sub(before);
        Ok(figures(metric, unit, &measured, machine, scale).into())
    }
}

fn http_load(ends: Ends<'_>, node: &Node, body: usize, nopush: bool) -> Result<Vec<Figure>> {
    let program = which("wrk").context("wrk is missing: run `cargo xtask setup`")?;
    let port = nginx::port(body, HTTP_CONNECTIONS, nopush);
    let before = busy()?;
    let load = wrk(node, &program, ends, port, HTTP_CONNECTIONS, 1)?;
    let machine = busy()?.saturating_sub(before);
    let figure = |metric, unit, value| Figure {
        metric,
        unit,
        value,
    };
    let each = machine.as_secs_f64() * 1e6 / load.requests.max(1) as f64;
    Ok(vec![
        figure("requests", "1/s", load.per_second),
        figure("p50", "µs", load.p50),
        figure(MACHINE_CPU, "µs", each),
    ])
}

/// Every connection was used once, as those are that a client keeps for later.
fn idle(ends: Ends<'_>, connections: usize) -> Result<Vec<Figure>> {
    let listener = ends.listen(0)?;
    let before = memory::settled()?;
    let mut held = Held::open(ends, &listener, connections)?;
    held.exchange(1 << 10)?;
    // Acknowledgements are on their way, and what they free.
    Ok(vec![megabytes(before, memory::settled()?)])
}

/// Who reads a kilobyte now and then has as much before it as the sockets of both ends hold.
fn slow_readers(ends: Ends<'_>, connections: usize) -> Result<Vec<Figure>> {
    let listener = ends.listen(0)?;
    let before = memory::settled()?;
    let mut held = Held::open(ends, &listener, connections)?;
    held.fill()?;
    for _ in 0..2 {
        held.read(1 << 10)?;
        held.fill()?;
    }
    Ok(vec![megabytes(before, memory::used()?)])
}

fn megabytes(before: u64, after: u64) -> Figure {
    Figure {
        metric: "memory",
        unit: "MB",
        value: after.saturating_sub(before) as f64 / 1e6,
    }
}

const MACHINE_CPU: &str = "machine CPU";

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
        cpu(MACHINE_CPU, machine),
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
}
