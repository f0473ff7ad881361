//! `cargo xtask residue`: what Sinabro has left on this machine.

use anyhow::Result;
use sinabro_lab::residue::{Kind, Snapshot};
use std::process::ExitCode;

pub fn run() -> Result<ExitCode> {
    if !crate::root::is_root() {
        crate::root::become_root("looking into all namespaces and pins", &["residue"])?;
    }
    let left = Snapshot::take()?.ours();
    for item in &left {
        println!("  {item}");
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
