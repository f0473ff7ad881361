//! Streams and requests that must not notice what is done to the network under them.

use super::{PATIENCE, http::Load, load::Stream};
use anyhow::{Result, bail, ensure};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Traffic that runs until [`Traffic::finish`].
pub struct Traffic {
    pub streams: Vec<Stream>,
    pub loads: Vec<Load>,
}

impl Traffic {
    /// Everything moves on; an error says what stood still, and when.
    pub fn must_flow(&self, when: &str) -> Result<()> {
        let before = self.progress();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let after = self.progress();
            let still = before
                .iter()
                .zip(&after)
                .position(|(before, after)| before == after);
            let Some(still) = still else {
                return Ok(());
            };
            let names = self.streams.iter().map(Stream::name);
            let mut names = names.chain(self.loads.iter().map(Load::name));
            if Instant::now() > deadline {
                let name = names.nth(still).unwrap_or_default();
                bail!("{name} stood still {when}");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn progress(&self) -> Vec<u64> {
        let streams = self.streams.iter().map(Stream::received);
        streams
            .chain(self.loads.iter().map(Load::requests))
            .collect()
    }

    /// Ends everything in order; an error if a single request or byte was lost.
    pub fn finish(self) -> Result<String> {
        self.must_flow("at the end")?;
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
        Ok(format!(
            "0 of {requests} requests lost, {streams} streams whole"
        ))
    }
}
