//! A whole run's test programs: one after the other, and beside them those that wait for a good part of their
//! time. Tests of traffic are at their best with the machine for themselves.
//!
//! Cargo starts the runner for one program after the other. In a whole run that only writes down each
//! call, with the environment that cargo has made for it, and the programs are started from here. What a
//! program says is kept until it ends, so that what is printed is of one program at a time.

use crate::{ui, workspace};
use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read as _, Seek as _, Write as _},
    path::{Path, PathBuf},
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

/// What measures for how long traffic stands still has the machine for itself, at the end:
/// all tests of these programs,
const ALONE: [&str; 5] = ["handover", "refused", "restart", "sinabro_lab", "upgrade"];
/// and of these the ones whose names say so, as many at once as do not wait for a processor (those of `overlay_direct` wait for
/// agents to notice something for most of their time). Of their other tests at least so many at once as the second number says:
/// those of `masquerade` wait for connections to end.
const ALONE_IN_PART: [(&str, usize, usize); 3] = [
    ("layouts", 2, 1),
    ("masquerade", 2, 6),
    ("overlay_direct", 4, 3),
];
const MEASURING: &str = "under_load";
/// Those that are given the programs of an earlier state run there, too: these take minutes to build.
const SINCE_RELEASE: &str = "since_release";

/// Floods, and has the kernel drop packets of others that count what is lost. So the part of it that runs beside others is the last
/// but for what waits.
const FLOODS: &str = "masquerade";

/// How many of the slowest programs are named at the end.
const SLOWEST: usize = 10;

/// How many of the lines in which a program tells of its failures are printed again at the end.
const FAILURE_LINES: usize = 120;

/// Makes the command that starts a program in an environment.
type Start<'a> = &'a (dyn Fn(&Path, &[(OsString, OsString)]) -> Command + Sync);

/// A program as cargo would have started it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Call {
    program: PathBuf,
    arguments: Vec<OsString>,
    dir: PathBuf,
    environment: Vec<(OsString, OsString)>,
}

impl Call {
    /// What cargo asks this process for.
    pub fn of(program: &Path, arguments: impl Iterator<Item = OsString>) -> Result<Self> {
        Ok(Self {
            program: program.to_path_buf(),
            arguments: arguments.collect(),
            dir: env::current_dir()?,
            environment: env::vars_os().collect(),
        })
    }

    /// Writes it behind those that are in a directory.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let number = fs::read_dir(dir)?.count();
        let text = serde_json::to_vec(self)?;
        Ok(fs::write(dir.join(format!("{number:04}")), text)?)
    }

    /// All that are in a directory, in the order in which they were written.
    pub fn read(dir: &Path) -> Result<Vec<Self>> {
        let entries = fs::read_dir(dir)?.map(|entry| Ok(entry?.path()));
        let mut paths = entries.collect::<io::Result<Vec<_>>>()?;
        paths.sort();
        let read = |path: &PathBuf| Ok(serde_json::from_slice(&fs::read(path)?)?);
        paths.iter().map(read).collect()
    }

    /// The target's, as cargo knows it.
    pub fn name(&self) -> &str {
        target(&self.program).unwrap_or_default()
    }

    /// As `lab/overlay`, as two packages may have targets of one name; and which of its tests, if not all.
    fn label(&self) -> String {
        let package = self.dir.file_name().unwrap_or_default();
        let mut label = format!("{}/{}", package.to_string_lossy(), self.name());
        for argument in &self.arguments {
            label.push(' ');
            label.push_str(&argument.to_string_lossy());
        }
        label
    }

    /// With more arguments.
    fn with(&self, arguments: &[&str]) -> Self {
        let mut call = self.clone();
        call.arguments.extend(arguments.iter().map(OsString::from));
        call
    }

    /// With so many of its tests at a time.
    fn at_once(&self, tests: usize) -> Self {
        self.with(&["--test-threads", &tests.to_string()])
    }
}

/// As many tests as libtest runs at once.
fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// cargo calls a test program by its target's name and a hash.
pub fn target(program: &Path) -> Option<&str> {
    let name = program.file_name().and_then(OsStr::to_str)?;
    Some(name.rsplit_once('-')?.0)
}

