//! STATUS: whether an ADD can work.
//!
//! Runtimes that know the verb ask every few seconds (containerd from 2.0.1 on each time that the
//! kubelet asks it), and call a node NotReady whose plugin says no. An agent that is restarted or
//! upgraded is away for a while, in which pods that are started wait, and all others want nothing
//! of it. So who was fine a moment ago is taken for fine, for [`GRACE`].

use crate::{
    agent_client::{Agent, AgentError, BUDGET},
    conf::Conf,
    error::{Code, Error},
};
use nix::time::{ClockId, clock_gettime};
use sinabro_common::{
    api::{Adds, Request, Response, StatusReport},
    names,
};
use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// How long an agent may be away that was well: as long as a new image may take to come.
const GRACE: Duration = Duration::from_secs(120);

/// # Errors
/// Code 50 or 51, in the details what does not hold.
pub fn run(conf: &Conf) -> Result<(), Error> {
    let last = LastPossible::new(&conf.state_dir);
    let (error, may_pass) = match ask(conf) {
        Ok(report) => match report.adds.clone().unwrap_or_else(|| by_readiness(&report)) {
            Adds::Possible => {
                // Without it a restart is seen, no more.
                let _ = last.note();
                return Ok(());
            }
            Adds::NotYet(why) => (refused(&report, Code::NotAvailable, &why), true),
            Adds::Impossible(why) => (refused(&report, Code::NotAvailable, &why), false),
            Adds::Isolated(why) => (refused(&report, Code::LimitedConnectivity, &why), false),
        },
        Err(error) => {
            let may_pass = error.is_away();
            let mut error = Error::from(error);
            error.code = Code::NotAvailable;
            (error, may_pass)
        }
    };
    match may_pass && last.is_recent() {
        true => Ok(()),
        false => Err(error),
    }
}

fn ask(conf: &Conf) -> Result<Box<StatusReport>, AgentError> {
    let mut agent = Agent::connect(&conf.socket, BUDGET)?;
    match agent.call(Request::Status)? {
        Response::Status(report) => Ok(report),
        _ => Err(agent.garbled("not a status".into())),
    }
}

/// Of an agent of an earlier release, as in a downgrade.
fn by_readiness(report: &StatusReport) -> Adds {
    if report.ready {
        return Adds::Possible;
    }
    let failing = report.conditions.iter().filter(|c| !c.ok);
    let details: Vec<_> = failing
        .map(|c| format!("{}: {}", c.name, c.detail))
        .collect();
    Adds::NotYet(details.join("; "))
}

fn refused(report: &StatusReport, code: Code, why: &str) -> Error {
    let text = format!("no pod can be added on node {} now", report.node);
    Error::new(code, text).details(why)
}

/// When an ADD could last work, in seconds of the clock that no one sets and that a reboot starts
/// again, as it does the state directory.
struct LastPossible(PathBuf);

impl LastPossible {
    fn new(state_dir: &Path) -> Self {
        Self(state_dir.join(names::LAST_POSSIBLE_FILE))
    }

    /// Writes what has always the same length, and is never half there.
    fn note(&self) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
            .open(&self.0)?;
        file.write_all(format!("{:020}\n", now()?).as_bytes())
    }

    fn is_recent(&self) -> bool {
        let read = || -> Option<u64> { fs::read_to_string(&self.0).ok()?.trim().parse().ok() };
        let age = read().and_then(|then| now().ok()?.checked_sub(then));
        age.is_some_and(|age| age < GRACE.as_secs())
    }
}

fn now() -> io::Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
    Ok(u64::try_from(now.tv_sec()).unwrap_or_default())
}
