//! `cargo xtask vm`: the programs that users get, on the kernels that users run, each booted in a
//! virtual machine of its own.

mod budget;
mod environments;
mod initrd;
mod kernels;
mod machine;
mod modules;
mod outcome;
mod programs;
mod tables;

use crate::{arch::Arch, interrupt, report, root, setup, ui, workspace::target};
use anyhow::{Context as _, Result, bail, ensure};
use budget::Budget;
use environments::{SPECIAL, Special};
use kernels::{Image, KERNELS, Kernel};
use machine::Machine;
use modules::{Module, Modules};
use outcome::{Expected, Outcome};
use programs::Programs;
use serde::Serialize;
use sinabro_guest::{Check, Job, Message, Step};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::ExitCode,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

/// Machines at the same time: each has something to wait for, and two processors.
const AT_ONCE: usize = 2;

/// What nodes and tests use. A kernel may have it built in.
const MODULES: &[&str] = &[
    "veth",
    "vxlan",
    "bridge",
    "sch_ingress",
    "cls_bpf",
    "nf_tables",
];
const OPTIONAL_MODULES: &[&str] = &["act_bpf", "tls", "inet_diag", "tcp_diag", "crc32c_generic"];
const SCTP: &str = "sctp";

#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    action: Option<Action>,

    /// Only this kernel, as `list` names it; can be given more than once
    #[arg(long, value_name = "KERNEL")]
    only: Vec<String>,

    /// No special machines; and without --only, the oldest kernel, one in the middle, the newest
    #[arg(long)]
    short: bool,

    /// Take only this step; can be given more than once
    #[arg(long = "step", value_name = "STEP")]
    steps: Vec<StepName>,

    /// Every test of the data path, also those that take long under emulation
    #[arg(long)]
    thorough: bool,

    /// A kernel of your own; with --modules
    #[arg(
        long,
        value_name = "VMLINUZ",
        requires = "modules",
        conflicts_with = "only"
    )]
    kernel: Option<PathBuf>,

    /// Its modules, a directory as /lib/modules/RELEASE
    #[arg(long, value_name = "DIR", requires = "kernel")]
    modules: Option<PathBuf>,

    /// Fetch the newest packages of the kernels, also of those that are in the cache
    #[arg(long)]
    refresh: bool,

    /// Write down how many instructions each program takes now, as what it may take from now on
    #[arg(long)]
    write_budget: bool,

    /// Write the outcome to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Programs that are built already
    #[arg(long, hide = true, global = true, value_name = "DIR")]
    programs: Option<PathBuf>,
}

/// What is done in a machine.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum StepName {
    /// Load, verify and attach every program
    Verify,
    /// Be a node: prepare, agent, the plugin's verbs, an agent that is killed, uninstall
    Node,
    /// The demo's checks between two nodes, and agents that restart and are killed
    Lab,
    /// The data path's tests
    Datapath,
}

impl StepName {
    const ALL: [Self; 4] = [Self::Verify, Self::Node, Self::Lab, Self::Datapath];
    /// Where it is the machine that is special.
    const SPECIAL: [Self; 2] = [Self::Verify, Self::Node];

    fn step(self, thorough: bool) -> Step {
        match self {
            Self::Verify => Step::Verify,
            Self::Node => Step::Node,
            Self::Lab => Step::Lab,
            Self::Datapath => Step::Datapath { thorough },
        }
    }
}

#[derive(clap::Subcommand)]
enum Action {
    /// The kernels, and which of them are here
    List,
    /// A shell in a machine with that kernel, with the programs in /bin
    Shell {
        #[arg(value_name = "KERNEL")]
        kernel: String,
    },
}

#[derive(Serialize)]
struct Report<'a> {
    kernels: &'a [Outcome],
}

/// One machine to run.
struct Run<'a> {
    /// The series, or none for somebody's own.
    kernel: Option<&'static Kernel>,
    image: &'a Image,
    modules: &'a [Module],
    special: Option<&'static Special>,
    steps: Vec<Step>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    if matches!(options.action, Some(Action::List)) {
        return list();
    }
    ensure!(
        Arch::host()? == Arch::Amd64,
        "there are machines for amd64 only: the programs are built for this machine, {}",
        Arch::host()?
    );
    setup::ensure(setup::VM)?;
    interrupt::on_interrupt(|| {
        println!("\n  interrupted: ending the machines");
        machine::end_all();
    })?;
    match &options.action {
        Some(Action::Shell { kernel }) => shell(Kernel::by_name(kernel)?, options),
        _ => all(options),
    }
}

