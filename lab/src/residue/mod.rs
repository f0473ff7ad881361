//! What Sinabro leaves on a machine: links, routes, nftables' tables, namespaces, eBPF programs with
//! their links and maps, pins, cgroups, mounts, files, processes.
//!
//! A [`Snapshot`] lists them outside of all labs. [`Snapshot::ours`] picks what bears one of our
//! names; [`Snapshot::since`] what has come since an earlier one. Other software goes on with
//! its own links, mounts and processes meanwhile, so of those only our names count, and those of
//! programs that our tests and clusters start.
//!
//! Several runs may go on beside each other on a machine. A thing that bears a [mark](run) is blamed on the run of
//! that mark alone, also once that has ended. What a process without a mark holds, which somebody else looks after, is
//! nobody's: a test that was started by hand. One without a mark is blamed on every run in which it came.

pub mod bpf;
pub mod run;

use crate::wait::wait_within;
use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use sinabro_common::names;
use sinabro_netlink::{Conn, route::RouteFilter};
use std::{
    collections::BTreeSet,
    fmt, fs,
    os::unix::fs::DirEntryExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// The kernel takes namespaces apart some time after their last user is gone; on a busy machine
/// a killed process, too, needs a processor to end.
const SETTLE: Duration = Duration::from_secs(15);

/// What kind of thing is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    Link,
    Route,
    /// Of nftables.
    Table,
    Namespace,
    Program,
    /// Attaches a program.
    BpfLink,
    Map,
    Pin,
    Cgroup,
    Mount,
    File,
    Process,
}

impl Kind {
    pub const ALL: [Self; 12] = [
        Self::Link,
        Self::Route,
        Self::Table,
        Self::Namespace,
        Self::Program,
        Self::BpfLink,
        Self::Map,
        Self::Pin,
        Self::Cgroup,
        Self::Mount,
        Self::File,
        Self::Process,
    ];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Link => "link",
            Self::Route => "route",
            Self::Table => "nftables table",
            Self::Program => "eBPF program",
            Self::BpfLink => "eBPF link",
            Self::Map => "eBPF map",
            Self::Namespace => "namespace",
            Self::Pin => "pin",
            Self::Cgroup => "cgroup",
            Self::Mount => "mount",
            Self::File => "file",
            Self::Process => "process",
        })
    }
}

/// One thing and its name: a link's, a path, or a process's name and id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Item {
    pub kind: Kind,
    pub name: String,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

impl Item {
    fn is_ours(&self) -> bool {
        let last = self.name.rsplit('/').next().unwrap_or(&self.name);
        match self.kind {
            Kind::Link => names::is_pod_link(&self.name) || self.name.starts_with("sinabro"),
            Kind::Namespace | Kind::Cgroup | Kind::File => last.starts_with("sinabro"),
            Kind::Pin | Kind::Mount => self.name.contains("/sinabro"),
            // Only ours are listed.
            Kind::Route | Kind::Program | Kind::BpfLink | Kind::Map => true,
            Kind::Table => last.contains("sinabro"),
            Kind::Process => OURS.contains(&self.program()),
        }
    }

    /// Of a process.
    fn program(&self) -> &str {
        let name = self.name.rsplit_once(" (");
        name.map_or(self.name.as_str(), |(program, _)| program)
    }

    /// New while nobody else has a reason to make such a thing: likely ours, whatever its name.
    fn is_suspect(&self) -> bool {
        match self.kind {
            Kind::Namespace | Kind::Pin | Kind::Table => true,
            Kind::Process => STARTED.contains(&self.program()),
            _ => false,
        }
    }
}

/// Processes by the names that the kernel has of them, 15 characters at most.
const OURS: [&str; 5] = [
    "sinabro",
    "sinabro-agent",
    "sinabro-lab",
    "sinabro-node",
    "sinabroctl",
];
/// Others' programs that tests, benchmarks and clusters start.
const STARTED: [&str; 18] = [
    "agnhost",
    "containerd",
    "containerd-shim",
    "coredns",
    "e2e.test",
    "etcd",
    "ginkgo",
    "iperf3",
    "kube-apiserver",
    "kube-controller",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "nginx",
    "pause",
    "runc",
    "wrk",
];

/// What there is at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    items: BTreeSet<Item>,
    /// Processes that somebody else started and still looks after.
    attended: BTreeSet<Item>,
    /// Marks of runs; several may hold one thing.
    runs: BTreeSet<(Item, String)>,
}

impl Snapshot {
    /// Looks around. Needs root to see everything.
    pub fn take() -> Result<Self> {
        Self::take_for(std::process::id())
    }

