//! Traffic between pods, on one node and across two, beside what others put there, and beside the
//! limit: the same machines without any pod network.
//!
//! All subjects are on one lab, in turns: each case is measured for all of them before the next one,
//! in an order that rotates from round to round. Clients are on one CPU and servers on another. So
//! what the machine does to a round it does to all, and the ratio within a round is what counts.
//!
//! Nothing is accelerated: that is `bench tcp`. Nodes have the netfilter rules that kube-proxy has for
//! some Services, as they have in a cluster, with all subjects but the limit.
//!
//! Pods of one node are also compared with those that have one MTU for everything, and with one pod's
//! loopback: see [`local_mtu`].

mod aims;
mod case;
mod local_mtu;
mod measure;
pub mod others;
mod pair;
pub mod rules;
mod scene;

use super::{
    Output, Programs,
    aim::{self, WithAims},
    as_root,
    cgroup::Tree,
    congestion::Congestion,
    figures::{self, Figures, OURS},
    output::Report,
    processor, remaining,
    row::{Curve, Row},
    slower, verdict,
};
use crate::{setup, ui};
use anyhow::{Context as _, Result, ensure};
use case::Case;
use measure::Bench;
use pair::{DIRECT, NATIVE};
use scene::{Scene, Way};
use sinabro_lab::traffic::seat::two_cpus;
use std::{process::ExitCode, time::Instant};

#[derive(Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,

    /// Rounds, each of all subjects; at least 5
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,

    /// Shorter measurements and fewer cases: four minutes instead of twelve
    #[arg(long)]
    short: bool,

    /// Only the pods of one node, only those of two, or only one node's by the MTU of their links
    #[arg(long, value_enum)]
    only: Option<Way>,

    /// Only cases whose name has this in it
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,

    /// For how many Services the nodes have the rules that kube-proxy makes with iptables
    #[arg(long, value_name = "SERVICES", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(..=20_000))]
    rules: u32,

    /// Nodes know each other by IPv6, in which their tunnels are then
    #[arg(long)]
    ipv6_nodes: bool,

    /// Nodes get packets as network cards give them, in memory that nobody else has: by the lab's
    /// cables alone TCP's receivers get the sender's own, which the kernel copies before anybody
    /// may take a tunnel's headers off (Linux 6.6)
    #[arg(long)]
    as_cards: bool,

    #[command(flatten)]
    congestion: Congestion,

    #[command(flatten)]
    output: Output,
}

impl Options {
    fn is_wanted(&self, way: Way) -> bool {
        self.only.is_none_or(|only| only == way)
    }

    fn cases(&self, way: Way) -> impl Iterator<Item = Case> {
        let wanted = |case: &Case| {
            let text = self.case.as_ref();
            text.is_none_or(|text| case.to_string().contains(text))
        };
        case::cases(way, self.short).filter(wanted)
    }

    /// The same options for the same program under sudo.
    fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments: Vec<String> = ["bench", "pod"].map(String::from).into();
        arguments.extend(self.programs.arguments()?);
        arguments.extend(["--rounds".into(), self.rounds.to_string()]);
        arguments.extend(["--rules".into(), self.rules.to_string()]);
        arguments.extend(self.short.then(|| "--short".into()));
        arguments.extend(self.ipv6_nodes.then(|| "--ipv6-nodes".into()));
        arguments.extend(self.as_cards.then(|| "--as-cards".into()));
        if let Some(way) = self.only {
            arguments.extend(["--only".into(), way.name().into()]);
        }
        if let Some(text) = &self.case {
            // One argument, whatever it begins with.
            arguments.push(format!("--case={text}"));
        }
        arguments.push(self.congestion.argument());
        arguments.extend(self.output.arguments()?);
        Ok(arguments)
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    options.programs.ensure(setup::BENCH_POD)?;
    as_root(&options.arguments()?)?;
    measure(&options)
}

