//! Machines that run, some at a time, and what each is doing.

use super::{
    environments::Special,
    kernels::{Image, Kernel},
    machine::{self, Machine},
    modules::Module,
    outcome::{Expected, Outcome},
    programs::Archives,
};
use crate::{ui, workspace::target};
use sinabro_guest::{Check, Job, Message, Step};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

/// Each machine takes more than a gigabyte.
const MOST_AT_ONCE: usize = 6;

/// Machines at the same time: each has one processor, and something to wait for.
fn at_once() -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    (processors + processors.div_ceil(2)).min(MOST_AT_ONCE)
}

/// One machine to run.
pub struct Run<'a> {
    /// The series, or none for somebody's own.
    pub kernel: Option<&'static Kernel>,
    pub image: &'a Image,
    pub special: Option<&'static Special>,
    /// One after another; files that survive one are there in those after it.
    pub boots: Vec<Boot<'a>>,
}

/// What a machine does from its start to its end.
pub struct Boot<'a> {
    /// The machine's, or of another kernel before it.
    pub image: &'a Image,
    pub modules: &'a [Module],
    pub steps: Vec<Step>,
}

pub fn all(runs: &[Run<'_>], archives: &Archives) -> Vec<Outcome> {
    let waiting = Mutex::new(runs.iter());
    let outcomes = Mutex::new(Vec::new());
    let progress = Progress::default();
    thread::scope(|scope| {
        for _ in 0..at_once().min(runs.len()) {
            scope.spawn(|| {
                loop {
                    let next = lock(&waiting).next();
                    let Some(run) = next else { return };
                    let outcome = run.go(archives, &progress);
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
    fn go(&self, archives: &Archives, progress: &Progress) -> Outcome {
        let mut outcome = Outcome::new(
            self.kernel
                .map_or(self.image.release.as_str(), |kernel| kernel.name),
            &self.image.release,
            self.special.map_or("", |special| special.name),
        );
        let title = outcome.title();
        let dir = title.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let dir = target().join("vm").join(dir);
        let mut survivors = BTreeMap::new();
        for boot in &self.boots {
            outcome.boots(&boot.image.release);
            let machine = Machine {
                image: boot.image,
                programs: &archives.of(&boot.steps),
                modules: boot.modules,
                survivors: &survivors.clone(),
                job: Job {
                    environment: self
                        .special
                        .map(|special| (special.environment)())
                        .unwrap_or_default(),
                    steps: boot.steps.clone(),
                    ..Job::default()
                },
                command_line: self.special.map_or("", |special| special.command_line),
                dir: dir.clone(),
            };
            let ended = machine.run(|message| match message {
                Message::Doing(what) => progress.now(&title, what),
                Message::Survives(file) => {
                    survivors.insert(file.path, file.content);
                }
                message => {
                    if let Message::Check(check) = &message
                        && !check.ok
                    {
                        progress.failed(&title, check);
                    }
                    outcome.take(message);
                }
            });
            if !outcome.end(ended, machine::kernel_trouble(&dir)) {
                break;
            }
        }
        let has = |step: &Step| self.boots.iter().any(|boot| boot.steps.contains(step));
        outcome.judge(&Expected {
            kernel: self.kernel,
            special: self.special,
            is_verified: has(&Step::Verify),
            has_agent: has(&Step::Node) || has(&Step::AllRefused),
        });
        outcome
    }
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
