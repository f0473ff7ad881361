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

mod case;
mod local_mtu;
mod measure;
pub mod others;
mod pair;
pub mod rules;
mod scene;

use super::{
    as_root,
    cgroup::Tree,
    common::Common,
    figures::{self, Figures, OURS},
    notably_slower,
    output::Report,
    processor, remaining,
    row::Row,
};
use crate::{setup, ui};
use anyhow::{Context as _, Result, ensure};
use case::Case;
use measure::Bench;
use pair::{DIRECT, KERNEL, NATIVE, SERVICE};
use scene::{Scene, Way};
use sinabro_lab::traffic::seat::two_cpus;
use std::{process::ExitCode, time::Instant};

#[derive(Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,

    /// Only the pods of one node, only those of two, or only one node's by the MTU of their links
    #[arg(long, value_enum)]
    only: Option<Way>,

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
}

impl Options {
    fn is_wanted(&self, way: Way) -> bool {
        self.only.is_none_or(|only| only == way)
    }

    fn cases(&self, way: Way) -> impl Iterator<Item = Case> {
        let cases = case::cases(way, self.common.short);
        cases.filter(|case| self.common.is_wanted(case))
    }

    /// The same options for the same program under sudo.
    fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments = self.common.arguments("pod")?;
        arguments.extend(["--rules".into(), self.rules.to_string()]);
        arguments.extend(self.ipv6_nodes.then(|| "--ipv6-nodes".into()));
        arguments.extend(self.as_cards.then(|| "--as-cards".into()));
        if let Some(way) = self.only {
            arguments.extend(["--only".into(), way.name().into()]);
        }
        Ok(arguments)
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    options.common.programs.ensure(setup::BENCH_POD)?;
    as_root(&options.arguments()?)?;
    measure(&options)
}

fn measure(options: &Options) -> Result<ExitCode> {
    let common = &options.common;
    let any = scene::WAYS
        .into_iter()
        .any(|way| options.is_wanted(way) && options.cases(way).next().is_some());
    ensure!(
        any,
        "no case has `{}` in its name",
        common.case.as_deref().unwrap_or_default()
    );
    common.congestion.choose()?;
    let cgroups = Tree::new(|| ())?;
    let cpus = two_cpus()?;
    let step = ui::step("making nodes and pods of all subjects");
    let scene = Scene::make(cpus, options, cgroups.make()?)?;
    step.done_in_time();
    println!("{}", introduction(&scene, options));
    processor::background()?;
    scene.verify()?;

    let bench = Bench::new(common.short);
    let mut figures = Figures::default();
    let mut step = ui::step("measuring");
    let started = Instant::now();
    let rounds = common.rounds;
    // The first round warms caches up, and does not count.
    for round in 0..=rounds {
        for way in scene.ways() {
            let subjects = scene.subjects(way);
            for case in options.cases(way) {
                let left = remaining(started, round, rounds);
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
        let by_service = format!("{OURS}{SERVICE}");
        // All but the first are there across nodes only.
        for subject in [OURS, DIRECT, NATIVE, KERNEL, &by_service] {
            let mut of_subject = figures.rows_of(way, subject);
            of_subject.retain(|row| row.against.ends_with(SERVICE) == subject.ends_with(SERVICE));
            if let Some((commit, _)) = common.programs.earlier() {
                let same_way = pair::earlier_of(subject, commit);
                of_subject.retain(|row| row.against == same_way);
            }
            figures::print(&of_subject, way);
            rows.extend(of_subject);
        }
    }
    let report = Report {
        curves: figures.curves(),
        ..Report::of(rows)?
    };
    common.output.report("pod", &report)?;
    Ok(common.programs.verdict(notably_slower(&report.rows)))
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
        options.common.congestion,
        if options.ipv6_nodes {
            "; nodes known by IPv6"
        } else {
            ""
        },
        options.common.rounds
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::parsed;

    #[test]
    fn cases_are_chosen_by_name_also_under_sudo() {
        let given = ["--only", "local-mtu", "--case", "rr 4 KB", "--ipv6-nodes"];
        let chosen: Options = parsed(&given);
        let names: Vec<String> = chosen.cases(Way::LocalMtu).map(|c| c.to_string()).collect();
        let expected = [
            "rr 4 KB",
            "rr 4 KB, CPUs awake",
            "rr 4 KB, IPv6",
            "rr 4 KB, CPUs awake, IPv6",
        ];
        assert_eq!(names, expected);
        let again: Options = parsed(&chosen.arguments().unwrap()[2..]);
        assert_eq!(again.common.case, chosen.common.case);
        assert!(again.ipv6_nodes);
        assert_eq!(again.only, Some(Way::LocalMtu));
        assert!(!again.is_wanted(Way::Across));
        // Not taken for an option.
        let odd: Options = parsed(&["--case=--short"]);
        let odd: Options = parsed(&odd.arguments().unwrap()[2..]);
        assert_eq!(odd.common.case.as_deref(), Some("--short"));
    }

    #[test]
    fn a_name_that_no_case_has_is_an_error() {
        let error = measure(&parsed(&["--case", "stream 2 KB"])).unwrap_err();
        assert!(error.to_string().contains("stream 2 KB"), "{error}");
    }
}
