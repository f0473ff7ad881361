//! Rows seen on two kinds of connections.

use super::{Connect, Row, stage::LATE};
use std::{
    fmt::Write as _,
    io,
    sync::{Mutex, PoisonError},
    thread,
};

/// What was seen.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub row: &'static Row,
    pub plain: String,
    pub accelerated: String,
}

impl Outcome {
    pub fn passed(&self) -> bool {
        self.plain == self.accelerated
    }

    /// Whether it differs because something did not happen in time.
    pub fn late(&self) -> bool {
        let late = |seen: &str| seen.contains(LATE);
        !self.passed() && (late(&self.plain) || late(&self.accelerated))
    }
}

/// Observes rows on both kinds, several at a time; most of them only wait. The outcomes are in
/// the rows' order.
///
/// # Errors
/// If no thread can be started.
pub fn compare(
    rows: &[&'static Row],
    plain: &dyn Connect,
    accelerated: &dyn Connect,
    at_once: usize,
) -> io::Result<Vec<Outcome>> {
    let todo = Mutex::new(rows.iter().enumerate());
    let next = || todo.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut outcomes = Vec::new();
        while let Some((n, &row)) = next() {
            let outcome = Outcome {
                row,
                plain: row.observe(plain),
                accelerated: row.observe(accelerated),
            };
            outcomes.push((n, outcome));
        }
        outcomes
    };
    let mut outcomes: Vec<_> = thread::scope(|scope| {
        let workers = (0..at_once).map(|_| {
            thread::Builder::new()
                .name("tcp-battery".into())
                .spawn_scoped(scope, work)
        });
        let workers = workers.collect::<io::Result<Vec<_>>>()?;
        let ended = workers.into_iter().map(|worker| {
            let panicked = |_| io::Error::other("a row panicked");
            worker.join().map_err(panicked)
        });
        ended.collect::<io::Result<Vec<_>>>()
    })?
    .into_iter()
    .flatten()
    .collect();
    outcomes.sort_by_key(|(n, _)| *n);
    Ok(outcomes.into_iter().map(|(_, outcome)| outcome).collect())
}

/// One line for each outcome, and what was seen where that differs.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for outcome in outcomes {
        let verdict = if outcome.passed() { "same" } else { "DIFFERS" };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:28} {:8} {}",
            outcome.row.id, verdict, outcome.plain
        );
        if !outcome.passed() {
            let _ = writeln!(text, "{:28} {:8} {}", "", "", outcome.accelerated);
        }
    }
    text
}
