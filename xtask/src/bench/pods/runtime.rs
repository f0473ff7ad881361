//! What containerd says of itself: how long its calls of the network's plugins took.

use anyhow::{Context as _, Result, ensure};
use sinabro_lab::Place;

/// Where xtask/cluster/config has it serve its metrics, on each node.
const METRICS: &str = "http://127.0.0.1:1338/v1/metrics";
/// All plugins of a pod's network, from the first call to the last answer.
const TIMER: &str = "containerd_cri_network_plugin_operations_duration_seconds_seconds";
const SET_UP: &str = "operation_type=\"set_up_pod\"";

/// The calls so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timer {
    seconds: f64,
    calls: f64,
}

impl Timer {
    pub fn read(node: &Place) -> Result<Self> {
        let text = node.run(|| {
            let mut response = ureq::get(METRICS).call()?;
            Ok(response.body_mut().read_to_string()?)
        });
        Self::parse(&text.context("cannot read the metrics of containerd")?)
    }

    /// Nothing is counted before the first call.
    fn parse(text: &str) -> Result<Self> {
        let value = |what: &str| -> Result<f64> {
            let line = text.lines().find(|line| {
                let rest = line
                    .strip_prefix(TIMER)
                    .and_then(|line| line.strip_prefix(what));
                rest.is_some_and(|rest| rest.starts_with('{') && rest.contains(SET_UP))
            });
            let Some(line) = line else {
                return Ok(0.0);
            };
            let value = line.rsplit(' ').next().unwrap_or_default();
            value.parse().with_context(|| format!("{line:?}"))
        };
        Ok(Self {
            seconds: value("_sum")?,
            calls: value("_count")?,
        })
    }

    /// Milliseconds of each call since then, on the average.
    pub fn mean_since(&self, node: &Place) -> Result<f64> {
        let now = Self::read(node)?;
        let calls = now.calls - self.calls;
        ensure!(calls > 0.0, "containerd counted no call of a plugin");
        Ok((now.seconds - self.seconds) * 1e3 / calls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_set_a_pod_up_are_counted() {
        let text = format!(
            "# TYPE {TIMER} histogram\n\
             {TIMER}_bucket{{{SET_UP},le=\"0.005\"}} 1\n\
             {TIMER}_sum{{operation_type=\"tear_down_pod\"}} 9\n\
             {TIMER}_sum{{{SET_UP}}} 0.25\n\
             {TIMER}_count{{{SET_UP}}} 5\n"
        );
        let parsed = Timer {
            seconds: 0.25,
            calls: 5.0,
        };
        assert_eq!(Timer::parse(&text).unwrap(), parsed);
        assert_eq!(Timer::parse("").unwrap(), Timer::default());
        let end = text.replace(" 0.25", "");
        assert!(Timer::parse(&end).is_err());
    }
}
