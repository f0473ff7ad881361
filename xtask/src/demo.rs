//! `cargo xtask demo`: two nodes on this machine, real programs, real traffic, one table.

use crate::{build, interrupt, report, residue, root, setup, ui, workspace::dist};
use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use sinabro_lab::{
    Binaries, Lab, Lifetime,
    checks::{CHECKS, PODS_PER_NODE, Scene, service},
    holder, measures,
    residue::{Snapshot, left_since},
};
use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

/// Pods on one node when its agent's memory is looked at.
const IDLE_PODS: usize = 50;
/// Half as much again as it has, of which a third are the maps of Services.
const MEMORY_LIMIT: u64 = 22 << 20;
const PLUGIN_LIMIT: u64 = 3 << 20;

#[derive(clap::Args)]
pub struct Options {
    /// Leave nodes and pods up, and print how to look around
    #[arg(long)]
    keep: bool,

    /// Write checks and measures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Programs that are built already; set when the demo starts itself again as root
    #[arg(long, hide = true, value_name = "DIR")]
    programs: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    ok: bool,
    detail: String,
}

#[derive(Default, Serialize)]
struct Report {
    ok: bool,
    checks: Vec<Row>,
    measures: BTreeMap<String, f64>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let programs = match &options.programs {
        Some(dir) => std::path::absolute(dir)?,
        None => {
            setup::ensure(setup::BUILD)?;
            build::release()?;
            dist()
        }
    };
    if !root::is_root() {
        let json = match &options.json {
            Some(path) => Some(std::path::absolute(path)?.display().to_string()),
            None => None,
        };
        let programs = programs.display().to_string();
        let mut arguments = vec!["demo", "--programs", &programs];
        if options.keep {
            arguments.push("--keep");
        }
        if let Some(json) = &json {
            arguments.extend(["--json", json]);
        }
        root::become_root("making network namespaces", &arguments)?;
    }
    show(options, programs)
}

