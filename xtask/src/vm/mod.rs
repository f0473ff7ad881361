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
mod run;
mod steps;
mod tables;
mod times;

use crate::{arch::Arch, interrupt, report, root, setup, ui, workspace::target};
use anyhow::{Context as _, Result, bail, ensure};
use budget::Budget;
use environments::{SPECIAL, Special};
use kernels::{Image, KERNELS, Kernel};
use machine::Machine;
use modules::{Module, Modules};
use outcome::Outcome;
use programs::Programs;
use run::{Boot, Run};
use serde::Serialize;
use sinabro_guest::{Job, Step};
use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, time::Instant};
use steps::StepName;

/// What nodes and tests use. A kernel may have it built in.
const MODULES: &[&str] = &[
    "veth",
    "vxlan",
    "bridge",
    "sch_ingress",
    "cls_bpf",
    "nf_tables",
    "tun",
];
const OPTIONAL_MODULES: &[&str] = &["act_bpf", "tls", "inet_diag", "tcp_diag", "crc32c_generic"];

const NO_MORE: &[&str] = &[];

#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    action: Option<Action>,

    /// Only this kernel, as `list` names it; can be given more than once
    #[arg(long, value_name = "KERNEL")]
    only: Vec<String>,

    /// Only special machines with this in their name, for example `VLAN`
    #[arg(long, value_name = "TEXT")]
    special: Option<String>,

    /// Few special machines; and without --only, the oldest kernel, one in the middle, the newest
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
    let every = SPECIAL.iter().flat_map(|special| special.modules);
    let modules = modules_of(&image, &every.copied().collect::<Vec<_>>())?;
    let programs = Programs::build(options.programs.as_deref())?.with_busybox()?;
    let machine = Machine {
        image: &image,
        programs: &[&programs.finish()],
        modules: &modules,
        survivors: &BTreeMap::new(),
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

/// A kernel that machines are started with.
struct Kit {
    /// The series, or none for somebody's own.
    kernel: Option<&'static Kernel>,
    image: Image,
    /// With those that special machines need beside the others.
    modules: BTreeMap<&'static [&'static str], Vec<Module>>,
}

impl Kit {
    fn new(kernel: Option<&'static Kernel>, image: Image) -> Result<Self> {
        let step = ui::step(format!("unpacking modules of {}", image.release));
        let mut modules = BTreeMap::from([(NO_MORE, modules_of(&image, NO_MORE)?)]);
        for special in SPECIAL {
            let is_its = kernel.is_some_and(|kernel| special.kernels.contains(&kernel.name));
            if is_its && !modules.contains_key(special.modules) {
                modules.insert(special.modules, modules_of(&image, special.modules)?);
            }
        }
        step.clear();
        Ok(Self {
            kernel,
            image,
            modules,
        })
    }

    fn is(&self, name: &str) -> bool {
        self.kernel.is_some_and(|kernel| kernel.name == name)
    }
}

fn all(options: &Options) -> Result<ExitCode> {
    let started = Instant::now();
    let mut kits = Vec::new();
    for (kernel, image) in images(options)? {
        kits.push(Kit::new(kernel, image)?);
    }
    let wanted = machines(options, &kits);
    // Those that a machine has before the one that it is about.
    let mut others = Vec::new();
    for (kit, special) in &wanted {
        if let Some(name) = special.and_then(|special| special.before(kit.kernel))
            && !kits.iter().chain(&others).any(|kit| kit.is(name))
        {
            let kernel = Kernel::by_name(name)?;
            others.push(Kit::new(Some(kernel), kernel.image()?)?);
        }
    }
    let stock: Vec<&Kit> = kits.iter().chain(&others).collect();
    let runs = wanted
        .into_iter()
        .map(|(kit, special)| plan(options, kit, special, &stock));
    let runs: Vec<_> = runs.collect();
    let archives = programs::archives(options.programs.as_deref(), &runs)?;
    let mut outcomes = run::all(&runs, &archives);
    let order = |outcome: &Outcome| {
        KERNELS
            .iter()
            .position(|kernel| kernel.name == outcome.name)
    };
    outcomes.sort_by_key(|outcome| (!outcome.environment.is_empty(), order(outcome)));
    judge_budget(options, &mut outcomes)?;

    tables::print(&outcomes);
    times::print(&outcomes);
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

/// Those without anything special first: they take longest.
fn machines<'a>(options: &Options, kits: &'a [Kit]) -> Vec<(&'a Kit, Option<&'static Special>)> {
    let mut found: Vec<(&Kit, Option<&'static Special>)> =
        kits.iter().map(|kit| (kit, None)).collect();
    for special in SPECIAL {
        let of = kits
            .iter()
            .filter(|kit| special.kernels.iter().any(|name| kit.is(name)));
        if special.short || !options.short {
            found.extend(of.map(|kit| (kit, Some(special))));
        }
    }
    found.retain(|(_, special)| !steps(options, *special).is_empty() && named(options, *special));
    found
}

fn named(options: &Options, special: Option<&Special>) -> bool {
    let name = special.map_or("", |special| special.name);
    options
        .special
        .as_ref()
        .is_none_or(|text| name.contains(text))
}

/// What is wanted of such a machine.
fn steps(options: &Options, special: Option<&Special>) -> Vec<Step> {
    let names = special.map_or(StepName::PLAIN, |special| special.steps);
    let chosen = |name: &&StepName| options.steps.is_empty() || options.steps.contains(name);
    let chosen = names.iter().filter(chosen);
    chosen
        .flat_map(|name| name.boots(options.thorough))
        .collect()
}

/// What such a machine does.
fn plan<'a>(
    options: &Options,
    kit: &'a Kit,
    special: Option<&'static Special>,
    stock: &[&'a Kit],
) -> Run<'a> {
    let steps = steps(options, special);
    let more = special.map_or(NO_MORE, |special| special.modules);
    let boot = |kit: &'a Kit, steps: &[Step]| Boot {
        image: &kit.image,
        // A machine before this one is another kernel's, and needs no more than all do.
        modules: kit.modules.get(more).unwrap_or(&kit.modules[NO_MORE]),
        steps: steps.to_vec(),
    };
    let before = special.and_then(|special| special.before(kit.kernel));
    let before = before.and_then(|name| stock.iter().copied().find(|kit| kit.is(name)));
    let boots = match (before, steps.split_first()) {
        (Some(before), Some((first, rest))) => {
            let first = boot(before, std::slice::from_ref(first));
            let rest = rest.chunks(1).map(|step| boot(kit, step));
            [first].into_iter().chain(rest).collect()
        }
        _ => vec![boot(kit, &steps)],
    };
    Run {
        kernel: kit.kernel,
        image: &kit.image,
        special,
        boots,
    }
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

/// A kernel that has one of `more` built in has no such module.
fn modules_of(image: &Image, more: &[&str]) -> Result<Vec<Module>> {
    let optional = [OPTIONAL_MODULES, more].concat();
    let order = || Modules::list(&image.modules)?.load_order(MODULES, &optional);
    order().with_context(|| format!("modules of {}", image.release))
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
