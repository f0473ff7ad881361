//! `cargo xtask`: everything that is done to the project, one file per command.

mod arch;
mod archive;
mod bench;
mod build;
mod chart;
mod cluster;
mod debian;
mod demo;
mod deploy;
mod differential;
#[cfg(test)]
mod documents;
mod e2e;
mod earlier;
mod fuzz;
mod image;
mod interrupt;
mod manifest;
mod report;
mod residue;
mod root;
mod setup;
mod test;
mod ui;
mod vm;
mod workspace;

use clap::{Parser, Subcommand};
use sinabro_lab::residue::run;
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
    Build(build::Options),
    /// Make two nodes on this machine and show pods talking to each other, to the nodes and to
    /// the outside
    Demo(demo::Options),
    /// Run every test, the privileged ones in namespaces of their own
    Test(test::Options),
    /// Measure against the plugins that others use, and against plain TCP
    Bench(bench::Options),
    /// Look for inputs that break the parsers of what comes from outside
    Fuzz(fuzz::Options),
    /// Compare what Services lead to with kube-proxy's own code, on random ones
    Differential(differential::Options),
    /// Write the image's archive, target/dist/sinabro-image.tar
    Image(image::Options),
    /// Check that the Helm chart renders to the objects of deploy/sinabro.yaml
    Chart,
    /// Put the agent, as the sources are, into a kind cluster, which is made if there is none
    DeployAgent,
    /// Run a real Kubernetes cluster on this machine, without Docker
    #[command(subcommand)]
    Cluster(cluster::Action),
    /// Run Kubernetes' own network tests, and what happens in a cluster's life, on a real cluster.
    /// What a cluster with other options kept on its disks is forgotten, one that runs is left alone
    E2e(e2e::Options),
    /// Boot other kernels in virtual machines and run programs, plugin, agent and checks on each
    Vm(vm::Options),
    /// List links, routes, namespaces, eBPF programs, pins, cgroups, mounts, files and processes of
    /// Sinabro on this machine; exit code 1 if there are any
    Residue(residue::Options),
}

fn main() -> ExitCode {
    if let Some(code) = fuzz::rustc_wrapper().or_else(test::runner) {
        return code;
    }
    let result = run::begin().and_then(|()| match Cli::parse().command {
        Command::Setup(options) => setup::run(&options),
        Command::Build(options) => build::run(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Differential(options) => differential::run(&options),
        Command::Image(options) => image::run(&options),
        Command::Chart => chart::run(),
        Command::DeployAgent => deploy::run(),
        Command::Cluster(action) => cluster::run(&action),
        Command::E2e(options) => e2e::run(&options),
        Command::Vm(options) => vm::run(&options),
        Command::Residue(options) => residue::run(&options),
    });
    result.unwrap_or_else(|error| {
        ui::error(&format!("{error:#}"));
        ExitCode::FAILURE
    })
}
