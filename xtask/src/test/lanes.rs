//! A whole run's test programs: one after the other, and beside them those that wait for a good part of their
//! time. Tests of traffic are at their best with the machine for themselves.
//!
//! Cargo starts the runner for one program after the other. In a whole run that only writes down each
//! call, with the environment that cargo has made for it, and the programs are started from here. What a
//! program says is kept until it ends, so that what is printed is of one program at a time.

use super::{
    call::Call,
    lane::{self, Lane},
};
use crate::{ui, workspace};
use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use std::{
    env, fs,
    io::{self, Read as _, Seek as _, Write as _},
    process::{Command, ExitStatus},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Names process groups that stand still meanwhile, separated by spaces: builds that go on beside tests. Whatever their
/// priority, they hold locks of the kernel's now and then while others wait.
const PAUSE: &str = "SINABRO_TEST_PAUSE";

/// How many of the slowest programs are named at the end.
const SLOWEST: usize = 10;

/// How many of the lines in which a program tells of its failures are printed again at the end.
const FAILURE_LINES: usize = 120;

/// Makes the command that starts a program.
type Start<'a> = &'a (dyn Fn(&Call) -> Command + Sync);

/// All, by how they are run: the first two beside each other, and within each one after the other.
struct Order {
    waiting: Vec<Call>,
    working: Vec<Call>,
    alone: Vec<Call>,
    /// Whether any needs the programs of the released state.
    needs_released: bool,
}

/// Programs in the order in which they begin, each with its tests.
fn in_order(calls: &[(Call, Vec<String>)], nightly: bool) -> Order {
    let of = |lane| -> Vec<Call> {
        let parts = calls
            .iter()
            .filter_map(|(call, tests)| call.part(lane, tests));
        parts.collect()
    };
    let [mut waiting, mut working, alone] = match nightly {
        true => [Vec::new(), Vec::new(), of(Lane::Nightly)],
        false => [Lane::Waiting, Lane::Working, Lane::Alone].map(of),
    };
    // A test that needs them and has not the name fails on every machine, and not only where they are not built yet.
    for call in waiting.iter_mut().chain(&mut working) {
        call.environment
            .retain(|(name, _)| name != super::RELEASED_PROGRAMS);
    }
    let mut tests = calls.iter().flat_map(|(_, tests)| tests);
    Order {
        waiting,
        working,
        alone,
        needs_released: tests
            .any(|test| lane::needs_released(test) && (Lane::of(test) == Lane::Nightly) == nightly),
    }
}

struct Outcome {
    label: String,
    took: Duration,
    status: ExitStatus,
    /// What a failed one told of its failures.
    failures: String,
}

/// Runs all, or those of each night alone. The programs of the released state are made by `prepare`
/// when others need the machine less: tests that need them are among those that run alone.
///
/// `took` says what came before.
pub fn run(
    calls: Vec<Call>,
    nightly: bool,
    mut took: Vec<Took>,
    prepare: &(dyn Fn() + Sync),
    command: Start<'_>,
) -> Result<()> {
    let started = Instant::now();
    let listed = calls.into_iter().map(|call| {
        let tests = call.tests()?;
        Ok((call, tests))
    });
    let order = in_order(&listed.collect::<Result<Vec<_>>>()?, nightly);
    let outcomes = Mutex::new(Vec::new());
    let failure = Mutex::new(Ok(()));
    let stop = AtomicBool::new(false);
    let one = |call: &Call| match start(call, command) {
        Ok(outcome) => locked(&outcomes).push(outcome),
        Err(error) => {
            stop.store(true, Ordering::Relaxed);
            *locked(&failure) = Err(error).with_context(|| call.label());
        }
    };
    let lane = |calls: &[Call]| {
        for call in calls {
            if !stop.load(Ordering::Relaxed) {
                one(call);
            }
        }
    };
    let prepared = thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            lane(&order.waiting);
            // Not with the others standing still: it may wait for one of them.
            let needed = order.needs_released;
            needed.then(|| Took::measured("build of the released state", prepare).0)
        });
        lane(&order.working);
        waiting.join()
    });
    let prepared = prepared.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    took.extend(prepared);
    let paused = Paused::groups(&env::var(PAUSE).unwrap_or_default())?;
    lane(&order.alone);
    drop(paused);
    failure
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)?;
    let outcomes = outcomes
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    report(outcomes, took, started.elapsed())
}

/// For how long something took the run that is no test program.
pub struct Took {
    what: &'static str,
    time: Duration,
}

impl Took {
    pub fn measured<R>(what: &'static str, run: impl FnOnce() -> R) -> (Self, R) {
        let started = Instant::now();
        let result = run();
        let time = started.elapsed();
        (Self { what, time }, result)
    }
}

/// Process groups that stand still.
struct Paused(Vec<Pid>);

