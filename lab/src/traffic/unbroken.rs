//! Streams and requests that must not notice what is done to the network under them.

use super::{http::Load, load::Stream};
use crate::wait::wait_for;
use anyhow::{Result, bail, ensure};

/// Traffic that runs until [`Traffic::finish`].
pub struct Traffic {
    pub streams: Vec<Stream>,
    pub loads: Vec<Load>,
}

impl Traffic {
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
