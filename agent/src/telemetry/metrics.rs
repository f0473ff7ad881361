//! The metrics, by name.

use std::time::Duration;

/// Counters that are fed as things happen.
#[derive(Debug, Default)]
pub struct Metrics {}

impl Metrics {
    /// Counts one request on the agent's socket. `result` is `ok` or the error code.
    pub fn api_request(&self, _call: &'static str, _result: &'static str, _took: Duration) {}
}
