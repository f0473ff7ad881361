//! ADD and DEL of whole plugins, from exec to exit, beside ptp with host-local, or beside the
//! plugin and agent of an earlier commit.
//!
//! Both run on the same lab node (an earlier commit's on one of its own, with its own agent), into
//! sandboxes made alike beforehand, with both address families, in turns. What is timed is posix_spawn to wait: no shell, no copy of a large
//! process. The agent that serves ours is the release build.
//!
//! Our DEL answers before the kernel has taken the link apart, ptp's after. So the time until
//! all links are gone is a row of its own, and nothing is timed before the kernel has settled.

use super::{Output, Programs, Report, Row, as_root, both, row, slower, stats};
use crate::{interrupt, setup, ui};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use sinabro_lab::{Binaries, Lab, Lifetime, Node, Place, cni::Call, holder, node::netns_path};
use sinabro_netlink::link;
use std::{
    fs,
    path::PathBuf,
    process::{ExitCode, Stdio},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

const SPEC: &str = "1.0.0";

#[derive(Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,

    /// Rounds, each of both subjects; at least 5
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,

    /// Pods in sequence, and at once
    #[arg(long, default_value_t = 50)]
    pods: usize,

    #[command(flatten)]
    output: Output,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    options.programs.ensure(setup::BENCH)?;
    let (rounds, pods) = (options.rounds.to_string(), options.pods.to_string());
    let given = ["bench", "cni", "--rounds", &rounds, "--pods", &pods];
    let mut arguments = given.map(String::from).to_vec();
    arguments.extend(options.programs.arguments()?);
    arguments.extend(options.output.arguments()?);
    as_root(&arguments)?;
    measure(&options)
}

/// A plugin and its configuration.
pub(super) struct Subject {
    name: String,
    /// The number of its node, from 1.
    node: usize,
    plugin: PathBuf,
    config: Value,
}

/// One verb for all pods of a round, in milliseconds.
struct Phase {
    calls: Vec<f64>,
    /// From the first exec until the kernel has what was asked: links there, or gone.
    all: f64,
}

/// The figures of one subject in one round.
struct Round {
    add: Phase,
    del: Phase,
    add_at_once: Phase,
    del_at_once: Phase,
}

/// How long the kernel may take to settle.
const SETTLE: Duration = Duration::from_secs(30);

fn measure(options: &Options) -> Result<ExitCode> {
    interrupt::on_interrupt(holder::end_all)?;
    let present = Binaries::at(options.programs.present())?;
    let earlier = options.programs.earlier();
    let nodes = 1 + usize::from(earlier.is_some());
    let lab = Lab::new(present.clone(), nodes, Lifetime::Process)?;
    let ours = sinabro("sinabro", 1, &present);
    let (theirs, against) = match earlier {
        Some((commit, dir)) => {
            let binaries = Binaries::at(dir)?;
            lab.node(2).set_binaries(binaries.clone());
            (sinabro(commit, 2, &binaries), commit.to_owned())
        }
        None => (ptp()?, "ptp with host-local".into()),
    };
    for node in lab.nodes() {
        node.start_agent()?;
        node.wait_ready()?;
    }
    println!(
        "  {} against {against}: ADD and DEL, exec to exit, IPv4 and IPv6\n  \
         (without duplicate address detection, for which ptp would wait over a second),\n  \
         {} pods one after the other, then all at once; {} rounds in turns. \"all done\": from the\n  \
         first exec until the kernel has made, or removed, every link",
        ours.name, options.pods, options.rounds
    );
    let mut rounds: Vec<[Round; 2]> = Vec::new();
    let mut step = ui::step("measuring");
    // The first round warms caches up and does not count.
    for number in 0..=options.rounds {
        step.now(format!("round {number} of {}", options.rounds));
        let one = |subject: &Subject| round(lab.node(subject.node), subject, number, options.pods);
        let pair = both(number, |subject| one([&ours, &theirs][subject]))?;
        if number > 0 {
            rounds.push(pair);
        }
    }
    step.clear();

    let rows = rows(&rounds, &ours.name, &theirs.name, options.pods);
    row::print(&rows, ["case", ""], 2);
    let report = Report::of(rows)?;
    options.output.report("cni", &report)?;
    Ok(options.programs.verdict(slower(&report.rows)))
}

pub(super) fn sinabro(name: &str, node: usize, binaries: &Binaries) -> Subject {
    Subject {
        name: name.into(),
        node,
        plugin: binaries.plugin(),
        config: json!({"cniVersion": SPEC, "name": "bench", "type": "sinabro"}),
    }
}

fn ptp() -> Result<Subject> {
    let reference = setup::reference_plugins().context("the plugin ptp is missing")?;
    Ok(Subject {
        name: "ptp".into(),
        node: 1,
        plugin: reference.join("ptp"),
        config: json!({
            "cniVersion": SPEC,
            "name": "bench-ptp",
            "type": "ptp",
            "ipMasq": false,
            "ipam": {
                "type": "host-local",
                // On the node's tmpfs, as are our leases.
                "dataDir": "/run/lab/host-local",
                "ranges": [[{"subnet": "10.99.0.0/16"}], [{"subnet": "fd00:99::/64"}]],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            },
        }),
    })
}

