//! What the machine's processors do meanwhile.

use anyhow::{Context as _, Result};
use std::{fs, thread, time::Duration};

/// What a machine without other work may do of its own.
const QUIET: f64 = 0.05;

/// How much of the CPUs' time something else takes, while nothing is measured; said if it is much.
pub fn background() -> Result<f64> {
    const TIME: Duration = Duration::from_millis(500);
    let before = busy()?;
    thread::sleep(TIME);
    let cpus = thread::available_parallelism()?.get() as f64;
    let busy = busy()?.saturating_sub(before);
    let background = busy.as_secs_f64() / TIME.as_secs_f64() / cpus;
    if background > QUIET {
        let percent = background * 100.0;
        println!("  The machine is busy with something else: {percent:.0} % of its CPUs' time");
    }
    Ok(background)
}

/// What all CPUs have done since the machine started: user, nice, system, irq and softirq time
/// (proc_stat(5)). Only on an otherwise idle machine is it all for what is measured.
pub fn busy() -> Result<Duration> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let ticks = busy_ticks(&text).context("/proc/stat has no line `cpu`")?;
    // USER_HZ, which is 100 on every architecture (sysconf(_SC_CLK_TCK)).
    Ok(Duration::from_millis(ticks * 10))
}

fn busy_ticks(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line
        .split_ascii_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    // Idle and iowait are the fourth and the fifth.
    let [user, nice, system, _, _, irq, softirq, ..] = fields[..] else {
        return None;
    };
    Some(user + nice + system + irq + softirq)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_not_busy() {
        let text = "cpu  1 20 300 999 999 4000 50000 7 8 9\ncpu0 5 5 5 5 5 5 5 5 5 5\n";
        assert_eq!(busy_ticks(text), Some(54_321));
        assert_eq!(busy_ticks("cpu  1 20 300 999 999 4000\n"), None);
        assert_eq!(busy_ticks("cpu  1 20 x 999 999 4000 50000\n"), None);
        assert_eq!(busy_ticks(""), None);
    }
}
