//! The cgroups of the cluster's machines: one per machine in every hierarchy that is mounted.
//!
//! With cgroup v2 alone, a group that hands controllers down may hold no process itself
//! (Documentation/admin-guide/cgroup-v2.rst, "no internal processes"): the machine's programs
//! are then in a group `system` below the machine's, beside the kubelet's `kubepods`.

use anyhow::{Context as _, Result, bail};
use std::{
    fs::{self, File},
    io,
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

pub const MOUNT: &str = "/sys/fs/cgroup";
/// Directory of all the cluster's groups, in each hierarchy.
const TOP: &str = "sinabro-cluster";
pub const SYSTEM: &str = "system";
const PATIENCE: Duration = Duration::from_secs(15);

pub struct Cgroup {
    machine: String,
    /// Roots of the hierarchies; one if there is cgroup v2 alone.
    roots: Vec<PathBuf>,
    unified: bool,
}

/// Whether cgroup v2 is all there is.
pub fn is_unified() -> bool {
    Path::new(MOUNT).join("cgroup.controllers").exists()
}

impl Cgroup {
    pub fn of(machine: &str) -> Result<Self> {
        let unified = is_unified();
        let roots = match unified {
            true => vec![PathBuf::from(MOUNT)],
            false => {
                let mut roots: Vec<PathBuf> = fs::read_dir(MOUNT)
                    .with_context(|| format!("cannot read {MOUNT}"))?
                    .map(|entry| Ok(entry?.path()))
                    .collect::<io::Result<_>>()?;
                // Some are links to others: cpu and cpuacct to cpu,cpuacct.
                roots.retain(|root| !root.is_symlink() && root.join("cgroup.procs").exists());
                roots.sort();
                roots
            }
        };
        if roots.is_empty() {
            bail!("no cgroup hierarchy is mounted below {MOUNT}");
        }
        Ok(Self {
            machine: machine.into(),
            roots,
            unified,
        })
    }

    pub fn make(&self) -> Result<()> {
        for root in &self.roots {
            let mut path = root.clone();
            for part in [TOP, &self.machine] {
                if self.unified {
                    hand_down(&path)?;
                }
                let parent = path.clone();
                path.push(part);
                make_dir(&path)?;
                // A cpuset begins empty and takes no process before it has these.
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let (from, to) = (parent.join(file), path.join(file));
                    if !self.unified && to.exists() {
                        fs::copy(&from, &to)
                            .with_context(|| format!("cannot write {}", to.display()))?;
                    }
                }
            }
            if self.unified {
                make_dir(&path.join(SYSTEM))?;
            }
        }
        Ok(())
    }

    /// What the machine sees as the root of each hierarchy.
    pub fn machines(&self) -> Vec<PathBuf> {
        self.roots
            .iter()
            .map(|root| self.of_machine(root))
            .collect()
    }

    fn of_machine(&self, root: &Path) -> PathBuf {
        root.join(TOP).join(&self.machine)
    }

    fn of_programs(&self, root: &Path) -> PathBuf {
        let machine = self.of_machine(root);
        if self.unified {
            machine.join(SYSTEM)
        } else {
            machine
        }
    }

    /// Has the machine's first command start in the groups that are to be the roots of what the
    /// machine sees; [`Self::settle`] moves it on.
    pub fn found(&self, command: &mut Command) -> Result<()> {
        start_in(self.roots.iter().map(|root| self.of_machine(root)), command)
    }

    /// Moves the machine's first processes to where its other programs are.
    pub fn settle(&self, pids: &[i32]) -> Result<()> {
        for root in &self.roots {
            let file = self.of_programs(root).join("cgroup.procs");
            for pid in pids {
                fs::write(&file, pid.to_string())
                    .with_context(|| format!("cannot write {}", file.display()))?;
            }
        }
        Ok(())
    }

    /// Has a command start where the machine's programs are.
    pub fn join(&self, command: &mut Command) -> Result<()> {
        start_in(
            self.roots.iter().map(|root| self.of_programs(root)),
            command,
        )
    }

    /// Takes the machine's groups away, and the common one with the last machine.
    pub fn remove(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        for root in &self.roots {
            let path = self.of_machine(root);
            // A killed process leaves its group a moment after it is gone.
            while let Err(error) = remove_tree(&path) {
                if Instant::now() > deadline {
                    return Err(error)
                        .with_context(|| format!("cannot remove cgroup {}", path.display()));
                }
                thread::sleep(Duration::from_millis(20));
            }
            let _ = fs::remove_dir(root.join(TOP));
        }
        Ok(())
    }
}

fn start_in(groups: impl Iterator<Item = PathBuf>, command: &mut Command) -> Result<()> {
    let files: Vec<File> = groups
        .map(|group| {
            let path = group.join("cgroup.procs");
            File::options()
                .write(true)
                .open(&path)
                .with_context(|| format!("cannot open {}", path.display()))
        })
        .collect::<Result<_>>()?;
    // SAFETY: write(2) is async-signal-safe; the files live as long as the closure.
    unsafe {
        command.pre_exec(move || {
            for file in &files {
                // Zero is the process that writes.
                if libc::write(file.as_raw_fd(), c"0".as_ptr().cast(), 1) != 1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    Ok(())
}

fn make_dir(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make cgroup {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Gives a group's children all controllers that it has itself.
fn hand_down(path: &Path) -> Result<()> {
    let controllers = fs::read_to_string(path.join("cgroup.controllers"))?;
    for controller in controllers.split_whitespace() {
        // One that is bound to a v1 hierarchy or cannot be delegated is done without.
        let _ = fs::write(
            path.join("cgroup.subtree_control"),
            format!("+{controller}"),
        );
    }
    Ok(())
}

fn remove_tree(path: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}
