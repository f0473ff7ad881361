//! The agent in clusters of thousands of nodes: how it starts, what it costs while nothing happens,
//! how soon the kernel knows of a change, what a pod costs, and what all of its agents together
//! ask of the API server.
//!
//! The API server and etcd are Kubernetes' own; nodes are Node objects of a real one's size with
//! kubelets' heartbeats. Each measurement is on a lab node of its own, which has the release build,
//! the overlay and a route to every other node, and no traffic.

mod changes;
mod figures;
mod heartbeats;
pub(super) mod object;
mod storm;
mod subject;

use super::{
    Output, Programs,
    api_server::{self, ApiServer},
    as_root_with_kubernetes,
};
use crate::{cluster, interrupt, report, setup, ui};
use anyhow::{Result, ensure};
use figures::{Figures, Report};
use heartbeats::Heartbeats;
use sinabro_lab::{Binaries, Lab, Lifetime, holder};
use std::{path::PathBuf, process::ExitCode, time::Duration};
use subject::Effort;

#[derive(Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,

    /// Sizes of the cluster, one after the other [default: 100,5000,15000, with --short 100,5000]
    #[arg(long, value_name = "NODES", value_delimiter = ',')]
    nodes: Option<Vec<usize>>,

    /// Rounds for each size [default: 1, against an earlier commit 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10))]
    rounds: Option<u32>,

    /// Fewer nodes and shorter measurements: three minutes instead of ten
    #[arg(long)]
    short: bool,

    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Options {
    fn sizes(&self) -> Vec<usize> {
        let mut sizes = match (&self.nodes, self.short) {
            (Some(sizes), _) => sizes.clone(),
            (None, true) => vec![100, 5_000],
            (None, false) => vec![100, 5_000, 15_000],
        };
        // The cluster only grows.
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    fn effort(&self) -> Effort {
        match self.short {
            true => Effort {
                rest: Duration::from_secs(20),
                changes: 5,
                pods: 10,
            },
            false => Effort {
                rest: Duration::from_secs(60),
                changes: 17,
                pods: 30,
            },
        }
    }

    fn rounds(&self) -> u32 {
        let default = if self.programs.earlier().is_some() {
            3
        } else {
            1
        };
        self.rounds.unwrap_or(default)
    }

    /// The same options for the same program under sudo.
    fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments: Vec<String> = ["bench", "nodes"].map(String::from).into();
        arguments.extend(self.programs.arguments()?);
        let sizes: Vec<_> = self.sizes().iter().map(ToString::to_string).collect();
        arguments.extend(["--nodes".into(), sizes.join(",")]);
        arguments.extend(["--rounds".into(), self.rounds().to_string()]);
        arguments.extend(self.short.then(|| "--short".into()));
        arguments.extend(Output::json(&self.json).arguments()?);
        Ok(arguments)
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    let sizes = options.sizes();
    let most = sizes.last().copied().unwrap_or(0) + options.effort().changes;
    ensure!(
        sizes.first().is_some_and(|least| *least > 0) && most <= object::MOST,
        "--nodes takes numbers from 1 to {}",
        object::MOST - options.effort().changes
    );
    options.programs.ensure(setup::BUILD)?;
    as_root_with_kubernetes(&options.arguments()?)?;
    measure(&options)
}

fn measure(options: &Options) -> Result<ExitCode> {
    interrupt::on_interrupt(holder::end_all)?;
    let present = Binaries::at(options.programs.present())?;
    let mut subjects = vec![("sinabro".to_owned(), present.clone())];
    if let Some((commit, dir)) = options.programs.earlier() {
        subjects.push((commit.to_owned(), Binaries::at(dir)?));
    }
    let mut lab = Lab::new(present, 0, Lifetime::Process)?;
    let step = ui::step("starting etcd and the API server");
    let server = ApiServer::start(&lab)?;
    step.done_in_time();
    let bytes = object::node(&object::entry(0)).to_string().len();
    println!(
        "  Kubernetes {}: etcd and kube-apiserver alone; Nodes of {:.1} KB, each with a heartbeat every\n  \
         five minutes; agents on lab nodes, one at a time",
        cluster::components::KUBERNETES,
        bytes as f64 / 1e3,
    );
    let mut figures = Figures::new(subjects.iter().map(|(name, _)| name.clone()).collect());
    let measured = in_all_sizes(options, &mut lab, &server, &subjects, &mut figures);
    // What was measured before something failed is shown all the same.
    figures.print();
    measured?;
    if let Some(path) = &options.json {
        let report = Report {
            machine: report::Machine::look()?,
            kubernetes: cluster::components::KUBERNETES,
            node_bytes: bytes,
            rounds: options.rounds(),
            rows: figures.rows(),
            storms: figures.storms,
        };
        report::write(path, &report)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn in_all_sizes(
    options: &Options,
    lab: &mut Lab,
    server: &ApiServer,
    subjects: &[(String, Binaries)],
    figures: &mut Figures,
) -> Result<()> {
    let mut there = 0;
    for size in options.sizes() {
        api_server::create_all("Nodes", there..size, |number| {
            server
                .client
                .create_node(&object::node(&object::entry(number)))
        })?;
        there = size;
        let heartbeats = Heartbeats::start(&server.client, size);
        for round in 0..options.rounds() {
            for turn in 0..subjects.len() {
                // Each goes first as often as the other.
                let number = (turn + round as usize) % subjects.len();
                let (name, binaries) = &subjects[number];
                let mut step = ui::step(format!("{size} nodes, {name}"));
                let now = |what: &str| step.now(format!("{size} nodes, {name}: {what}"));
                let effort = options.effort();
                let measured =
                    subject::measure(lab, server, binaries, size, &heartbeats, effort, now)?;
                figures.add(size, number, &measured);
                step.done_in_time();
            }
        }
        let step = ui::step(format!("{size} nodes, {} lists at once", storm::AGENTS));
        figures.storms.extend(storm::measure(server, size)?);
        step.done_in_time();
    }
    Ok(())
}
