//! `cargo xtask fuzz`: libFuzzer over every parser that takes bytes from outside, from the corpus
//! in fuzz/corpus on.
//!
//! The engine is built from its crate by a C++ compiler; the coverage that leads it is put in by
//! rustc's own LLVM. Both work with the stable toolchain of the project. Only the workspace's own
//! crates are instrumented, by a wrapper around rustc ([`rustc_wrapper`]), so what they depend on
//! is shared with all other builds.

use crate::{
    setup, ui,
    workspace::{cargo_with_ebpf, root, run as show, target},
};
use anyhow::{Context as _, Result, bail, ensure};
use std::{
    env,
    ffi::OsString,
    fs,
    num::NonZero,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::Mutex,
    thread,
};

/// Tells this program that it is called in the place of rustc.
const WRAPPER: &str = "SINABRO_FUZZ_RUSTC";

/// What libFuzzer wants (LLVM, SanitizerCoverage), and optimisation, with the checks kept that
/// find something. A comparison of texts has to stay a call: the engine sees what an input was
/// compared with there, and nothing of it in the loads that LLVM makes of short ones (Clang has
/// -fno-builtin-memcmp in its -fsanitize=fuzzer for that).
const INSTRUMENTATION: [&str; 9] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-max-loads-per-memcmp=0",
    "-Copt-level=1",
    "-Cdebug-assertions=on",
    "-Coverflow-checks=on",
];

/// What every run of the engine is given.
const ENGINE_OPTIONS: [&str; 4] = [
    "-timeout=10",
    "-rss_limit_mb=2048",
    "-max_len=4096",
    "-print_final_stats=1",
];

/// Within so many inputs a planted bug is found: three times what it took in the slowest run that was seen.
const PLANTED_INPUTS: &str = "-runs=4000000";

/// After each input the engine goes through the counters of all code there is: without optimisation
/// that is nearly all it does.
const ENGINE: &str = "profile.dev.package.libfuzzer-sys.opt-level=2";

