//! Waiting for a condition, the one way that all tests do it.
//!
//! There is one patience, far beyond what anything takes on a busy machine: only a failure uses it
//! up, so a short one would gain nothing and make tests depend on the clock. How long something
//! *may* take is not for a wait to say; [`crate::traffic::gaps`] measures what traffic sees of it.

use anyhow::{Result, anyhow};
use std::{
    env, hint,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A virtual machine may be without its processor for seconds, and a build may run beside.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The variable by which an emulated machine, which is many times as slow, asks for as many times the
/// patience.
pub const SLOWNESS: &str = "SINABRO_LAB_SLOWNESS";

/// How many times as slow this machine is as others; 1 unless [`SLOWNESS`] says more.
pub fn slowness() -> u32 {
    static SLOWNESS_HERE: OnceLock<u32> = OnceLock::new();
    *SLOWNESS_HERE.get_or_init(|| {
        let times = env::var(SLOWNESS).ok().and_then(|text| text.parse().ok());
        times.unwrap_or(1).max(1)
    })
}

const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// A pause is this part of the time that was waited before, so that at most so much is lost by it.
const PART: u32 = 16;

/// Asks until there is an answer. An error is one more reason to ask again, and the last one is
/// what a failure reports.
pub fn wait_for<T>(what: &str, ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    wait_within(PATIENCE, what, ask)
}

/// The same where a minute is not enough: for a whole cluster's doings.
pub fn wait_within<T>(
    patience: Duration,
    what: &str,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    let patience = patience * slowness();
    loop {
        let answer = ask();
        if let Ok(Some(answer)) = answer {
            return Ok(answer);
        }
        let waited = start.elapsed();
        if waited >= patience {
            let vain = format!(
                "waited {:.0} s without success: {what}",
                waited.as_secs_f64()
            );
            return Err(match answer {
                Err(error) => error.context(vain),
                Ok(_) => anyhow!(vain),
            });
        }
        let pause = (waited / PART).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        thread::sleep(pause.min(patience - waited));
    }
}

/// For tests: panics where it is called if the condition does not come to hold.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    eventually_some(what, || holds().then_some(()));
}

/// For tests: what was waited for, or a panic where this is called.
#[track_caller]
pub fn eventually_some<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    match wait_for(what, || Ok(find())) {
        Ok(found) => found,
        Err(error) => panic!("{error:#}"),
    }
}

/// Returns once so many came here, at as nearly the same moment as two processors can have. A processor that is the
/// other's, too, is given away.
pub fn meet(arrived: &AtomicU32, all: u32) {
    arrived.fetch_add(1, Ordering::AcqRel);
    let mut looks = 0;
    while arrived.load(Ordering::Acquire) < all {
        looks += 1;
        match looks % 10_000 {
            0 => thread::yield_now(),
            _ => hint::spin_loop(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn an_answer_ends_the_wait_and_errors_before_it_do_not() {
        let mut asked = 0;
        let answer = wait_for("the third answer", || {
            asked += 1;
            match asked {
                1 => bail!("not there"),
                2 => Ok(None),
                _ => Ok(Some(asked)),
            }
        });
        assert_eq!(answer.unwrap(), 3);
    }

    #[test]
    fn a_failure_says_what_was_waited_for_and_why_it_did_not_come() {
        let wait = |ask: fn() -> Result<Option<()>>| {
            let error = wait_within(Duration::ZERO, "the node to be ready", ask);
            format!("{:#}", error.unwrap_err())
        };
        let told = wait(|| bail!("no agent listens"));
        assert!(told.contains("the node to be ready"), "{told}");
        assert!(told.ends_with(": no agent listens"), "{told}");
        assert_eq!(
            wait(|| Ok(None)),
            "waited 0 s without success: the node to be ready"
        );
    }
}
