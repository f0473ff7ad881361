//! How many connections a node has room for, if the settings do not say.
//!
//! One for each 64 KiB of memory, to the nearest power of two: a 170th of the memory. nf_conntrack has no more than
//! 262,144 however large the machine (`nf_conntrack_init_start`), but takes their memory only as they come; here tables are
//! made whole, so that no packet waits for memory.
//!
//! From Linux 5.11 on maps are charged to the cgroup of whoever makes them. Where the agent's has a limit, the table
//! may take what is left of it: beyond the limit the kernel kills the agent.

use crate::datapath::cgroup::memory_limit;
use sinabro_common::api::{RoomFrom, RoomReport};

/// What a connection costs the kernel: a record of 224 bytes, an alias of 128, and 16 of each of the two tables' buckets;
const BYTES: u64 = 384;
/// where Services are translated, room for another alias.
const BYTES_OF_SERVICES: u64 = 144;

/// No fewer, unless a limit says so: what kube-proxy lets conntrack have (--conntrack-min).
const MIN: u64 = 1 << 17;
const MAX: u64 = 1 << 20;
/// Of which there is one connection.
const MEMORY_OF_ONE: u64 = 64 << 10;
/// However small the limit: below that no setting goes either.
const MIN_WITHIN_LIMIT: u64 = 1 << 10;
/// What all else of the agent takes while it starts, verifier and other maps included: 85 MiB were measured with two processors
/// (Linux 6.18). Each more takes a megabyte, up to eight.
const OWN: u64 = 92 << 20;

/// Connections that there is room for, and why so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub connections: u32,
    /// Bytes of each.
    each: u64,
    from: RoomFrom,
}

impl Room {
    /// As set, or by what memory there is. `of_services`: Services are translated.
    pub fn new(set: Option<u32>, of_services: bool) -> Self {
        let each = BYTES + if of_services { BYTES_OF_SERVICES } else { 0 };
        let limit = memory_limit();
        let Some(connections) = set else {
            let memory = nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total());
            return Self::by_memory(memory, limit, each);
        };
        let bytes = u64::from(connections) * each;
        if let Some(limit) = limit.filter(|limit| bytes + OWN > *limit) {
            tracing::warn!(
                connections,
                bytes,
                limit,
                "the table of connections counts against the memory limit of the agent's container, which the agent itself takes up to 92 MiB of"
            );
        }
        Self {
            connections,
            each,
            from: RoomFrom::Setting,
        }
    }

    fn by_memory(memory: u64, limit: Option<u64>, each: u64) -> Self {
        let by_memory = nearest_power(memory / MEMORY_OF_ONE).clamp(MIN, MAX);
        let within =
            |limit: u64| power_below(limit.saturating_sub(OWN) / each).max(MIN_WITHIN_LIMIT);
        let (connections, from) = match limit.map(|limit| (within(limit), limit)) {
            Some((fewer, limit)) if fewer < by_memory => (fewer, RoomFrom::Limit(limit)),
            _ => (by_memory, RoomFrom::Memory(memory)),
        };
        Self {
            connections: connections as u32,
            each,
            from,
        }
    }

    /// Of a table that has so many: not this, where the kernel refused this version's programs and that of before
    /// goes on.
    pub fn report(&self, capacity: u64) -> RoomReport {
        RoomReport {
            connections: capacity,
            bytes: capacity * self.each,
            from: match capacity == u64::from(self.connections) {
                true => self.from,
                false => RoomFrom::Earlier,
            },
        }
    }
}

/// The largest power of two that is no larger; zero if there is none.
pub fn power_below(number: u64) -> u64 {
    number.checked_ilog2().map_or(0, |power| 1 << power)
}

/// The nearest power of two, the larger of two that are as near.
pub fn nearest_power(number: u64) -> u64 {
    let below = power_below(number);
    match number - below < below.div_ceil(2) {
        true => below,
        false => 2 * below,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn larger_machines_have_room_for_more() {
        for (memory, connections) in [
            (0, 131_072),
            (GIB, 131_072),
            // A machine has somewhat less than it is sold by.
            (4 * GIB - 200 * MIB, 131_072),
            (8 * GIB - 300 * MIB, 131_072),
            (16 * GIB - 400 * MIB, 262_144),
            (24 * GIB - 500 * MIB, 262_144),
            (32 * GIB - 700 * MIB, 524_288),
            (64 * GIB - GIB, 1_048_576),
            (1024 * GIB, 1_048_576),
            (u64::MAX, 1_048_576),
        ] {
            let room = Room::by_memory(memory, None, BYTES);
            assert_eq!(room.connections, connections, "{memory}");
            assert_eq!(room.from, RoomFrom::Memory(memory));
            // What version 1 of cgroups has for no limit.
            let without = Room::by_memory(memory, Some(0x7fff_ffff_ffff_f000), BYTES);
            assert_eq!(without, room);
        }
    }

    #[test]
    fn a_limit_of_the_agent_is_never_reached() {
        for (limit, connections) in [
            (0, 1024),
            (92 * MIB, 1024),
            (112 * MIB, 32_768),
            (128 * MIB, 65_536),
            (160 * MIB, 131_072),
            (288 * MIB, 524_288),
        ] {
            let room = Room::by_memory(64 * GIB, Some(limit), BYTES);
            assert_eq!(room.connections, connections);
            assert_eq!(room.from, RoomFrom::Limit(limit));
            let bytes = room.report(connections.into()).bytes;
            assert!(limit < 93 * MIB || bytes + 85 * MIB < limit);
        }
        // With Services, too.
        let each = BYTES + BYTES_OF_SERVICES;
        let room = Room::by_memory(64 * GIB, Some(128 * MIB), each);
        assert_eq!(room.connections, 65_536);
        assert!(room.report(65_536).bytes + 85 * MIB < 128 * MIB);
        // More than there would be anyway.
        let room = Room::by_memory(GIB, Some(GIB), BYTES);
        assert_eq!(room.from, RoomFrom::Memory(GIB));
    }

    #[test]
    fn a_table_of_before_is_called_so() {
        let room = Room::by_memory(GIB, None, BYTES);
        assert_eq!(room.report(131_072).from, RoomFrom::Memory(GIB));
        assert_eq!(room.report(4096).from, RoomFrom::Earlier);
    }
}
