//! `cargo xtask e2e`: a real Kubernetes cluster, the upstream conformance tests of the network,
//! and what happens to a cluster's network in its life: upgrades, crashes, reboots, full disks.
//!
//! Everything runs on the cluster that `cargo xtask cluster up` makes, from the same manifest and
//! image archive that users apply. Requests under load come from this process, from inside the
//! pods' network namespaces, so a lost one is counted and shown with its error.

mod asking;
mod availability;
mod inside;
mod load;
pub mod pods;
mod scenarios;
mod world;

use crate::{
    cluster::{
        self, Cluster, Containerd, Families, Proxy, Variant,
        conformance::{self, Tests},
    },
    earlier::Earlier,
    interrupt, report, residue, ui,
};
use anyhow::{Context as _, Result, ensure};
use scenarios::Scenario;
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

    /// Leave out the scenarios that are played each night
    #[arg(long)]
    quick: bool,

    /// Run only scenarios whose name contains this text; may be given several times. The
    /// conformance tests run only if `conformance` is among them
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// Kubernetes' own tests that are run. Others than conformance are run alone, without the scenarios, on a
    /// cluster of the size that they need
    #[arg(long, value_name = "NAME", default_value = "conformance")]
    tests: Tests,

    /// List the scenarios and what each shows
    #[arg(long)]
    list: bool,

    /// Leave the cluster up
    #[arg(long, conflicts_with = "all")]
    keep: bool,

    #[command(flatten)]
    variant: Variant,

    /// One cluster after the other: every containerd with every kube-proxy, without kube-proxy, and each
    /// family alone.
    /// What an earlier cluster kept on its disks is forgotten
    #[arg(long, conflicts_with_all = ["proxy", "containerd", "families"])]
    all: bool,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }

    /// The same of a scenario.
    fn plays(&self, scenario: &Scenario) -> bool {
        let is_due = !(self.quick && scenario.nightly);
        self.tests == Tests::Conformance && is_due && self.wants(scenario.name)
    }
}

/// What `--all` runs on, in this order.
const ALL: [Variant; 8] = [
    variant(Containerd::V2, Proxy::None, Families::Dual),
    variant(Containerd::V2, Proxy::Nftables, Families::Dual),
    variant(Containerd::V2, Proxy::Iptables, Families::Dual),
    variant(Containerd::V1_6, Proxy::Nftables, Families::Dual),
    variant(Containerd::V1_6, Proxy::Iptables, Families::Dual),
    variant(Containerd::V2, Proxy::None, Families::Ipv6),
    variant(Containerd::V2, Proxy::Nftables, Families::Ipv4),
    variant(Containerd::V2, Proxy::Nftables, Families::Ipv6),
];

const fn variant(containerd: Containerd, proxy: Proxy, families: Families) -> Variant {
    Variant {
        proxy,
        containerd,
        families,
    }
}

/// Of one cluster.
#[derive(Serialize)]
struct Report {
    cluster: Variant,
    seconds: f64,
    conformance: Conformance,
    scenarios: Vec<Row>,
}

#[derive(Default, Serialize)]
struct Conformance {
    /// Names of tests.
    passed: Vec<String>,
    skipped: Vec<String>,
    /// Failures, and tests that should have run.
    faults: Vec<String>,
    seconds: f64,
}

impl Report {
    fn new(cluster: Variant) -> Self {
        Self {
            cluster,
            seconds: 0.0,
            conformance: Conformance::default(),
            scenarios: Vec::new(),
        }
    }

    fn ok(&self) -> bool {
        self.conformance.faults.is_empty() && self.scenarios.iter().all(|row| row.ok)
    }

    fn summary(&self) -> String {
        let failed = self.scenarios.iter().filter(|row| !row.ok).count();
        format!(
            "conformance: {} passed, {} skipped, {} wrong; scenarios: {} passed, {failed} failed; {:.0} s",
            self.conformance.passed.len(),
            self.conformance.skipped.len(),
            self.conformance.faults.len(),
            self.scenarios.len() - failed,
            self.seconds
        )
    }
}

