//! Whether applications see the same on accelerated connections of this kernel as on plain ones.
//!
//! The quick rows of [`sinabro_battery`], seen on loopback connections of two network namespaces made
//! for it, of which one is accelerated: by the programs that the node runs, with maps of their
//! own. It changes nothing on the node, and takes two or three seconds, once for each boot,
//! kernel and build ([`file`]).
//!
//! It needs root, or at least CAP_SYS_ADMIN for the namespaces, besides what loading programs
//! takes: `sinabroctl prepare` runs it, and the agent where it may.

pub mod file;

use crate::{
    chain::Chain,
    datapath::{Apart, DatapathError},
    memory,
    state_file::FileError,
};
use sinabro_battery::{self as battery, Between, Class, Outcome, Row};
use sinabro_common::{
    abi::acceleration::{AccelerationCounters, Skip},
    api::{RowReport, SelfTestReport, Verdict},
    names,
};
use sinabro_netlink::{Conn, NetNs, link};
use std::{io, net::Ipv4Addr, path::Path, time::Duration};

/// Rows looked at at the same time: most of the time they wait.
const AT_ONCE: usize = 16;
/// How patient who looks again at what did not happen within a second.
const MORE_PATIENCE: Duration = Duration::from_millis(1500);
/// Far less than the rows send.
const LEAST_REDIRECTED: u64 = 1 << 20;

const NOT_RUN: &str =
    "the self-test has not run: run `sinabroctl prepare` as root, then restart the agent";

#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    #[error("cannot load the programs")]
    Load(#[source] DatapathError),
    #[error("cannot make a network namespace")]
    Namespace(#[from] sinabro_netlink::Error),
    #[error("this kernel does not number network namespaces, Linux 5.14 does")]
    Cookie,
    #[error("cannot start its threads")]
    Thread(#[source] io::Error),
    #[error(
        "its connections were not accelerated ({enrolled} sockets enrolled, {redirected} bytes, not \
         enrolled: {skipped}), attach to the cgroup that this process is in"
    )]
    NotAccelerated {
        enrolled: u64,
        redirected: u64,
        skipped: String,
    },
}

/// Runs it: the report of what was found.
///
/// # Errors
/// If it could not be run.
pub fn run(bpf_dir: &Path, cgroup: Option<&Path>) -> Result<SelfTestReport, SelfTestError> {
    let outcomes = observe(bpf_dir, cgroup);
    memory::release();
    Ok(judge(&outcomes?))
}

fn observe(bpf_dir: &Path, cgroup: Option<&Path>) -> Result<Vec<Outcome>, SelfTestError> {
    let ((plain, _), (fast, cookie)) = (scratch()?, scratch()?);
    let cookie = cookie.ok_or(SelfTestError::Cookie)?;
    let apart = Apart::load(&bpf_dir.join(names::BPF_SELF_TEST_DIR), cgroup)
        .map_err(SelfTestError::Load)?;
    apart
        .accelerate_loopback(cookie)
        .map_err(SelfTestError::Load)?;
    let between =
        |netns: &NetNs| Between::new(netns.clone(), netns.clone(), Ipv4Addr::LOCALHOST.into());
    let (plain, fast) = (between(&plain), between(&fast));
    let rows: Vec<_> = battery::rows().filter(|row| row.quick).collect();
    let compare = |rows: &[&'static Row], plain: &Between, fast: &Between| {
        battery::compare(rows, plain, fast, AT_ONCE).map_err(SelfTestError::Thread)
    };
    let mut outcomes = compare(&rows, &plain, &fast)?;
    // A node that has just started may be too busy for a second.
    let late: Vec<_> = outcomes.iter().filter(|outcome| outcome.late()).collect();
    let late: Vec<_> = late.iter().map(|outcome| outcome.row).collect();
    let (plain, fast) = (plain.patient(MORE_PATIENCE), fast.patient(MORE_PATIENCE));
    for again in compare(&late, &plain, &fast)? {
        let is_it = |outcome: &&mut Outcome| std::ptr::eq(outcome.row, again.row);
        if let Some(outcome) = outcomes.iter_mut().find(is_it) {
            *outcome = again;
        }
    }
    let counted = apart.counters().map_err(SelfTestError::Load)?;
    if counted.redirected_bytes < LEAST_REDIRECTED {
        return Err(SelfTestError::NotAccelerated {
            enrolled: counted.enrolled,
            redirected: counted.redirected_bytes,
            skipped: skipped(&counted),
        });
    }
    Ok(outcomes)
}

