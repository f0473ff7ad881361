//! Which run a thing is of.
//!
//! A run is one process of `cargo xtask` and all that it starts. Its mark, `PID-START`, is in the environment of each
//! of its processes; one that has another environment has the mark of the process that it is below. A cgroup has
//! the mark in its name, or that of a process in it, and a program that of whatever process holds it.

use super::entries;
use anyhow::{Context as _, Result};
use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{self, Command},
};

/// The variable with the mark.
const VARIABLE: &str = "SINABRO_RUN";
/// What the mark follows in names.
const IN_NAMES: &str = "-run-";

/// The mark of the run that this process is of.
pub fn own() -> Option<String> {
    env::var(VARIABLE).ok()
}

/// For programs that are started with an environment of their own.
pub fn inherited() -> Option<(&'static str, String)> {
    own().map(|mark| (VARIABLE, mark))
}

/// A part of a name, for what outlives processes.
pub fn in_name() -> String {
    own().map_or_else(String::new, |mark| format!("{IN_NAMES}{mark}"))
}

/// Begins a run with this process, unless it is of one: it executes itself again, as what it starts is to have the
/// mark from the beginning (proc_pid_environ(5)).
///
/// # Errors
/// If it cannot be executed.
pub fn begin() -> Result<()> {
    if own().is_some() {
        return Ok(());
    }
    let pid = process::id();
    let mark = format!("{pid}-{}", start(pid).context("cannot find this process")?);
    let program = env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command.args(env::args_os().skip(1)).env(VARIABLE, mark);
    Err(command.exec()).context("cannot begin a run")
}

/// Whether the process that began it is there.
pub fn is_alive(mark: &str) -> bool {
    let begun = mark.split_once('-');
    begun.is_some_and(|(pid, begun)| {
        let pid = pid.parse().ok();
        pid.and_then(start).is_some_and(|start| start == begun)
    })
}

/// When a process began, in the kernel's ticks (proc_pid_stat(5)).
fn start(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    fields.skip(19).map(str::to_owned).next()
}

/// The marks of processes, by their ids, of which the parents are given.
pub fn of_processes(parents: &BTreeMap<u32, u32>) -> BTreeMap<u32, String> {
    let own = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let mut variables = environment.split(|byte| *byte == 0);
        let prefix = format!("{VARIABLE}=");
        let mark = variables.find_map(|variable| variable.strip_prefix(prefix.as_bytes()))?;
        Some((*pid, String::from_utf8_lossy(mark).into_owned()))
    };
    let marks: BTreeMap<u32, String> = parents.keys().filter_map(own).collect();
    let above = |pid: &u32| {
        let mut above = *pid;
        // No process is below so many, and ids may be given again meanwhile.
        for _ in 0..100 {
            if let Some(mark) = marks.get(&above) {
                return Some((*pid, mark.clone()));
            }
            above = *parents.get(&above)?;
        }
        None
    };
    parents.keys().filter_map(above).collect()
}

/// Said of what a process without a mark holds: to a process without a mark it may be its own.
pub const UNMARKED: &str = "unmarked";

/// Whether somebody else than the process `own` looks after a process of that parent.
pub fn is_attended(parent: u32, own: u32) -> bool {
    parent != 1 && parent != own
}

/// Of processes that may hold something, whose it is: marks, and [`UNMARKED`] for those that have none and are attended.
pub fn holders(
    marks: &BTreeMap<u32, String>,
    parents: &BTreeMap<u32, u32>,
    own: u32,
) -> BTreeMap<u32, String> {
    let unmarked = parents
        .iter()
        .filter(|(pid, parent)| **pid != own && is_attended(**parent, own))
        .map(|(pid, _)| (*pid, UNMARKED.to_owned()));
    let mut holders: BTreeMap<_, _> = unmarked.collect();
    holders.extend(marks.clone());
    holders
}

