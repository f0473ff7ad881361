//! `cargo xtask test`: every test of the workspace, then a look at what they left behind.
//!
//! With arguments cargo runs what they choose, and what it says is seen at once. Without, it builds,
//! and [`lanes`] runs the programs, each test as its path says ([`lane`]).

mod call;
mod lane;
mod lanes;

use crate::{
    build,
    earlier::Earlier,
    residue, root, setup, ui,
    workspace::{Rustc, cargo_with_ebpf, run as show},
};
use anyhow::{Context as _, Result, bail};
use call::Call;
use lanes::Took;
use sinabro_lab::{residue::left, tools};
use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

/// Tells this program that cargo calls it to run a test program, the first of its arguments.
const RUNNER: &str = "SINABRO_TEST_RUNNER";
/// Names a directory where the runner writes down what it is called for, and does not run it.
const CALLS: &str = "SINABRO_TEST_CALLS";
/// Tells libtest how many tests run at once.
const THREADS: &str = "RUST_TEST_THREADS";

/// Tells tests where the programs of the released state are.
const RELEASED_PROGRAMS: &str = "SINABRO_EARLIER_DIR";

#[derive(clap::Args)]
pub struct Options {
    /// Run the tests of each night: those with `nightly` in their paths, which a run of every change
    /// leaves out. What arguments choose runs with and without this
    #[arg(long)]
    nightly: bool,

    /// Arguments for `cargo test`, for example `--package sinabro-lab --test crash`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    arguments: Vec<String>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure(setup::TEST)?;
    if !root::is_root() {
        root::require_sudo("a part of the tests")?;
    }
    let mut arguments = options.arguments.iter();
    let of_packages =
        arguments.any(|argument| argument == "-p" || argument.starts_with("--package"));
    if of_packages {
        // Tests of several nodes start the programs as a user would.
        build::debug()?;
    }

    let own = env::current_exe().context("cannot find this program")?;
    // A list, as a path may have spaces.
    let runner = format!("target.{}.runner=[{own:?}]", Rustc::find()?.host);
    let cargo = || {
        let mut command = cargo_with_ebpf();
        command.args(["--config", &runner, "test"]).env(RUNNER, "1");
        if let Some(dir) = setup::reference_plugins() {
            command.env("SINABRO_REFERENCE_PLUGINS", dir);
        }
        if let Some(dir) = setup::tools() {
            command.env(tools::VARIABLE, dir);
        }
        if !of_packages {
            // Makes the programs, too: their packages have tests that start them. A build of them alone
            // would choose other features of what they use, and compile it all twice.
            command.args(["--workspace", "--exclude", "sinabro-ebpf"]);
        }
        command.args(&options.arguments);
        command
    };
    let before = residue::look()?;
    let passed = match options.arguments.is_empty() {
        true => whole(cargo(), cargo(), options.nightly),
        false => show(&mut cargo()).context("tests failed"),
    };

    let left = left(&before, residue::look)?;
    for item in &left {
        ui::error(&format!("left behind: {item}"));
    }
    passed?;
    if left.is_empty() {
        println!("nothing left behind: {}", residue::kinds());
        Ok(ExitCode::SUCCESS)
    } else {
        Ok(ExitCode::FAILURE)
    }
}

