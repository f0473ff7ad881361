//! Traffic that must not notice what is done to the network under it: streams, requests, and a
//! meter that sees how long it stood still.

use super::{
    gaps::{Meter, Watched},
    http::Load,
    load::Stream,
    path::Path,
};
use crate::wait::wait_for;
use anyhow::{Result, bail, ensure};
use std::time::Duration;

/// How much of it there is on each path.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Between blocks of a stream and between requests, so that the machine has time for others.
    pub pause: Duration,
    /// Who ask at once. They open a new connection now and then; without any, all that there is was there at the beginning.
    pub clients: usize,
}

/// Traffic that runs until [`Traffic::finish`].
pub struct Traffic {
    streams: Vec<Stream>,
    loads: Vec<Load>,
    meter: Meter,
}

impl Traffic {
    /// Streams, requests and the meter on every path. A translated one carries no stream, and its
    /// next port leads to the meter.
    pub fn start(paths: &[Path], pace: Pace) -> Result<Self> {
        let (mut streams, mut loads, mut watched) = (Vec::new(), Vec::new(), Vec::new());
        for path in paths {
            if path.is_translated() {
                watched.push(path.next_port());
            } else {
                streams.push(Stream::start(
                    &path.from,
                    &path.to,
                    path.address,
                    pace.pause,
                )?);
                watched.push(path.clone());
            }
            if pace.clients > 0 {
                loads.push(Load::on(path, pace.clients, pace.pause)?);
            }
        }
        let meter = Meter::start(&watched)?;
        let traffic = Self {
            streams,
            loads,
            meter,
        };
        traffic.must_flow("at the beginning")?;
        Ok(traffic)
    }

    /// Lets it run for a while. Before the first [`Traffic::event`] this is the time that all
    /// later gaps are compared with.
    pub fn watch(&self, time: Duration) {
        self.meter.watch(time);
    }

    /// Something is done to it now: the cause of gaps from here on, in reports.
    pub fn event(&self, what: &str) -> Result<()> {
        self.meter.event(what)
    }

    /// Everything moves on; an error says what stood still, and when.
    pub fn must_flow(&self, when: &str) -> Result<()> {
        let before = self.progress();
        wait_for("all traffic to move on", || {
            let after = self.progress();
            let mut both = before.iter().zip(&after);
            let Some(still) = both.position(|(before, after)| before == after) else {
                return Ok(Some(()));
            };
            let names = self.streams.iter().map(Stream::name);
            let name = names.chain(self.loads.iter().map(Load::name)).nth(still);
            bail!("{} stood still {when}", name.unwrap_or_default())
        })
    }

    fn progress(&self) -> Vec<u64> {
        let streams = self.streams.iter().map(Stream::received);
        streams
            .chain(self.loads.iter().map(Load::requests))
            .collect()
    }

    /// Ends everything in order; an error if a single request or byte was lost, or if a path
    /// stood still for longer than [`super::gaps::ALLOWED`] more than before.
    pub fn finish(self) -> Result<String> {
        let (told, watched) = self.finish_disturbed()?;
        let gaps = watched.must_hold().map_err(|error| {
            let lines = watched.table().join("\n  ");
            error.context(format!("traffic was disturbed\n  {lines}"))
        })?;
        Ok(format!("{told}; {gaps}"))
    }

    /// The same where packets may be lost for moments: no request and no byte of a stream may be, and how long each path stood
    /// still is not judged.
    pub fn finish_disturbed(self) -> Result<(String, Watched)> {
        self.must_flow("at the end")?;
        let watched = self.meter.finish()?;
        let (streams, mut requests) = (self.streams.len(), 0);
        for stream in self.streams {
            stream.finish()?;
        }
        for load in self.loads {
            let name = load.name().to_string();
            let report = load.finish()?;
            ensure!(
                report.failures.is_empty(),
                "{name}: {} of {} requests failed: {}",
                report.failures.len(),
                report.requests,
                report.failures[0]
            );
            requests += report.requests;
        }
        let told = format!("0 of {requests} requests lost, {streams} streams whole");
        Ok((told, watched))
    }
}
