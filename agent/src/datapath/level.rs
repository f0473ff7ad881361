//! Which programs run: this version's if the kernel takes them all, else the best that it does take.
//!
//! 1. **current**: all of this version's;
//! 2. **last good**: those that ran last on this node ([`super::last_good`]), if they mean the same by
//!    the maps as this agent. On a node that was not rebooted they are the ones that run already: the
//!    kernel took them, and each is replaced by itself;
//! 3. **reduced**: this version's without redirection and acceleration. Not in the place of programs
//!    that do more and run;
//! 4. **none**: what runs goes on as it is, and where nothing runs the kernel forwards by itself.
//!
//! Each is loaded and verified beside what runs, and no link or pin changes before one is chosen. The
//! acceleration has no part in the choice: a node can do without, and has tried it before. Nor have the programs that
//! translate Services at sockets.

use super::{
    DatapathConfig, DatapathError,
    files::{ObjectFiles, spoil},
    last_good,
    maps::{self, migrations::Known},
    object::{self, Extent, Objects},
};
use crate::chain::Chain;
use sinabro_common::{
    abi::{Addr, config::NodeConfig},
    fail_point,
};
use std::{fmt, path::Path};

/// Which programs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Current,
    LastGood,
    Reduced,
    None,
}

impl Level {
    pub const ALL: [Self; 4] = [Self::Current, Self::LastGood, Self::Reduced, Self::None];

    /// As settings, metrics and tests call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::LastGood => "last-good",
            Self::Reduced => "reduced",
            Self::None => "none",
        }
    }
}

/// What was chosen, and why nothing better.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub level: Level,
    /// The version whose programs they are.
    pub version: String,
    /// Whether programs ran on this node before, since it was booted.
    pub ran: bool,
    /// What was tried before, and what the kernel said.
    pub refused: Vec<String>,
}

impl Choice {
    /// Why nothing better, in a line; empty if there is nothing better.
    pub fn why(&self) -> String {
        self.refused.join("; ")
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.level {
            Level::Current => f.write_str("current"),
            Level::LastGood => write!(f, "last good, of version {}", self.version),
            Level::Reduced => f.write_str("reduced: without redirection and acceleration"),
            Level::None if self.ran => f.write_str("none of this version; those of before go on"),
            Level::None => f.write_str("none"),
        }
    }
}

/// One way to load programs.
struct Candidate {
    level: Level,
    files: ObjectFiles,
    extent: Extent,
}

impl Candidate {
    fn new(level: Level, files: ObjectFiles, extent: Extent) -> Self {
        let mut files = files;
        let current = level != Level::LastGood;
        let all = fail_point::refused(if current { "current" } else { "last-good" });
        if all {
            spoil(&mut files.uplink);
            spoil(&mut files.overlay);
            spoil(&mut files.service_sock);
        }
        let redirects = current && extent != Extent::Reduced;
        if all || (redirects && fail_point::refused("redirect")) {
            spoil(&mut files.pod);
        }
        if all || (current && fail_point::refused("acceleration")) {
            spoil(&mut files.sock);
        }
        Self {
            level,
            files,
            extent,
        }
    }

    /// Loads it; an error if the kernel refuses any program of it.
    fn load(&self, config: &DatapathConfig, known: &Known) -> Result<Objects, DatapathError> {
        object::load(config, known, &self.files, self.extent)
    }
}

