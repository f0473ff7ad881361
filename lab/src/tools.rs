//! Programs that people try a network with, run inside a place: `ping`, `nslookup` and `wget` of busybox, which is one program, and
//! `traceroute`; with others of the machine's own, if it has them.
//!
//! `cargo xtask test` unpacks the first two from Debian's packages where it can, and tells tests where.

use crate::{Place, cni::await_end};
use anyhow::{Context as _, Result};
use std::{
    env,
    ffi::OsStr,
    fs::File,
    io::{Read as _, Seek as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Names the directory that packages were unpacked into.
pub const VARIABLE: &str = "SINABRO_TOOLS_DIR";

/// Longer than any of them takes by itself.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a program wrote to both of its outputs, and whether it said that all is well.
#[derive(Clone, Debug)]
pub struct Said {
    pub text: String,
    pub success: bool,
}

/// A program, and what stands before its arguments.
#[derive(Clone, Debug)]
pub struct Tool {
    program: PathBuf,
    first: Vec<&'static str>,
}

impl Tool {
    /// One of busybox's programs, if that is there.
    pub fn of_busybox(name: &'static str) -> Option<Self> {
        Some(Self {
            program: find("busybox")?,
            first: vec![name],
        })
    }

    /// The one that traces by datagrams, echo requests and SYNs; busybox has another of this name.
    pub fn traceroute() -> Option<Self> {
        let tool = Self {
            program: find("traceroute.db").or_else(|| find("traceroute"))?,
            first: Vec::new(),
        };
        let mut asks = Command::new(&tool.program);
        let said = asks.arg("-V").stdin(Stdio::null()).output().ok()?;
        // By which of its outputs depends on the version.
        let said = [said.stdout, said.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        said.starts_with("Modern traceroute").then_some(tool)
    }

    /// One of the machine's own.
    pub fn of_machine(name: &str) -> Option<Self> {
        Some(Self {
            program: in_dirs(env::split_paths(&env::var_os("PATH")?), name)?,
            first: Vec::new(),
        })
    }

    /// Runs it to its end inside a network.
    pub fn run(&self, place: &Place, arguments: &[impl AsRef<OsStr>]) -> Result<Said> {
        let output = tempfile::tempfile().context("cannot make a file")?;
        let run = || -> Result<Said> {
            let mut command = Command::new(&self.program);
            command.args(&self.first).args(arguments);
            // A file holds all that is written; of a pipe somebody would have to read meanwhile.
            let to = |file: &File| Ok::<_, std::io::Error>(Stdio::from(file.try_clone()?));
            command.stdout(to(&output)?).stderr(to(&output)?);
            place.put(command.stdin(Stdio::null()).env("LC_ALL", "C"));
            let mut child = command.spawn().context("cannot start it")?;
            await_end(&mut child, Instant::now() + DEADLINE)?;
            let success = child.wait()?.success();
            let mut bytes = Vec::new();
            (&output).rewind()?;
            (&output).read_to_end(&mut bytes)?;
            Ok(Said {
                text: String::from_utf8_lossy(&bytes).into_owned(),
                success,
            })
        };
        run().with_context(|| format!("{} in {}", self.program.display(), place.name()))
    }
}

/// Unpacked, or the machine's own.
fn find(name: &str) -> Option<PathBuf> {
    let unpacked = env::var_os(VARIABLE).map(PathBuf::from);
    let dirs = ["usr/bin", "bin", "usr/sbin"];
    let unpacked = unpacked.and_then(|root| in_dirs(dirs.map(|dir| root.join(dir)), name));
    unpacked.or_else(|| in_dirs(env::split_paths(&env::var_os("PATH")?), name))
}

fn in_dirs(dirs: impl IntoIterator<Item = PathBuf>, name: &str) -> Option<PathBuf> {
    let paths = dirs.into_iter().map(|dir: PathBuf| dir.join(name));
    paths.into_iter().find(|path: &PathBuf| Path::is_file(path))
}