    /// The same in the place of another process, which has not the right to look.
    pub fn take_for(own: u32) -> Result<Self> {
        let mut items = BTreeSet::new();
        let mut attended = BTreeSet::new();
        let mut runs = BTreeSet::new();
        let processes: Vec<_> = entries(Path::new("/proc"))
            .filter_map(|dir| process(&dir))
            .collect();
        let parents = processes.iter().map(|(pid, parent, _)| (*pid, *parent));
        let parents = parents.collect();
        let marks = run::of_processes(&parents);
        let mut add = |kind, name: String| {
            items.insert(Item { kind, name });
        };
        for link in Conn::new()?.links().context("cannot list links")? {
            add(Kind::Link, link.name);
        }
        let filter = RouteFilter {
            protocol: Some(names::ROUTE_PROTOCOL),
            ..RouteFilter::default()
        };
        for route in Conn::new()?.routes(&filter).context("cannot list routes")? {
            add(
                Kind::Route,
                format!("{} in table {}", route.dst, route.table),
            );
        }
        for table in tables() {
            add(Kind::Table, table);
        }
        if let Some(objects) = bpf::objects() {
            let kinds = [
                (Kind::Program, objects.programs),
                (Kind::BpfLink, objects.links),
                (Kind::Map, objects.maps),
            ];
            let held = bpf::held(&run::holders(&marks, &parents, own));
            for (kind, objects) in kinds {
                for (name, programs) in objects {
                    let of = programs.iter().filter_map(|program| held.get(program));
                    for mark in of.flatten() {
                        let name = name.clone();
                        runs.insert((Item { kind, name }, mark.clone()));
                    }
                    add(kind, name);
                }
            }
        }
        for dir in ["/run/netns", "/var/run/netns"] {
            entries(Path::new(dir)).for_each(|path| add(Kind::Namespace, text(&path)));
        }
        for (path, filesystem) in mounts()? {
            match filesystem.as_str() {
                "bpf" => walk(&path, u32::MAX, &mut |pin| add(Kind::Pin, text(pin))),
                // The lab's and the agent's are near the root; a deep walk would be slow.
                "cgroup" | "cgroup2" => walk(&path, 2, &mut |group| {
                    let (kind, name) = (Kind::Cgroup, text(group));
                    let item = Item { kind, name };
                    if item.is_ours() {
                        let of = run::of_cgroup(group, &marks);
                        runs.extend(of.into_iter().map(|mark| (item.clone(), mark)));
                    }
                    add(kind, item.name);
                }),
                _ => {}
            }
            add(Kind::Mount, text(&path));
        }
        for dir in ["/run", "/tmp"] {
            entries(Path::new(dir)).for_each(|path| add(Kind::File, text(&path)));
        }
        for (pid, parent, name) in processes {
            let kind = Kind::Process;
            let item = Item { kind, name };
            if let Some(mark) = marks.get(&pid) {
                runs.insert((item.clone(), mark.clone()));
            } else if run::is_attended(parent, own) {
                attended.insert(item.clone());
            }
            add(kind, item.name);
        }
        Ok(Self {
            items,
            attended,
            runs,
        })
    }

    /// The marks of the runs that a thing is of.
    pub fn runs(&self, item: &Item) -> Vec<&str> {
        let of_item = self.runs.iter().filter(|(of, _)| of == item);
        of_item.map(|(_, mark)| mark.as_str()).collect()
    }

    /// What bears one of our names.
    pub fn ours(&self) -> Vec<Item> {
        self.items
            .iter()
            .filter(|item| item.is_ours())
            .cloned()
            .collect()
    }

    /// What is here, was not there before, is likely ours, and of no other run.
    pub fn since(&self, before: &Self) -> Vec<Item> {
        self.of_run(run::own().as_deref(), before)
    }

    fn of_run(&self, own: Option<&str>, before: &Self) -> Vec<Item> {
        let is_others = |item: &Item| {
            let runs = self.runs(item);
            !runs.is_empty() && !runs.contains(&own.unwrap_or(run::UNMARKED))
        };
        self.items
            .difference(&before.items)
            .filter(|item| !self.attended.contains(item))
            .filter(|item| item.is_ours() || item.is_suspect())
            .filter(|item| !is_others(item))
            .cloned()
            .collect()
    }
}

/// What is left of what came since `before`, once the kernel has had time to clean up.
pub fn left_since(before: &Snapshot) -> Result<Vec<Item>> {
    left(before, Snapshot::take)
}