fn list() -> Result<ExitCode> {
    let mut rows = vec![
        ["kernel", "here", "in --short", "special machines"]
            .map(String::from)
            .to_vec(),
    ];
    for kernel in KERNELS {
        let cached = kernel.cached()?.map(|image| image.release);
        let special = SPECIAL
            .iter()
            .filter(|special| special.kernels.contains(&kernel.name));
        let special: Vec<_> = special.map(|special| special.name).collect();
        rows.push(vec![
            format!("Linux {}", kernel.name),
            cached.unwrap_or_else(|| "is fetched when it is needed".into()),
            if kernel.short { "yes" } else { "" }.into(),
            special.join(", "),
        ]);
    }
    ui::table(&rows);
    println!("  in no archive: {}", kernels::MISSING.join(", "));
    Ok(ExitCode::SUCCESS)
}

fn shell(kernel: &'static Kernel, options: &Options) -> Result<ExitCode> {
    let image = kernel.image()?;
    let modules = modules_of(&image, true)?;
    let programs = Programs::build(options.programs.as_deref())?.with_busybox()?;
    let machine = Machine {
        image: &image,
        programs: &programs.finish(),
        modules: &modules,
        job: Job {
            shell: true,
            ..Job::default()
        },
        command_line: "",
        dir: target().join("vm/shell"),
    };
    machine.shell()?;
    Ok(ExitCode::SUCCESS)
}

fn all(options: &Options) -> Result<ExitCode> {
    let started = Instant::now();
    let images = images(options)?;
    let programs = Programs::build(options.programs.as_deref())?
        .archive
        .finish();
    // Without SCTP, and with it.
    let mut modules = BTreeMap::new();
    for (_, image) in &images {
        let step = ui::step(format!("unpacking modules of {}", image.release));
        let both = [modules_of(image, false)?, modules_of(image, true)?];
        modules.insert(image.release.clone(), both);
        step.clear();
    }
    let mut runs = Vec::new();
    for (kernel, image) in &images {
        let [plain, with_sctp] = &modules[&image.release];
        let run = |special: Option<&'static Special>, steps: &[StepName]| {
            let chosen =
                |step: &&StepName| options.steps.is_empty() || options.steps.contains(step);
            let steps: Vec<_> = steps
                .iter()
                .filter(chosen)
                .map(|step| step.step(options.thorough))
                .collect();
            (!steps.is_empty()).then_some(Run {
                kernel: *kernel,
                image,
                modules: match special {
                    Some(special) if (special.environment)().sctp => with_sctp,
                    _ => plain,
                },
                special,
                steps,
            })
        };
        runs.extend(run(None, &StepName::ALL));
        let of = |special: &&Special| kernel.is_some_and(|k| special.kernels.contains(&k.name));
        if !options.short {
            let specials = SPECIAL.iter().filter(of);
            runs.extend(specials.filter_map(|special| run(Some(special), &StepName::SPECIAL)));
        }
    }
    // What takes longest first.
    runs.sort_by_key(|run| run.special.is_some());
    let mut outcomes = run_all(&runs, &programs);
    let order = |outcome: &Outcome| {
        KERNELS
            .iter()
            .position(|kernel| kernel.name == outcome.name)
    };
    outcomes.sort_by_key(|outcome| (!outcome.environment.is_empty(), order(outcome)));
    judge_budget(options, &mut outcomes)?;

    tables::print(&outcomes);
    let failed: usize = outcomes
        .iter()
        .map(|outcome| outcome.failures().count())
        .sum();
    println!(
        "\n  {} machines, {failed} failures, {:.0} s",
        outcomes.len(),
        started.elapsed().as_secs_f64()
    );
    if let Some(path) = &options.json {
        report::write(path, &Report { kernels: &outcomes })?;
    }
    Ok(match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

fn images(options: &Options) -> Result<Vec<(Option<&'static Kernel>, Image)>> {
    if let (Some(kernel), Some(modules)) = (&options.kernel, &options.modules) {
        return Ok(vec![(None, kernels::own(kernel, modules)?)]);
    }
    let chosen: Vec<&'static Kernel> = match (options.only.as_slice(), options.short) {
        ([], true) => KERNELS.iter().filter(|kernel| kernel.short).collect(),
        ([], false) => KERNELS.iter().collect(),
        (names, _) => names
            .iter()
            .map(|name| Kernel::by_name(name))
            .collect::<Result<_>>()?,
    };
    let image = |kernel: &'static Kernel| {
        if options.refresh {
            let step = ui::step(format!("fetching Linux {}", kernel.name));
            kernel
                .fetch()
                .with_context(|| format!("cannot fetch Linux {}", kernel.name))?;
            step.done_in_time();
        }
        Ok((Some(kernel), kernel.image()?))
    };
    chosen.into_iter().map(image).collect()
}

