//! HTTP between two ends: nginx with one worker, and wrk with one thread.

pub mod nginx;
mod wrk;

pub use nginx::Nginx;
pub use wrk::wrk;

use super::{
    figures::{Figure, MACHINE_CPU},
    processor::busy,
};
use crate::workspace::which;
use anyhow::{Context as _, Result};
use sinabro_lab::{Node, traffic::seat::Ends};

/// What wrk says after a second, and the CPU time of the machine for each request.
pub fn load(node: &Node, ends: Ends<'_>, port: u16, connections: usize) -> Result<Vec<Figure>> {
    let program = which("wrk").context("wrk is missing: run `cargo xtask setup`")?;
    let before = busy()?;
    let load = wrk(node, &program, ends, port, connections, 1)?;
    let machine = busy()?.saturating_sub(before);
    let figure = |metric, unit, value| Figure {
        metric,
        unit,
        value,
    };
    let each = machine.as_secs_f64() * 1e6 / load.requests.max(1) as f64;
    Ok(vec![
        figure("requests", "1/s", load.per_second),
        figure("p50", "µs", load.p50),
        figure(MACHINE_CPU, "µs", each),
    ])
}
