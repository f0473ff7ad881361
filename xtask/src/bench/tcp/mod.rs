//! TCP between two pods of one node, accelerated, beside that of two plain pods and beside
//! 127.0.0.1 (or ::1) inside one pod.
//!
//! All three run on one lab node, under one agent that accelerates who asks for it, in turns: each
//! case is measured for all subjects before the next one, in an order that rotates from round to
//! round. Clients are on one CPU and servers on another. So what the machine does to a round it
//! does to all three, and the ratio within a round is what counts.
//!
//! Against an earlier commit there are two nodes, each with the programs of one of them, and the
//! accelerated pods of the one take the place of the other's plain ones; with `--control` plain
//! pods are compared with plain pods.
//!
//! Nothing is reported unless the accelerated pods' bytes do go past their link: see [`subject`].
//!
//! Limit: the agent's socket programs see the plain subjects' sockets, too, and leave them alone.
//! What that costs is in their figures.

mod case;
mod figures;
mod subject;

use super::{Output, Programs, as_root, congestion::Congestion, processor, remaining};
use crate::{interrupt, report, setup, ui};
use anyhow::{Context as _, Result};
use case::{Bench, Part};
use figures::{Figures, Report};
use sinabro_lab::{holder, traffic::seat::two_cpus};
use std::{process::ExitCode, time::Instant};
use subject::Scene;

#[derive(Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,

    /// Rounds, each of all subjects; at least 5 [default: 7, or 5 with --short]
    #[arg(long, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: Option<u32>,

    /// Fewer sizes and shorter measurements: two minutes instead of ten
    #[arg(long)]
    short: bool,

    /// Only one part
    #[arg(long, value_enum)]
    only: Option<Part>,

    /// IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,

    /// Accelerate nothing: what then differs between the subjects is this machine's noise
    #[arg(long)]
    control: bool,

    #[command(flatten)]
    congestion: Congestion,

    #[command(flatten)]
    output: Output,
}

impl Options {
    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.short { 5 } else { 7 })
    }

    /// The same options for the same program under sudo.
    fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments: Vec<String> = ["bench", "tcp"].map(String::from).into();
        arguments.extend(self.programs.arguments()?);
        arguments.extend(["--rounds".into(), self.rounds().to_string()]);
        let flags = [
            ("--short", self.short),
            ("--ipv6", self.ipv6),
            ("--control", self.control),
        ];
        for (flag, given) in flags {
            arguments.extend(given.then(|| flag.to_string()));
        }
        if let Some(part) = self.only {
            arguments.extend(["--only".into(), part.name().into()]);
        }
        arguments.push(self.congestion.argument());
        arguments.extend(self.output.arguments()?);
        Ok(arguments)
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    options.programs.ensure(setup::BENCH_TCP)?;
    as_root(&options.arguments()?)?;
    measure(&options)
}

fn measure(options: &Options) -> Result<ExitCode> {
    options.congestion.choose()?;
    interrupt::on_interrupt(holder::end_all)?;
    let cpus = two_cpus()?;
    let scene = Scene::make(cpus, options)?;
    let bench = Bench::new(&scene, options.short);
    let cases = case::cases(options.only, options.short);

    let rounds = options.rounds();
    println!("{}", introduction(&scene, options));
    let background = processor::background()?;
    scene.verify(&bench)?;
    let mut figures = Figures::default();
    let mut step = ui::step("measuring");
    let started = Instant::now();
    // The first round warms caches and what the data path learns up, and does not count.
    for round in 0..=rounds {
        for case in &cases {
            let left = remaining(started, round, rounds);
            step.now(format!("round {round} of {rounds}{left}: {case}"));
            for turn in 0..scene.subjects().len() {
                let number = (turn + round as usize) % scene.subjects().len();
                let subject = &scene.subjects()[number];
                let measured = bench
                    .measure(case, subject)
                    .with_context(|| format!("{case}, {}", subject.name))?;
                if round > 0 {
                    figures.add(case, number, measured);
                }
            }
        }
    }
    step.clear();
    scene.verify(&bench)?;

    figures.print(scene.names());
    let earlier = options.programs.earlier();
    if !options.control && earlier.is_none() {
        figures.print_not_accelerated(rounds);
    }
    let report = Report {
        machine: report::Machine::look()?,
        client_cpu: cpus[0],
        server_cpu: cpus[1],
        rounds,
        background,
        ipv6: options.ipv6,
        control: options.control,
        against: earlier.map(|(commit, _)| commit.to_owned()),
        rows: figures.rows(scene.names()),
    };
    options.output.write("tcp", &report, &report.rows, &[])?;
    let slower = figures::slower_than_plain(&report.rows, scene.names());
    Ok(options.programs.verdict(slower))
}

fn introduction(scene: &Scene, options: &Options) -> String {
    let [client, server] = scene.cpus();
    let cpus = match client == server {
        true => format!("both ends on CPU {client}, the only one"),
        false => format!("clients on CPU {client}, servers on CPU {server}"),
    };
    let [plain, other, local] = scene.names();
    let (congestion, rounds) = (&options.congestion, options.rounds());
    format!(
        "  TCP between two pods of one node, {plain} and {other}, and over {local} inside one pod;\n  \
         {cpus}; {congestion}; {rounds} rounds in turns.\n  \
         HTTP is nginx with one worker and wrk with one thread, which asks again once it has the\n  \
         answer: p50 and p99 are what it waited then. Per request: \"machine CPU\" is all that the\n  \
         machine did meanwhile, \"CPU\" what the threads of both ends did; \"crossed the link\" are\n  \
         bytes, of streams per MB",
    )
}
