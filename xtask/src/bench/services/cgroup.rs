//! A cgroup for each node, in which this process is while it plays the node's pods: otherwise every node's
//! programs on sockets would see every connection.

use anyhow::{Context as _, Result};
use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

const DIR: &str = "sinabro-bench";

/// They go with it.
pub struct Cgroups(Tree);

/// Where they are.
#[derive(Clone)]
pub struct Tree {
    /// Where cgroup v2 is mounted, and where this process was.
    mount: PathBuf,
    before: PathBuf,
}

impl Cgroups {
    pub fn new() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let mount = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let point = fields.next()?;
            (fields.next()? == "cgroup2").then(|| PathBuf::from(point))
        });
        let mount = mount.context("no cgroup v2 is mounted: mount one, see mount(8)")?;
        let of_process = fs::read_to_string("/proc/self/cgroup")?;
        let own = of_process
            .lines()
            .find_map(|line| line.strip_prefix("0::/"));
        let before = mount.join(own.context("this process is in no cgroup of version 2")?);
        Ok(Self(Tree { mount, before }))
    }

    /// Where they are, for who ends this process before its time.
    pub fn tree(&self) -> Tree {
        self.0.clone()
    }

    /// Makes the cgroup of a node.
    pub fn make(&self, node: &str) -> Result<PathBuf> {
        let path = self.of(node);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    fn of(&self, node: &str) -> PathBuf {
        self.0.mount.join(DIR).join(node)
    }

    /// Moves this process: sockets that it makes from here on are the node's.
    pub fn enter(&self, node: &str) -> Result<()> {
        join(&self.of(node))
    }

    /// Moves this process to where it was: its sockets are no node's.
    pub fn leave(&self) -> Result<()> {
        join(&self.0.before)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        self.0.remove();
    }
}

impl Tree {
    /// Moves this process out, and removes them all: who else was in them has ended by then, or is about to.
    pub fn remove(&self) {
        let _ = join(&self.before);
        let top = self.mount.join(DIR);
        for entry in fs::read_dir(&top).into_iter().flatten().flatten() {
            let _ = remove(&entry.path());
        }
        let _ = remove(&top);
    }
}

fn join(path: &Path) -> Result<()> {
    fs::write(path.join("cgroup.procs"), "0")
        .with_context(|| format!("cannot join the cgroup {}", path.display()))
}

/// What has ended leaves its cgroup a moment later.
fn remove(path: &Path) -> io::Result<()> {
    let mut result = Ok(());
    for _ in 0..50 {
        result = fs::remove_dir(path);
        match &result {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                thread::sleep(Duration::from_millis(20));
            }
            _ => break,
        }
    }
    result
}
