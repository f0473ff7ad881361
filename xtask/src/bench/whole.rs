//! All benches that fit into twenty minutes, as one report.
//!
//! Each is this program again with that bench's own options, so that it shows what it shows by itself,
//! and cleans up after itself. One that fails leaves the others their place in the report.

use super::{
    Programs,
    output::{Output, Ran, Report, Whole},
    page::page,
};
use crate::{cluster, interrupt, report, setup, ui, workspace};
use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};
use std::{
    env, fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::atomic::{AtomicI32, Ordering},
    time::Instant,
};

#[derive(Clone, clap::Args)]
#[group(id = "whole")]
pub struct Options {
    /// Shorter measurements: about half the time, and more noise
    #[arg(long)]
    short: bool,

    /// Only these benches
    #[arg(long, value_enum, value_delimiter = ',', value_name = "BENCH")]
    only: Vec<Bench>,

    #[command(flatten)]
    output: Output,

    /// Where the programs are, for the process that sudo starts: it builds nothing as root.
    #[arg(long, hide = true, value_name = "DIR")]
    programs: Option<PathBuf>,
}

#[derive(clap::Args)]
pub struct Page {
    /// The report
    json: PathBuf,

    /// The page
    html: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Bench {
    Cni,
    Tcp,
    Pod,
    Pods,
}

impl Bench {
    const ALL: [Self; 4] = [Self::Cni, Self::Tcp, Self::Pod, Self::Pods];

    fn name(self) -> &'static str {
        match self {
            Self::Cni => "cni",
            Self::Tcp => "tcp",
            Self::Pod => "pod",
            Self::Pods => "pods",
        }
    }

    /// What it is measured with here.
    fn arguments(self, short: bool) -> &'static [&'static str] {
        match (self, short) {
            (Self::Cni, false) => &["--rounds", "5"],
            (Self::Cni, true) => &["--rounds", "5", "--pods", "20"],
            (Self::Tcp, _) => &["--short"],
            (Self::Pod, false) => &[],
            (Self::Pod, true) => &["--short"],
            (Self::Pods, false) => &["--pods", "30"],
            (Self::Pods, true) => &["--pods", "10"],
        }
    }

    /// About how long that takes, on two cores.
    fn seconds(self, short: bool) -> u64 {
        match (self, short) {
            (Self::Cni, false) => 60,
            (Self::Cni, true) => 30,
            (Self::Tcp, _) => 150,
            (Self::Pod, false) => 660,
            (Self::Pod, true) => 260,
            (Self::Pods, false) => 240,
            (Self::Pods, true) => 90,
        }
    }

    fn needs(self) -> &'static [setup::Need] {
        match self {
            Self::Cni => setup::BENCH,
            Self::Tcp => setup::BENCH_TCP,
            Self::Pod => setup::BENCH_POD,
            Self::Pods => setup::CLUSTER,
        }
    }
}

impl Options {
    /// The same options for the same program under sudo.
    fn arguments(&self, output: &Output, programs: &Programs) -> Result<Vec<String>> {
        let mut arguments = vec!["bench".to_owned()];
        arguments.extend(programs.arguments()?);
        arguments.extend(self.short.then(|| "--short".into()));
        if !self.only.is_empty() {
            let names: Vec<&str> = self.only.iter().map(|bench| bench.name()).collect();
            arguments.extend(["--only".into(), names.join(",")]);
        }
        arguments.extend(output.arguments()?);
        Ok(arguments)
    }

    fn benches(&self) -> Vec<Bench> {
        let wanted = |bench: &Bench| self.only.is_empty() || self.only.contains(bench);
        Bench::ALL.into_iter().filter(wanted).collect()
    }

