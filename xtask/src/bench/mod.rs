//! `cargo xtask bench`: comparisons, interleaved on this machine, as ratios.

mod cni;
mod pods;
mod stats;
mod tcp;

use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// ADD and DEL, exec to exit, beside the plugins ptp and host-local
    Cni(cni::Options),
    /// Pods from request to Running on a real cluster, beside the plugin bridge
    Pods(pods::Options),
    /// TCP between two pods of one node, accelerated, beside plain and beside 127.0.0.1
    Tcp(tcp::Options),
}

pub fn run(options: &Options) -> Result<ExitCode> {
    match &options.what {
        What::Cni(options) => cni::run(options),
        What::Pods(options) => pods::run(options),
        What::Tcp(options) => tcp::run(options),
    }
}

/// One comparison.
#[derive(Serialize)]
pub struct Row {
    pub case: String,
    pub metric: String,
    pub unit: &'static str,
    pub subject: &'static str,
    /// Median over the rounds.
    pub value: f64,
    pub against: &'static str,
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