/// Has cargo build the tests, run those in documentation, and say which programs it would run.
fn whole(mut build: Command, mut cargo: Command, nightly: bool) -> Result<()> {
    let build = || show(build.arg("--no-run")).context("cannot build the tests");
    let (time, built) = Took::measured("build of the tests", build);
    built?;
    let calls = tempfile::tempdir().context("cannot make a directory for cargo's calls")?;
    cargo.env(CALLS, calls.path()).stdin(Stdio::null());
    // Where it says of each program that it runs it.
    let listed = cargo.stdout(Stdio::inherit()).output();
    let listed = listed.context("cannot run cargo")?;
    if !listed.status.success() {
        eprint!("{}", String::from_utf8_lossy(&listed.stderr));
        bail!("tests failed: cargo ended with {}", listed.status);
    }
    let calls = Call::read(calls.path()).context("cannot read which programs cargo would run")?;
    let released = Earlier::released()?;
    // Most of them do not use it, and the lanes take it from these.
    let with_released = |mut call: Call| {
        let variable = (RELEASED_PROGRAMS.into(), released.programs().into());
        call.environment.push(variable);
        call
    };
    let calls = calls.into_iter().map(with_released).collect();
    lanes::run(calls, nightly, vec![time], &|| ensure(&released), &start).context("tests failed")
}

/// Builds the released programs. Without git's history there are none, and only the tests that need
/// them fail.
fn ensure(released: &Earlier) {
    if let Err(error) = released.ensure() {
        ui::error(&format!("no upgrade can be tested: {error:#}"));
    }
}

/// If cargo calls this program to run a test program: runs it, or writes down how.
pub fn runner() -> Option<ExitCode> {
    env::var_os(RUNNER)?;
    let mut arguments = env::args_os().skip(1);
    let program = PathBuf::from(arguments.next()?);
    let status = run_for_cargo(&program, arguments).unwrap_or_else(|error| {
        ui::error(&format!("{}: {error:#}", program.display()));
        ExitCode::FAILURE
    });
    Some(status)
}

fn run_for_cargo(program: &Path, arguments: impl Iterator<Item = OsString>) -> Result<ExitCode> {
    let mut call = Call::of(program, arguments)?;
    // Tests in documentation are somewhere else, and gone when cargo has ended.
    let is_built = program.parent().and_then(Path::file_name) == Some(OsStr::new("deps"));
    if is_built {
        if let Some(calls) = env::var_os(CALLS) {
            call.write(Path::new(&calls))
                .context("cannot write down the call")?;
            return Ok(ExitCode::SUCCESS);
        }
        // With arguments of libtest's that have it list them, too, there are none to run.
        let tests = call.tests().unwrap_or_default();
        call.threads = lane::at_once(tests.iter().map(String::as_str));
        if tests.iter().any(|test| lane::needs_released(test)) {
            let released = Earlier::released()?;
            ensure(&released);
            let variable = (RELEASED_PROGRAMS.into(), released.programs().into());
            call.environment.push(variable);
        }
    }
    let status = start(&call).status().context("cannot start it")?;
    match status.code() {
        Some(code) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(101))),
        None => bail!("{status}"),
    }
}

/// What starts a test program, as root and with as many of its tests at once as suits them.
fn start(call: &Call) -> Command {
    let mut command = match root::is_root() {
        true => Command::new(&call.program),
        false => {
            let mut sudo = Command::new("sudo");
            sudo.arg("--preserve-env").arg(&call.program);
            sudo
        }
    };
    command.args(&call.arguments).current_dir(&call.dir);
    // Tests start programs that cargo has built, this one among them.
    let pairs = call.environment.iter().map(|(name, value)| (name, value));
    command.envs(pairs).env_remove(RUNNER).env_remove(CALLS);
    let threads = call.threads.filter(|_| env::var_os(THREADS).is_none());
    if let Some(threads) = threads {
        command.env(THREADS, threads.to_string());
    }
    command
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: super::Options,
    }

    #[test]
    fn tests_of_each_night_are_asked_for_before_cargos_arguments() {
        for (text, nightly, arguments) in [
            ("test", false, &[][..]),
            ("test --nightly", true, &[]),
            ("test --test alone a", false, &["--test", "alone", "a"]),
            ("test --nightly -p b", true, &["-p", "b"]),
        ] {
            let options = Command::parse_from(text.split(' ')).options;
            assert_eq!(options.nightly, nightly, "{text}");
            assert_eq!(options.arguments, arguments, "{text}");
        }
    }
}
