//! One start of a test program, as cargo would have it.

use super::lane::{self, Lane};
use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    env,
    ffi::{OsStr, OsString},
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// A program as cargo would have started it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Call {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub dir: PathBuf,
    pub environment: Vec<(OsString, OsString)>,
    /// Which of its tests, if not all.
    part: String,
    /// How many of them at once.
    pub threads: Option<usize>,
}

impl Call {
    /// What cargo asks this process for.
    pub fn of(program: &Path, arguments: impl Iterator<Item = OsString>) -> Result<Self> {
        Ok(Self {
            program: program.to_path_buf(),
            arguments: arguments.collect(),
            dir: env::current_dir()?,
            environment: env::vars_os().collect(),
            part: String::new(),
            threads: None,
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

    /// As `lab/nodes`, as two packages may have targets of one name; and which of its tests.
    pub fn label(&self) -> String {
        let package = self.dir.file_name().unwrap_or_default();
        let package = package.to_string_lossy();
        format!("{package}/{}{}", self.name(), self.part)
    }

    /// The target's, as cargo knows it: cargo adds a hash.
    fn name(&self) -> &str {
        let name = self.program.file_name().and_then(OsStr::to_str);
        let name = name.and_then(|name| name.rsplit_once('-'));
        name.map_or("", |(name, _)| name)
    }

    /// The paths of the tests that it runs, as [`Lane::of`] takes them.
    pub fn tests(&self) -> Result<Vec<String>> {
        let mut command = Command::new(&self.program);
        let pairs = self.environment.iter().map(|(name, value)| (name, value));
        command.envs(pairs).current_dir(&self.dir);
        command
            .args(&self.arguments)
            .args(["--list", "--format", "terse"]);
        let output = command.output();
        let output = output.with_context(|| format!("cannot start {}", self.program.display()))?;
        ensure!(
            output.status.success(),
            "{} does not list its tests: {}",
            self.program.display(),
            String::from_utf8_lossy(&output.stderr)
        );
        let listed = String::from_utf8_lossy(&output.stdout);
        let names = listed
            .lines()
            .filter_map(|line| line.strip_suffix(": test"));
        Ok(names
            .map(|name| format!("{}::{name}", self.name()))
            .collect())
    }

    /// What of it is in a lane, if any of its tests are there.
    pub fn part(&self, lane: Lane, tests: &[String]) -> Option<Self> {
        let inside = tests.iter().map(String::as_str);
        let inside: Vec<_> = inside.filter(|test| Lane::of(test) == lane).collect();
        let mut part = self.clone();
        if inside.len() < tests.len() {
            part.part = format!(" {lane:?}").to_lowercase();
            part.arguments.push("--exact".into());
            let names = inside.iter().filter_map(|test| test.split_once("::"));
            part.arguments.extend(names.map(|(_, name)| name.into()));
        }
        part.threads = lane::at_once(inside.iter().copied());
        part.threads.is_some().then_some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
