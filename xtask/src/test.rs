//! `cargo xtask test`: every test of the workspace, then a look at what they left behind.

use crate::{
    build, root, setup, ui,
    workspace::{Rustc, cargo_with_ebpf, run as show},
};
use anyhow::{Context as _, Result};
use sinabro_lab::residue::{Snapshot, left_since};
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Options {
    /// Arguments for `cargo test`, for example `--package sinabro-lab --test crash`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    arguments: Vec<String>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure(setup::TEST)?;
    if !root::is_root() {
        root::require_sudo("a part of the tests")?;
    }
    // Tests of several nodes start the programs as a user would.
    build::debug()?;

    let before = Snapshot::take()?;
    let mut command = cargo_with_ebpf();
    command.arg("test");
    if !options
        .arguments
        .iter()
        .any(|argument| argument == "-p" || argument.starts_with("--package"))
    {
        command.args(["--workspace", "--exclude", "sinabro-ebpf"]);
    }
    command.args(&options.arguments);
    if !root::is_root() {
        let host = Rustc::find()?.host.to_uppercase().replace('-', "_");
        command.env(format!("CARGO_TARGET_{host}_RUNNER"), "sudo --preserve-env");
    }
    let passed = show(&mut command).context("tests failed");

    let left = left_since(&before)?;
    for item in &left {
        ui::error(&format!("left behind: {item}"));
    }
    passed?;
    if left.is_empty() {
        println!("nothing left behind: {}", crate::residue::kinds());
        Ok(ExitCode::SUCCESS)
    } else {
        Ok(ExitCode::FAILURE)
    }
}