/// Why connections were not enrolled, and how many.
fn skipped(counted: &AccelerationCounters) -> String {
    let reasons = Skip::ALL.iter().zip(counted.skipped);
    let some = reasons.filter(|(_, count)| *count > 0);
    let some: Vec<_> = some
        .map(|(skip, count)| format!("{count} {}", skip.name()))
        .collect();
    match some.is_empty() {
        true => "none was seen".into(),
        false => some.join(", "),
    }
}

/// A network namespace with nothing but loopback, and the number by which programs know it.
fn scratch() -> Result<(NetNs, Option<u64>), SelfTestError> {
    let netns = NetNs::create()?;
    let mut conn = Conn::in_netns(&netns)?;
    let lo = conn.link_by_name("lo")?.index;
    conn.execute(link::set_up(lo))?;
    Ok((netns, conn.netns_cookie()?))
}

/// What the outcomes mean for this node.
fn judge(outcomes: &[Outcome]) -> SelfTestReport {
    let differ: Vec<_> = outcomes
        .iter()
        .filter(|outcome| !outcome.passed())
        .collect();
    let grave = differ
        .iter()
        .find(|outcome| outcome.row.class != Class::Behaviour);
    let (verdict, reason) = match (grave, differ.len()) {
        (Some(outcome), _) => (
            Verdict::Refused,
            format!("on this kernel {}", outcome.row.meaning),
        ),
        (None, 0) => (
            Verdict::AllPass,
            "applications see no difference".to_owned(),
        ),
        (None, some) => (
            Verdict::SomeFail,
            format!("{some} of {} rows differ", outcomes.len()),
        ),
    };
    SelfTestReport {
        verdict,
        reason,
        kernel: file::kernel(),
        rows: outcomes.iter().map(report).collect(),
    }
}

fn report(outcome: &Outcome) -> RowReport {
    let row = outcome.row;
    RowReport {
        id: row.id.into(),
        title: row.title.into(),
        class: row.class,
        passed: outcome.passed(),
        plain: outcome.plain.clone(),
        accelerated: outcome.accelerated.clone(),
        meaning: row.meaning.into(),
    }
}

/// The report of a test that could not be run.
pub fn refused(reason: String) -> SelfTestReport {
    SelfTestReport {
        verdict: Verdict::Refused,
        reason,
        kernel: file::kernel(),
        rows: Vec::new(),
    }
}

impl SelfTestError {
    /// Whether another attempt, with more rights, may fare better.
    pub fn is_permission(&self) -> bool {
        matches!(self, Self::Namespace(sinabro_netlink::Error::Permission(_)))
    }
}

/// The report for now.
#[derive(Debug)]
pub struct Obtained {
    pub report: SelfTestReport,
    /// Whether it was there already, and the test had not to be run.
    pub kept: bool,
    /// Why it could not be kept.
    pub problem: Option<FileError>,
}

/// The report that is kept, or what running the test finds, which is kept then unless that fails.
/// That nothing may be accelerated is worth another look where that is allowed.
pub fn obtain(state_dir: &Path, bpf_dir: &Path, cgroup: Option<&Path>) -> Obtained {
    let obtained = |report, kept| Obtained {
        report,
        kept,
        problem: None,
    };
    let before = match file::load(state_dir) {
        Some(report) if report.verdict != Verdict::Refused => return obtained(report, true),
        before => before,
    };
    let report = match run(bpf_dir, cgroup) {
        Ok(report) => report,
        Err(error) if error.is_permission() => {
            return obtained(before.unwrap_or_else(|| refused(NOT_RUN.into())), false);
        }
        Err(error) => refused(format!("the self-test could not be run: {}", Chain(&error))),
    };
    let problem = file::save(state_dir, &report).err();
    Obtained {
        problem,
        ..obtained(report, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An outcome of some row of that class.
    fn outcome(class: Class, passed: bool) -> Outcome {
        let row = battery::rows().find(|row| row.class == class).unwrap();
        Outcome {
            row,
            plain: "seen".into(),
            accelerated: if passed { "seen" } else { "seen otherwise" }.into(),
        }
    }

    #[test]
    fn the_gravest_difference_decides() {
        use Class::{BackPressure, Behaviour, Order};
        let verdict = |failing: &[Class]| {
            let outcomes = [Behaviour, Order, BackPressure]
                .map(|class| outcome(class, !failing.contains(&class)));
            judge(&outcomes).verdict
        };
        assert_eq!(verdict(&[]), Verdict::AllPass);
        assert_eq!(verdict(&[Behaviour]), Verdict::SomeFail);
        assert_eq!(verdict(&[Order]), Verdict::Refused);
        assert_eq!(verdict(&[Behaviour, BackPressure]), Verdict::Refused);
    }
}