/// Loads what the kernel takes.
///
/// # Errors
/// What no other programs would cure, such as a directory that is not on a bpffs.
pub fn choose(config: &DatapathConfig, known: &Known) -> Result<(Objects, Choice), DatapathError> {
    let current = ObjectFiles::current()?;
    let ran = has_run(&config.bpf_dir);
    let mut refused = Vec::new();
    let of = |level, extent| Candidate::new(level, current.clone(), extent);
    let chosen = |candidate: &Candidate, objects, refused| {
        let choice = Choice {
            level: candidate.level,
            version: candidate.files.version.clone().into_owned(),
            ran,
            refused,
        };
        Ok((objects, choice))
    };

    let mut candidates = vec![of(Level::Current, Extent::Whole)];
    match kept(config, &candidates[0].files) {
        Ok(Some(files)) => {
            candidates.push(Candidate::new(Level::LastGood, files, Extent::Whole));
        }
        Ok(None) => {}
        // Said only where they would have been of use.
        Err(why) => refused.push(why),
    }
    if !ran {
        candidates.push(of(Level::Reduced, Extent::Reduced));
    }
    for candidate in candidates {
        match candidate.load(config, known) {
            Ok(objects) => return chosen(&candidate, objects, refused),
            Err(error) if is_refusal(&error) => {
                let (level, version) = (candidate.level.name(), &candidate.files.version);
                tracing::warn!(level, %version, "the kernel refused programs: {}", Chain(&error));
                refused.push(format!("{level} ({version}): {}", in_a_line(&error)));
            }
            Err(error) => return Err(error),
        }
    }
    let none = of(Level::None, Extent::Maps);
    chosen(&none, none.load(config, known)?, refused)
}

/// The programs that ran last, if they are others than these and of use.
fn kept(config: &DatapathConfig, current: &ObjectFiles) -> Result<Option<ObjectFiles>, String> {
    let Some(path) = &config.last_good else {
        return Ok(None);
    };
    match last_good::read(path) {
        Ok(Some(kept)) if kept == *current => Ok(None),
        Ok(Some(kept)) if kept.layout != current.layout => Err(format!(
            "{} ({}): its maps are laid out in another way",
            Level::LastGood.name(),
            kept.version
        )),
        Ok(kept) => Ok(kept),
        Err(error) => Err(error.to_string()),
    }
}

/// Which program, and the verifier's verdict; the log has all that it said.
pub fn in_a_line(error: &DatapathError) -> String {
    match error {
        DatapathError::Refused {
            program,
            log,
            source,
        } => {
            match verdict(log) {
                Some(verdict) => format!("{program}: {verdict}"),
                // Not the verifier's doing.
                None => format!("{program}: {}", Chain(source.as_ref())),
            }
        }
        other => Chain(other).to_string(),
    }
}

/// The last line of a verifier's log that [ends before its statistics](object::end_of_log).
fn verdict(log: &str) -> Option<&str> {
    let lines = log.lines().map(str::trim);
    lines.rev().find(|line| !line.is_empty())
}

/// Whether the kernel refused it, so that others may do better.
fn is_refusal(error: &DatapathError) -> bool {
    matches!(
        error,
        DatapathError::Refused { .. } | DatapathError::Object { .. }
    )
}

/// Whether an agent of any version had programs on this node since it was booted: each sets the
/// node's settings then, and none without programs does.
pub fn has_run(directory: &Path) -> bool {
    const UNSET: NodeConfig = NodeConfig {
        masquerade_v4: Addr([0; 16]),
        masquerade_v6: Addr([0; 16]),
        nat_port_min: 0,
        nat_port_max: 0,
        flags: 0,
    };
    match maps::config::pinned(directory) {
        None => false,
        Some(Ok(config)) => config != UNSET,
        // What cannot be read is somebody's.
        Some(Err(_)) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::{object::end_of_log, verdict};

    #[test]
    fn the_verdict_is_what_comes_before_the_work_in_whatever_words() {
        let old = "0: (b7) r0 = 0\n1: (0f) r0 += r9\nR9 !read_ok\nverification time 41 usec\nstack depth 0\n\
                   processed 2 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0\n";
        // Linux 7.3 counts by subprogram, too.
        let new = "R9 !read_ok\n\nverification time 41 usec\nstack depth 0+0\n\
                   subprog 0 (pod_in) static insns_self 2 insns_total 2 stack 0\n\
                   subprog 1 (memset) static insns_self 0 insns_total 0 stack 0\nprocessed 2 insns\n";
        for log in [
            old,
            new,
            "R9 !read_ok",
            "R9 !read_ok\nprocessed 2 insns\nmore",
        ] {
            assert_eq!(verdict(&end_of_log(log)), Some("R9 !read_ok"), "{log}");
        }
        for log in [
            "",
            "\n\n",
            "processed 2 insns (limit 1000000)",
            "stack depth 0\nmore",
        ] {
            assert_eq!(verdict(&end_of_log(log)), None, "{log}");
        }
    }
}