fn round(node: &Node, subject: &Subject, number: u32, pods: usize) -> Result<Round> {
    let ids: Vec<String> = (0..pods)
        .map(|pod| format!("{}-{number}-{pod}", subject.name))
        .collect();
    for id in &ids {
        quick_sandbox(node, id)?;
    }
    let bare = links(node)?;
    let result = Round {
        add: phase(node, bare + pods, || {
            in_sequence(node, subject, "ADD", &ids)
        })?,
        del: phase(node, bare, || in_sequence(node, subject, "DEL", &ids))?,
        add_at_once: phase(node, bare + pods, || at_once(node, subject, "ADD", &ids))?,
        del_at_once: phase(node, bare, || at_once(node, subject, "DEL", &ids))?,
    };
    for id in &ids {
        node.remove_sandbox(id)?;
    }
    Ok(result)
}

/// Times calls on a settled kernel, and until the node has `links` links.
fn phase(node: &Node, wanted: usize, calls: impl FnOnce() -> Result<Vec<f64>>) -> Result<Phase> {
    settle(node.place())?;
    let start = Instant::now();
    let calls = calls()?;
    while links(node)? != wanted {
        ensure!(
            start.elapsed() < SETTLE,
            "the node has {} links instead of {wanted}",
            links(node)?
        );
        thread::sleep(Duration::from_micros(500));
    }
    let all = start.elapsed().as_secs_f64() * 1e3;
    Ok(Phase { calls, all })
}

fn links(node: &Node) -> Result<usize> {
    Ok(node.netlink()?.links()?.len())
}

/// Waits until the kernel has no leftovers to clean up: namespaces that were removed are taken
/// apart under the lock that every change of a link needs.
pub(super) fn settle(place: &Place) -> Result<()> {
    const QUIET: u32 = 50;
    let mut conn = place.conn()?;
    let lo = conn.link_by_name("lo")?.index;
    let start = Instant::now();
    let mut quiet = 0;
    while quiet < QUIET && start.elapsed() < SETTLE {
        let asked = Instant::now();
        conn.execute(link::set_up(lo))?;
        // Uncontended, this takes microseconds.
        quiet = match asked.elapsed() < Duration::from_millis(1) {
            true => quiet + 1,
            false => 0,
        };
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// A sandbox without duplicate address detection (RFC 4862 §5.4): ptp waits more than a second
/// for it, which would say nothing about the plugins' own work. Ours never waits.
pub(super) fn quick_sandbox(node: &Node, id: &str) -> Result<Place> {
    let sandbox = node.make_sandbox(id)?;
    sandbox.run(|| {
        for conf in ["all", "default"] {
            let path = format!("/proc/sys/net/ipv6/conf/{conf}/accept_dad");
            fs::write(&path, "0").with_context(|| format!("cannot write {path}"))?;
        }
        Ok(())
    })?;
    Ok(sandbox)
}

pub(super) fn in_sequence(
    node: &Node,
    subject: &Subject,
    command: &str,
    ids: &[String],
) -> Result<Vec<f64>> {
    node.namespace().run(|| {
        ids.iter()
            .map(|id| call(subject, command, id, || ()))
            .collect()
    })
}

fn at_once(node: &Node, subject: &Subject, command: &str, ids: &[String]) -> Result<Vec<f64>> {
    let start = Barrier::new(ids.len());
    // Threads inherit the namespaces of the one that starts them.
    node.namespace().run(|| {
        thread::scope(|scope| {
            let threads: Vec<_> = ids
                .iter()
                .map(|id| {
                    scope.spawn(|| {
                        call(subject, command, id, || {
                            start.wait();
                        })
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread
                        .join()
                        .map_err(|_| anyhow::anyhow!("a thread panicked"))?
                })
                .collect()
        })
    })
}

/// One call, in milliseconds. `ready` is called just before the clock starts.
fn call(subject: &Subject, command: &str, id: &str, ready: impl FnOnce()) -> Result<f64> {
    let prepared = Call {
        plugin: &subject.plugin,
        command,
        container_id: id,
        netns: Some(&netns_path(id)),
        args: None,
        config: &subject.config,
    }
    .command();
    ready();
    let mut process = prepared?;
    process.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = process
        .spawn()
        .with_context(|| format!("cannot start {}", subject.name))?;
    // What a plugin prints fits into a pipe: nobody needs to read before it ends.
    let status = child.wait()?;
    let took = start.elapsed();
    if !status.success() {
        let answer = sinabro_lab::cni::answer(child)?;
        bail!(
            "{command} of {id}: {status}, {} {}",
            answer.json,
            answer.stderr.trim()
        );
    }
    Ok(took.as_secs_f64() * 1e3)
}

fn rows(rounds: &[[Round; 2]], ours: &str, theirs: &str, pods: usize) -> Vec<Row> {
    type Pick = fn(&Round) -> &Phase;
    let cases: [(String, Pick); 4] = [
        (format!("ADD, {pods} in sequence"), |round| &round.add),
        (format!("DEL, {pods} in sequence"), |round| &round.del),
        (format!("ADD, {pods} at once"), |round| &round.add_at_once),
        (format!("DEL, {pods} at once"), |round| &round.del_at_once),
    ];
    type Metric = fn(&Phase) -> f64;
    let metrics: [(&str, Metric); 3] = [
        ("p50", |phase| stats::percentile(&phase.calls, 50.0)),
        (stats::tail_name(pods), |phase| stats::tail(&phase.calls)),
        ("all done", |phase| phase.all),
    ];
    let mut rows = Vec::new();
    for (case, pick) in cases {
        for (name, metric) in metrics {
            let figures = |subject: usize| -> Vec<f64> {
                rounds
                    .iter()
                    .map(|round| metric(pick(&round[subject])))
                    .collect()
            };
            rows.extend(Row::new(
                &case,
                name,
                "ms",
                (ours, &figures(0)),
                (theirs, &figures(1)),
            ));
        }
    }
    rows
}
