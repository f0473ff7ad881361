//! Whether this kernel's accelerated connections keep order and back-pressure.
//!
//! [`check`] is done on loopback connections of a network namespace made for it, accelerated by the
//! programs that the node runs, with maps of their own. It changes nothing on the node and takes
//! well under a second, once for each boot, kernel and build ([`file`]).
//!
//! It needs root, or at least CAP_SYS_ADMIN for the namespace, besides what loading programs
//! takes. An agent that may does it when the first pod asks for acceleration; for others
//! `sinabroctl prepare` does.

mod check;
pub mod file;
mod loopback;

use crate::{
    chain::Chain,
    datapath::{Apart, DatapathError},
    memory,
    state_file::FileError,
};
use check::Fault;
use loopback::Loopback;
use sinabro_common::{
    abi::acceleration::{AccelerationCounters, Skip},
    api::{SelfTestReport, Verdict},
    names,
};
use sinabro_netlink::{Conn, NetNs, link};
use std::{path::Path, sync::OnceLock, time::Instant};

/// Far less than the check sends.
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
    #[error(transparent)]
    Fault(Fault),
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
/// If it could not be run to its end.
pub fn run(bpf_dir: &Path, cgroup: Option<&Path>) -> Result<SelfTestReport, SelfTestError> {
    let result = on_accelerated(bpf_dir, cgroup);
    memory::release();
    let (verdict, reason) = match result {
        Ok(()) => (
            Verdict::Accelerate,
            "order and back-pressure hold".to_owned(),
        ),
        Err(SelfTestError::Fault(fault)) if fault.is_found() => {
            (Verdict::Refused, format!("on this kernel {fault}"))
        }
        Err(error) => return Err(error),
    };
    Ok(SelfTestReport {
        tried: true,
        ..report(verdict, reason)
    })
}

