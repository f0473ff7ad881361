//! What is measured, and how long.

use super::subject::{Scene, Subject};
use crate::bench::{
    figures::Figure,
    http::{
        self,
        nginx::{self, BODIES},
    },
    processor::busy,
};
use anyhow::{Context as _, Result};
use sinabro_lab::traffic::{
    brief::brief, one_way::one_way, round_trips::round_trips, seat::Measured,
};
use std::{
    fmt,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// nginx and wrk
    Http,
    /// Requests and responses of equal size
    Rr,
    /// One-way streams
    Stream,
    /// A connection per request
    Short,
}

impl Part {
    pub fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Rr => "rr",
            Self::Stream => "stream",
            Self::Short => "short",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    Http { connections: usize, body: usize },
    RoundTrips { connections: usize, size: usize },
    Stream { message: usize },
    Brief,
}

impl Case {
    fn is_in_short_run(&self) -> bool {
        match *self {
            Self::Http { connections, body } => match body {
                36 => true,
                _ => body == 16 << 10 && connections == 50,
            },
            Self::RoundTrips { size, .. } => [64, 16 << 10].contains(&size),
            Self::Stream { message } => [1, 1 << 10, 128 << 10].contains(&message),
            Self::Brief => true,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |connections: &usize| if *connections == 1 { "" } else { "s" };
        match self {
            Self::Http { connections, body } => {
                let (body, s) = (size(*body), plural(connections));
                write!(f, "HTTP, {body}, {connections} connection{s}")
            }
            Self::RoundTrips {
                connections,
                size: message,
            } => {
                let (message, s) = (size(*message), plural(connections));
                write!(
                    f,
                    "request/response, {message}, {connections} connection{s}"
                )
            }
            Self::Stream { message } => write!(f, "stream, {} messages", size(*message)),
            Self::Brief => write!(f, "short connections"),
        }
    }
}

fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        _ => format!("{} KB", bytes >> 10),
    }
}

/// Threads at each end of short connections.
const THREADS: usize = 16;
/// Connections, of the kind about to be measured, from which the data path may learn.
const LESSONS: usize = 200;

/// Sizes of requests, and of responses.
const SIZES: [usize; 5] = [1, 64, 1 << 10, 16 << 10, 64 << 10];
const CONNECTIONS: [usize; 2] = [1, 16];
/// Servers' ports: those that stay the same from round to round, and those that are new each time.
const FIRST_PORT: u16 = 9000;
const FIRST_FRESH_PORT: u16 = 10_000;

/// A short run has the sizes at which acceleration matters most and least.
pub fn cases(only: Option<Part>, short: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    let wanted = |part| only.is_none_or(|only| only == part);
    if wanted(Part::Http) {
        for body in BODIES {
            cases.extend(nginx::CONNECTIONS.map(|connections| Case::Http { connections, body }));
        }
    }
    if wanted(Part::Rr) {
        for size in SIZES {
            cases.extend(CONNECTIONS.map(|connections| Case::RoundTrips { connections, size }));
        }
    }
    if wanted(Part::Stream) {
        let messages = [1, 64, 1 << 10, 16 << 10, 128 << 10];
        cases.extend(messages.map(|message| Case::Stream { message }));
    }
    if wanted(Part::Short) {
        cases.push(Case::Brief);
    }
    cases.retain(|case| !short || case.is_in_short_run());
    cases
}

pub struct Bench<'a> {
    scene: &'a Scene,
    /// Of everything but HTTP, which takes whole seconds.
    time: Duration,
    next_port: AtomicU16,
}

impl<'a> Bench<'a> {
    pub fn new(scene: &'a Scene, short: bool) -> Self {
        let time = Duration::from_millis(if short { 200 } else { 500 });
        let next_port = AtomicU16::new(FIRST_FRESH_PORT);
        Self {
            scene,
            time,
            next_port,
        }
    }

    /// A server port that nothing has been learnt about.
    fn fresh_port(&self) -> u16 {
        self.next_port.fetch_add(1, Ordering::Relaxed)
    }