#[derive(clap::Args)]
pub struct Options {
    /// How long each target runs
    #[arg(long, value_name = "MINUTES", default_value_t = 0.5)]
    minutes: f64,
    /// Only this target, a directory of fuzz/corpus; can be given more than once
    #[arg(long = "target", value_name = "TARGET")]
    targets: Vec<String>,
    /// Only this input, for example one that was found; needs one --target
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Whether the engine finds the bug that each target has planted in it for that; ends when it
    /// does, or after so many inputs that it should have
    #[arg(long, conflicts_with_all = ["input", "minutes"])]
    planted: bool,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let all = targets()?;
    if let Some(unknown) = options.targets.iter().find(|name| !all.contains(name)) {
        bail!("there is no target {unknown}, there are {}", all.join(", "));
    }
    let chosen = match options.targets.is_empty() {
        true => all,
        false => options.targets.clone(),
    };
    ensure!(
        options.minutes.is_finite() && options.minutes > 0.0,
        "--minutes must be more than 0"
    );
    let fuzz = Fuzz {
        program: build()?,
        seconds: (options.minutes * 60.0).ceil() as u64,
        planted: options.planted,
    };
    if let Some(input) = &options.input {
        let [name] = chosen.as_slice() else {
            bail!("--input needs one --target");
        };
        let mut command = fuzz.command(name)?;
        show(command.arg(input)).with_context(|| format!("{} breaks {name}", input.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    fuzz.all(&chosen)
}

struct Fuzz {
    program: PathBuf,
    seconds: u64,
    planted: bool,
}

/// How a target's run ended.
struct Outcome {
    name: String,
    /// The last lines of libFuzzer, from which it is seen what was found.
    said: String,
    passed: bool,
}

impl Fuzz {
    /// As many at a time as there are processors.
    fn all(&self, names: &[String]) -> Result<ExitCode> {
        let waiting = Mutex::new(names.iter());
        let outcomes = Mutex::new(Vec::new());
        let workers = thread::available_parallelism().map_or(1, NonZero::get);
        thread::scope(|scope| {
            for _ in 0..workers.min(names.len()) {
                scope.spawn(|| {
                    loop {
                        let next = waiting.lock().ok().and_then(|mut names| names.next());
                        let Some(name) = next else { return };
                        let outcome = self.one(name);
                        if let Ok(mut outcomes) = outcomes.lock() {
                            outcomes.push(outcome);
                        }
                    }
                });
            }
        });
        let outcomes = outcomes.into_inner().unwrap_or_default();
        let mut failed = outcomes.len() != names.len();
        let mut rows = vec![vec![
            "target".to_string(),
            "inputs run".into(),
            "a second".into(),
            "kept".into(),
            "".into(),
        ]];
        for outcome in outcomes {
            let outcome = outcome?;
            // `-print_final_stats=1` ends in lines such as `stat::number_of_executed_units: 5`.
            let statistic = |name: &str| {
                let mut lines = outcome.said.lines();
                let value = lines.find_map(|line| line.strip_prefix(&format!("stat::{name}:")));
                value.map_or_else(|| "?".to_string(), |value| value.trim().to_string())
            };
            let end = match (self.planted, outcome.passed) {
                (false, true) => "nothing found",
                (true, true) => "the planted bug was found",
                (false, false) => "BROKEN",
                (true, false) => "the planted bug was NOT found",
            };
            rows.push(vec![
                outcome.name.clone(),
                statistic("number_of_executed_units"),
                statistic("average_exec_per_sec"),
                statistic("new_units_added"),
                end.into(),
            ]);
            if !outcome.passed {
                failed = true;
                eprintln!("{}", outcome.said);
                ui::error(&format!("{}: {end}", outcome.name));
            }
        }
        ui::table(&rows);
        Ok(match failed {
            true => ExitCode::FAILURE,
            false => ExitCode::SUCCESS,
        })
    }

    fn one(&self, name: &str) -> Result<Outcome> {
        // What is new goes to the first directory. A planted bug is found from the corpus in the
        // tree alone.
        let found = match self.planted {
            true => work(name).join("planted"),
            false => work(name).join("corpus"),
        };
        if self.planted {
            let _ = fs::remove_dir_all(&found);
        }
        make(&found)?;
        let limit = match self.planted {
            true => PLANTED_INPUTS.to_owned(),
            false => format!("-max_total_time={}", self.seconds),
        };
        let output = self
            .command(name)?
            .args([&found, &corpus().join(name)])
            .arg(limit)
            .args(ENGINE_OPTIONS)
            // Whether an input is new that goes through some loop more often. Of JSON hardly anything
            // else would be kept than ways to break it; a packet's headers are such a loop.
            .arg(format!("-use_counters={}", u8::from(name == "packet")))
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let planted = said.contains("the planted bug");
        let ended = output.status.success();
        ensure!(
            ended || said.contains("SUMMARY: libFuzzer"),
            "the engine of {name} failed ({}): {}",
            output.status,
            last_lines(&said)
        );
        Ok(Outcome {
            name: name.to_owned(),
            passed: match self.planted {
                true => planted,
                false => ended,
            },
            said: last_lines(&said),
        })
    }

    /// The engine over a target. What breaks it is left below the build directory, however it ends.
    fn command(&self, name: &str) -> Result<Command> {
        let artifacts = work(name).join(match self.planted {
            true => "planted-found",
            false => "found",
        });
        make(&artifacts)?;
        let mut command = Command::new(&self.program);
        command
            .current_dir(root())
            .env("SINABRO_FUZZ_TARGET", name)
            .env_remove("SINABRO_FUZZ_PLANTED")
            .arg(format!("-artifact_prefix={}/", artifacts.display()));
        if self.planted {
            command.env("SINABRO_FUZZ_PLANTED", "1");
        }
        Ok(command)
    }
}

/// What runs of a target leave.
fn work(name: &str) -> PathBuf {
    target().join("fuzz").join(name)
}

fn make(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))
}

fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

fn corpus() -> PathBuf {
    root().join("fuzz/corpus")
}

/// Each has a directory; a test of the package sees to that.
fn targets() -> Result<Vec<String>> {
    let directory = corpus();
    let entries = fs::read_dir(&directory);
    let entries = entries.with_context(|| format!("cannot list {}", directory.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn build() -> Result<PathBuf> {
    setup::ensure(setup::FUZZ)?;
    let own = env::current_exe().context("cannot find this program")?;
    show(
        cargo_with_ebpf()
            // Of the workspace, as its tests are: of this package alone cargo would choose other features of what it uses, and compile
            // that once more.
            .args(["build", "--workspace", "--exclude", "sinabro-ebpf"])
            .args(["--features", "sinabro-fuzz/libfuzzer", "--bin", "fuzz"])
            .args(["--config", ENGINE])
            .env("RUSTC_WORKSPACE_WRAPPER", own)
            .env(WRAPPER, "1"),
    )
    .context("cannot build the fuzz targets")?;
    Ok(target().join("debug/fuzz"))
}

/// If cargo calls this program in the place of rustc: does what rustc would, with instrumentation
/// where it is wanted. The first argument is rustc's path.
pub fn rustc_wrapper() -> Option<ExitCode> {
    env::var_os(WRAPPER)?;
    let mut arguments = env::args_os().skip(1);
    let rustc = arguments.next()?;
    let arguments: Vec<OsString> = arguments.collect();
    let mut command = Command::new(&rustc);
    command.args(&arguments);
    if is_instrumented(&arguments) {
        command.args(INSTRUMENTATION);
    }
    Some(match command.status() {
        Ok(status) => ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)),
        Err(error) => {
            ui::error(&format!(
                "cannot start {}: {error}",
                Path::new(&rustc).display()
            ));
            ExitCode::FAILURE
        }
    })
}

/// Libraries, and the program that has the engine: without it no program can be linked that has
/// code with instrumentation. So no build script either.
fn is_instrumented(arguments: &[OsString]) -> bool {
    let after = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.to_str()
    };
    let library = matches!(after("--crate-type"), Some("lib" | "rlib"));
    library || after("--crate-name") == Some("fuzz")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_linked_with_the_engine_is_instrumented() {
        let asked = |text: &str| {
            let arguments: Vec<_> = text.split(' ').map(OsString::from).collect();
            is_instrumented(&arguments)
        };
        assert!(asked(
            "--crate-name sinabro_cni --edition=2024 cni/src/lib.rs --crate-type lib"
        ));
        assert!(asked("--crate-name fuzz fuzz/src/main.rs --crate-type bin"));
        assert!(!asked(
            "--crate-name build_script_build agent/build.rs --crate-type bin"
        ));
        assert!(!asked(
            "--crate-name sinabro_agent agent/src/main.rs --crate-type bin"
        ));
        assert!(!asked("- --crate-name ___ --print=file-names --crate-type"));
        assert!(!asked("-vV"));
    }
}
