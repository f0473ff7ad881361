//! `cargo xtask test`: every test of the workspace, then a look at what they left behind.

use crate::{
    build,
    earlier::Earlier,
    residue, root, setup, ui,
    workspace::{Rustc, cargo_with_ebpf, run as show},
};
use anyhow::{Context as _, Result};
use sinabro_lab::residue::left;
use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Tells this program that cargo calls it to run a test program, the first of its arguments.
const RUNNER: &str = "SINABRO_TEST_RUNNER";

/// Test programs that wait for agents nearly all of their time, for example for a peer to count as
/// silent: run as many of their tests at once as there are.
const MOSTLY_WAIT: [&str; 2] = ["peers", "troubles"];

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
    let earlier = match runs(&["upgrade", "layouts", "masquerade"], &options.arguments) {
        true => earlier()?,
        false => None,
    };
    let next = runs(&["layouts"], &options.arguments).then(build::next);

    let mut command = cargo_with_ebpf();
    let own = env::current_exe().context("cannot find this program")?;
    // A list, as a path may have spaces.
    let runner = format!("target.{}.runner=[{own:?}]", Rustc::find()?.host);
    command.args(["--config", &runner, "test"]);
    if let Some(dir) = earlier {
        command.env("SINABRO_EARLIER_DIR", dir);
    }
    if let Some(dir) = setup::reference_plugins() {
        command.env("SINABRO_REFERENCE_PLUGINS", dir);
    }
    if let Some(dir) = next.transpose()? {
        command.env("SINABRO_NEXT_DIR", dir);
    }
    let mut arguments = options.arguments.iter();
    match arguments.any(|argument| argument == "-p" || argument.starts_with("--package")) {
        // Tests of several nodes start the programs as a user would.
        true => build::debug()?,
        // Makes the programs, too: their packages have tests that start them. A build of them alone
        // would choose other features of what they use, and compile it all twice.
        false => {
            command.args(["--workspace", "--exclude", "sinabro-ebpf"]);
        }
    }
    let before = residue::look()?;
    command.args(&options.arguments);
    command.env(RUNNER, "1");
    let passed = show(&mut command).context("tests failed");

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

/// If cargo calls this program to run a test program: runs it as root, with as many of its tests at
/// once as suits it.
pub fn runner() -> Option<ExitCode> {
    env::var_os(RUNNER)?;
    let mut arguments = env::args_os().skip(1);
    let program = PathBuf::from(arguments.next()?);
    let mut command = match root::is_root() {
        true => Command::new(&program),
        false => {
            let mut sudo = Command::new("sudo");
            sudo.arg("--preserve-env").arg(&program);
            sudo
        }
    };
    // Tests start programs that cargo has built, this one among them.
    command.args(arguments).env_remove(RUNNER);
    if mostly_waits(&program) && env::var_os("RUST_TEST_THREADS").is_none() {
        command.env("RUST_TEST_THREADS", "8");
    }
    Some(match command.status() {
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

/// cargo calls a test program by its target's name and a hash.
fn mostly_waits(program: &Path) -> bool {
    let name = program.file_name().and_then(OsStr::to_str);
    let name = name.and_then(|name| Some(name.rsplit_once('-')?.0));
    name.is_some_and(|name| MOSTLY_WAIT.contains(&name))
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

/// Where the earlier programs are. Without git's history there are none, and only the tests that
/// need them fail.
fn earlier() -> Result<Option<PathBuf>> {
    let earlier = Earlier::released()?;
    match earlier.ensure() {
        Ok(()) => Ok(Some(earlier.programs())),
        Err(error) => {
            ui::error(&format!("no upgrade can be tested: {error:#}"));
            Ok(None)
        }
    }
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