/// The same with another way to look.
pub fn left(before: &Snapshot, look: impl Fn() -> Result<Snapshot>) -> Result<Vec<Item>> {
    let mut left: Option<Vec<Item>> = None;
    let settled = wait_within(SETTLE, "the kernel to clean up", || {
        let mut now = look()?.since(before);
        // What is left stays; what other runs make and take away meanwhile does not.
        now.retain(|item| left.as_ref().is_none_or(|left| left.contains(item)));
        let is_over = now.is_empty();
        left = Some(now);
        Ok(is_over.then_some(()))
    });
    match left {
        // That something is left is an answer.
        Some(left) => Ok(left),
        None => settled.map(|()| Vec::new()),
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A directory's entries; none if it cannot be read.
fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

fn walk(dir: &Path, depth: u32, found: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let path = entry.path();
        // A cgroup's own files are not things left behind; pins have no inode of a directory.
        let is_control_file = !is_dir && depth != u32::MAX;
        if !is_control_file && entry.ino() != 0 {
            found(&path);
        }
        if is_dir && depth > 1 {
            walk(&path, depth - 1, found);
        }
    }
}

/// Tables of nftables in this network namespace, as `FAMILY NAME`; none where there is no nft.
fn tables() -> Vec<String> {
    let listed = Command::new("nft").args(["list", "tables"]).output();
    let text = listed.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| Some(line.strip_prefix("table ")?.to_owned()))
        .collect()
}

/// Mount points and file system types of this mount namespace (proc_pid_mountinfo(5)).
fn mounts() -> Result<Vec<(PathBuf, String)>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot list mounts")?;
    Ok(table
        .lines()
        .filter_map(|line| {
            let (mount, filesystem) = line.split_once(" - ")?;
            let path = mount.split(' ').nth(4)?;
            let kind = filesystem.split(' ').next()?;
            Some((PathBuf::from(path), kind.to_string()))
        })
        .collect())
}

/// The ids of a process that still runs and of its parent, and `NAME (PID)` (proc_pid_stat(5)).
fn process(dir: &Path) -> Option<(u32, u32, String)> {
    let pid: u32 = dir.file_name()?.to_str()?.parse().ok()?;
    let stat = fs::read_to_string(dir.join("stat")).ok()?;
    // A name may contain anything, brackets too.
    let (start, end) = (stat.find('(')?, stat.rfind(')')?);
    let mut rest = stat[end + 1..].split_ascii_whitespace();
    // A zombie holds nothing any more, it only waits to be noticed.
    if rest.next()? == "Z" {
        return None;
    }
    let parent = rest.next()?.parse().ok()?;
    Some((pid, parent, format!("{} ({pid})", &stat[start + 1..end])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(kind: Kind, name: &str) -> Item {
        Item {
            kind,
            name: name.into(),
        }
    }

    #[test]
    fn our_names_are_told_from_others() {
        for (kind, name) in [
            (Kind::Link, "snb0123456789ab"),
            (Kind::Link, "sinabro_vxlan"),
            (Kind::File, "/run/sinabro"),
            (Kind::Pin, "/sys/fs/bpf/sinabro/links/host-in"),
            (Kind::Process, "sinabro-agent (12)"),
        ] {
            assert!(item(kind, name).is_ours(), "{kind} {name}");
        }
        for (kind, name) in [
            (Kind::Link, "eth0"),
            (Kind::Link, "snb-other"),
            (Kind::File, "/run/systemd"),
            (Kind::Process, "sinabro-agentx (12)"),
        ] {
            assert!(!item(kind, name).is_ours(), "{kind} {name}");
        }
    }

    #[test]
    fn only_what_is_new_and_ours_counts() {
        let old = Snapshot {
            items: BTreeSet::from([item(Kind::Link, "sinabro_vxlan")]),
            ..Snapshot::default()
        };
        let new = Snapshot {
            items: BTreeSet::from([
                item(Kind::Link, "sinabro_vxlan"),
                item(Kind::Link, "docker0"),
                item(Kind::Link, "snb0123456789ab"),
                item(Kind::Namespace, "/run/netns/x"),
                item(Kind::Process, "sinabro-agent (12)"),
                item(Kind::Process, "sinabro-agent (13)"),
            ]),
            attended: BTreeSet::from([item(Kind::Process, "sinabro-agent (12)")]),
            runs: BTreeSet::from([(item(Kind::Process, "sinabro-agent (13)"), "1-1".into())]),
        };
        // What has no mark may be of any run.
        let all = [
            item(Kind::Link, "snb0123456789ab"),
            item(Kind::Namespace, "/run/netns/x"),
            item(Kind::Process, "sinabro-agent (13)"),
        ];
        assert_eq!(new.of_run(Some("1-1"), &old), all);
        assert_eq!(new.of_run(Some("2-2"), &old), all[..2]);
        assert_eq!(new.of_run(None, &old), all[..2]);
    }
}