/// The marks of a cgroup.
pub fn of_cgroup(path: &Path, processes: &BTreeMap<u32, String>) -> BTreeSet<String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut marks: BTreeSet<String> = of_name(&name).into_iter().collect();
    let ids = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    let ids = ids.lines().filter_map(|id| id.parse().ok());
    marks.extend(ids.filter_map(|id: u32| processes.get(&id).cloned()));
    for below in entries(path).filter(|below| below.is_dir()) {
        marks.extend(of_cgroup(&below, processes));
    }
    marks
}

fn of_name(name: &str) -> Option<String> {
    let mut numbers = name.split_once(IN_NAMES)?.1.splitn(3, '-');
    Some(format!("{}-{}", numbers.next()?, numbers.next()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{Item, Kind, Snapshot, bpf};
    use super::*;
    use crate::{
        Lifetime, Namespace,
        traffic::machine_code::{self, Code, Op},
        wait::wait_for,
    };
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    use std::{
        ffi::CStr,
        io::{Read as _, Write as _},
        os::fd::{AsRawFd as _, OwnedFd},
        process::Stdio,
    };

    /// Runs that have ended.
    const RUNS: [&str; 3] = ["1-1", "2-2", "3-3"];

    /// What `own` is blamed for of these things.
    fn blamed<'a>(own: &str, all: &'a [Item], before: &Snapshot) -> Vec<&'a Item> {
        let left = Snapshot::take().unwrap().of_run(Some(own), before);
        all.iter().filter(|item| left.contains(item)).collect()
    }

    #[test]
    fn each_run_is_blamed_for_the_processes_that_it_leaves() {
        let dir = tempfile::tempdir().unwrap();
        let agent = dir.path().join("sinabro-agent");
        fs::copy("/bin/sleep", &agent).unwrap();
        let before = Snapshot::take().unwrap();
        // Its parent ends at once, and it is below the first process.
        let leave = |mark| {
            let mut command = Command::new("sh");
            command.args(["-c", "\"$0\" 600 >&- 2>&- & echo $!"]);
            let output = command.arg(&agent).env(VARIABLE, mark).output().unwrap();
            let pid = String::from_utf8(output.stdout).unwrap();
            // Until it executes the program it is another shell, and for a moment then has no environment.
            let of = Path::new("/proc").join(pid.trim());
            wait_for("a program to run", || {
                let runs = fs::read_to_string(of.join("comm"))?.trim() == "sinabro-agent";
                let known = !fs::read(of.join("environ"))?.is_empty();
                Ok((runs && known).then_some(()))
            })
            .unwrap();
            let name = format!("sinabro-agent ({})", pid.trim());
            (
                pid.trim().parse::<i32>().unwrap(),
                Item {
                    kind: Kind::Process,
                    name,
                },
            )
        };
        let (pids, left): (Vec<i32>, Vec<Item>) = RUNS[..2].iter().map(leave).unzip();
        let seen = RUNS.map(|own| blamed(own, &left, &before));
        for pid in pids {
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        }
        assert_eq!(seen, [vec![&left[0]], vec![&left[1]], vec![]]);
    }

    /// A program of the data path by its name, and its id.
    fn load() -> (OwnedFd, u32) {
        const PROG_LOAD: libc::c_int = 5;
        const PROG_TYPE_SOCKET_FILTER: u64 = 1;
        const LICENSE: &CStr = c"GPL";
        let mut code = Code::default();
        code.op(Op::Set, 0, 0, 0, 0);
        code.op(Op::Exit, 0, 0, 0, 0);
        let code = code.linked();
        let mut attr = [0_u64; 9];
        attr[0] = PROG_TYPE_SOCKET_FILTER | (code.len() as u64) << 32;
        attr[1] = code.as_ptr() as u64;
        attr[2] = LICENSE.as_ptr() as u64;
        attr[6] = u64::from_ne_bytes(*b"pod_left");
        let fd = machine_code::bpf(PROG_LOAD, &mut attr).unwrap();
        let info = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_raw_fd()));
        let info = info.unwrap();
        let id = info.split_once("prog_id:").unwrap().1;
        let id = id.split_whitespace().next().unwrap();
        (fd, id.parse().unwrap())
    }

    #[test]
    fn a_program_is_of_the_run_whose_process_holds_it() {
        let before = Snapshot::take().unwrap();
        let (fd, id) = load();
        let program = Item {
            kind: Kind::Program,
            name: format!("pod_left ({id})"),
        };
        let mut command = Command::new("cat");
        command.env(VARIABLE, RUNS[0]).stderr(fd);
        let mut holder = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        command.stderr(Stdio::null());
        // It has its environment once it runs, which is later than the return of what starts it.
        holder.stdin.as_ref().unwrap().write_all(b"x").unwrap();
        let mut said = [0];
        holder
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut said)
            .unwrap();
        let left = [program];
        let seen = RUNS.map(|own| blamed(own, &left, &before).len());
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(seen, [1, 0, 0]);
    }

    #[test]
    fn what_somebody_without_a_mark_holds_is_of_no_run() {
        // The first process, a shell, a run, what that has started, a shell's test, and what nobody looks after.
        let parents = BTreeMap::from([(1, 0), (10, 1), (20, 10), (21, 20), (30, 10), (40, 1)]);
        let marks = BTreeMap::from([(20, "20-1".to_owned()), (21, "20-1".to_owned())]);
        let held = holders(&marks, &parents, 20);
        let said = |pid| held.get(&pid).map(String::as_str);
        assert_eq!(
            [10, 20, 21, 30, 40].map(said),
            [None, Some("20-1"), Some("20-1"), Some(UNMARKED), None]
        );
        let item = |name: &str| Item {
            kind: Kind::Program,
            name: name.into(),
        };
        let all = [item("theirs"), item("ours"), item("lost")];
        let now = Snapshot {
            items: all.clone().into(),
            runs: [
                (all[0].clone(), UNMARKED.into()),
                (all[1].clone(), "20-1".into()),
            ]
            .into(),
            ..Snapshot::default()
        };
        let blamed = |own| now.of_run(own, &Snapshot::default());
        assert_eq!(blamed(Some("20-1")), [item("lost"), item("ours")]);
        // Whoever has no mark may have made what has none.
        assert_eq!(blamed(None), [item("lost"), item("theirs")]);
    }

    #[test]
    fn a_program_that_is_pinned_is_of_the_run_whose_process_sees_the_pin() {
        const OBJ_PIN: libc::c_int = 6;
        let node = Namespace::new("pins", Lifetime::Process).unwrap();
        let (fd, id) = load();
        let pin = || {
            let path = c"/sys/fs/bpf/left";
            let mut attr = [path.as_ptr() as u64, fd.as_raw_fd() as u64];
            Ok(machine_code::call(OBJ_PIN, &mut attr)?)
        };
        node.run(pin).unwrap();
        drop(fd);
        let holder = BTreeMap::from([(node.pid().cast_unsigned(), RUNS[0].to_owned())]);
        let held = bpf::held(&holder);
        assert_eq!(held[&id], BTreeSet::from([RUNS[0].to_owned()]));
    }

    #[test]
    fn a_mark_tells_whether_its_run_goes_on() {
        let (pid, begun) = (process::id(), start(process::id()).unwrap());
        assert!(is_alive(&format!("{pid}-{begun}")));
        // Another process has the id by now.
        assert!(!is_alive(&format!("{pid}-{begun}1")) && !is_alive("none"));
        let name = format!("sinabro-test{IN_NAMES}{pid}-{begun}-7-1");
        assert_eq!(of_name(&name), Some(format!("{pid}-{begun}")));
        assert_eq!(of_name("sinabro-cluster"), None);
    }
}
