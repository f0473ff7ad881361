//! What is put into every machine: the programs that users get, process 1, the data path's tests.

use super::{initrd::Archive, run::Run};
use crate::{
    build,
    workspace::{cargo_with_ebpf, dist, output, run as show, target, which},
};
use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use sinabro_guest::{BIN_DIR, DATAPATH_SUITE, REFUSING_AGENT, Step};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

pub struct Programs {
    /// Without busybox, which nothing but a person needs.
    pub archive: Archive,
}

impl Programs {
    /// Builds them; `dir` has those that users get, if they are built already.
    pub fn build(dir: Option<&Path>) -> Result<Self> {
        let dir = match dir {
            Some(dir) => dir.to_owned(),
            None => {
                build::release()?;
                dist()
            }
        };
        let mut cargo = cargo_with_ebpf();
        show(cargo.args(["build", "--package", "sinabro-guest"]))
            .context("cannot build what runs in the machines")?;
        let suite = suite()?;
        let mut archive = Archive::new();
        put(&mut archive, "/init", &target().join("debug/sinabro-guest"))?;
        put(&mut archive, &format!("{BIN_DIR}/{DATAPATH_SUITE}"), &suite)?;
        for (name, _) in build::PROGRAMS {
            put(&mut archive, &format!("{BIN_DIR}/{name}"), &dir.join(name))?;
        }
        Ok(Self { archive })
    }

    pub fn with_busybox(self) -> Result<Archive> {
        let mut archive = self.archive;
        let busybox = which("busybox").context("there is no busybox")?;
        put(&mut archive, "/bin/busybox", &busybox)?;
        archive.file(
            "/etc/profile",
            b"/bin/busybox --install -s /bin 2>/dev/null\ncat <<'END'\n\
            Sinabro's programs are in /bin; `exit` ends the machine, Ctrl-A X at once.\nEND\n",
        );
        Ok(archive)
    }
}

/// What machines have in their file systems.
pub struct Archives {
    common: Vec<u8>,
    /// If a step needs them.
    refusing: Option<Vec<u8>>,
    ip: Option<Vec<u8>>,
}

impl Archives {
    /// What a machine needs that takes these steps.
    pub fn of(&self, steps: &[Step]) -> Vec<&[u8]> {
        let refusing = self.refusing.iter().filter(|_| refuses(steps));
        let ip = self.ip.iter().filter(|_| calls_ip(steps));
        let all = [&self.common].into_iter().chain(refusing).chain(ip);
        all.map(Vec::as_slice).collect()
    }
}

fn refuses(steps: &[Step]) -> bool {
    let needs = |step: &Step| matches!(step, Step::Refused | Step::AllRefused);
    steps.iter().any(needs)
}

/// Some of the data path's tests change routes and neighbours by it.
fn calls_ip(steps: &[Step]) -> bool {
    let needs = |step: &Step| matches!(step, Step::Datapath { thorough: true });
    steps.iter().any(needs)
}

/// Builds what these machines need.
pub fn archives(dir: Option<&Path>, runs: &[Run<'_>]) -> Result<Archives> {
    let common = Programs::build(dir)?.archive.finish();
    let is_needed = |needs: fn(&[Step]) -> bool| {
        let mut boots = runs.iter().flat_map(|run| &run.boots);
        boots.any(|boot| needs(&boot.steps))
    };
    Ok(Archives {
        common,
        refusing: is_needed(refuses).then(refusing).transpose()?,
        ip: is_needed(calls_ip).then(ip).transpose()?,
    })
}

fn ip() -> Result<Vec<u8>> {
    let program = which("ip").context("there is no ip, of the package iproute2")?;
    let mut archive = Archive::default();
    put(&mut archive, &format!("{BIN_DIR}/ip"), &program)?;
    Ok(archive.finish())
}

/// The agent that the lab's tests start: only a debug build has its programs refused.
fn refusing() -> Result<Vec<u8>> {
    let mut cargo = cargo_with_ebpf();
    show(cargo.args([
        "build",
        "--package",
        "sinabro-agent",
        "--bin",
        "sinabro-agent",
    ]))
    .context("cannot build the agent")?;
    let mut archive = Archive::default();
    let path = format!("{BIN_DIR}/{REFUSING_AGENT}");
    put(&mut archive, &path, &target().join("debug/sinabro-agent"))?;
    Ok(archive.finish())
}

/// The tests' program, as cargo names it.
fn suite() -> Result<PathBuf> {
    let mut cargo = cargo_with_ebpf();
    cargo.args([
        "test",
        "--no-run",
        "--package",
        "sinabro-agent",
        "--test",
        "datapath",
    ]);
    let said =
        output(cargo.args(["--message-format", "json"])).context("cannot build the tests")?;
    let messages = said
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let executables = messages.filter(|message| message["target"]["name"] == "datapath");
    let path = executables
        .filter_map(|message| Some(message["executable"].as_str()?.into()))
        .next();
    path.context("cargo names no program of the tests")
}

fn put(archive: &mut Archive, path: &str, program: &Path) -> Result<()> {
    let libraries = libraries(program)?;
    let stripped = tempfile::NamedTempFile::new()?;
    let mut strip = Command::new("strip");
    output(strip.arg("-o").arg(stripped.path()).arg(program))?;
    archive.program(path, &fs::read(stripped.path())?, &libraries)
}

/// What ldd(1) says that a program is linked with; none for a static one.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let ldd = Command::new("ldd")
        .arg(program)
        .output()
        .context("cannot run ldd")?;
    let said = String::from_utf8_lossy(&ldd.stdout);
    if !ldd.status.success() {
        let complaint = String::from_utf8_lossy(&ldd.stderr);
        if said.contains("not a dynamic") || complaint.contains("not a dynamic") {
            return Ok(Vec::new());
        }
        bail!("ldd {}: {}", program.display(), complaint.trim());
    }
    listed(&said)
}

/// `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, or the loader's path alone.
fn listed(ldd: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in ldd.lines() {
        if line.contains("not found") {
            bail!("a library is missing: {}", line.trim());
        }
        let path = line.split_whitespace().find(|word| word.starts_with('/'));
        found.extend(path.map(PathBuf::from));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_a_path() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n\tstatically linked\n";
        let found = listed(ldd).unwrap();
        let paths = [
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert_eq!(found, paths.map(PathBuf::from));
        assert!(listed("\tlibx.so => not found\n").is_err());
    }
}
