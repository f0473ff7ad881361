//! The agent in a cluster of tens of thousands of Services: how soon all are in the kernel, what one change
//! takes, and what memory they cost.
//!
//! The API server and etcd are Kubernetes' own, Services and EndpointSlices of a real one's size; no controllers, no other
//! nodes. The agent is the release build on a lab node of its own, where one of the Services leads to a pod.

mod objects;
mod subject;

use super::{
    Output, Programs,
    api_server::{self, ApiServer},
    as_root_with_kubernetes, number, stats,
};
use crate::{
    cluster, interrupt,
    report::{self, Machine},
    setup, ui,
};
use anyhow::Result;
use serde::Serialize;
use sinabro_lab::{Binaries, Lab, Lifetime, holder};
use std::{path::PathBuf, process::ExitCode};
use subject::{Measured, Size};

const MB: f64 = 1e6;

#[derive(Clone, clap::Args)]
pub struct Options {
    /// How many Services there are
    #[arg(long, default_value_t = 50_000,
          value_parser = clap::value_parser!(u32).range(2..=objects::MOST as i64))]
    services: u32,

    /// How many endpoints each of them has
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
    endpoints: u8,

    /// How many of them change, one after the other
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=objects::MOST_CHANGES as i64))]
    changes: u16,

    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Where the programs are, for the process that sudo starts: it builds nothing as root.
    #[arg(long, hide = true, value_name = "DIR")]
    programs: Option<PathBuf>,
}

impl Options {
    fn size(&self) -> Size {
        Size {
            services: self.services as usize,
            each: self.endpoints.into(),
            changes: self.changes.into(),
        }
    }

    /// The same options for the same program under sudo.
    fn arguments(&self, programs: &Programs) -> Result<Vec<String>> {
        let mut arguments: Vec<String> = ["bench", "service-scale"].map(String::from).into();
        arguments.extend(programs.arguments()?);
        arguments.extend(["--services".into(), self.services.to_string()]);
        arguments.extend(["--endpoints".into(), self.endpoints.to_string()]);
        arguments.extend(["--changes".into(), self.changes.to_string()]);
        arguments.extend(Output::json(&self.json).arguments()?);
        Ok(arguments)
    }
}

/// A figure.
#[derive(Clone, Debug, Serialize)]
struct Row {
    what: &'static str,
    unit: &'static str,
    value: f64,
}

/// The JSON file.
#[derive(Serialize)]
struct Report {
    machine: Machine,
    kubernetes: &'static str,
    services: usize,
    endpoints: usize,
    changes: usize,
    rows: Vec<Row>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut programs = Programs::alone(options.programs.clone());
    programs.ensure(setup::BUILD)?;
    as_root_with_kubernetes(&options.arguments(&programs)?)?;
    measure(options, programs.present())
}

fn measure(options: &Options, programs: PathBuf) -> Result<ExitCode> {
    interrupt::on_interrupt(holder::end_all)?;
    let size = options.size();
    let binaries = Binaries::at(programs)?;
    let mut lab = Lab::new(binaries.clone(), 0, Lifetime::Process)?;
    let step = ui::step("starting etcd and the API server");
    let server = ApiServer::start(&lab)?;
    step.done_in_time();
    let client = &server.client;
    for namespace in objects::namespaces() {
        client.create("/api/v1/namespaces", &namespace)?;
    }
    api_server::create_all("Services with EndpointSlices", 0..size.services, |number| {
        client.create(&objects::services_path(number), &objects::service(number))?;
        let slice = objects::slice(number, &objects::endpoints(number, size.each));
        client.create(&objects::slices_path(number), &slice)
    })?;
    let endpoints = size.services * size.each;
    let mut step = ui::step(format!("{} Services, {endpoints} endpoints", size.services));
    let measured = subject::measure(&mut lab, &server, &binaries, size, |what| step.now(what))?;
    step.done_in_time();

    let rows = rows(&measured);
    let mut table = vec![vec![String::new(), String::new(), String::new()]];
    table.extend(
        rows.iter()
            .map(|row| vec![row.what.into(), row.unit.into(), number(row.value)]),
    );
    println!();
    ui::table(&table);
    if let Some(path) = &options.json {
        let report = Report {
            machine: Machine::look()?,
            kubernetes: cluster::components::KUBERNETES,
            services: size.services,
            endpoints,
            changes: size.changes,
            rows,
        };
        report::write(path, &report)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn rows(measured: &Measured) -> Vec<Row> {
    let Measured {
        first,
        again,
        memory,
        ..
    } = measured;
    let row = |what, unit, value| Row { what, unit, value };
    vec![
        row("first start: ready after", "s", first.ready),
        row("first start: all published after", "s", first.complete),
        row(
            "first start: of that, planning and publishing",
            "s",
            first.publishing,
        ),
        row("first start: CPU", "s", first.cpu),
        row("first start: received", "MB", first.received / MB),
        row("first start: memory, peak", "MB", first.peak / MB),
        row("start after a kill: ready after", "s", again.ready),
        row(
            "start after a kill: all compared after",
            "s",
            again.complete,
        ),
        row("start after a kill: CPU", "s", again.cpu),
        row("start after a kill: memory, peak", "MB", again.peak / MB),
        row("at rest: memory", "MB", memory.resident / MB),
        row("at rest: of that, its own", "MB", memory.own / MB),
        row(
            "a change, until it is published: median",
            "ms",
            stats::median(&measured.changes),
        ),
        row(
            "a change: slowest of a hundred",
            "ms",
            stats::tail(&measured.changes),
        ),
        row(
            "a change: planning and publishing, 99 of 100 within",
            "ms",
            measured.publishing,
        ),
        row("a change: the agent's CPU", "ms", measured.change_cpu),
    ]
}
