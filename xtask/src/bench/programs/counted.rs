//! What the kernel counts of the programs that belong to certain maps.

use anyhow::{Context as _, Result};
use aya::{
    programs::loaded_programs,
    sys::{Stats, enable_stats},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::fd::OwnedFd,
};

/// Present names, in the order of a packet's way.
pub const NAMES: [&str; 8] = [
    "pod_out",
    "overlay_out",
    "uplink_out",
    "uplink_in",
    "overlay_in",
    "pod_in",
    "pod_sockets",
    "pod_messages",
];
/// Names that earlier commits gave to what is called otherwise now.
const FORMER: [(&str, &str); 2] = [("host_out", "uplink_out"), ("host_in", "uplink_in")];

/// Counting, for all programs of the machine, until it is dropped.
pub struct Counter {
    _statistics: OwnedFd,
}

impl Counter {
    pub fn start() -> Result<Self> {
        let statistics = enable_stats(Stats::RunTime);
        Ok(Self {
            _statistics: statistics.context("cannot have programs' runs counted (Linux 5.8)")?,
        })
    }

    /// Runs so far of the programs that use one of these maps, by name.
    pub fn read(&self, maps: &BTreeSet<u32>) -> Result<Counted> {
        let mut counted = Counted::default();
        for program in loaded_programs() {
            // Others' may go while they are listed.
            let Ok(program) = program else { continue };
            let used = program.map_ids().ok().flatten().unwrap_or_default();
            let Some(name) = program.name_as_str().and_then(known) else {
                continue;
            };
            if used.iter().any(|id| maps.contains(id)) {
                let sum = counted.0.entry(name).or_default();
                sum.runs += program.run_count();
                sum.nanoseconds += program.run_time().as_nanos() as u64;
            }
        }
        Ok(counted)
    }
}

fn known(name: &str) -> Option<&'static str> {
    let former = FORMER.into_iter().find(|(former, _)| *former == name);
    let name = former.map_or(name, |(_, present)| present);
    NAMES.into_iter().find(|known| *known == name)
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sum {
    runs: u64,
    nanoseconds: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Counted(BTreeMap<&'static str, Sum>);

impl Counted {
    /// What was added. A program that came meanwhile counts whole.
    pub fn since(&self, before: &Self) -> Self {
        let more = |(name, sum): (&&'static str, &Sum)| {
            let before = before.0.get(name).copied().unwrap_or_default();
            let sum = Sum {
                runs: sum.runs.saturating_sub(before.runs),
                nanoseconds: sum.nanoseconds.saturating_sub(before.nanoseconds),
            };
            (*name, sum)
        };
        Self(self.0.iter().map(more).collect())
    }

    /// Nanoseconds of a run, if there were so many.
    pub fn mean(&self, name: &str, least: u64) -> Option<f64> {
        let sum = self.0.get(name).filter(|sum| sum.runs >= least)?;
        Some(sum.nanoseconds as f64 / sum.runs as f64)
    }
}

/// Numbers of the maps that a process has open.
pub fn maps_of(pid: i32) -> Result<BTreeSet<u32>> {
    let directory = format!("/proc/{pid}/fdinfo");
    let mut maps = BTreeSet::new();
    let entries = fs::read_dir(&directory).with_context(|| format!("cannot read {directory}"))?;
    for entry in entries {
        // Closed meanwhile.
        let Ok(text) = fs::read_to_string(entry?.path()) else {
            continue;
        };
        maps.extend(map_id(&text));
    }
    Ok(maps)
}

fn map_id(text: &str) -> Option<u32> {
    let id = text.lines().find_map(|line| line.strip_prefix("map_id:"))?;
    id.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_tells_its_map() {
        let text = "pos:\t0\nflags:\t02000002\nmap_type:\t9\nmap_id:\t41\nfrozen:\t0\n";
        assert_eq!(map_id(text), Some(41));
        assert_eq!(map_id("pos:\t0\n"), None);
    }

    #[test]
    fn only_what_was_added_counts() {
        let counted =
            |runs, nanoseconds| Counted(BTreeMap::from([("pod_in", Sum { runs, nanoseconds })]));
        let since = counted(30, 5000).since(&counted(10, 1000));
        assert_eq!(since.mean("pod_in", 20), Some(200.0));
        assert_eq!(since.mean("pod_in", 21), None);
        assert_eq!(since.mean("pod_out", 0), None);
    }

    #[test]
    fn former_names_are_those_of_today() {
        assert_eq!(known("host_in"), Some("uplink_in"));
        assert_eq!(known("pod_out"), Some("pod_out"));
        assert_eq!(known("else"), None);
    }
}