fn measure(options: &Options) -> Result<ExitCode> {
    let any = scene::WAYS
        .into_iter()
        .any(|way| options.is_wanted(way) && options.cases(way).next().is_some());
    ensure!(
        any,
        "no case has `{}` in its name",
        options.case.as_deref().unwrap_or_default()
    );
    options.congestion.choose()?;
    let cgroups = Tree::new(|| ())?;
    let cpus = two_cpus()?;
    let step = ui::step("making nodes and pods of all subjects");
    let scene = Scene::make(cpus, options, cgroups.make()?)?;
    step.done_in_time();
    println!("{}", introduction(&scene, options));
    processor::background()?;
    scene.verify()?;

    let bench = Bench::new(options.short);
    let mut figures = Figures::default();
    let mut step = ui::step("measuring");
    let started = Instant::now();
    // The first round warms caches up, and does not count.
    for round in 0..=options.rounds {
        for way in scene.ways() {
            let subjects = scene.subjects(way);
            for case in options.cases(way) {
                let left = remaining(started, round, options.rounds);
                let rounds = options.rounds;
                step.now(format!("round {round} of {rounds}{left}: {case}"));
                for turn in 0..subjects.len() {
                    let subject = &subjects[(turn + round as usize) % subjects.len()];
                    let measured = bench
                        .measure(&case, &scene, subject)
                        .with_context(|| format!("{case}, {}", subject.name))?;
                    if round > 0 {
                        figures.add(&case, &subject.name, measured);
                    }
                }
            }
        }
    }
    step.clear();
    scene.verify()?;

    let mut rows: Vec<Row> = Vec::new();
    for way in scene.ways() {
        // Those past the stack are there across nodes only.
        for subject in [OURS, DIRECT, NATIVE] {
            let mut of_subject = figures.rows_of(way, subject);
            if let Some((commit, _)) = options.programs.earlier() {
                let same_way = pair::earlier_of(subject, commit);
                of_subject.retain(|row| row.against == same_way);
            }
            figures::print(&of_subject, way);
            rows.extend(of_subject);
        }
    }
    let curves: Vec<Curve> = figures.curves();
    let aims = aims::aims(&rows);
    aim::print(&aims);
    let met = aims.iter().all(|aim| aim.met);
    let report = WithAims {
        report: Report {
            curves,
            ..Report::of(rows)?
        },
        aims,
    };
    let Report { rows, curves, .. } = &report.report;
    options.output.write("pod", &report, rows, curves)?;
    Ok(match options.programs.earlier() {
        Some((commit, _)) => verdict(commit, slower(rows)),
        None if met => ExitCode::SUCCESS,
        None => ExitCode::FAILURE,
    })
}

fn introduction(scene: &Scene, options: &Options) -> String {
    let mut text = String::new();
    for way in scene.ways() {
        let names: Vec<&str> = scene.subjects(way).iter().map(|s| &*s.name).collect();
        text += &format!("  {way}: {}\n", names.join(", "));
    }
    let [client, server] = scene.cpus();
    text + &format!(
        "  clients on CPU {client}, servers on CPU {server}; rules for {} Services; {}{};\n  \
         {} rounds in turns.\n  \
         CPU is what the threads of both ends did per request, packet or gigabyte, in the kernel\n  \
         too; \"machine CPU\" is all that the machine did meanwhile",
        options.rules,
        options.congestion,
        if options.ipv6_nodes {
            "; nodes known by IPv6"
        } else {
            ""
        },
        options.rounds
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn options(arguments: &[&str]) -> Options {
        use clap::Parser as _;
        let arguments = ["pod"].iter().chain(arguments);
        Cli::try_parse_from(arguments).unwrap().options
    }

    #[test]
    fn cases_are_chosen_by_name_also_under_sudo() {
        let chosen = options(&["--only", "local-mtu", "--case", "rr 4 KB", "--ipv6-nodes"]);
        let names: Vec<String> = chosen.cases(Way::LocalMtu).map(|c| c.to_string()).collect();
        let expected = [
            "rr 4 KB",
            "rr 4 KB, CPUs awake",
            "rr 4 KB, IPv6",
            "rr 4 KB, CPUs awake, IPv6",
        ];
        assert_eq!(names, expected);
        let again = chosen.arguments().unwrap();
        let again: Vec<&str> = again[2..].iter().map(String::as_str).collect();
        let again = options(&again);
        assert_eq!(again.case, chosen.case);
        assert!(again.ipv6_nodes);
        assert_eq!(again.only, Some(Way::LocalMtu));
        assert!(!again.is_wanted(Way::Across));
        // Not taken for an option.
        let odd = options(&["--case=--short"]).arguments().unwrap();
        let odd: Vec<&str> = odd[2..].iter().map(String::as_str).collect();
        assert_eq!(options(&odd).case.as_deref(), Some("--short"));
    }

    #[test]
    fn a_name_that_no_case_has_is_an_error() {
        let error = measure(&options(&["--case", "stream 2 KB"])).unwrap_err();
        assert!(error.to_string().contains("stream 2 KB"), "{error}");
    }
}
