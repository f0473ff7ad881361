//! `cargo xtask test`: every test of the workspace, then a look at what they left behind.

use crate::{
    build,
    earlier::Earlier,
    residue, root, setup, ui,
    workspace::{Rustc, cargo_with_ebpf, run as show},
};
use anyhow::{Context as _, Result};
use sinabro_lab::residue::left;
use std::{path::PathBuf, process::ExitCode};

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
    let earlier = match upgrades(&options.arguments) {
        true => earlier()?,
        false => None,
    };

    let mut command = cargo_with_ebpf();
    command.arg("test");
    if let Some(dir) = earlier {
        command.env("SINABRO_EARLIER_DIR", dir);
    }
    let mut arguments = options.arguments.iter();
    match arguments.any(|argument| argument == "-p" || argument.starts_with("--package")) {
        // Tests of several nodes start the programs as a user would.
        true => build::debug()?,
        // Makes the programs, too: their packages have tests that start them. A build of them alone
        // would choose other features of what they use, and compile it all twice.
        false => {
            command.args(["--workspace", "--exclude", "sinabro-ebpf"]);
        }
    }
    let before = residue::look()?;
    command.args(&options.arguments);
    if !root::is_root() {
        let host = Rustc::find()?.host.to_uppercase().replace('-', "_");
        command.env(format!("CARGO_TARGET_{host}_RUNNER"), "sudo --preserve-env");
    }
    let passed = show(&mut command).context("tests failed");

    let left = left(&before, residue::look)?;
    for item in &left {
        ui::error(&format!("left behind: {item}"));
    }
    passed?;
    if left.is_empty() {
        println!("nothing left behind: {}", residue::kinds());
        Ok(ExitCode::SUCCESS)
    } else {
        Ok(ExitCode::FAILURE)
    }
}

/// Whether the tests that cargo is asked for may be those of upgrades, which need the programs of
/// an earlier state.
fn upgrades(arguments: &[String]) -> bool {
    let mut arguments = arguments.iter().map(String::as_str).peekable();
    let (mut package, mut target) = (true, true);
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (argument, arguments.peek().copied()),
        };
        match name {
            "-p" | "--package" => package = value == Some("sinabro-lab"),
            "--test" => target = value == Some("upgrade"),
            "--lib" | "--bins" | "--bin" | "--doc" => target = false,
            _ => {}
        }
    }
    package && target
}

/// Where the earlier programs are. Without git's history there are none, and only the tests that
/// need them fail.
fn earlier() -> Result<Option<PathBuf>> {
    let earlier = Earlier::released()?;
    match earlier.ensure() {
        Ok(()) => Ok(Some(earlier.programs())),
        Err(error) => {
            ui::error(&format!("no upgrade can be tested: {error:#}"));
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_tests_of_upgrades_have_an_earlier_state_built() {
        let upgrades = |text: &str| {
            let words = text.split_whitespace().map(str::to_owned);
            super::upgrades(&words.collect::<Vec<_>>())
        };
        for text in [
            "",
            "--release",
            "-p sinabro-lab",
            "--package=sinabro-lab",
            "--test upgrade",
        ] {
            assert!(upgrades(text), "{text}");
        }
        for text in [
            "-p sinabro-cni",
            "--package=xtask upgrade",
            "-p sinabro-lab --test overlay",
            "--test=crash",
            "-p sinabro-lab --lib",
        ] {
            assert!(!upgrades(text), "{text}");
        }
    }
}
