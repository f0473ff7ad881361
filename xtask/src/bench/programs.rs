//! What each eBPF program costs for each run, in nanoseconds, under real traffic on every path that
//! packets take; beside those of an earlier commit.
//!
//! The kernel counts: with BPF_ENABLE_STATS (Linux 5.8) it takes the time before and after each run
//! of a program. Taking the time is in the figure itself, with some 20 ns, so a program's cost is
//! less than what is shown, and a ratio nearer to one than the truth.
//!
//! Each subject has two lab nodes with agents of its own, among all of which the overlay is, and the
//! same pods; what is measured of one is followed by the same of the other. Each round has newly
//! loaded programs. Without an earlier commit
//! both are the present programs: what then differs is this machine's noise.

mod counted;
mod paths;

use super::{Output, Programs, Report, Row, as_root, both, row, slower};
use crate::{interrupt, setup, ui};
use anyhow::Result;
use counted::{Counted, Counter};
use paths::{Path, Scene};
use sinabro_lab::{Binaries, Lab, Lifetime, holder};
use std::{collections::BTreeMap, process::ExitCode, time::Duration};

#[derive(Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    programs: Programs,

    /// Rounds, each of both subjects; at least 5
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,

    /// Services are Sinabro's, so that packets go past the nodes' stacks
    #[arg(long)]
    past_the_stack: bool,

    #[command(flatten)]
    output: Output,
}

/// How long traffic goes on for one figure.
const TIME: Duration = Duration::from_millis(300);
/// Fewer runs say nothing.
const RUNS: u64 = 100;

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut options = options.clone();
    options.programs.ensure(setup::BENCH)?;
    let rounds = options.rounds.to_string();
    let given = ["bench", "programs", "--rounds", &rounds];
    let mut arguments = given.map(String::from).to_vec();
    arguments.extend(options.past_the_stack.then(|| "--past-the-stack".into()));
    arguments.extend(options.programs.arguments()?);
    arguments.extend(options.output.arguments()?);
    as_root(&arguments)?;
    measure(&options)
}

/// Nanoseconds of a run, of both subjects, in each round; by the numbers of path and program.
type Figures = BTreeMap<[usize; 2], Vec<[f64; 2]>>;

fn measure(options: &Options) -> Result<ExitCode> {
    interrupt::on_interrupt(holder::end_all)?;
    let present = Binaries::at(options.programs.present())?;
    let earlier = options.programs.earlier();
    let lab = Lab::new(present.clone(), 4, Lifetime::Process)?;
    if let Some((_, dir)) = earlier {
        for node in [3, 4] {
            lab.node(node).set_binaries(Binaries::at(dir)?);
        }
    }
    let names = [
        "sinabro",
        earlier.map_or("sinabro as well", |(commit, _)| commit),
    ];
    let past = options.past_the_stack;
    let scenes = [Scene::make(&lab, 1, past)?, Scene::make(&lab, 3, past)?];
    println!(
        "  {} against {}: nanoseconds of one run of each program, {} rounds in turns",
        names[0], names[1], options.rounds
    );
    let counter = Counter::start()?;
    let mut figures = Figures::new();
    let mut step = ui::step("measuring");
    let paths = Path::all();
    // The first round warms caches up and does not count.
    for round in 0..=options.rounds {
        step.now(format!("round {round} of {}: loading", options.rounds));
        for scene in &scenes {
            scene.load_anew()?;
        }
        for (number, path) in paths.iter().enumerate() {
            step.now(format!("round {round} of {}: {path}", options.rounds));
            let [ours, theirs] = both(round, |subject| {
                let scene = &scenes[subject];
                let before = counter.read(scene.maps())?;
                scene.send(path, TIME)?;
                Ok(counter.read(scene.maps())?.since(&before))
            })?;
            if round > 0 {
                note(&mut figures, number, &ours, &theirs);
            }
        }
    }
    step.clear();
    drop(counter);

    let rows = rows(&figures, &paths, options.rounds, names);
    row::print(&rows, ["path", "program"], 0);
    let report = Report::of(rows)?;
    options.output.report("programs", &report)?;
    Ok(options.programs.verdict(slower(&report.rows)))
}

fn note(figures: &mut Figures, path: usize, ours: &Counted, theirs: &Counted) {
    for (program, name) in counted::NAMES.into_iter().enumerate() {
        if let (Some(a), Some(b)) = (ours.mean(name, RUNS), theirs.mean(name, RUNS)) {
            figures.entry([path, program]).or_default().push([a, b]);
        }
    }
}

/// Programs that every round saw; others run now and then only.
fn rows(figures: &Figures, paths: &[Path], rounds: u32, names: [&str; 2]) -> Vec<Row> {
    let complete = figures
        .iter()
        .filter(|(_, values)| values.len() == rounds as usize);
    let row = |([path, program], values): (&[usize; 2], &Vec<[f64; 2]>)| {
        let of = |subject: usize| values.iter().map(|pair| pair[subject]).collect::<Vec<_>>();
        let case = paths[*path].to_string();
        let program = counted::NAMES[*program];
        let (ours, theirs) = ((names[0], &*of(0)), (names[1], &*of(1)));
        Row::new(&case, program, "ns", ours, theirs)
    };
    complete.filter_map(row).collect()
}