impl Paused {
    fn groups(names: &str) -> Result<Self> {
        let groups = names
            .split_whitespace()
            .map(|name| Ok(Pid::from_raw(name.parse()?)));
        let groups: Result<Vec<_>> = groups.collect();
        let paused = Self(groups.with_context(|| format!("{PAUSE}={names}"))?);
        // Who has ended needs no rest.
        paused.signal(Signal::SIGSTOP);
        Ok(paused)
    }

    fn signal(&self, signal: Signal) {
        for group in &self.0 {
            let _ = killpg(*group, signal);
        }
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        self.signal(Signal::SIGCONT);
    }
}

/// Runs one and prints what it has said.
fn start(call: &Call, command: Start<'_>) -> Result<Outcome> {
    let label = call.label();
    println!("    Starting {label}");
    let mut said = tempfile::tempfile().context("cannot make a file for what a test says")?;
    let started = Instant::now();
    let mut command = command(call);
    command
        .stdin(std::process::Stdio::null())
        .stdout(said.try_clone()?)
        .stderr(said.try_clone()?);
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", call.program.display()))?;
    let took = started.elapsed();
    let mut out = io::stdout().lock();
    let program = call.program.strip_prefix(workspace::root());
    let program = program.unwrap_or(&call.program);
    writeln!(out, "     Running {label} ({})", program.display())?;
    said.rewind()?;
    io::copy(&mut said, &mut out)?;
    let mut failures = String::new();
    if !status.success() {
        writeln!(out, "{label}: {status}")?;
        failures = failures_in(&mut said)?;
    }
    out.flush()?;
    Ok(Outcome {
        label,
        took,
        status,
        failures,
    })
}

/// From where libtest begins to tell of failed tests, or the end of what a program said that came to no such place.
/// Without backtraces, which are longer than all else.
fn failures_in(said: &mut fs::File) -> io::Result<String> {
    let mut text = Vec::new();
    said.rewind()?;
    said.read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text
        .lines()
        .filter(|line| !is_of_a_backtrace(line))
        .collect();
    let told = lines.iter().position(|line| *line == "failures:");
    let from = lines.len().saturating_sub(FAILURE_LINES);
    Ok(lines[told.map_or(from, |told| told.max(from))..].join("\n"))
}

/// As std and anyhow write it: `   3: function`, and below it `             at file:line`.
fn is_of_a_backtrace(line: &str) -> bool {
    let text = line.trim_start();
    let number = text.split_once(": ").map(|(number, _)| number);
    let is_frame = number.is_some_and(|number| number.parse::<u32>().is_ok());
    text.len() < line.len() && (is_frame || text.starts_with("at "))
}

