//! `cargo xtask bench`: comparisons, interleaved on this machine, as ratios.

mod api_server;
mod cgroup;
mod cni;
mod common;
mod congestion;
mod feed;
mod figures;
mod http;
mod memory;
mod nat;
mod nodes;
mod output;
mod page;
mod pod;
mod pods;
mod process;
mod processor;
mod programs;
mod published;
mod row;
mod service_scale;
mod services;
mod stats;
mod tcp;
mod whole;

use output::{Output, Report};
use row::Row;

use crate::{
    build, cluster,
    earlier::Earlier,
    root, setup,
    workspace::{self, dist},
};
use anyhow::Result;
use clap::Subcommand;
use sinabro_lab::Node;
use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Options {
    #[command(subcommand)]
    what: Option<What>,

    #[command(flatten)]
    whole: whole::Options,
}

#[derive(Subcommand)]
enum What {
    /// ADD and DEL, exec to exit, beside the plugins ptp and host-local, or beside an earlier
    /// commit's
    Cni(cni::Options),
    /// Traffic from pods to the outside, masqueraded, beside iptables and nftables, or beside an
    /// earlier commit's
    Nat(nat::Options),
    /// The agent in clusters of thousands of nodes, before Kubernetes' own API server
    Nodes(nodes::Options),
    /// Draw the page of a report from its JSON file
    Page(whole::Page),
    /// Traffic between pods, on one node and across nodes, beside what others put there
    Pod(pod::Options),
    /// Pods from request to Running on a real cluster, beside the plugin bridge
    Pods(pods::Options),
    /// What each eBPF program costs for each packet, on every path, beside an earlier commit's
    Programs(programs::Options),
    /// Connections and datagrams by Services, beside the pod's own address, and beside kube-proxy with
    /// nftables and iptables
    Services(services::Options),
    /// The agent in a cluster of tens of thousands of Services, before Kubernetes' own API server
    ServiceScale(service_scale::Options),
    /// TCP between two pods of one node, accelerated, beside plain and beside 127.0.0.1, or beside
    /// an earlier commit's
    Tcp(tcp::Options),
}

pub fn run(options: &Options) -> Result<ExitCode> {
    match &options.what {
        None => whole::run(&options.whole),
        Some(What::Cni(options)) => cni::run(options),
        Some(What::Nat(options)) => nat::run(options),
        Some(What::Nodes(options)) => nodes::run(options),
        Some(What::Page(options)) => whole::draw(options),
        Some(What::Pod(options)) => pod::run(options),
        Some(What::Pods(options)) => pods::run(options),
        Some(What::Programs(options)) => programs::run(options),
        Some(What::Services(options)) => services::run(options),
        Some(What::ServiceScale(options)) => service_scale::run(options),
        Some(What::Tcp(options)) => tcp::run(options),
    }
}

/// What is measured: the present programs and, if wanted, an earlier commit's.
#[derive(Clone, Debug, Default, clap::Args)]
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
    /// The present ones alone, where they are if they are there already.
    fn alone(programs: Option<PathBuf>) -> Self {
        Self {
            programs,
            ..Self::default()
        }
    }

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

    /// Says which figures are slower than the earlier commit's, if there is one; the exit code.
    fn verdict<'a>(&self, slower: impl Iterator<Item = &'a Row>) -> ExitCode {
        let Some((commit, _)) = self.earlier() else {
            return ExitCode::SUCCESS;
        };
        let mut code = ExitCode::SUCCESS;
        for row in slower {
            let (case, metric, ratio) = (&row.case, &row.metric, row.ratio);
            println!("  slower than {commit} in every round: {case}, {metric}, {ratio:.2}");
            code = ExitCode::FAILURE;
        }
        if code == ExitCode::SUCCESS {
            println!("  nothing is slower than {commit} in every round");
        }
        code
    }
}

