//! `cargo xtask e2e`: a real Kubernetes cluster, the upstream conformance tests of the network,
//! and what happens to a cluster's network in its life: upgrades, crashes, reboots, full disks.
//!
//! Everything runs on the cluster that `cargo xtask cluster up` makes, from the same manifest and
//! image archive that users apply. Requests under load come from this process, from inside the
//! pods' network namespaces, so a lost one is counted and told with its error.

mod load;
pub mod pods;
mod scenarios;
mod world;

use crate::{
    cluster::{self, Cluster, conformance},
    interrupt, report, residue, ui,
};
use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use sinabro_lab::residue::{Snapshot, left_since};
use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};
use world::World;

/// Longest time the API server is away in a run that is not `--short`.
const OUTAGE: Duration = Duration::from_secs(120);
const SHORT_OUTAGE: Duration = Duration::from_secs(20);
/// How long traffic is watched before something is done to it.
const BEFORE: Duration = Duration::from_secs(60);
const SHORT_BEFORE: Duration = Duration::from_secs(15);

#[derive(clap::Args)]
pub struct Options {
    /// Write the outcome to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Shorter outages, for CI
    #[arg(long)]
    short: bool,

    /// Run only scenarios whose name contains this text; may be given several times. The
    /// conformance tests run only if `conformance` is among them
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// List the scenarios and what each shows
    #[arg(long)]
    list: bool,

    /// Leave the cluster up
    #[arg(long)]
    keep: bool,
}

#[derive(Default, Serialize)]
struct Report {
    conformance: Conformance,
    scenarios: Vec<Row>,
}

#[derive(Default, Serialize)]
struct Conformance {
    passed: usize,
    failed: usize,
    /// Every test that ran.
    names: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failures: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    ok: bool,
    detail: String,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    if options.list {
        for scenario in scenarios::ALL {
            println!("  {:<18} {}", scenario.name, scenario.shows);
        }
        return Ok(ExitCode::SUCCESS);
    }
    for text in &options.only {
        let known = |name: &str| name.contains(text.as_str());
        ensure!(
            known("conformance") || scenarios::ALL.iter().any(|s| known(s.name)),
            "no scenario's name contains `{text}`, see --list"
        );
    }
    cluster::as_root(Some(cluster::Cni::Sinabro))?;
    let before = Snapshot::take()?;
    interrupt::on_interrupt(|| {
        println!("\n  interrupted: taking the cluster down");
        if let Err(error) = cluster::end() {
            ui::error(&format!("{error:#}"));
        }
    })?;

    let started = Instant::now();
    let mut report = Report::default();
    let played = play(options, &mut report);
    if let Err(error) = played {
        note(&mut report, "run", Err(error), started);
    }
    if !options.keep {
        let gone = take_down(&before);
        note(&mut report, "residue", gone, Instant::now());
    }
    let failed = report.scenarios.iter().filter(|row| !row.ok).count();
    println!(
        "\n  conformance: {} passed, {} failed; scenarios: {} passed, {failed} failed; {:.0} s",
        report.conformance.passed,
        report.conformance.failed,
        report.scenarios.len() - failed,
        started.elapsed().as_secs_f64()
    );
    if let Some(path) = &options.json {
        report::write(path, &report)?;
    }
    Ok(match failed + report.conformance.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

fn play(options: &Options, report: &mut Report) -> Result<()> {
    let wanted = |name: &str| {
        options.only.is_empty() || options.only.iter().any(|text| name.contains(text.as_str()))
    };
    println!(
        "{}",
        ui::bold("A cluster of one control plane and two nodes")
    );
    let cluster = Cluster::up(&cluster::Options::default())?;
    if wanted("conformance") {
        println!("\n{}", ui::bold("Kubernetes' own tests of the network"));
        let outcome = conformance::run(&cluster, &conformance::Options::default())?;
        report.conformance = Conformance {
            passed: outcome.passed.len(),
            failed: outcome.failed.len(),
            names: outcome
                .passed
                .iter()
                .cloned()
                .chain(outcome.failed.iter().map(|f| f.name.clone()))
                .collect(),
            failures: outcome
                .failed
                .iter()
                .map(|f| format!("{}: {}", f.name, f.message))
                .collect(),
        };
        ensure!(
            report.conformance.passed + report.conformance.failed > 0,
            "no conformance test ran"
        );
    }
    println!("\n{}", ui::bold("What happens to a cluster"));
    let (outage, before) = match options.short {
        true => (SHORT_OUTAGE, SHORT_BEFORE),
        false => (OUTAGE, BEFORE),
    };
    let mut world = World::new(cluster, outage, before)?;
    for scenario in scenarios::ALL {
        if !wanted(scenario.name) {
            continue;
        }
        let start = Instant::now();
        let step = ui::step(scenario.name);
        let outcome = world
            .healthy()
            .and_then(|()| world.quiet())
            .context("before it began")
            .and_then(|()| (scenario.run)(&mut world));
        step.clear();
        if let Err(error) = &outcome {
            world.explain(scenario.name, error);
        }
        note(report, scenario.name, outcome, start);
        world.clean();
    }
    Ok(())
}

fn note(report: &mut Report, name: &str, outcome: Result<String>, start: Instant) {
    let (ok, detail) = match outcome {
        Ok(detail) => (true, detail),
        Err(error) => (false, format!("{error:#}")),
    };
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "  {}  {name:<18} {detail} {}",
        ui::verdict(ok),
        ui::dim(&format!("({seconds:.0} s)"))
    );
    report.scenarios.push(Row {
        name: name.into(),
        ok,
        detail,
    });
}

fn take_down(before: &Snapshot) -> Result<String> {
    Cluster::open()?.down(false)?;
    let left = left_since(before)?;
    let names: Vec<String> = left.iter().map(ToString::to_string).collect();
    ensure!(left.is_empty(), "left behind: {}", names.join(", "));
    Ok(format!("no {}", residue::kinds()))
}