/// What took longest, and, last of all, what has failed and how: often only the end of a long run's output is kept.
fn report(mut outcomes: Vec<Outcome>, took: Vec<Took>, all: Duration) -> Result<()> {
    outcomes.sort_by_key(|outcome| std::cmp::Reverse(outcome.took));
    let programs = outcomes.len();
    println!(
        "{programs} test programs in {:.0} s; what took longest:",
        all.as_secs_f64()
    );
    let seconds = |time: Duration| format!("{:.0}", time.as_secs_f64());
    let mut rows = vec![vec!["what".to_string(), "seconds".into()]];
    let builds = took.iter().map(|build| (build.what, build.time));
    let tests = outcomes
        .iter()
        .take(SLOWEST)
        .map(|outcome| (outcome.label.as_str(), outcome.took));
    rows.extend(
        builds
            .chain(tests)
            .map(|(what, time)| vec![what.into(), seconds(time)]),
    );
    ui::table(&rows);
    outcomes.retain(|outcome| !outcome.status.success());
    for Outcome {
        label,
        status,
        failures,
        ..
    } in &outcomes
    {
        println!("\n{label} ({status}) said:\n{failures}");
    }
    let failed: Vec<_> = outcomes
        .iter()
        .map(|failed| failed.label.as_str())
        .collect();
    if !failed.is_empty() {
        bail!(
            "{} of {programs} test programs failed: {}",
            failed.len(),
            failed.join(", ")
        );
    }
    Ok(())
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        os::unix::{fs::symlink, process::CommandExt as _},
        path::Path,
    };

    fn call(program: &Path, dir: &Path) -> Call {
        let mut call = Call::of(program, std::iter::empty()).unwrap();
        call.dir = dir.to_path_buf();
        call.environment = vec![
            ("A".into(), "a b".into()),
            (super::super::RELEASED_PROGRAMS.into(), "/released".into()),
        ];
        call
    }

    #[test]
    fn each_test_is_in_one_lane() {
        let of = |name: &str, tests: &[&str]| {
            let tests = tests.iter().map(|test| format!("{name}::{test}"));
            let program = format!("target/debug/deps/{name}-1c0ffee");
            let call = call(program.as_ref(), "/tree/lab".as_ref());
            (call, tests.collect::<Vec<_>>())
        };
        let calls = [
            of("waiting", &["a::b", "a::c_under_load", "a::nightly_d"]),
            of("nodes", &["a::b"]),
            of("alone", &["a::since_release"]),
            of("empty", &[]),
        ];
        let labels = |calls: &[Call]| -> Vec<_> { calls.iter().map(Call::label).collect() };
        let know = |calls: &[Call]| -> Vec<usize> {
            calls.iter().map(|call| call.environment.len()).collect()
        };
        let order = in_order(&calls, false);
        assert_eq!(labels(&order.waiting), ["lab/waiting waiting"]);
        assert_eq!(order.waiting[0].arguments, ["--exact", "a::b"]);
        assert_eq!(labels(&order.working), ["lab/nodes"]);
        assert!(order.working[0].arguments.is_empty());
        assert_eq!(labels(&order.alone), ["lab/waiting alone", "lab/alone"]);
        let known = [&order.waiting, &order.working, &order.alone].map(|calls| know(calls));
        assert_eq!(known, [vec![1], vec![1], vec![2, 2]]);
        assert!(order.needs_released);
        let order = in_order(&calls, true);
        assert!(order.waiting.is_empty() && order.working.is_empty());
        assert_eq!(labels(&order.alone), ["lab/waiting nightly"]);
        assert!(!order.needs_released);
    }

    #[test]
    fn what_goes_on_beside_tests_stands_still_as_long_as_it_is_to() {
        let mut sleeper = Command::new("sleep")
            .arg("60")
            .process_group(0)
            .spawn()
            .unwrap();
        let state = |pid: u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit(')').next().unwrap().trim_start().chars().next()
        };
        let id = sleeper.id();
        let paused = Paused::groups(&format!("{id} ")).unwrap();
        sinabro_lab::wait::eventually("it to stand still", || state(id) == Some('T'));
        drop(paused);
        sinabro_lab::wait::eventually("it to go on", || state(id) == Some('S'));
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        // One that is gone, none, and what is no number.
        drop(Paused::groups(&id.to_string()).unwrap());
        drop(Paused::groups("").unwrap());
        assert!(Paused::groups("12 all").is_err());
    }

    #[test]
    fn of_a_failed_program_what_it_tells_of_its_failures_is_kept() {
        let of = |text: &str| {
            let mut said = tempfile::tempfile().unwrap();
            said.write_all(text.as_bytes()).unwrap();
            failures_in(&mut said).unwrap()
        };
        let told = "failures:\n\n---- a stdout ----\npanicked\n\nfailures:\n    a";
        assert_eq!(of(&format!("test a ... FAILED\n\n{told}\n")), told);
        let frame = "  12: core::ops::function\n             at ./src/wait.rs:7\n";
        let traced = told.replace("panicked\n", &format!("panicked\n{}", frame.repeat(99)));
        assert_eq!(of(&traced), told);
        assert_eq!(of("test a ... \nkilled"), "test a ... \nkilled");
        let long = "a line\n".repeat(2 * FAILURE_LINES);
        assert_eq!(of(&long).lines().count(), FAILURE_LINES);
        assert_eq!(
            of(&format!("failures:\n{long}end")).lines().last(),
            Some("end")
        );
        assert_eq!(of(""), "");
    }

    #[test]
    fn programs_run_where_cargo_would_have_and_a_failure_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let made = |name: &str, test: &str, script: &str| {
            let program = dir.path().join(format!("{name}-0"));
            symlink("/bin/sh", &program).unwrap();
            let dir = dir.path().join(format!("in_{name}"));
            fs::create_dir(&dir).unwrap();
            let mut call = call(&program, &dir);
            let listed = format!("case $0 in --list) echo '{test}: test'; exit ;; esac");
            call.arguments = vec!["-c".into(), format!("{listed}\n{script}").into()];
            call
        };
        let prepared = AtomicBool::new(false);
        let prepare = || prepared.store(true, Ordering::Relaxed);
        let start = |call: &Call| {
            let mut command = Command::new(&call.program);
            command.args(&call.arguments).current_dir(&call.dir);
            command.envs(call.environment.iter().map(|(name, value)| (name, value)));
            command
        };
        let run = |calls: &[&Call], nightly| {
            let calls = calls.iter().map(|call| (*call).clone()).collect();
            run(calls, nightly, Vec::new(), &prepare, &start)
        };
        let good = made(
            "one",
            "a",
            "test \"$A\" = 'a b' && test \"${PWD##*/}\" = in_one && touch done",
        );
        let bad = made("two", "b_since_release", "exit 3");
        let nightly = made("three", "nightly::c", "touch done");
        run(&[&good, &nightly], false).unwrap();
        assert!(good.dir.join("done").exists());
        assert!(!nightly.dir.join("done").exists());
        assert!(!prepared.load(Ordering::Relaxed));
        let error = run(&[&good, &bad], false).unwrap_err().to_string();
        assert_eq!(error, "1 of 2 test programs failed: in_two/two");
        assert!(prepared.load(Ordering::Relaxed));
        run(&[&bad, &nightly], true).unwrap();
        assert!(nightly.dir.join("done").exists());
    }
}
