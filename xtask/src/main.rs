//! `cargo xtask`: everything that is done to the project, one file per command.

#[allow(dead_code)]
mod archive;
mod bench;
mod build;
mod debian;
mod demo;
mod interrupt;
mod report;
mod residue;
mod root;
mod setup;
mod test;
mod ui;
mod workspace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Builds, shows, tests and measures Sinabro.
///
/// Every command first brings what it needs and is missing (see `setup`). Only what makes
/// network namespaces runs as root, through sudo if need be.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what is missing to build, test and measure; does nothing twice
    Setup(setup::Options),
    /// Build the static release binaries into target/dist
    #[command(visible_alias = "dist")]
    Build,
    /// Make two nodes on this machine and show pods talking to each other, to the nodes and to
    /// the outside
    Demo(demo::Options),
    /// Run every test, the privileged ones in namespaces of their own
    Test(test::Options),
    /// Measure against the plugins that others use
    Bench(bench::Options),
    /// List links, namespaces, pins, cgroups, mounts, files and processes of Sinabro on this
    /// machine; exit code 1 if there are any
    Residue,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Setup(options) => setup::run(&options),
        Command::Build => build::run(),
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Residue => residue::run(),
    };
    result.unwrap_or_else(|error| {
        ui::error(&format!("{error:#}"));
        ExitCode::FAILURE
    })
}
