//! wrk, and what it prints.

use anyhow::{Context as _, Result, bail, ensure};
use sinabro_lab::{Node, Program, traffic::seat::Ends};
use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// How long it may take beyond its time.
const PATIENCE: Duration = Duration::from_secs(20);

/// What wrk measured: requests per second, and latencies in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    pub requests: u64,
    pub per_second: f64,
    pub p50: f64,
    pub p99: f64,
}

/// Runs wrk for whole seconds: it knows no others.
pub fn wrk(
    node: &Node,
    wrk: &Path,
    ends: Ends<'_>,
    port: u16,
    connections: usize,
    seconds: u64,
) -> Result<Load> {
    let mut command = Command::new(wrk);
    command
        .env_clear()
        .args(["-t1", "--latency", "--timeout", "10s"])
        .args([format!("-c{connections}"), format!("-d{seconds}s")])
        .arg(format!(
            "http://{}/",
            ends.target((ends.address, port).into())
        ))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let deadline = Instant::now() + Duration::from_secs(seconds) + PATIENCE;
    let output = Program::start(node, ends.client, command)?
        .output(deadline)
        .context("wrk")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "wrk failed: {} {}",
        text.trim(),
        stderr.trim()
    );
    parse(&text).with_context(|| format!("wrk says:\n{text}"))
}

/// Reads wrk's report; an error if anything went wrong in it.
fn parse(text: &str) -> Result<Load> {
    for trouble in ["Socket errors:", "Non-2xx"] {
        if let Some(line) = text.lines().find(|line| line.contains(trouble)) {
            bail!("{}", line.trim());
        }
    }
    let after = |name: &str| -> Result<&str> {
        let mut lines = text.lines().map(str::trim);
        let value = lines.find_map(|line| line.strip_prefix(name));
        Ok(value.with_context(|| format!("no `{name}`"))?.trim())
    };
    let requests = text
        .lines()
        .find_map(|line| line.trim().split_once(" requests in "))
        .context("no `requests in`")?;
    Ok(Load {
        requests: requests.0.parse()?,
        per_second: after("Requests/sec:")?.parse()?,
        p50: microseconds(after("50%")?)?,
        p99: microseconds(after("99%")?)?,
    })
}

/// As wrk writes a time: `252.00us`, `1.20ms`, `1.00s`, `1.00m`.
fn microseconds(text: &str) -> Result<f64> {
    let units = [
        ("us", 1.0),
        ("ms", 1e3),
        ("s", 1e6),
        ("m", 60e6),
        ("h", 3600e6),
    ];
    let (number, factor) = units
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))
        .with_context(|| format!("`{text}` is no time"))?;
    let number: f64 = number
        .parse()
        .with_context(|| format!("`{text}` is no time"))?;
    Ok(number * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "Running 1s test @ http://10.244.1.3:8000/
  1 threads and 50 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   273.63us   62.92us   1.69ms   89.45%
    Req/Sec   181.80k     6.69k  191.58k    72.73%
  Latency Distribution
     50%  252.00us
     75%  301.00us
     90%  349.00us
     99%    1.20ms
  198760 requests in 1.10s, 37.34MB read
Requests/sec: 180732.35
Transfer/sec:     33.96MB
";

    #[test]
    fn a_report_is_read() {
        let load = Load {
            requests: 198_760,
            per_second: 180_732.35,
            p50: 252.0,
            p99: 1200.0,
        };
        assert_eq!(parse(REPORT).unwrap(), load);
        assert_eq!(microseconds("1.50s").unwrap(), 1.5e6);
        assert_eq!(microseconds("2.00m").unwrap(), 120e6);
    }

    #[test]
    fn failures_are_no_figures() {
        let errors = "  Socket errors: connect 0, read 3, write 0, timeout 0\n";
        let status = "  Non-2xx or 3xx responses: 7\n";
        for trouble in [errors, status] {
            let text = REPORT.replace("Requests/sec", &format!("{trouble}Requests/sec"));
            assert!(
                parse(&text)
                    .unwrap_err()
                    .to_string()
                    .contains(trouble.trim())
            );
        }
    }

    #[test]
    fn half_a_report_and_garbage_are_errors() {
        let whole = REPORT.find("180732.35").unwrap();
        for end in 0..whole {
            assert!(parse(&REPORT[..end]).is_err(), "{}", &REPORT[..end]);
        }
        assert!(parse(&REPORT.replace("252.00us", "252.00")).is_err());
        assert!(parse(&REPORT.replace("198760", "many")).is_err());
    }
}