fn modules_of(image: &Image, sctp: bool) -> Result<Vec<Module>> {
    let optional = match sctp {
        true => &[OPTIONAL_MODULES, &[SCTP]].concat(),
        false => OPTIONAL_MODULES,
    };
    let order = || Modules::list(&image.modules)?.load_order(MODULES, optional);
    order().with_context(|| format!("modules of {}", image.release))
}

/// Some at a time.
fn run_all(runs: &[Run<'_>], programs: &[u8]) -> Vec<Outcome> {
    let waiting = Mutex::new(runs.iter());
    let outcomes = Mutex::new(Vec::new());
    let progress = Progress::default();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(runs.len()) {
            scope.spawn(|| {
                loop {
                    let next = lock(&waiting).next();
                    let Some(run) = next else { return };
                    let outcome = run.go(programs, &progress);
                    progress.done(&outcome);
                    lock(&outcomes).push(outcome);
                }
            });
        }
    });
    progress.clear();
    outcomes
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
}

/// What these locks guard is whole after every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run<'_> {
    fn go(&self, programs: &[u8], progress: &Progress) -> Outcome {
        let started = Instant::now();
        let mut outcome = Outcome::new(
            self.kernel
                .map_or(self.image.release.as_str(), |kernel| kernel.name),
            &self.image.release,
            self.special.map_or("", |special| special.name),
        );
        let title = outcome.title();
        let dir = title.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let dir = target().join("vm").join(dir);
        let machine = Machine {
            image: self.image,
            programs,
            modules: self.modules,
            job: Job {
                environment: self
                    .special
                    .map(|special| (special.environment)())
                    .unwrap_or_default(),
                steps: self.steps.clone(),
                ..Job::default()
            },
            command_line: self.special.map_or("", |special| special.command_line),
            dir: dir.clone(),
        };
        let ended = machine.run(|message| match message {
            Message::Doing(what) => progress.now(&title, what),
            message => {
                if let Message::Check(check) = &message
                    && !check.ok
                {
                    progress.failed(&title, check);
                }
                outcome.take(message);
            }
        });
        outcome.end(ended, machine::kernel_trouble(&dir));
        outcome.judge(&Expected {
            kernel: self.kernel,
            special: self.special,
            is_verified: self.steps.contains(&Step::Verify),
            has_agent: self.steps.contains(&Step::Node),
        });
        outcome.seconds = started.elapsed().as_secs_f64();
        outcome
    }
}

/// The programs of kernels as they come are held to what is written down.
fn judge_budget(options: &Options, outcomes: &mut [Outcome]) -> Result<()> {
    let path = Budget::path();
    let mut budget = match options.write_budget && !path.exists() {
        true => Budget::default(),
        false => Budget::read(&path)?,
    };
    let is_series = |outcome: &&mut Outcome| {
        outcome.environment.is_empty() && KERNELS.iter().any(|kernel| kernel.name == outcome.name)
    };
    let mut written = false;
    for outcome in outcomes.iter_mut().filter(is_series) {
        if options.write_budget && !outcome.programs.is_empty() {
            budget.note(&outcome.name, &outcome.programs);
            written = true;
        }
        if !outcome.programs.is_empty() {
            let exceeded = budget.exceeded(&outcome.name, &outcome.programs);
            outcome.judge_budget(&exceeded);
        }
    }
    if written {
        budget.write(&path)?;
        root::give_back(&path);
        println!("  written to {}", path.display());
    } else if options.write_budget {
        bail!("no kernel of the list was run: nothing is written down");
    }
    Ok(())
}

/// What each machine is doing, in one line.
#[derive(Default)]
struct Progress {
    doing: Mutex<BTreeMap<String, String>>,
    step: Mutex<Option<ui::Step>>,
}

impl Progress {
    fn now(&self, title: &str, what: String) {
        let mut doing = lock(&self.doing);
        doing.insert(title.to_owned(), what);
        let all: Vec<_> = doing
            .iter()
            .map(|(title, what)| format!("{title}: {what}"))
            .collect();
        let mut step = lock(&self.step);
        step.get_or_insert_with(|| ui::step("booting"))
            .now(all.join("; "));
    }

    /// At once: the rest may take minutes.
    fn failed(&self, title: &str, check: &Check) {
        let first = check.detail.lines().next().unwrap_or_default();
        let verdict = ui::verdict(false);
        self.print(&format!("  {verdict}  {title}: {}: {first}", check.name));
    }

    fn done(&self, outcome: &Outcome) {
        lock(&self.doing).remove(&outcome.title());
        self.print(&outcome.line());
    }

    fn print(&self, line: &str) {
        match lock(&self.step).take() {
            Some(step) => step.done(line),
            None => println!("{line}"),
        }
    }

    fn clear(&self) {
        if let Some(step) = lock(&self.step).take() {
            step.clear();
        }
    }
}