#[derive(Serialize)]
struct Row {
    name: String,
    ok: bool,
    detail: String,
    seconds: f64,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    if options.list {
        for scenario in scenarios::ALL {
            let night = if scenario.nightly {
                " (each night)"
            } else {
                ""
            };
            println!("  {:<18} {}{night}", scenario.name, scenario.shows);
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
    let variants = match options.all {
        true => ALL.to_vec(),
        false => vec![options.variant],
    };
    let is_played =
        |s: &Scenario| options.plays(s) && variants.iter().any(|variant| s.is_for(*variant));
    for scenario in scenarios::ALL {
        // By its name alone it would be a run of nothing.
        ensure!(
            options.only.iter().all(|text| text != scenario.name) || is_played(scenario),
            "{} is not for such a cluster: {}",
            scenario.name,
            scenario.needs()
        );
    }
    if (scenarios::ALL.iter()).any(|s| s.name == scenarios::UPGRADE && is_played(s)) {
        Earlier::released()?.ensure()?;
    }
    let (nodes, zones) = options.tests.nodes_and_zones();
    let clusters: Vec<cluster::Options> = variants
        .iter()
        .map(|variant| cluster::Options {
            nodes,
            zones,
            variant: *variant,
            ..cluster::Options::default()
        })
        .collect();
    cluster::as_root(&clusters)?;
    interrupt::on_interrupt(|| {
        println!("\n  interrupted: taking the cluster down");
        if let Err(error) = cluster::end() {
            ui::error(&format!("{error:#}"));
        }
    })?;

    let mut reports = Vec::new();
    for cluster in &clusters {
        match options.all {
            true => cluster::forget()?,
            false => cluster::forget_other(cluster)?,
        }
        println!("\n{}", ui::bold(&cluster.variant.to_string()));
        reports.push(on_cluster(options, cluster)?);
        // After each, so that an interruption leaves what is known.
        if let Some(path) = &options.json {
            report::write(path, &reports)?;
        }
    }
    println!();
    for report in &reports {
        println!("  {}  {}", ui::verdict(report.ok()), report.cluster);
        println!("      {}", report.summary());
    }
    Ok(match reports.iter().all(Report::ok) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn on_cluster(options: &Options, cluster: &cluster::Options) -> Result<Report> {
    let before = Snapshot::take()?;
    let started = Instant::now();
    let mut report = Report::new(cluster.variant);
    let played = play(options, cluster, &mut report);
    if let Err(error) = played {
        note(&mut report, "run", Err(error), started);
    }
    if !options.keep {
        let gone = take_down(&before);
        note(&mut report, "residue", gone, Instant::now());
    }
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

fn play(options: &Options, cluster: &cluster::Options, report: &mut Report) -> Result<()> {
    let nodes = cluster.nodes;
    println!(
        "{}",
        ui::bold(&format!("A cluster of one control plane and {nodes} nodes"))
    );
    let cluster = Cluster::up(cluster)?;
    if options.wants("conformance") {
        println!("\n{}", ui::bold("Kubernetes' own tests of the network"));
        let (options, start) = (conformance::Options::of(options.tests), Instant::now());
        let outcome = conformance::run(&cluster, &options)?;
        report.conformance = Conformance {
            faults: outcome.faults(&options),
            skipped: outcome.skipped.into_iter().map(|s| s.name).collect(),
            passed: outcome.passed,
            seconds: start.elapsed().as_secs_f64(),
        };
    }
    if options.tests != Tests::Conformance {
        return Ok(());
    }
    println!("\n{}", ui::bold("What happens to a cluster"));
    let (outage, before) = match options.short {
        true => (SHORT_OUTAGE, SHORT_BEFORE),
        false => (OUTAGE, BEFORE),
    };
    let mut world = World::new(cluster, outage, before)?;
    // What a run that was interrupted left on the cluster's disks.
    world.clean();
    for scenario in scenarios::ALL {
        if !options.plays(scenario) || !scenario.is_for(world.cluster.variant()) {
            continue;
        }
        let start = Instant::now();
        let step = ui::step(scenario.name);
        let outcome = world
            .healthy()
            .and_then(|()| world.quiet())
            .context("before it began")
            .and_then(|()| (scenario.run)(&mut world))
            .map(|detail| world.with_longest_wait(detail));
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
        seconds,
    });
}

fn take_down(before: &Snapshot) -> Result<String> {
    Cluster::open()?.down(false)?;
    let left = left_since(before)?;
    let names: Vec<String> = left.iter().map(ToString::to_string).collect();
    ensure!(left.is_empty(), "left behind: {}", names.join(", "));
    Ok(format!("no {}", residue::kinds()))
}