fn show(options: &Options, programs: PathBuf) -> Result<ExitCode> {
    let started = Instant::now();
    let before = Snapshot::take()?;
    let on_interrupt = before.clone();
    interrupt::on_interrupt(move || {
        println!("\n  interrupted: ending everything");
        holder::end_all();
        report_left(&on_interrupt);
    })?;

    let mut report = Report::default();
    let lab = play(options, programs, &mut report);
    match lab {
        Ok(lab) if options.keep => {
            look_around(&lab);
            std::mem::forget(lab);
        }
        lab => {
            match lab {
                // It holds the nodes' mount namespaces, and they the file systems of the pins.
                Ok(lab) => drop(lab),
                Err(error) => note(&mut report, "run", "the demo ran to its end", Err(error)),
            }
            holder::end_all();
            let left = left_since(&before).and_then(|left| {
                let names: Vec<String> = left.iter().map(ToString::to_string).collect();
                ensure!(left.is_empty(), "{}", names.join(", "));
                Ok(format!("no {}", residue::kinds()))
            });
            note(&mut report, "residue", "nothing left behind", left);
        }
    }

    let failed = report.checks.iter().filter(|check| !check.ok).count();
    report.ok = failed == 0;
    let passed = report.checks.len() - failed;
    println!(
        "\n  {} passed, {failed} failed, {:.0} s",
        passed,
        started.elapsed().as_secs_f64()
    );
    if let Some(path) = &options.json {
        report::write(path, &report)?;
    }
    Ok(match report.ok {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Everything from the first namespace to the last measurement.
fn play(options: &Options, programs: PathBuf, report: &mut Report) -> Result<Lab> {
    let lifetime = match options.keep {
        true => Lifetime::Kept,
        false => Lifetime::Process,
    };
    println!(
        "{}",
        ui::bold("Two nodes, a router between them, a host outside")
    );
    let step = ui::step("making nodes n1 and n2, a router, an outside host");
    let lab = Lab::new(Binaries::at(programs)?, 2, lifetime)?;
    step.done_in_time();

    let step = ui::step("starting the agents");
    service::start(&lab)?;
    step.done_in_time();

    let step = ui::step(format!("adding {PODS_PER_NODE} pods to each node by CNI"));
    let scene = Scene::new(lab)?;
    step.done_in_time();

    println!("\n{}", ui::bold("Checks, each with real traffic"));
    for check in CHECKS {
        let step = ui::step(check.title);
        let result = check.run(&scene);
        step.done(&line(check.title, &result));
        record(report, check.name, result);
    }

    println!("\n{}", ui::bold("Measured, one TCP connection each"));
    paths(&scene, report)?;
    println!();
    sizes(&scene, report)?;
    Ok(scene.into_lab())
}

fn paths(scene: &Scene, report: &mut Report) -> Result<()> {
    let headings = ["path", "Gbit/s", "round trip p50 µs", "p99 µs"];
    let mut rows = vec![headings.map(String::from).to_vec()];
    let mut paths = Vec::new();
    let mut step = ui::step("measuring");
    for planned in measures::paths(scene) {
        step.now(format!("measuring {}", planned.1));
        let path = measures::measure(&planned)?;
        rows.push(vec![
            path.title.to_string(),
            format!("{:.1}", path.gbit_per_second),
            format!("{:.0}", path.latency_p50_us),
            format!("{:.0}", path.latency_p99_us),
        ]);
        paths.push(path);
    }
    step.clear();
    ui::table(&rows);
    report.measures.extend(measures::flatten(&paths));
    Ok(())
}

/// The agent's memory with many idle pods, and the plugin's size.
fn sizes(scene: &Scene, report: &mut Report) -> Result<()> {
    let node = scene.node(1);
    let title = format!("agent's memory, {IDLE_PODS} pods, idle");
    let mut step = ui::step(&title);
    step.now(format!("adding pods until there are {IDLE_PODS}"));
    let adding = Instant::now();
    let pods = measures::fill(node, IDLE_PODS)?;
    let adding = adding.elapsed();
    step.now("leaving the agent alone for a moment");
    thread::sleep(Duration::from_secs(2));
    let memory = measures::agent_memory(node);
    let verdict =
        memory.and_then(|bytes| within("resident", bytes, MEMORY_LIMIT, report, "agent_rss_bytes"));
    step.done(&line(&title, &verdict));
    record(report, "agent_memory", verdict);

    let title = format!("{} pods at a time, and away again", pods.len());
    let mut step = ui::step(&title);
    step.now("deleting them again");
    let deleted = measures::clear(node, &pods).map(|()| {
        format!(
            "added in {:.1} s; after deletion their leases are free",
            adding.as_secs_f64()
        )
    });
    step.done(&line(&title, &deleted));
    record(report, "many_pods", deleted);

    let title = "CNI plugin's size";
    let plugin = node.binaries().plugin();
    let bytes = fs::metadata(&plugin)
        .map(|meta| meta.len())
        .context("cannot look at the plugin");
    let verdict =
        bytes.and_then(|bytes| within("static", bytes, PLUGIN_LIMIT, report, "plugin_bytes"));
    note(report, "plugin_size", title, verdict);
    Ok(())
}

fn within(what: &str, bytes: u64, limit: u64, report: &mut Report, name: &str) -> Result<String> {
    report.measures.insert(name.into(), bytes as f64);
    let text = format!(
        "{:.1} MB {what}, limit {} MB",
        bytes as f64 / f64::from(1 << 20),
        limit >> 20
    );
    ensure!(bytes < limit, "{text}");
    Ok(text)
}

fn line(title: &str, result: &Result<String>) -> String {
    let pad = " ".repeat(42_usize.saturating_sub(title.chars().count()));
    let verdict = ui::verdict(result.is_ok());
    match result {
        Ok(detail) => format!("  {verdict}  {title}{pad}{}", ui::dim(detail)),
        Err(error) => format!("  {verdict}  {title}{pad}{error:#}"),
    }
}

fn record(report: &mut Report, name: &str, result: Result<String>) {
    report.checks.push(Row {
        name: name.into(),
        ok: result.is_ok(),
        detail: result.unwrap_or_else(|error| format!("{error:#}")),
    });
}

fn note(report: &mut Report, name: &str, title: &str, result: Result<String>) {
    println!("{}", line(title, &result));
    record(report, name, result);
}

fn report_left(before: &Snapshot) {
    match left_since(before) {
        Ok(left) if left.is_empty() => println!("  nothing left behind"),
        Ok(left) => left
            .iter()
            .for_each(|item| ui::error(&format!("left behind: {item}"))),
        Err(error) => ui::error(&format!("{error:#}")),
    }
}

fn look_around(lab: &Lab) {
    println!("\n{}", ui::bold("Kept. Look around, as root:"));
    for node in lab.nodes() {
        println!(
            "  nsenter -t {} -n -m {} status   # also endpoints, services, nodes, metrics",
            node.namespace().pid(),
            node.binaries().ctl().display()
        );
    }
    let n1 = lab.node(1).namespace().pid();
    println!("  nsenter -t {n1} -n -m ip netns exec n1-pod1 ip address");
    println!(
        "  nsenter -t {n1} -n -m cat {}",
        sinabro_lab::node::LOG_FILE
    );
    println!(
        "  nsenter -t {n1} -n -m curl -s http://127.0.0.1:9632/metrics   # also healthz, readyz"
    );
    println!(
        "  nsenter -t {} -n ip address   # the outside host",
        lab.outside().pid()
    );
    let pids: Vec<String> = lab.pids().iter().map(ToString::to_string).collect();
    println!(
        "End it, and everything is gone:\n  kill -9 {}",
        pids.join(" ")
    );
}
