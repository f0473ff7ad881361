//! What an agent's self-test of the kernel's TCP has found, handed on to the nodes that come after.
//!
//! The test takes seconds of every new node, finds the same on all of one machine, and few tests are
//! about it. A run of tests names a directory by [`VARIABLE`], in which reports are kept for its time;
//! without, as in demos and benchmarks, every node looks for itself. An agent takes a report only if
//! it was made in this boot, by this kernel and with its own programs, so a wrong one does no harm.

use anyhow::{Context as _, Result};
use sinabro_common::names;
use std::{
    env,
    ffi::OsStr,
    fs::{self, DirBuilder},
    io::{ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};
use tempfile::NamedTempFile;

/// The variable with the directory, which has to be there.
pub const VARIABLE: &str = "SINABRO_LAB_SELF_TESTS";

/// Gives a node on which no agent has run yet what an earlier one of this program has found, if that
/// is known.
///
/// # Errors
/// If it cannot be written.
pub fn give(agent: &Path, state_dir: &Path) -> Result<()> {
    match env::var_os(VARIABLE) {
        Some(dir) => give_from(&dir, agent, state_dir),
        None => Ok(()),
    }
}

/// Keeps what the agent that serves on a node has found.
///
/// # Errors
/// If it cannot be written.
pub fn keep(agent: &Path, state_dir: &Path) -> Result<()> {
    match env::var_os(VARIABLE) {
        Some(dir) => keep_in(&dir, agent, state_dir),
        None => Ok(()),
    }
}

fn give_from(dir: &OsStr, agent: &Path, state_dir: &Path) -> Result<()> {
    let report = match fs::read(kept(dir, agent)?) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => read.context("cannot read a self-test's report")?,
    };
    let write = || {
        // As the agent makes it.
        let mut make = DirBuilder::new();
        make.recursive(true).mode(0o700).create(state_dir)?;
        fs::write(state_dir.join(names::SELF_TEST_FILE), &report)
    };
    write().with_context(|| format!("cannot write into {}", state_dir.display()))
}

fn keep_in(dir: &OsStr, agent: &Path, state_dir: &Path) -> Result<()> {
    let kept = kept(dir, agent)?;
    let found = state_dir.join(names::SELF_TEST_FILE);
    if kept.exists() || !found.exists() {
        return Ok(());
    }
    // Whole at once: other tests read it.
    let mut file = NamedTempFile::new_in(dir).context("cannot keep a self-test's report")?;
    file.write_all(&fs::read(&found)?)?;
    file.persist(&kept)?;
    Ok(())
}

/// Where the report of a program is. Programs of several states of the project have tests in common.
fn kept(dir: &OsStr, agent: &Path) -> Result<PathBuf> {
    let of = fs::metadata(agent).with_context(|| format!("cannot find {}", agent.display()))?;
    let name = format!("{}-{}-{}", of.ino(), of.mtime(), of.mtime_nsec());
    Ok(Path::new(dir).join(name))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_report_goes_from_node_to_node_of_one_program() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (kept, file) = (at("kept"), names::SELF_TEST_FILE);
        fs::create_dir(&kept).unwrap();
        for name in ["agent", "another"] {
            fs::write(at(name), name).unwrap();
        }
        let give = |agent: &str, to: &str| give_from(kept.as_os_str(), &at(agent), &at(to));
        let keep = |agent: &str, of: &str| keep_in(kept.as_os_str(), &at(agent), &at(of));

        // None yet, and one that made none.
        give("agent", "first").unwrap();
        keep("agent", "first").unwrap();
        assert!(!at("first").exists());
        fs::create_dir(at("first")).unwrap();
        fs::write(at("first").join(file), "found").unwrap();
        keep("agent", "first").unwrap();
        give("agent", "second/state").unwrap();
        let given = at("second/state");
        assert_eq!(fs::read(given.join(file)).unwrap(), b"found");
        assert_eq!(fs::metadata(&given).unwrap().mode() & 0o7777, 0o700);
        give("another", "third").unwrap();
        assert!(!at("third").exists());
        assert_eq!(fs::read_dir(&kept).unwrap().count(), 1);
        assert!(give("none", "third").is_err());
    }
}
