//! Traffic from pods to a host outside the cluster: masqueraded by ours, by iptables, by nftables, and
//! routed without any translation, which is the limit.
//!
//! All subjects are on one lab, on one network with the host outside, in turns: each case is measured for
//! all of them before the next one, in an order that rotates from round to round. Clients are on one CPU
//! and the host outside on another. So what the machine does to a round it does to all, and the ratio
//! within a round is what counts.
//!
//! Two sets of nodes differ in what else netfilter has to do: nothing, or the rules that kube-proxy makes.
//! A third part puts other connections into the tables first: what a packet costs must not grow with
//! their number ([`flows`]).

mod case;
mod flows;
mod measure;
mod scene;
mod translators;

use super::{
    as_root,
    cgroup::Tree,
    common::Common,
    figures::{self, Figures},
    notably_slower,
    output::Report,
    processor, remaining,
    row::Row,
};
use crate::{setup, ui};
use anyhow::{Context as _, Result, ensure};
use case::{Case, Part};
use flows::Limit;
use measure::Bench;
use scene::Scene;
use sinabro_lab::traffic::seat::two_cpus;
use std::{process::ExitCode, time::Instant};

#[derive(Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,

    /// Only the nodes without further rules, only those with kube-proxy's, or only the cases with other
    /// connections in the tables
    #[arg(long, value_enum)]
    only: Option<Part>,

    /// IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,

    /// For how many Services the nodes of that part have the rules that kube-proxy makes with iptables
    #[arg(long, value_name = "SERVICES", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rules: u32,
}

impl Options {
    fn cases(&self, part: Part) -> impl Iterator<Item = Case> {
        let is_wanted = self.only.is_none_or(|only| only == part);
        let cases = case::cases(part, self.common.short).filter(move |_| is_wanted);
        cases.filter(|case| self.common.is_wanted(case))
    }

    /// The same options for the same program under sudo.
    fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments = self.common.arguments("nat")?;
        arguments.extend(["--rules".into(), self.rules.to_string()]);
        arguments.extend(self.ipv6.then(|| "--ipv6".into()));
        if let Some(part) = self.only {
            arguments.extend(["--only".into(), part.name().into()]);
        }
        Ok(arguments)
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    options.common.programs.ensure(setup::BENCH_NAT)?;
    as_root(&options.arguments()?)?;
    measure(&options)
}

fn measure(options: &Options) -> Result<ExitCode> {
    let common = &options.common;
    let any = Part::ALL
        .iter()
        .any(|part| options.cases(*part).next().is_some());
    ensure!(
        any,
        "no case has `{}` in its name",
        common.case.as_deref().unwrap_or_default()
    );
    common.congestion.choose()?;
    let cgroups = Tree::new(Limit::put_back)?;
    let cpus = two_cpus()?;
    let step = ui::step("making nodes and pods of all subjects");
    let most = options.cases(Part::Flows).map(|case| case.flows).max();
    let _limit = most.map(Limit::raise).transpose()?;
    let scene = Scene::make(cpus, options, cgroups.make()?)?;
    step.done_in_time();
    println!("{}", introduction(&scene, options)?);
    processor::background()?;
    scene.verify()?;

    let bench = Bench::new(common.short);
    let mut figures = Figures::default();
    let mut step = ui::step("measuring");
    let started = Instant::now();
    let rounds = common.rounds;
    // The first round warms caches up, and does not count.
    for round in 0..=rounds {
        let left = remaining(started, round, rounds);
        let mut now = |case: &Case| step.now(format!("round {round} of {rounds}{left}: {case}"));
        for part in [Part::Plain, Part::KubeProxy] {
            let subjects = scene.subjects(part);
            for case in options.cases(part) {
                now(&case);
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
        // One table at a time: netfilter has one for all networks of the machine.
        for number in case::NUMBERS {
            let is_wanted = |case: &Case| case.flows == number;
            let cases: Vec<Case> = options.cases(Part::Flows).filter(is_wanted).collect();
            let Some(first) = cases.first() else {
                continue;
            };
            let subjects = scene.subjects(Part::Flows);
            for turn in 0..subjects.len() {
                let subject = &subjects[(turn + round as usize) % subjects.len()];
                now(first);
                let mut of_subject = || -> Result<()> {
                    let filled = scene.fill(subject, number)?;
                    for case in &cases {
                        now(case);
                        let measured = bench.measure(case, &scene, subject)?;
                        if round > 0 {
                            figures.add(case, &subject.name, measured);
                        }
                    }
                    filled.empty()
                };
                of_subject()
                    .with_context(|| format!("{number} other connections, {}", subject.name))?;
            }
        }
    }
    step.clear();
    scene.verify()?;

    let mut rows: Vec<Row> = Vec::new();
    for part in Part::ALL {
        let of_part = figures.rows(part);
        figures::print(&of_part, part);
        rows.extend(of_part);
    }
    let names = scene.subjects(Part::Flows).into_iter().map(|s| &*s.name);
    let growth = case::growth(&figures, names, common.short);
    case::print_growth(&growth);
    rows.extend(growth);
    let report = Report::of(rows)?;
    common.output.report("nat", &report)?;
    Ok(common.programs.verdict(notably_slower(&report.rows)))
}

fn introduction(scene: &Scene, options: &Options) -> Result<String> {
    let mut text = String::new();
    for part in Part::ALL {
        let names: Vec<&str> = scene.subjects(part).iter().map(|s| &*s.name).collect();
        if !names.is_empty() {
            text += &format!("  {part}: {}\n", names.join(", "));
        }
    }
    if options.common.programs.earlier().is_none() {
        text += &format!("  {}\n", translators::versions()?);
    }
    let [client, server] = scene.cpus();
    Ok(text
        + &format!(
            "  {}, clients on CPU {client}, the host outside on CPU {server};\n  \
             {}; {} rounds in turns.\n  \
             CPU is what the threads of both ends did per request, packet or gigabyte, in the kernel\n  \
             too; \"machine CPU\" is all that the machine did meanwhile",
            if options.ipv6 { "IPv6" } else { "IPv4" },
            options.common.congestion,
            options.common.rounds
        ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::parsed;

    #[test]
    fn cases_are_chosen_by_part_and_name_also_under_sudo() {
        let given = ["--only", "flows", "--case", "UDP", "--ipv6", "--short"];
        let chosen: Options = parsed(&given);
        let names: Vec<String> = Part::ALL
            .into_iter()
            .flat_map(|part| chosen.cases(part))
            .map(|case| case.to_string())
            .collect();
        assert!(!names.is_empty());
        assert!(names.iter().all(|name| name.contains("UDP")), "{names:?}");
        assert!(names.iter().all(|name| name.contains("other")), "{names:?}");
        let again: Options = parsed(&chosen.arguments().unwrap()[2..]);
        assert_eq!(again.common.case, chosen.common.case);
        assert_eq!(again.only, Some(Part::Flows));
        assert!(again.ipv6 && again.common.short);
    }

    #[test]
    fn a_name_that_no_case_has_is_an_error() {
        let error = measure(&parsed(&["--case", "stream 2 KB"])).unwrap_err();
        assert!(error.to_string().contains("stream 2 KB"), "{error}");
    }
}
