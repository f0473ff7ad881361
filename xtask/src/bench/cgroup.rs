//! A cgroup for each node with an agent. Agents attach programs on sockets to the root, unless they are told otherwise,
//! and so all of a bench's would run for every socket of every subject.
//!
//! ```text
//! sinabro-bench-PID   this process, but
//!   n1, n2, …         its threads that play pods of these nodes
//! ```

use super::agent_help;
use crate::{interrupt, workspace::output};
use anyhow::{Context as _, Result, ensure};
use sinabro_lab::{Cgroup, Lab, Node, Place, holder, residue::bpf};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
    thread,
    time::Duration,
};

/// The cgroups of who reads it.
const OWN: &str = "/proc/thread-self/cgroup";

/// They go with it.
pub struct Cgroups(Tree);

/// Where they are to be.
#[derive(Clone)]
pub struct Tree {
    /// Where cgroup v2 is mounted, and where this process was.
    mount: PathBuf,
    before: PathBuf,
    /// Where it is meanwhile.
    top: PathBuf,
}

impl Tree {
    /// From now on Ctrl-C ends what the lab has started, does something else, and removes them.
    pub fn new(undo: fn()) -> Result<Self> {
        let tree = Self::find()?;
        let made = tree.clone();
        interrupt::on_interrupt(move || {
            holder::end_all();
            undo();
            made.remove();
        })?;
        Ok(tree)
    }

    fn find() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let mount = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let point = fields.next()?;
            (fields.next()? == "cgroup2").then(|| PathBuf::from(point))
        });
        let mount = mount.context("no cgroup v2 is mounted: mount one, see mount(8)")?;
        Ok(Self {
            before: mount.join(below_mount(&fs::read_to_string(OWN)?)?),
            top: mount.join(format!("sinabro-bench-{}", process::id())),
            mount,
        })
    }

    /// Moves this process to where nodes' cgroups can be made.
    pub fn make(self) -> Result<Cgroups> {
        let top = self.top.clone();
        fs::create_dir(&top).with_context(|| format!("cannot make {}", top.display()))?;
        let cgroups = Cgroups(self);
        move_to(&top)?;
        Ok(cgroups)
    }

    /// Moves this process to where it was, and removes them all. Whoever is still in them is killed.
    fn remove(&self) {
        // Where it was may be gone, as it was empty meanwhile.
        let moved = move_to(&self.before).or_else(|_| move_to(&self.mount));
        if moved.is_err() {
            return;
        }
        // Known to Linux 5.14 and newer.
        let _ = fs::write(self.top.join("cgroup.kill"), "1");
        // What ends leaves its cgroup a moment later.
        for _ in 0..50 {
            for entry in fs::read_dir(&self.top).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(entry.path());
            }
            if fs::remove_dir(&self.top).is_ok() || !self.top.exists() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Cgroups {
    /// Gives a node its own, before its agent is started and its pods are made. Earlier agents that take none keep to the
    /// root.
    pub fn give(&self, node: &Node) -> Result<()> {
        if !takes_one(node)? {
            return Ok(());
        }
        let path = self.of(node);
        fs::create_dir(&path)
            .and_then(|()| fs::write(path.join("cgroup.type"), "threaded"))
            .with_context(|| format!("cannot make {}", path.display()))?;
        node.set_cgroup(Cgroup::open(&path)?);
        Ok(())
    }

    fn of(&self, node: &Node) -> PathBuf {
        self.0.top.join(node.name())
    }

    /// An error unless the programs on sockets that run at a place are those of its own node's agent, or none if it has
    /// no agent.
    pub fn verify(&self, lab: &Lab, place: &Place) -> Result<()> {
        let mut nodes = lab.nodes().iter();
        let node = nodes.find(|node| node.has(place) && node.agent_pid().is_some());
        if let Some(node) = node
            && !takes_one(node)?
        {
            return Ok(());
        }
        let expected = node.map_or_else(|| self.0.top.clone(), |node| self.of(node));
        let mut program = Command::new("cat");
        place.put(&mut program);
        let program = output(program.arg(OWN))?;
        let thread = place.run(|| Ok(fs::read_to_string(OWN)?))?;
        for text in [program, thread] {
            let found = self.0.mount.join(below_mount(&text)?);
            ensure!(
                found == expected,
                "{} is in the cgroup {} instead of {}",
                place.name(),
                found.display(),
                expected.display()
            );
        }
        let programs = bpf::all_on_cgroup(&expected)?;
        match node {
            None => ensure!(
                programs.is_empty(),
                "{programs:?} run for sockets of {}",
                place.name()
            ),
            Some(node) => ensure!(
                !programs.is_empty() || !has_programs(node)?,
                "the programs on sockets of {} are not on {}",
                node.name(),
                expected.display()
            ),
        }
        Ok(())
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        self.0.remove();
    }
}

fn takes_one(node: &Node) -> Result<bool> {
    Ok(agent_help(node)?.contains("--cgroup-dir "))
}

/// Whether a node's agent has attached any to whichever cgroup.
fn has_programs(node: &Node) -> Result<bool> {
    let modes = node.status()?.modes;
    Ok(modes.values().any(|mode| mode.starts_with("on, cgroup ")))
}

fn move_to(path: &Path) -> Result<()> {
    fs::write(path.join("cgroup.procs"), "0")
        .with_context(|| format!("cannot join the cgroup {}", path.display()))
}

/// The cgroup of version 2, of what [`OWN`] says.
fn below_mount(text: &str) -> Result<&str> {
    let own = text.lines().find_map(|line| line.strip_prefix("0::/"));
    own.context("this process is in no cgroup of version 2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_version_2_is_read_beside_those_of_version_1() {
        let text = "5:devices:/a\n1:name=systemd:/b\n0::/user.slice/c\n";
        assert_eq!(below_mount(text).unwrap(), "user.slice/c");
        // The root itself.
        assert_eq!(
            Path::new("/m").join(below_mount("0::/").unwrap()),
            Path::new("/m/")
        );
        assert!(below_mount("5:devices:/a\n").is_err());
    }
}
