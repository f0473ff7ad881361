//! How many endpoints of Services a node has room for, if the settings do not say: one for each 16 KiB of memory, which is a
//! 256th of it, and no more than the largest cluster has that is aimed at. The maps' arrays are made whole.

use crate::{
    connections::{nearest_power, power_below},
    datapath::{ServiceRoom, cgroup::memory_limit},
};
use std::path::Path;

/// What an endpoint costs the kernel: itself, two slots, a set, and a bucket of the frontends' table.
const BYTES: u64 = 24 + 2 * 8 + 8 + 16;
const MEMORY_OF_ONE: u64 = 256 * BYTES;
const MIN: u64 = 1 << 16;
const MAX: u64 = 1 << 18;
/// Of a limit of the agent's memory, which the table of connections takes what it can of.
const PART_OF_LIMIT: u64 = 16;
/// However small the limit: below that no setting goes either.
const MIN_WITHIN_LIMIT: u64 = 1 << 10;

/// As set, or by what memory there is; no smaller than the maps in which Services are published.
pub fn service_room(set: Option<u32>, bpf_dir: &Path) -> ServiceRoom {
    let endpoints = set.unwrap_or_else(|| {
        let memory = nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total());
        by_memory(memory, memory_limit())
    });
    let room = ServiceRoom::of_endpoints(endpoints);
    let in_use = ServiceRoom::in_use(bpf_dir);
    let room = in_use.map_or(room.clone(), |in_use| room.at_least(&in_use));
    tracing::info!(?room, "the maps of Services");
    room
}

fn by_memory(memory: u64, limit: Option<u64>) -> u32 {
    let by_memory = nearest_power(memory / MEMORY_OF_ONE).clamp(MIN, MAX);
    let within = |limit: u64| power_below(limit / PART_OF_LIMIT / BYTES).max(MIN_WITHIN_LIMIT);
    limit.map_or(by_memory, |limit| by_memory.min(within(limit))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn larger_machines_have_room_for_more_within_the_agents_limit() {
        for (memory, endpoints) in [
            (0, 65_536),
            (GIB, 65_536),
            (2 * GIB - 100 * MIB, 131_072),
            // A machine has somewhat less than it is sold by.
            (4 * GIB - 200 * MIB, 262_144),
            (1024 * GIB, 262_144),
        ] {
            assert_eq!(by_memory(memory, None), endpoints, "{memory}");
            // What version 1 of cgroups has for no limit.
            assert_eq!(by_memory(memory, Some(0x7fff_ffff_ffff_f000)), endpoints);
        }
        for (limit, endpoints) in [
            (0, 1024),
            (64 * MIB, 65_536),
            (128 * MIB, 131_072),
            (GIB, 262_144),
        ] {
            assert_eq!(by_memory(64 * GIB, Some(limit)), endpoints, "{limit}");
            let bytes = u64::from(endpoints) * BYTES;
            assert!(limit < MIB || bytes <= limit / PART_OF_LIMIT);
        }
    }
}