/// All, by how they are run: the first two beside each other, and within each one after the other.
struct Order {
    waiting: Vec<Call>,
    working: Vec<Call>,
    alone: Vec<Call>,
}

/// Programs in the order in which they begin.
fn in_order(calls: Vec<Call>) -> Order {
    let (mut waiting, mut working, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for call in calls {
        let in_part = ALONE_IN_PART.iter().find(|(name, ..)| *name == call.name());
        if let Some((_, measuring, others)) = in_part {
            let part = call.with(&[MEASURING, SINCE_RELEASE]);
            alone.push(part.at_once(*measuring));
            let rest = call.with(&["--skip", MEASURING, "--skip", SINCE_RELEASE]);
            let rest = rest.at_once(processors().max(*others));
            match call.name() == FLOODS {
                true => working.push(rest),
                false => waiting.push(rest),
            }
        } else if ALONE.contains(&call.name()) {
            alone.push(call);
        } else if super::waits(&call.program) {
            waiting.push(call);
        } else {
            working.push(call);
        }
    }
    working.sort_by_key(|call| call.name() == FLOODS);
    // A test that needs them and has not the name fails on every machine, and not only where they are not built yet.
    for call in waiting.iter_mut().chain(&mut working) {
        call.environment
            .retain(|(name, _)| name != super::EARLIER_PROGRAMS);
    }
    Order {
        waiting,
        working,
        alone,
    }
}

struct Outcome {
    label: String,
    took: Duration,
    status: ExitStatus,
    /// What a failed one told of its failures.
    failures: String,
}

/// Runs all. What those that are named in `late` need is made by `prepare` when others need the machine less: they
/// are among those that run alone.
pub fn run(
    calls: Vec<Call>,
    late: &[&str],
    prepare: &(dyn Fn() + Sync),
    command: Start<'_>,
) -> Result<()> {
    let started = Instant::now();
    let Order {
        waiting,
        working,
        alone,
    } = in_order(calls);
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
    thread::scope(|scope| {
        scope.spawn(|| {
            lane(&waiting);
            // Not with the others standing still: it may wait for one of them.
            if alone.iter().any(|call| late.contains(&call.name())) {
                prepare();
            }
        });
        lane(&working);
    });
    let paused = Paused::groups(&env::var(PAUSE).unwrap_or_default())?;
    lane(&alone);
    drop(paused);
    failure
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)?;
    let outcomes = outcomes
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    report(outcomes, started.elapsed())
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
    let mut command = command(&call.program, &call.environment);
    command
        .args(&call.arguments)
        .current_dir(&call.dir)
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

/// The slowest, and, last of all, what has failed and how: often only the end of a long run's output is kept.
fn report(mut outcomes: Vec<Outcome>, took: Duration) -> Result<()> {
    outcomes.sort_by_key(|outcome| std::cmp::Reverse(outcome.took));
    let programs = outcomes.len();
    println!(
        "{programs} test programs in {:.0} s; the slowest:",
        took.as_secs_f64()
    );
    let mut rows = vec![vec!["program".to_string(), "seconds".into()]];
    for outcome in outcomes.iter().take(SLOWEST) {
        let seconds = format!("{:.0}", outcome.took.as_secs_f64());
        rows.push(vec![outcome.label.clone(), seconds]);
    }
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
    use std::os::unix::{fs::symlink, process::CommandExt as _};

    fn call(name: &str) -> Call {
        Call {
            program: format!("target/debug/deps/{name}-1c0ffee").into(),
            arguments: Vec::new(),
            dir: "/tree/lab".into(),
            environment: vec![(super::super::EARLIER_PROGRAMS.into(), "/earlier".into())],
        }
    }

    #[test]
    fn what_waits_is_beside_the_others_and_what_measures_gaps_is_alone() {
        let calls = [
            "peers",
            "a",
            "upgrade",
            "agent",
            "b",
            "restart",
            "masquerade",
            "crash",
            "datapath",
        ]
        .map(call);
        let order = in_order(calls.into());
        let labels = |calls: &[Call]| -> Vec<_> { calls.iter().map(Call::label).collect() };
        let others = format!(
            "lab/masquerade --skip under_load --skip since_release --test-threads {}",
            processors().max(6)
        );
        assert_eq!(
            labels(&order.working),
            ["lab/a", "lab/agent", "lab/b", "lab/datapath", &others]
        );
        assert_eq!(labels(&order.waiting), ["lab/peers", "lab/crash"]);
        assert_eq!(
            labels(&order.alone),
            [
                "lab/upgrade",
                "lab/restart",
                "lab/masquerade under_load since_release --test-threads 2"
            ]
        );
        let know = |calls: &[Call]| -> Vec<usize> {
            calls.iter().map(|call| call.environment.len()).collect()
        };
        assert_eq!(know(&order.alone), [1; 3]);
        assert_eq!(
            (know(&order.working), know(&order.waiting)),
            (vec![0; 5], vec![0; 2])
        );
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
    fn programs_that_are_named_are_there() {
        let root = workspace::root();
        let alone = ALONE
            .iter()
            .chain(ALONE_IN_PART.iter().map(|(name, ..)| name));
        for name in alone.chain(&super::super::WAIT_OFTEN) {
            let dirs =
                ["lab/tests", "agent/tests", "battery/tests"].map(|dir| root.join(dir).join(name));
            let is = |dir: &PathBuf| dir.is_dir() || dir.with_extension("rs").is_file();
            // sinabro_lab: the package's own tests.
            assert!(*name == "sinabro_lab" || dirs.iter().any(is), "{name}");
        }
        // Without any, what measures would run beside others, and nothing alone.
        for (name, ..) in ALONE_IN_PART {
            let path = root.join("lab/tests").join(name);
            let files: Vec<_> = match fs::read_dir(&path) {
                Ok(entries) => entries.map(|entry| entry.unwrap().path()).collect(),
                Err(_) => vec![path.with_extension("rs")],
            };
            let measures = |file: &PathBuf| {
                let text = fs::read_to_string(file).unwrap();
                let mut lines = text.lines();
                lines.any(|line| line.starts_with("fn ") && line.contains(MEASURING))
            };
            assert!(files.iter().any(measures), "{name}");
        }
    }

    #[test]
    fn a_call_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..12 {
            let arguments = [number.to_string().into()].into_iter();
            let call = Call::of(Path::new("deps/x-1"), arguments).unwrap();
            call.write(dir.path()).unwrap();
        }
        let calls = Call::read(dir.path()).unwrap();
        let numbers: Vec<_> = calls.iter().map(|call| call.arguments[0].clone()).collect();
        assert_eq!(
            numbers,
            (0..12)
                .map(|n| n.to_string().into())
                .collect::<Vec<OsString>>()
        );
        assert_eq!(calls[3].dir, env::current_dir().unwrap());
        assert!(calls[3].environment.iter().any(|(name, _)| name == "PATH"));
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
        for name in ["sh-0", "upgrade-0"] {
            symlink("/bin/sh", dir.path().join(name)).unwrap();
        }
        let made = |name: &str, script: &str, program: &str| Call {
            program: dir.path().join(program),
            arguments: ["-c", script].map(OsString::from).into(),
            dir: dir.path().join(name),
            environment: vec![("A".into(), "a b".into())],
        };
        let sh = |program: &Path, environment: &[(OsString, OsString)]| {
            let mut command = Command::new(program);
            command.envs(environment.iter().map(|(name, value)| (name, value)));
            command
        };
        let prepared = AtomicBool::new(false);
        let prepare = || prepared.store(true, Ordering::Relaxed);
        for name in ["one", "two"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let good = made(
            "one",
            "test \"$A\" = 'a b' && test \"${PWD##*/}\" = one && touch done",
            "sh-0",
        );
        run(vec![good.clone()], &["upgrade"], &prepare, &sh).unwrap();
        assert!(dir.path().join("one/done").exists());
        assert!(!prepared.load(Ordering::Relaxed));
        let bad = made("two", "exit 3", "upgrade-0");
        let error = run(vec![good, bad], &["upgrade"], &prepare, &sh);
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "1 of 2 test programs failed: two/upgrade -c exit 3");
        assert!(prepared.load(Ordering::Relaxed));
    }
}
