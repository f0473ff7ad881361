//! What an agent's metrics say of Services.

use anyhow::{Context as _, Result};
use sinabro_lab::Node;
use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

/// Where agents are asked for metrics.
const METRICS: &str = "127.0.0.1:9632";

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Published {
    pub services: f64,
    /// Services that are not as they should be, for want of room.
    pub waiting: f64,
    pub endpoints: f64,
    pub changes: Durations,
}

/// A histogram of seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Durations {
    pub count: f64,
    pub sum: f64,
    /// Upper bound, and how many are not above it.
    buckets: Vec<(f64, f64)>,
}

impl Durations {
    /// What came since an earlier look.
    pub fn since(&self, before: &Self) -> Self {
        let buckets = self.buckets.iter().zip(&before.buckets);
        Self {
            count: self.count - before.count,
            sum: self.sum - before.sum,
            buckets: buckets
                .map(|((bound, now), (_, then))| (*bound, now - then))
                .collect(),
        }
    }

    /// The smallest bound that such a share is not above; infinite if there are none.
    pub fn within(&self, share: f64) -> f64 {
        let enough = |(_, count): &&(f64, f64)| *count > 0.0 && *count >= share * self.count;
        let found = self.buckets.iter().find(enough);
        found.map_or(f64::INFINITY, |(bound, _)| *bound)
    }
}

pub fn ask(node: &Node) -> Result<Published> {
    let metrics = node.place().run(|| {
        let mut stream = TcpStream::connect(METRICS)?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    })?;
    read(&metrics)
}

fn read(metrics: &str) -> Result<Published> {
    let mut published = Published::default();
    let mut has_services = false;
    for line in metrics.lines() {
        let Some((name, value)) = line.rsplit_once(' ') else {
            continue;
        };
        let Some(name) = name.strip_prefix("sinabro_service") else {
            continue;
        };
        let value: f64 = value
            .parse()
            .with_context(|| format!("metrics have {line}"))?;
        const DURATION: &str = "_change_duration_seconds";
        match name {
            "s" => (published.services, has_services) = (value, true),
            "s_waiting" => published.waiting = value,
            "_endpoints" => published.endpoints = value,
            _ => match name.strip_prefix(DURATION) {
                Some("_count") => published.changes.count = value,
                Some("_sum") => published.changes.sum = value,
                Some(bucket) => {
                    let bound = bucket
                        .strip_prefix("_bucket{le=\"")
                        .and_then(|bound| bound.strip_suffix("\"}"));
                    let bound = bound.with_context(|| format!("metrics have {line}"))?;
                    let bound = match bound {
                        "+Inf" => f64::INFINITY,
                        bound => bound.parse()?,
                    };
                    published.changes.buckets.push((bound, value));
                }
                None => {}
            },
        }
    }
    has_services
        .then_some(published)
        .context("no metric sinabro_services: does the agent translate Services?")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP sinabro_services Services that are translated.\n\
        sinabro_services 12.0\n\
        sinabro_services_waiting 1.0\n\
        sinabro_service_endpoints 60.0\n\
        sinabro_service_map_entries{map=\"frontends\"} 7.0\n\
        sinabro_service_change_duration_seconds_sum 2.5\n\
        sinabro_service_change_duration_seconds_count 3\n\
        sinabro_service_change_duration_seconds_bucket{le=\"0.001\"} 2\n\
        sinabro_service_change_duration_seconds_bucket{le=\"1.0\"} 2\n\
        sinabro_service_change_duration_seconds_bucket{le=\"+Inf\"} 3\n";

    #[test]
    fn metrics_are_read() {
        let published = read(PAGE).unwrap();
        assert_eq!(published.services, 12.0);
        assert_eq!((published.waiting, published.endpoints), (1.0, 60.0));
        let changes = &published.changes;
        assert_eq!((changes.count, changes.sum), (3.0, 2.5));
        assert_eq!(changes.within(0.5), 0.001);
        assert_eq!(changes.within(0.99), f64::INFINITY);
        assert!(read("sinabro_nodes 1\n").is_err());
        assert!(read("sinabro_services many\n").is_err());
    }

    #[test]
    fn what_came_since_is_counted_alone() {
        let before = read(PAGE).unwrap().changes;
        let mut after = before.clone();
        after.count += 100.0;
        after.sum += 0.2;
        after.buckets[0].1 += 98.0;
        after.buckets[1].1 += 99.0;
        after.buckets[2].1 += 100.0;
        let since = after.since(&before);
        assert_eq!((since.within(0.98), since.within(0.99)), (0.001, 1.0));
        assert_eq!(before.since(&before).within(0.99), f64::INFINITY);
    }
}
