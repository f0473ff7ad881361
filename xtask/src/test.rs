//! `cargo xtask test`: every test of the workspace, then a look at what they left behind.
//!
//! With arguments cargo runs what they choose, and what it says is seen at once. Without, it builds,
//! and [`lanes`] runs the programs.

mod lanes;

use crate::{
    build,
    earlier::Earlier,
    residue, root, setup, ui,
    workspace::{Rustc, cargo_with_ebpf, run as show},
};
use anyhow::{Context as _, Result, bail};
use lanes::Call;
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

/// Tells tests where the programs of an earlier state are.
const EARLIER_PROGRAMS: &str = "SINABRO_EARLIER_DIR";

/// Tests of the lab some of which need the programs of an earlier state.
const NEED_EARLIER: [&str; 3] = ["upgrade", "layouts", "masquerade"];

/// Test programs that wait for agents nearly all of their time, for example for a peer to count as
/// silent: run as many of their tests at once as there are.
const MOSTLY_WAIT: [&str; 2] = ["peers", "troubles"];

/// Others that wait for half of their time and more, and whose traffic may stand still meanwhile: they run beside those that
/// take processors, too.
const WAIT_OFTEN: [&str; 5] = [
    "crash",
    "fail_points",
    "flaws",
    "masquerade_settings",
    "node_sockets",
];

#[derive(clap::Args)]
pub struct Options {
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
    let earlier = Earlier::released()?;
    let needs_earlier = runs(&NEED_EARLIER, &options.arguments);
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
        if needs_earlier {
            command.env(EARLIER_PROGRAMS, earlier.programs());
        }
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
        true => whole(cargo(), cargo(), &earlier),
        false => {
            if needs_earlier {
                ensure(&earlier);
            }
            show(&mut cargo()).context("tests failed")
        }
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
fn whole(mut build: Command, mut cargo: Command, earlier: &Earlier) -> Result<()> {
    show(build.arg("--no-run")).context("cannot build the tests")?;
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
    lanes::run(calls, &NEED_EARLIER, &|| ensure(earlier), &start).context("tests failed")
}

/// Builds the earlier programs. Without git's history there are none, and only the tests that need
/// them fail.
fn ensure(earlier: &Earlier) {
    if let Err(error) = earlier.ensure() {
        ui::error(&format!("no upgrade can be tested: {error:#}"));
    }
}

/// If cargo calls this program to run a test program: runs it, or writes down how.
pub fn runner() -> Option<ExitCode> {
    env::var_os(RUNNER)?;
    let mut arguments = env::args_os().skip(1);
    let program = PathBuf::from(arguments.next()?);
    // Tests in documentation are somewhere else, and gone when cargo has ended.
    let is_built = program.parent().and_then(Path::file_name) == Some(OsStr::new("deps"));
    if let Some(calls) = env::var_os(CALLS).filter(|_| is_built) {
        let written = Call::of(&program, arguments).and_then(|call| call.write(Path::new(&calls)));
        return Some(match written {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                ui::error(&format!(
                    "cannot write down {}: {error:#}",
                    program.display()
                ));
                ExitCode::FAILURE
            }
        });
    }
    Some(match start(&program, &[]).args(arguments).status() {
        Ok(status) => match status.code() {
            Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(101)),
            None => {
                ui::error(&format!("{}: {status}", program.display()));
                ExitCode::from(101)
            }
        },
        Err(error) => {
            ui::error(&format!("cannot start {}: {error}", program.display()));
            ExitCode::FAILURE
        }
    })
}

/// What starts a test program, as root and with as many of its tests at once as suits it.
fn start(program: &Path, environment: &[(OsString, OsString)]) -> Command {
    let mut command = match root::is_root() {
        true => Command::new(program),
        false => {
            let mut sudo = Command::new("sudo");
            sudo.arg("--preserve-env").arg(program);
            sudo
        }
    };
    // Tests start programs that cargo has built, this one among them.
    let pairs = environment.iter().map(|(name, value)| (name, value));
    command.envs(pairs).env_remove(RUNNER).env_remove(CALLS);
    if mostly_waits(program) && env::var_os("RUST_TEST_THREADS").is_none() {
        command.env("RUST_TEST_THREADS", "8");
    }
    command
}

fn mostly_waits(program: &Path) -> bool {
    lanes::target(program).is_some_and(|name| MOSTLY_WAIT.contains(&name))
}

fn waits(program: &Path) -> bool {
    let often = lanes::target(program).is_some_and(|name| WAIT_OFTEN.contains(&name));
    often || mostly_waits(program)
}

/// Whether the tests that cargo is asked for may be these of the lab, which need programs of another
/// state.
fn runs(tests: &[&str], arguments: &[String]) -> bool {
    let mut arguments = arguments.iter().map(String::as_str).peekable();
    // Of several packages, and of several targets, one is enough.
    let (mut package, mut target) = (None, None);
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (argument, arguments.peek().copied()),
        };
        match name {
            "-p" | "--package" => {
                package = Some(value == Some("sinabro-lab") || package == Some(true));
            }
            "--test" => {
                let is = value.is_some_and(|value| tests.contains(&value));
                target = Some(is || target == Some(true));
            }
            "--lib" | "--bins" | "--bin" | "--doc" => target = target.or(Some(false)),
            _ => {}
        }
    }
    package.unwrap_or(true) && target.unwrap_or(true)
}

#[cfg(test)]
mod tests {
    #[test]
    fn more_tests_at_once_are_for_programs_that_wait() {
        let waits = |path| super::mostly_waits(std::path::Path::new(path));
        assert!(waits("target/debug/deps/peers-1c0ffee"));
        assert!(!waits("target/debug/deps/streams-1c0ffee"));
        assert!(!waits("target/debug/deps/peers"));
        let tests = crate::workspace::root().join("lab/tests");
        for name in super::MOSTLY_WAIT {
            let file = tests.join(name).with_extension("rs");
            assert!(file.is_file(), "there is no {}", file.display());
        }
    }

    #[test]
    fn only_tests_of_upgrades_have_an_earlier_state_built() {
        let upgrades = |text: &str| {
            let words = text.split_whitespace().map(str::to_owned);
            super::runs(&["upgrade"], &words.collect::<Vec<_>>())
        };
        for text in [
            "",
            "--release",
            "-p sinabro-lab",
            "--package=sinabro-lab",
            "-p sinabro-lab -p xtask",
            "--test upgrade",
            "--test upgrade --test=overlay",
            "--test overlay --test upgrade --lib",
        ] {
            assert!(upgrades(text), "{text}");
        }
        for text in [
            "-p sinabro-cni",
            "--package=xtask upgrade",
            "-p sinabro-lab --test overlay",
            "--test=crash",
            "-p sinabro-lab --lib",
        ] {
            assert!(!upgrades(text), "{text}");
        }
    }
}
