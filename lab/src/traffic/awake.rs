//! CPUs that are kept from idling, without taking anything from who has something to do.
//!
//! Two ends that talk by turns let their CPUs fall idle between messages. What waking up costs, and what
//! the kernel does before a CPU sleeps (the tick goes on if a timer is near), is then a large part of
//! each round trip, and differs between machines more than what is measured.

use super::seat::cpu_set;
use crate::raise::Raise;
use anyhow::{Context as _, Result, anyhow};
use nix::{errno::Errno, sched::sched_setaffinity, unistd::Pid};
use std::{
    hint::spin_loop,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

/// Calls `f` while a thread of SCHED_IDLE (sched(7)) spins on each of these CPUs.
pub fn awake<T>(cpus: &[usize], f: impl FnOnce() -> Result<T>) -> Result<T> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _raise = Raise(&stop);
        let (ready, is_ready) = mpsc::channel();
        for cpu in cpus {
            let (ready, stop) = (ready.clone(), &stop);
            scope.spawn(move || {
                let placed = last_of_all(*cpu);
                let spins = placed.is_ok();
                let _ = ready.send(placed);
                while spins && !stop.load(Ordering::Relaxed) {
                    spin_loop();
                }
            });
        }
        for _ in cpus {
            let placed = is_ready.recv().map_err(|_| anyhow!("a thread ended"))?;
            placed.context("cannot keep a CPU awake")?;
        }
        f()
    })
}

/// Puts the calling thread on a CPU, behind all threads of usual scheduling.
fn last_of_all(cpu: usize) -> Result<()> {
    sched_setaffinity(Pid::from_raw(0), &cpu_set(cpu)?)?;
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure outlives the call; 0 is the calling thread.
    let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none) };
    Errno::result(set)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::seat::two_cpus;

    #[test]
    fn threads_spin_behind_all_others_and_end() {
        let cpus = two_cpus().unwrap();
        let policies = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let stat = |task: std::io::Result<std::fs::DirEntry>| {
                std::fs::read_to_string(task.ok()?.path().join("stat")).ok()
            };
            // Field 41 is the policy (proc_pid_stat(5)), 39 behind the name, which may have spaces.
            let policy = |stat: String| {
                let fields = stat.rsplit_once(") ")?.1.split(' ').nth(38)?;
                fields.parse::<i32>().ok()
            };
            let policies = tasks.filter_map(stat).filter_map(policy);
            policies
                .filter(|policy| *policy == libc::SCHED_IDLE)
                .count()
        };
        let before = policies();
        let during = awake(&cpus, || Ok(policies())).unwrap();
        assert!(during >= before + 2, "{before}, {during}");
        let error = awake(&cpus, || -> Result<()> { anyhow::bail!("as it came") });
        assert_eq!(error.unwrap_err().to_string(), "as it came");
        assert!(awake(&[1 << 20], || Ok(())).is_err());
    }
}