    /// Where the report goes.
    fn output(&self) -> Output {
        let default = |extension| {
            workspace::target()
                .join("bench/report")
                .with_extension(extension)
        };
        let or = |path: &Option<PathBuf>, extension| path.clone().or(Some(default(extension)));
        Output {
            json: or(&self.output.json, "json"),
            html: or(&self.output.html, "html"),
        }
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let output = options.output();
    for path in [&output.json, &output.html].into_iter().flatten() {
        let directory = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let mut programs = Programs::alone(options.programs.clone());
    let benches = options.benches();
    let needs = benches.iter().flat_map(|bench| bench.needs());
    programs.ensure(&needs.copied().collect::<Vec<_>>())?;
    // A cluster's programs are built once; its machines are made when it is their turn.
    let cluster = cluster::Options::default();
    let clusters = benches.contains(&Bench::Pods).then_some(&cluster);
    cluster::as_root_with(clusters, &options.arguments(&output, &programs)?)?;
    interrupt::on_interrupt(end_running)?;
    measure(options, &benches, &output, &programs.present())
}

/// Draws a page from a report's JSON file.
pub fn draw(options: &Page) -> Result<ExitCode> {
    report::write_text(&options.html, &page(&Whole::read(&options.json)?))?;
    Ok(ExitCode::SUCCESS)
}

fn measure(
    options: &Options,
    benches: &[Bench],
    output: &Output,
    programs: &Path,
) -> Result<ExitCode> {
    let mut whole = Whole::now()?;
    for (number, bench) in benches.iter().enumerate() {
        let left: u64 = benches[number..]
            .iter()
            .map(|bench| bench.seconds(options.short))
            .sum();
        let heading = format!(
            "{} of {}: bench {}; about {} min left",
            number + 1,
            benches.len(),
            bench.name(),
            left.div_ceil(60)
        );
        println!("\n{}", ui::bold(&heading));
        let json = own_json(output, *bench);
        // What an earlier run wrote is not this one's.
        let _ = fs::remove_file(&json);
        let started = Instant::now();
        let ended = one(*bench, options.short, programs, &json);
        let report = ended.and_then(|()| Ok(serde_json::from_slice::<Report>(&fs::read(&json)?)?));
        let (rows, curves, failure) = match report {
            Ok(report) => (report.rows, report.curves, None),
            Err(failure) => (Vec::new(), Vec::new(), Some(format!("{failure:#}"))),
        };
        if let Some(failure) = &failure {
            ui::error(&format!("bench {}: {failure}", bench.name()));
        }
        let given = bench.arguments(options.short).join(" ");
        let command = format!("cargo xtask bench {} {given}", bench.name());
        let ran = Ran {
            bench: bench.name().into(),
            command: command.trim_end().into(),
            seconds: started.elapsed().as_secs(),
            failure,
        };
        whole.add(ran, &rows, &curves);
        // What comes later may take long, or fail.
        output.whole(&whole)?;
    }
    println!();
    output.announce();
    Ok(
        match whole.benches.iter().any(|ran| ran.failure.is_some()) {
            false => ExitCode::SUCCESS,
            true => ExitCode::FAILURE,
        },
    )
}

/// Where a bench writes what it has to say by itself: beside the report.
fn own_json(output: &Output, bench: Bench) -> PathBuf {
    let report = output.json.clone().unwrap_or_default();
    report.with_extension(format!("{}.json", bench.name()))
}

/// The bench that runs; 0: none.
static RUNNING: AtomicI32 = AtomicI32::new(0);

/// Runs one to its end.
fn one(bench: Bench, short: bool, programs: &Path, json: &Path) -> Result<()> {
    let mut command = Command::new(env::current_exe()?);
    command.args(["bench", bench.name()]);
    command.args(bench.arguments(short));
    if bench != Bench::Pods {
        command.arg("--programs").arg(programs);
    }
    command.arg("--json").arg(json);
    run_to_its_end(command)
}

fn run_to_its_end(mut command: Command) -> Result<()> {
    let parent = nix::unistd::getpid();
    // SAFETY: only async-signal-safe system calls.
    unsafe {
        command.pre_exec(move || {
            nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
            // The parent may have died before the line above.
            match nix::unistd::getppid() == parent {
                true => Ok(()),
                false => Err(Errno::ESRCH.into()),
            }
        });
    }
    let mut child = command.spawn().context("cannot start it")?;
    RUNNING.store(child.id() as i32, Ordering::SeqCst);
    let status = child.wait();
    RUNNING.store(0, Ordering::SeqCst);
    let status = status?;
    match status.success() {
        true => Ok(()),
        false => bail!("it ended with {status}"),
    }
}

/// Has the bench that runs end by itself, and waits for it: it knows what to remove.
fn end_running() {
    let pid = RUNNING.load(Ordering::SeqCst);
    if pid == 0 {
        return;
    }
    let pid = Pid::from_raw(pid);
    // On a terminal Ctrl-C came to it, too; it takes the first signal only.
    let _ = kill(pid, Signal::SIGTERM);
    let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    while waitid(Id::Pid(pid), ended) == Err(Errno::EINTR) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_benches_together_take_less_than_twenty_minutes() {
        let all = |short| {
            Bench::ALL
                .map(|bench| bench.seconds(short))
                .iter()
                .sum::<u64>()
        };
        assert!(all(false) < 20 * 60 && all(true) < all(false));
    }

    #[test]
    fn what_a_bench_is_given_is_what_it_takes() {
        use clap::Parser as _;
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            options: super::super::Options,
        }
        for bench in Bench::ALL {
            for short in [false, true] {
                let own = ["bench", bench.name()].into_iter();
                let arguments = own.chain(bench.arguments(short).iter().copied());
                let parsed = Cli::try_parse_from(arguments.chain(["--json", "file"]));
                assert!(
                    parsed.is_ok_and(|cli| cli.options.what.is_some()),
                    "{bench:?}"
                );
            }
        }
    }

    #[test]
    fn a_bench_that_fails_is_an_error_and_one_that_runs_is_waited_for() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        assert!(run_to_its_end(shell("exit 0")).is_ok());
        let error = run_to_its_end(shell("exit 3")).unwrap_err().to_string();
        assert!(error.contains('3'), "{error}");
        // Asked to end, it ends in its own time, and is waited for until it has.
        let directory = tempfile::tempdir().unwrap();
        let (ready, cleaned) = (
            directory.path().join("ready"),
            directory.path().join("cleaned"),
        );
        let script = format!(
            "trap 'sleep 0.2; echo > {}; exit 1' TERM; echo > {}; while :; do sleep 0.01; done",
            cleaned.display(),
            ready.display()
        );
        std::thread::scope(|scope| {
            let running = scope.spawn(|| run_to_its_end(shell(&script)));
            sinabro_lab::wait::eventually("the bench to run", || {
                ready.exists() && RUNNING.load(Ordering::SeqCst) != 0
            });
            end_running();
            assert!(running.join().unwrap().is_err());
            assert!(cleaned.exists());
        });
        // None runs: nothing to wait for.
        end_running();
    }
}
