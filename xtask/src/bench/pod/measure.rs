//! How it is measured, and how long.

use super::{
    case::{Case, Kind},
    scene::{Scene, Subject, Way},
};
use crate::bench::{
    figures::{Figure, MACHINE_CPU, Outcome, rates},
    http, memory,
    processor::busy,
};
use anyhow::Result;
use sinabro_lab::traffic::{
    awake::awake,
    brief::brief,
    datagrams::{datagrams, headers},
    held::Held,
    one_way::streams,
    round_trips::{latency, round_trips},
    seat::Ends,
};
use std::time::Duration;

/// Threads at each end of short connections.
const THREADS: usize = 4;
const HTTP_CONNECTIONS: usize = 50;

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
        let (metric, unit, measured) = match case.kind {
            Kind::Streams {
                connections,
                message,
            } => {
                let listener = ends.listen(0)?;
                let measured = streams(ends, &listener, connections, message, time)?;
                ("throughput", "Gbit/s", measured)
            }
            Kind::RoundTrips { connections, size } => {
                let listener = ends.listen(0)?;
                let measured = round_trips(ends, &listener, size, connections, time)?;
                ("requests", "1/s", measured)
            }
            Kind::RoundTripsAwake(size) => {
                let listener = ends.listen(0)?;
                let measure = || round_trips(ends, &listener, size, 1, time);
                let measured = awake(&scene.cpus(), measure)?;
                let mut figures = rates("requests", "1/s", &measured, Duration::ZERO);
                // The machine was never idle.
                figures.retain(|figure| figure.metric != MACHINE_CPU);
                return Ok(figures.into());
            }
            Kind::Connections => {
                let listener = ends.listen(0)?;
                let measured = brief(ends, &listener, THREADS, 0, time)?;
                ("requests", "1/s", measured)
            }
            Kind::Http { body, nopush } => {
                let port = http::nginx::port(body, HTTP_CONNECTIONS, nopush);
                return Ok(http::load(scene.files(), ends, port, HTTP_CONNECTIONS)?.into());
            }
            Kind::Packets(size) => {
                let measured = datagrams(ends, size, time)?.received;
                ("received", "1/s", measured)
            }
            Kind::Datagrams(size) => {
                let measured = datagrams(ends, size + headers(ends.address), time)?.received;
                ("received", "1/s", measured)
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
        Ok(rates(metric, unit, &measured, machine).into())
    }
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
