//! Services: what pods get by a Service's address beside the pod's own, and beside what kube-proxy makes of it with
//! nftables and with iptables, or beside an earlier commit's, for few Services and for many.
//!
//! Every translator has nodes of its own on one lab, one for each number of Services, and all are measured in many short
//! turns, which each of them begins as often as any other. kube-proxy is Kubernetes' own; it is told of the Services, makes its
//! rules, and goes. IPv4.

mod case;
mod kube_proxy;
mod objects;
mod scene;

use super::{
    Output, Programs, as_root_with_kubernetes,
    cgroup::Tree,
    figures::{self, Figures},
    notably_slower,
    output::Report,
    processor, remaining,
    row::{self, Row},
};
use crate::{setup, ui};
use anyhow::{Context as _, Result};
use case::Number;
use scene::Scene;
use sinabro_lab::traffic::seat::two_cpus;
use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

/// How often it is each subject's turn, for each case of a round. What a busy machine takes comes and goes within tenths
/// of a second, so that long turns would compare one moment with another.
const SLICES: usize = 12;

#[derive(Clone, clap::Args)]
pub struct Options {
    /// Rounds, each of all subjects; at least 5
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,

    /// Shorter measurements, and no 10,000 Services
    #[arg(long)]
    short: bool,

    /// How many Services there are [default: 10,1000,10000, with --short 10,1000]
    #[arg(long, value_name = "SERVICES", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(10..=50_000))]
    services: Vec<u32>,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    programs: Programs,
}

impl Options {
    fn numbers(&self) -> Vec<u32> {
        match (self.services.is_empty(), self.short) {
            (false, _) => self.services.clone(),
            (true, false) => vec![10, 1_000, 10_000],
            (true, true) => vec![10, 1_000],
        }
    }

    /// How long a subject is measured before it is the next one's turn.
    fn slice(&self) -> Duration {
        Duration::from_millis(if self.short { 10 } else { 25 })
    }

    /// The same options for the same program under sudo.
    fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments: Vec<String> = ["bench", "services"].map(String::from).into();
        arguments.extend(self.programs.arguments()?);
        arguments.extend(["--rounds".into(), self.rounds.to_string()]);
        arguments.extend(self.short.then(|| "--short".into()));
        if !self.services.is_empty() {
            let numbers: Vec<String> = self.services.iter().map(ToString::to_string).collect();
            arguments.extend(["--services".into(), numbers.join(",")]);
        }
        arguments.extend(self.output.arguments()?);
        Ok(arguments)
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    options.programs.ensure(setup::BENCH_NAT)?;
    as_root_with_kubernetes(&options.arguments()?)?;
    measure(&options)
}

fn measure(options: &Options) -> Result<ExitCode> {
    let cgroups = Tree::new(|| ())?;
    let (cpus, numbers) = (two_cpus()?, options.numbers());
    let mut step = ui::step("making nodes, pods and rules of all subjects");
    let programs = &options.programs;
    let scene = Scene::make(cpus, programs, cgroups.make()?, &numbers, &mut step)?;
    step.done_in_time();
    let [client, server] = cpus;
    println!(
        "  clients on CPU {client}, servers on CPU {server}; {} rounds in turns",
        options.rounds
    );
    processor::background()?;

    let mut figures = Figures::default();
    let mut step = ui::step("measuring");
    let started = Instant::now();
    // The first round warms caches up, and does not count.
    for round in 0..=options.rounds {
        let left = remaining(started, round, options.rounds);
        let rounds = options.rounds;
        for case in case::cases(&numbers) {
            step.now(format!("round {round} of {rounds}{left}: {case}"));
            let subjects = case::subjects(&scene, &case);
            let mut done = vec![case::Done::default(); subjects.len()];
            for turn in 0..subjects.len() * SLICES {
                let at = (turn + turn / subjects.len() + round as usize) % subjects.len();
                done[at] += case::measure(&case, &scene, subjects[at], options.slice())
                    .with_context(|| format!("{case}, {}", subjects[at].0))?;
            }
            for ((name, _), done) in subjects.iter().zip(done).filter(|_| round > 0) {
                figures.add(&case, name, done.outcome(&case));
            }
        }
    }
    step.clear();
    scene.verify()?;
    report(options, &figures, &numbers)
}

fn report(options: &Options, figures: &Figures<Number>, numbers: &[u32]) -> Result<ExitCode> {
    let mut rows: Vec<Row> = Vec::new();
    for number in numbers {
        let of_number = figures.rows(Number(*number));
        figures::print(&of_number, Number(*number));
        rows.extend(of_number);
    }
    let growth = case::growth(figures, numbers);
    println!();
    row::print(&growth, ["most Services beside fewest", ""], 0);
    rows.extend(growth);
    let report = Report::of(rows)?;
    options.output.report("services", &report)?;
    let earlier = options.programs.earlier().map(|(commit, _)| commit);
    // Other rows have the pod's own address, or ours with fewer Services, on their other side.
    let slower = notably_slower(&report.rows).filter(|row| Some(&*row.against) == earlier);
    Ok(options.programs.verdict(slower))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::parsed;

    #[test]
    fn the_process_that_sudo_starts_measures_the_same() {
        let mut given: Options = parsed(&["--short", "--services", "20,30", "--rounds", "6"]);
        given.programs.programs = Some("/dist".into());
        let again: Options = parsed(&given.arguments().unwrap()[2..]);
        assert_eq!(again.numbers(), [20, 30]);
        assert_eq!((again.rounds, again.slice()), (6, given.slice()));
        assert_eq!(again.programs.programs, given.programs.programs);
        let default: Options = parsed(&[""; 0]);
        assert_eq!(default.numbers(), [10, 1_000, 10_000]);
    }
}