fn on_accelerated(bpf_dir: &Path, cgroup: Option<&Path>) -> Result<(), SelfTestError> {
    let (netns, cookie) = scratch()?;
    let cookie = cookie.ok_or(SelfTestError::Cookie)?;
    let apart = Apart::load(&bpf_dir.join(names::BPF_SELF_TEST_DIR), cgroup)
        .map_err(SelfTestError::Load)?;
    apart
        .accelerate_loopback(cookie)
        .map_err(SelfTestError::Load)?;
    check::check(&Loopback(&netns)).map_err(SelfTestError::Fault)?;
    let counted = apart.counters().map_err(SelfTestError::Load)?;
    if counted.redirected_bytes < LEAST_REDIRECTED {
        return Err(SelfTestError::NotAccelerated {
            enrolled: counted.enrolled,
            redirected: counted.redirected_bytes,
            skipped: skipped(&counted),
        });
    }
    Ok(())
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

fn report(verdict: Verdict, reason: String) -> SelfTestReport {
    SelfTestReport {
        verdict,
        reason,
        kernel: file::kernel(),
        ..SelfTestReport::default()
    }
}

/// The report of a test that could not be run.
pub fn refused(reason: String) -> SelfTestReport {
    report(Verdict::Refused, reason)
}

fn failed(error: &SelfTestError) -> SelfTestReport {
    match error.is_permission() {
        true => refused(NOT_RUN.into()),
        false => refused(format!("the self-test could not be run: {}", Chain(error))),
    }
}

impl SelfTestError {
    /// Whether another attempt, with more rights, may fare better.
    pub fn is_permission(&self) -> bool {
        matches!(self, Self::Namespace(sinabro_netlink::Error::Permission(_)))
    }
}

/// What an agent knows of it.
pub struct SelfTest {
    found: OnceLock<SelfTestReport>,
    run: Box<dyn Fn() -> SelfTestReport + Send + Sync>,
}

impl SelfTest {
    /// That has been run.
    pub fn known(report: SelfTestReport) -> Self {
        Self {
            found: OnceLock::from(report),
            run: Box::new(|| refused(NOT_RUN.into())),
        }
    }

    /// That is run when its verdict is asked for.
    pub fn untried(run: impl Fn() -> SelfTestReport + Send + Sync + 'static) -> Self {
        Self {
            found: OnceLock::new(),
            run: Box::new(run),
        }
    }

    /// As the report that is kept says, or to be run, if this process may.
    pub fn of_node(state_dir: &Path, bpf_dir: &Path, cgroup: Option<&Path>) -> Self {
        if let Some(report) = file::load(state_dir) {
            tell(&report);
            return Self::known(report);
        }
        if let Err(error) = scratch()
            && error.is_permission()
        {
            let report = failed(&error);
            tell(&report);
            return Self::known(report);
        }
        let (state_dir, bpf_dir) = (state_dir.to_owned(), bpf_dir.to_owned());
        let cgroup = cgroup.map(Path::to_owned);
        Self::untried(move || {
            let began = Instant::now();
            let report = match run(&bpf_dir, cgroup.as_deref()) {
                Ok(report) => {
                    if let Err(error) = file::save(&state_dir, &report) {
                        tracing::warn!("{}", Chain(&error));
                    }
                    report
                }
                // The next agent may fare better.
                Err(error) => failed(&error),
            };
            tracing::info!(took = ?began.elapsed(), "tried the tcp acceleration");
            tell(&report);
            report
        })
    }

    /// What is known so far.
    pub fn found(&self) -> Option<&SelfTestReport> {
        self.found.get()
    }

    /// The verdict. The first to ask has the test run, and others that ask meanwhile wait for that.
    pub fn verdict(&self) -> Verdict {
        self.found.get_or_init(&self.run).verdict
    }
}

fn tell(report: &SelfTestReport) {
    match report.verdict {
        Verdict::Refused => tracing::warn!("no tcp acceleration: {}", report.reason),
        Verdict::Accelerate => {
            tracing::info!("self-test of the tcp acceleration: {}", report.reason);
        }
    }
}

/// What `sinabroctl prepare` has found.
#[derive(Debug)]
pub struct Prepared {
    pub report: SelfTestReport,
    /// Whether it was there already, and the test had not to be run.
    pub kept: bool,
    /// Why it could not be kept.
    pub problem: Option<FileError>,
}

/// The report that is kept, or what running the test finds, which is kept then. That nothing may be
/// accelerated is worth another look.
pub fn prepare(state_dir: &Path, bpf_dir: &Path, cgroup: Option<&Path>) -> Prepared {
    let prepared = |report, kept| Prepared {
        report,
        kept,
        problem: None,
    };
    let before = match file::load(state_dir) {
        Some(report) if report.verdict == Verdict::Accelerate => return prepared(report, true),
        before => before,
    };
    let report = match run(bpf_dir, cgroup) {
        Ok(report) => report,
        Err(error) if error.is_permission() => {
            return prepared(before.unwrap_or_else(|| failed(&error)), false);
        }
        Err(error) => failed(&error),
    };
    let problem = file::save(state_dir, &report).err();
    Prepared {
        problem,
        ..prepared(report, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{
            Arc, Barrier,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    #[test]
    fn it_is_run_once_and_by_the_first_that_asks() {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let self_test = SelfTest::untried(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            report(Verdict::Accelerate, String::new())
        });
        assert!(self_test.found().is_none());
        let together = Barrier::new(8);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    together.wait();
                    assert_eq!(self_test.verdict(), Verdict::Accelerate);
                });
            }
        });
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        assert!(self_test.found().is_some());
    }

    #[test]
    fn what_is_kept_is_not_run_again() {
        let dir = tempfile::tempdir().unwrap();
        for verdict in [Verdict::Accelerate, Verdict::Refused] {
            file::save(dir.path(), &report(verdict, "of a test".into())).unwrap();
            // No data path can be there.
            let self_test = SelfTest::of_node(dir.path(), dir.path(), None);
            assert_eq!(self_test.found().map(|found| found.verdict), Some(verdict));
            assert_eq!(self_test.verdict(), verdict);
        }
    }

    #[test]
    fn what_could_not_be_run_accelerates_nothing_and_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(names::SELF_TEST_FILE), "garbage").unwrap();
        let self_test = SelfTest::of_node(dir.path(), dir.path(), None);
        assert_eq!(self_test.verdict(), Verdict::Refused);
        let found = self_test.found().unwrap();
        assert!(!found.tried && !found.reason.is_empty(), "{found:?}");
        assert_eq!(file::load(dir.path()), None);
    }
}