/// What is worse than an earlier commit's in every single round, which noise is not.
fn slower(rows: &[Row]) -> impl Iterator<Item = &Row> {
    rows.iter().filter(|row| match row.more_is_better() {
        true => row.spread[1] < 1.0,
        false => row.spread[0] > 1.0,
    })
}

/// By how much a median is worse before it counts.
const NOTABLE: f64 = 0.03;

/// The same, and notably so: of so many rows, a few are worse in each of five rounds by chance. What
/// other work of the machine is in, and a tail of a fraction of a second, is noise alone.
fn notably_slower(rows: &[Row]) -> impl Iterator<Item = &Row> {
    let counts = |row: &&Row| !["machine CPU", "p90", "p99", "p99.9"].contains(&&*row.metric);
    let notable = |row: &&Row| match row.more_is_better() {
        true => row.ratio < 1.0 - NOTABLE,
        false => row.ratio > 1.0 + NOTABLE,
    };
    slower(rows).filter(counts).filter(notable)
}

/// A round of two subjects, by number; each goes first as often as the other.
fn both<T>(round: u32, mut measure: impl FnMut(usize) -> Result<T>) -> Result<[T; 2]> {
    if round.is_multiple_of(2) {
        return Ok([measure(0)?, measure(1)?]);
    }
    let second = measure(1)?;
    Ok([measure(0)?, second])
}

/// What a node's agent says of its settings: an earlier commit's may know fewer.
fn agent_help(node: &Node) -> Result<String> {
    workspace::output(Command::new(node.binaries().agent()).arg("--help"))
}

/// Goes on as root with these arguments.
fn as_root(arguments: &[String]) -> Result<()> {
    if !root::is_root() {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        root::become_root("making network namespaces", &arguments)?;
    }
    Ok(())
}

/// The same for what needs Kubernetes' programs, which are built before.
fn as_root_with_kubernetes(arguments: &[String]) -> Result<()> {
    cluster::components::ensure_kubernetes()?;
    if !root::is_root() {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        // Root's home is another.
        let cache = cluster::layout::cache()?.display().to_string();
        let environment = [(cluster::layout::CACHE, cache)];
        root::become_root_with("making network namespaces", &arguments, &environment)?;
    }
    Ok(())
}

/// Three digits or all before the point.
fn number(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// About how long the rounds that are left take, once one has counted.
fn remaining(started: Instant, round: u32, rounds: u32) -> String {
    if round == 0 {
        return String::new();
    }
    let each = started.elapsed() / round;
    let left = (each * (rounds + 1)).saturating_sub(started.elapsed());
    match left > Duration::from_secs(60) {
        true => format!(", {} min left", left.as_secs().div_ceil(60)),
        false => format!(", {} s left", left.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Options as a command line gives them.
    pub fn parsed<T: clap::Args>(arguments: &[impl AsRef<str>]) -> T {
        let command = T::augment_args(clap::Command::new("bench").no_binary_name(true));
        let arguments = arguments
            .iter()
            .map(|argument| argument.as_ref().to_owned());
        let matches = command.try_get_matches_from(arguments).unwrap();
        T::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn slower_is_slower_in_every_round_and_notably() {
        let found = |metric, unit, ratios: [f64; 5]| {
            let row = Row::new("c", metric, unit, ("a", &ratios), ("b", &[1.0; 5]));
            notably_slower(&[row.unwrap()]).count() == 1
        };
        let worse = [0.8, 0.9, 0.95, 0.9, 0.85];
        assert!(found("requests", "1/s", worse));
        assert!(!found("CPU", "µs", worse));
        assert!(found("CPU", "µs", worse.map(|ratio| 1.0 / ratio)));
        assert!(!found("machine CPU", "µs", worse.map(|ratio| 1.0 / ratio)));
        assert!(!found("requests", "1/s", [0.8, 0.9, 1.01, 0.9, 0.85]));
        assert!(!found("requests", "1/s", [0.98, 0.99, 0.97, 0.98, 0.99]));
    }
}
