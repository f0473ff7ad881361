//! `cargo xtask residue`: what Sinabro has left on this machine.

use crate::{root, workspace::output};
use anyhow::{Context as _, Result};
use sinabro_lab::residue::{Kind, Snapshot, run};
use std::process::{Command, ExitCode};

#[derive(clap::Args)]
pub struct Options {
    /// Print everything that is here, as JSON, for the process with this id
    #[arg(long, value_name = "PID", hide = true)]
    snapshot_for: Option<u32>,
}

/// What is here, seen by root's eyes also where this process has others.
pub fn look() -> Result<Snapshot> {
    if root::is_root() {
        return Snapshot::take();
    }
    root::require_sudo("looking for what is left behind")?;
    let own = std::env::current_exe().context("cannot find the path of xtask")?;
    let mut command = Command::new("sudo");
    command
        .arg("--")
        .arg(own)
        .args(["residue", "--snapshot-for"]);
    let printed = output(command.arg(std::process::id().to_string()))?;
    serde_json::from_str(&printed).context("no snapshot was printed")
}

pub fn run(options: &Options) -> Result<ExitCode> {
    if let Some(pid) = options.snapshot_for {
        println!("{}", serde_json::to_string(&Snapshot::take_for(pid)?)?);
        return Ok(ExitCode::SUCCESS);
    }
    if !root::is_root() {
        root::become_root("looking into all namespaces and pins", &["residue"])?;
    }
    let all = Snapshot::take()?;
    let left = all.ours();
    for item in &left {
        let of_run = |mark| match run::is_alive(mark) {
            true => format!(", of run {mark}"),
            false => format!(", of run {mark}, which has ended"),
        };
        let runs: String = all.runs(item).into_iter().map(of_run).collect();
        println!("  {item}{runs}");
    }
    if left.is_empty() {
        println!("  nothing of Sinabro's here: {}", kinds());
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "  {} left; an agent that is meant to run here leaves them, too",
        left.len()
    );
    Ok(ExitCode::FAILURE)
}

/// What is looked at, for people.
pub fn kinds() -> String {
    let names: Vec<String> = Kind::ALL
        .iter()
        .map(|kind| match kind {
            Kind::Process => "processes".to_string(),
            kind => format!("{kind}s"),
        })
        .collect();
    names.join(", ")
}
