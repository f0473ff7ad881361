//! Process 1 of a virtual machine of `cargo xtask vm`, and, as its child, who takes the steps.
//!
//! Process 1 only mounts, loads modules, collects processes that end and restarts the machine, which
//! ends it. Everything else is done by the child, so that whatever happens to it is seen.

mod init;
mod node;
mod report;
mod steps;
mod uplink;

use anyhow::{Context as _, Result};
use sinabro_guest::{JOB_FILE, Job};
use std::{env, fs, process};

/// How process 1 calls itself for the steps.
const STEPS: &str = "steps";

fn main() {
    if process::id() == 1 {
        init::run();
    }
    // Anybody else's machine is left alone.
    let result = match env::args().nth(1).as_deref() {
        Some(STEPS) => steps::run(),
        _ => Err(anyhow::anyhow!("this is process 1 of `cargo xtask vm`")),
    };
    if let Err(error) = result {
        eprintln!("error: {error:#}");
        process::exit(1);
    }
}

fn job() -> Result<Job> {
    let text = fs::read(JOB_FILE).with_context(|| format!("cannot read {JOB_FILE}"))?;
    serde_json::from_slice(&text).with_context(|| format!("{JOB_FILE} is none"))
}
