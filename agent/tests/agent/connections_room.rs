//! For how many connections there is room: as set, by the machine's memory, within the agent's limit.

use crate::{
    connections::{connect, ctl, list, node},
    support::Node,
};
use sinabro_common::api::{RoomFrom, RoomReport};
use std::{
    fs, io,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process,
    sync::atomic::{AtomicU32, Ordering},
};

fn room(node: &Node) -> RoomReport {
    node.status().unwrap().connections.unwrap()
}

/// Also from the default of an earlier version.
#[test]
fn a_table_that_grows_or_goes_by_the_memory_keeps_what_is_in_it() {
    let (mut node, pod) = node();
    connect(&node, pod, 1000..1500);
    let set = |connections| RoomReport {
        connections,
        bytes: connections * 384,
        from: RoomFrom::Setting,
    };
    assert_eq!(room(&node), set(131_072));
    let before = list(&node, "").len();
    assert_eq!(before, 500);
    for size in ["200000", "auto", "140000"] {
        node.kill();
        node.start_with(&["--connections", size]);
        node.wait_ready();
        assert_eq!(list(&node, "").len(), before, "{size}");
        match size.parse() {
            Ok(number) => assert_eq!(room(&node), set(number)),
            Err(_) => {
                let room = room(&node);
                assert!(room.from != RoomFrom::Setting && room.from != RoomFrom::Earlier);
                let shown = ctl(&node, "connections stats");
                let shown = String::from_utf8(shown.stdout).unwrap();
                let line = format!("Room:         {}, for ", room.connections);
                assert!(shown.contains(&line), "{shown}");
            }
        }
    }
}

#[test]
fn a_pod_has_no_more_connections_than_the_settings_say() {
    let (mut node, pod) = node();
    node.kill();
    node.start_with(&["--connections-per-pod=120"]);
    node.wait_ready();
    connect(&node, pod, 1000..1200);
    assert_eq!(list(&node, "").len(), 120);
    // What is there stays, whatever the limit says now.
    node.kill();
    node.start_with(&["--connections-per-pod-unanswered=50"]);
    node.wait_ready();
    connect(&node, pod, 1000..1200);
    assert_eq!(list(&node, "").len(), 120);
    ctl(&node, "connections flush --all");
    // Of new ones this holds; counts are right again once the table was looked over.
    crate::support::eventually("fifty get in", || {
        connect(&node, pod, 2000..2100);
        list(&node, "").len() == 50
    });
    let shown = ctl(&node, "connections stats");
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("50 of 50"), "{shown}");
}

/// A cgroup of version 1, which is gone with this.
struct Cgroup(PathBuf);

static NUMBER: AtomicU32 = AtomicU32::new(0);

impl Cgroup {
    /// With a limit of the memory of what is in it; none where the machine has no such hierarchy.
    fn new(limit: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.split_once(":memory:"));
        let own = own?.1.trim_start_matches('/');
        let path = PathBuf::from("/sys/fs/cgroup/memory").join(own);
        let path = path.join(format!(
            "sinabro-room-{}-{}",
            process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        ));
        fs::create_dir(&path).ok()?;
        let cgroup = Self(path);
        let file = cgroup.0.join("memory.limit_in_bytes");
        fs::write(file, limit.to_string()).unwrap();
        Some(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let removed = fs::remove_dir(&self.0);
        assert!(std::thread::panicking() || removed.is_ok(), "{removed:?}");
    }
}

/// The kernel charges the table to the agent, and kills it beyond its limit.
#[test]
fn the_table_stays_within_the_agents_memory_limit() {
    const LIMIT: u64 = 128 << 20;
    let cgroups = [(); 2].map(|()| Cgroup::new(LIMIT));
    let [Some(small), Some(large)] = &cgroups else {
        println!("skipped: no cgroup of version 1 limits memory here");
        return;
    };
    let confined = |node: &Node, cgroup: &Cgroup, size: &str| {
        let mut command = node.command();
        command.args(["--connections", size]);
        let procs = cgroup.0.join("cgroup.procs");
        let enter = move || -> io::Result<()> { fs::write(&procs, "0") };
        // SAFETY: nothing else runs in the child that could hold a lock; it allocates no more than a path.
        unsafe { command.pre_exec(enter) };
        command
    };
    let ended = confined(&Node::new(), small, "1048576").status().unwrap();
    assert!(!ended.success(), "the limit does not count here");
    let mut node = Node::new();
    let command = confined(&node, large, "auto");
    node.start_command(command);
    node.wait_ready();
    let room = room(&node);
    assert_eq!(room.from, RoomFrom::Limit(LIMIT));
    assert_eq!(room.connections, 65_536);
    node.kill();
}
