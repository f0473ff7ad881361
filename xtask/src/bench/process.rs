//! What a process and its machine's network have used.

use anyhow::{Context as _, Result};
use nix::{
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};
use sinabro_lab::Namespace;
use std::{fs, time::Duration};

/// Processor time until now.
pub fn cpu(pid: i32) -> Result<Duration> {
    let clock = clock_getcpuclockid(Pid::from_raw(pid)).context("a process has ended")?;
    Ok(clock_gettime(clock)?.into())
}

/// Bytes of memory.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub resident: f64,
    /// Of that, what is no page of a file: its heap and stacks.
    pub own: f64,
    pub peak: f64,
}

pub fn memory(pid: i32) -> Result<Memory> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| -> Result<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let line = line.with_context(|| format!("no {name} in a process's status"))?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib * 1024.0)
    };
    Ok(Memory {
        resident: field("VmRSS:")?,
        own: field("RssAnon:")?,
        peak: field("VmHWM:")?,
    })
}

/// Bytes that came in over the machine's cable.
pub fn received(machine: &Namespace) -> Result<f64> {
    let table = machine.run(|| Ok(fs::read_to_string("/proc/thread-self/net/dev")?))?;
    let line = table.lines().find_map(|l| l.trim().strip_prefix("eth0:"));
    let bytes = line.and_then(|line| line.split_whitespace().next());
    Ok(bytes.context("no eth0")?.parse()?)
}
