//! The kernel's memory for connections.

use anyhow::{Context as _, Result};
use std::{
    fs, thread,
    time::{Duration, Instant},
};

/// How long the kernel may take to give back what was closed before.
const PATIENCE: Duration = Duration::from_secs(2);
/// By how much the memory of a machine without other work changes meanwhile.
const STEADY: u64 = 128 << 10;

/// Bytes that TCP counts as its own, of all queues of all namespaces, and those of unreclaimable slab,
/// which sockets themselves are. Of free memory or a control group's account either less would be in it,
/// or whatever else the machine does. The head of a queued buffer is in both: of 64 KB half a percent.
pub fn used() -> Result<u64> {
    let read = |path: &str| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
    let queues = queue_pages(&read("/proc/thread-self/net/sockstat")?);
    let queues = queues.context("/proc/net/sockstat has no memory of TCP")? * page_size();
    let slab = slab_bytes(&read("/proc/meminfo")?).context("/proc/meminfo has no SUnreclaim")?;
    Ok(queues + slab)
}

/// The same, once the kernel has given back what was closed before.
pub fn settled() -> Result<u64> {
    const LOOK: Duration = Duration::from_millis(50);
    let deadline = Instant::now() + PATIENCE;
    let mut before = used()?;
    loop {
        thread::sleep(LOOK);
        let now = used()?;
        if now.abs_diff(before) < STEADY || Instant::now() > deadline {
            return Ok(now);
        }
        before = now;
    }
}

fn page_size() -> u64 {
    // SAFETY: no pointers.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// `TCP: inuse 5 orphan 0 tw 0 alloc 8 mem 1`
fn queue_pages(sockstat: &str) -> Option<u64> {
    let line = sockstat
        .lines()
        .find_map(|line| line.strip_prefix("TCP:"))?;
    let mut fields = line.split_ascii_whitespace();
    fields.find(|field| *field == "mem")?;
    fields.next()?.parse().ok()
}

/// `SUnreclaim:        75840 kB`
fn slab_bytes(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let line = lines.find_map(|line| line.strip_prefix("SUnreclaim:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let text =
            "sockets: used 9\nTCP: inuse 5 orphan 0 tw 0 alloc 8 mem 17\nUDP: inuse 1 mem 2\n";
        assert_eq!(queue_pages(text), Some(17));
        assert_eq!(queue_pages("UDP: inuse 1 mem 2\n"), None);
        assert_eq!(queue_pages("TCP: inuse 5 mem\n"), None);
        let text = "Slab: 5 kB\nSUnreclaim:        75840 kB\n";
        assert_eq!(slab_bytes(text), Some(75840 << 10));
        assert_eq!(slab_bytes("SUnreclaim: 75840\n"), None);
        assert!(used().unwrap() > 0);
    }
}
