//! `cargo xtask bench`: comparisons, interleaved on this machine, as ratios.

mod cni;
mod nodes;
mod pods;
mod stats;
mod tcp;

use crate::{build, earlier::Earlier, setup, workspace::dist};
use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// ADD and DEL, exec to exit, beside the plugins ptp and host-local, or beside an earlier
    /// commit's
    Cni(cni::Options),
    /// The agent in clusters of thousands of nodes, before Kubernetes' own API server
    Nodes(nodes::Options),
    /// Pods from request to Running on a real cluster, beside the plugin bridge
    Pods(pods::Options),
    /// TCP between two pods of one node, accelerated, beside plain and beside 127.0.0.1, or beside
    /// an earlier commit's
    Tcp(tcp::Options),
}

pub fn run(options: &Options) -> Result<ExitCode> {
    match &options.what {
        What::Cni(options) => cni::run(options),
        What::Nodes(options) => nodes::run(options),
        What::Pods(options) => pods::run(options),
        What::Tcp(options) => tcp::run(options),
    }
}

/// One comparison.
#[derive(Clone, Serialize)]
pub struct Row {
    pub case: String,
    pub metric: String,
    pub unit: &'static str,
    pub subject: String,
    /// Median over the rounds.
    pub value: f64,
    pub against: String,
    /// Median over the rounds.
    pub against_value: f64,
    /// Median over the rounds of each round's own ratio: what slows a whole round cancels out.
    pub ratio: f64,
    /// Smallest and largest of the rounds' ratios.
    pub spread: [f64; 2],
}

/// A bench's JSON file.
#[derive(Serialize)]
pub struct Report {
    pub machine: crate::report::Machine,
    pub rows: Vec<Row>,
}

/// What is measured: the present programs and, if wanted, an earlier commit's.
#[derive(Clone, Debug, clap::Args)]
pub struct Programs {
    /// Compare with the programs of an earlier commit, which are built once: exit code 1 if the
    /// present ones are slower in every round
    #[arg(long, value_name = "COMMIT")]
    against: Option<String>,

    /// Where they are, for the process that sudo starts: it builds nothing as root.
    #[arg(long, hide = true, value_name = "DIR")]
    programs: Option<PathBuf>,

    #[arg(long, hide = true, value_name = "DIR")]
    earlier: Option<PathBuf>,
}

impl Programs {
    /// Builds what is not there yet.
    fn ensure(&mut self, needs: &[setup::Need]) -> Result<()> {
        if self.programs.is_some() {
            return Ok(());
        }
        setup::ensure(needs)?;
        build::release()?;
        self.programs = Some(dist());
        if let Some(commit) = &self.against {
            let earlier = Earlier::named(commit)?;
            earlier.ensure()?;
            self.against = Some(earlier.short().into());
            self.earlier = Some(earlier.programs());
        }
        Ok(())
    }

    /// The same for the same program under sudo.
    fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments = Vec::new();
        for (flag, dir) in [("--programs", &self.programs), ("--earlier", &self.earlier)] {
            if let Some(dir) = dir {
                let dir = std::path::absolute(dir)?.display().to_string();
                arguments.extend([flag.into(), dir]);
            }
        }
        if let Some(commit) = &self.against {
            arguments.extend(["--against".into(), commit.clone()]);
        }
        Ok(arguments)
    }

    fn present(&self) -> PathBuf {
        self.programs.clone().unwrap_or_else(dist)
    }

    /// The earlier commit and its programs.
    fn earlier(&self) -> Option<(&str, &Path)> {
        Some((self.against.as_deref()?, self.earlier.as_deref()?))
    }
}

/// Says which figures are worse than the earlier commit's in every single round, which noise is
/// not; the exit code.
fn verdict<'a>(commit: &str, slower: impl Iterator<Item = (&'a str, &'a str, f64)>) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for (case, metric, ratio) in slower {
        println!("  slower than {commit} in every round: {case}, {metric}, {ratio:.2}");
        code = ExitCode::FAILURE;
    }
    if code == ExitCode::SUCCESS {
        println!("  nothing is slower than {commit} in every round");
    }
    code
}
