//! How it is measured, and how long.

use super::{
    case::{Case, Kind, PACKET_CPU, Part},
    flows,
    scene::{Scene, Subject},
};
use crate::bench::{
    figures::{Figure, Outcome, rates},
    http,
    processor::busy,
};
use anyhow::Result;
use sinabro_lab::traffic::{
    brief::brief,
    datagrams::{Datagrams, datagrams, datagrams_back},
    echoes::{echoes, questions},
    one_way::{one_way, way_back},
    round_trips::round_trips,
};
use std::time::Duration;

/// As many bytes as a bulk sender passes to the kernel at once.
const BULK: usize = 1 << 17;
/// Bytes of a request, and of a response.
const REQUEST: usize = 64;
/// Bytes of a packet, with its IP header.
const PACKET: usize = 64;
/// Threads at each end of short connections.
const THREADS: usize = 4;
/// At most in a measurement: fewer than there are ports for in half a minute, which is for how long they are kept, by whoever translates.
const QUESTIONS: u64 = 2_000;
const BODY: usize = 36;
const HTTP_CONNECTIONS: usize = 50;

pub struct Bench {
    time: Duration,
}

impl Bench {
    pub fn new(short: bool) -> Self {
        let time = Duration::from_millis(if short { 120 } else { 300 });
        Self { time }
    }

    pub fn measure(&self, case: &Case, scene: &Scene, subject: &Subject) -> Result<Outcome> {
        let (ends, time, node) = (scene.ends(subject)?, self.time, scene.node(subject));
        let before = busy()?;
        let (metric, unit, measured) = match case.kind {
            Kind::StreamOut => {
                let listener = ends.listen(0)?;
                let measured = one_way(ends, &listener, BULK, time)?;
                ("throughput", "Gbit/s", measured)
            }
            Kind::StreamIn => {
                let listener = ends.listen(0)?;
                let measured = way_back(ends, &listener, BULK, time)?;
                ("throughput", "Gbit/s", measured)
            }
            Kind::RoundTrips(connections) => {
                let listener = ends.listen(0)?;
                let measured = round_trips(ends, &listener, REQUEST, connections, time)?;
                ("requests", "1/s", measured)
            }
            Kind::Echoes(flows) => ("requests", "1/s", echoes(ends, REQUEST, flows, time)?),
            Kind::Connections | Kind::Questions => {
                // Others are there on purpose.
                let counted = case.part != Part::Flows;
                if counted {
                    // What is over may leave the table meanwhile.
                    flows::flush(node)?;
                }
                let (entries, before) = (flows::entries(node)?, busy()?);
                let measured = match case.kind {
                    Kind::Questions => questions(ends, REQUEST, QUESTIONS, time)?,
                    _ => brief(ends, &ends.listen(0)?, THREADS, 0, time)?,
                };
                let entries = flows::entries(node)?.saturating_sub(entries);
                let machine = busy()?.saturating_sub(before);
                let mut figures = rates("requests", "1/s", &measured, machine);
                figures.extend(counted.then(|| Figure {
                    metric: "nf_conntrack",
                    unit: "entries",
                    value: entries as f64 / measured.count.max(1) as f64,
                }));
                return Ok(figures.into());
            }
            Kind::Http => {
                let port = http::nginx::port(BODY, HTTP_CONNECTIONS, true);
                return Ok(http::load(node, ends, port, HTTP_CONNECTIONS)?.into());
            }
            Kind::PacketsOut => return packets(datagrams(ends, PACKET, time)?, before),
            Kind::PacketsIn => return packets(datagrams_back(ends, PACKET, time)?, before),
        };
        let machine = busy()?.saturating_sub(before);
        Ok(rates(metric, unit, &measured, machine).into())
    }
}

fn packets(datagrams: Datagrams, before: Duration) -> Result<Outcome> {
    let machine = busy()?.saturating_sub(before);
    let mut figures = rates("received", "1/s", &datagrams.received, machine);
    // Who receives falls asleep and is woken up, or not, as it comes.
    figures.truncate(1);
    figures.push(Figure {
        metric: PACKET_CPU,
        unit: "µs",
        value: datagrams.sender_cpu.as_secs_f64() * 1e6 / datagrams.sent.max(1) as f64,
    });
    Ok(figures.into())
}