    pub fn measure(&self, case: &Case, subject: &Subject) -> Result<Vec<Figure>> {
        let ends = subject.ends();
        match *case {
            Case::Http { connections, body } => {
                let meter = Meter::start(subject)?;
                let (node, wrk) = (self.scene.node(subject), self.scene.wrk());
                let load = http::wrk(
                    node,
                    wrk,
                    ends,
                    nginx::port(body, connections, false),
                    connections,
                    1,
                )?;
                let mut figures = vec![
                    figure("requests", "1/s", load.per_second),
                    figure("p50", "µs", load.p50),
                    figure("p99", "µs", load.p99),
                ];
                figures.extend(meter.stop(subject, load.requests)?);
                Ok(figures)
            }
            Case::RoundTrips { connections, size } => {
                // A server keeps its port, and whatever the data path has learnt about it.
                let before = SIZES.iter().take_while(|other| **other != size).count();
                let one = CONNECTIONS
                    .iter()
                    .take_while(|other| **other != connections);
                let number = before * CONNECTIONS.len() + one.count();
                let listener = ends.listen(FIRST_PORT + number as u16)?;
                let meter = Meter::start(subject)?;
                let measured = round_trips(ends, &listener, size, connections, self.time)?;
                requests(measured, meter, subject)
            }
            Case::Stream { message } => {
                let listener = ends.listen(self.fresh_port())?;
                let first = one_way(ends, &listener, message, self.time)?;
                let meter = Meter::start(subject)?;
                let later = one_way(ends, &listener, message, self.time)?;
                let megabytes = |measured: Measured| measured.per_second() / 1e6;
                let mut figures = vec![
                    figure("first connection", "MB/s", megabytes(first)),
                    figure(LEARNT, "MB/s", megabytes(later)),
                ];
                figures.extend(meter.stop(subject, later.count.div_ceil(1_000_000))?);
                figures.retain(|figure| figure.metric == CROSSED || figure.unit == "MB/s");
                Ok(figures)
            }
            Case::Brief => {
                let listener = ends.listen(self.fresh_port())?;
                let meter = Meter::start(subject)?;
                let measured = brief(ends, &listener, THREADS, LESSONS, self.time)?;
                requests(measured, meter, subject)
            }
        }
    }

    /// Bytes that cross the server's link for each of a few thousand requests.
    pub fn crossing_per_request(&self, subject: &Subject) -> Result<f64> {
        let ends = subject.ends();
        let listener = ends.listen(self.fresh_port())?;
        let before = subject.crossed()?;
        let measured = round_trips(ends, &listener, REQUEST, 1, Duration::from_millis(200))?;
        let crossed = before.zip(subject.crossed()?);
        let (before, after) = crossed.context("this subject has no link")?;
        Ok((after - before) as f64 / measured.count.max(1) as f64)
    }
}

/// Bytes of a request, and of its answer, by which acceleration is verified.
pub const REQUEST: usize = 64;
/// Of streams: the connections after the first one to an endpoint.
pub const LEARNT: &str = "later connections";
/// Bytes that crossed the server's link.
pub const CROSSED: &str = "crossed the link";

fn figure(metric: &'static str, unit: &'static str, value: f64) -> Figure {
    Figure {
        metric,
        unit,
        value,
    }
}

fn requests(measured: Measured, meter: Meter, subject: &Subject) -> Result<Vec<Figure>> {
    let each = measured.cpu.as_secs_f64() * 1e6 / measured.count.max(1) as f64;
    let mut figures = vec![
        figure("requests", "1/s", measured.per_second()),
        figure("CPU", "µs", each),
    ];
    figures.extend(meter.stop(subject, measured.count)?);
    Ok(figures)
}

/// What the machine and a subject's link did meanwhile.
struct Meter {
    busy: Duration,
    crossed: Option<u64>,
}

impl Meter {
    fn start(subject: &Subject) -> Result<Self> {
        Ok(Self {
            busy: busy()?,
            crossed: subject.crossed()?,
        })
    }

    /// For each of `count` requests, or whatever was counted.
    fn stop(self, subject: &Subject, count: u64) -> Result<Vec<Figure>> {
        let count = count.max(1) as f64;
        let busy = busy()?.saturating_sub(self.busy);
        let each = busy.as_secs_f64() * 1e6 / count;
        let mut figures = vec![figure("machine CPU", "µs", each)];
        if let (Some(before), Some(after)) = (self.crossed, subject.crossed()?) {
            figures.push(figure(CROSSED, "B", (after - before) as f64 / count));
        }
        Ok(figures)
    }
}
