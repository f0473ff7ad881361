//! What each pinned map must look like for the programs to use it.
//!
//! The table repeats `agent-ebpf/src/maps.rs` from the user's side; a test compares the two.

use super::migrations::RETIRED;
use crate::datapath::{DatapathConfig, sys::MapInfo};
use sinabro_common::abi::{
    Addr,
    acceleration::{
        AcceleratedPod, AccelerationCounters, Account, Budget, Charge, ChargeKey, ConnectionKey,
        Enrolled, MAX_CHARGES, MAX_SERVERS, MAX_SOCKETS, ServerKey, SocketState, Traffic,
    },
    config::{MAX_NON_MASQUERADE, MAX_NON_MASQUERADE_BEFORE, NodeConfig},
    connection::{
        Alias, Connection, ConnectionKey as Ends, Finished, Fragment, FragmentKey, HOST_PORT_WORDS,
        Limits, MAX_FINISHED, MAX_FRAGMENTS, MAX_PORT_BITMAPS, OTHER_SHARES, PORT_TABLES, Share,
        TakenPorts, Tuple,
    },
    counters::{
        MAX_PEER_COUNTERS, NativeCounters, NativePlace, PLACES, PeerCounters, PeerPlace,
        PodCounters, PodPlace,
    },
    drop::MAX_DROP_REASONS,
    endpoint::{Endpoint, MAX_PODS, PodLink},
    flow::FLOW_EPOCHS,
    fragment::{EarlyFragment, EarlyKey, MAX_EARLY_FRAGMENTS},
    layout::{
        self, Field, FieldKey, FieldSpan, Layout, MAX_FIELDS, MAX_MAPS, MapRecord, OF_KEY, Place,
    },
    next_hop::{MAX_NEXT_HOPS, NextHop},
    node::{MAX_NODE_ADDRESSES, MAX_POD_RANGES, Native, Node, Overlay},
    service::{
        Affinity, AffinityKey, Backend, Frontend, FrontendKey, MAX_AFFINITIES, MAX_NETNS,
        MAX_SERVICE_RANGES, MAX_SOCKET_FRONTENDS, MAX_SOURCE_RANGES, MAX_STREAM_FRONTENDS, NetNs,
        RangeOf, ServiceSocket, Set, Slot, SocketFrontend, SocketKey, SourceKey,
    },
    uplink::{CHECKED_LINKS, MAX_UPLINKS, Uplink},
};
use std::{
    fmt,
    path::{Path, PathBuf},
};

/// `enum bpf_map_type`.
const HASH: u32 = 1;
const ARRAY: u32 = 2;
const PERCPU_HASH: u32 = 5;
const PERCPU_ARRAY: u32 = 6;
const LRU_HASH: u32 = 9;
const LPM_TRIE: u32 = 11;
const SOCKHASH: u32 = 18;
const QUEUE: u32 = 22;
const SK_STORAGE: u32 = 24;

/// Defined by BTF, as socket storage has to be, so that their pins are not in their definitions.
pub const SOCKET_STATES: &str = "SOCKET_STATES";
pub const SERVICE_SOCKETS: &str = "SERVICE_SOCKETS";

/// `BPF_F_NO_PREALLOC`.
const NO_PREALLOC: u32 = 1;
/// `BPF_F_MMAPABLE`.
const MMAPABLE: u32 = 1 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub name: &'static str,
    pub map_type: u32,
    pub key_size: u32,
    pub value_size: u32,
    pub max_entries: u32,
    pub flags: u32,
}

impl Shape {
    pub fn of(name: &'static str, info: &MapInfo) -> Self {
        Self {
            name,
            map_type: info.map_type,
            key_size: info.key_size,
            value_size: info.value_size,
            max_entries: info.max_entries,
            flags: info.map_flags,
        }
    }
}

impl Shape {
    /// Whether they differ in their size alone.
    pub fn is_other_size_of(&self, other: &Self) -> bool {
        let max_entries = self.max_entries;
        let other = Self {
            max_entries,
            ..*other
        };
        *self == other
    }

    /// To make such a map.
    pub fn info(&self) -> MapInfo {
        MapInfo {
            map_type: self.map_type,
            id: 0,
            key_size: self.key_size,
            value_size: self.value_size,
            max_entries: self.max_entries,
            map_flags: self.flags,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.map_type {
            HASH => f.write_str("hash")?,
            ARRAY => f.write_str("array")?,
            PERCPU_HASH => f.write_str("per-CPU hash")?,
            PERCPU_ARRAY => f.write_str("per-CPU array")?,
            LRU_HASH => f.write_str("LRU hash")?,
            LPM_TRIE => f.write_str("LPM trie")?,
            SOCKHASH => f.write_str("sock hash")?,
            QUEUE => f.write_str("queue")?,
            SK_STORAGE => f.write_str("socket storage")?,
            other => write!(f, "map of type {other}")?,
        }
        write!(
            f,
            " of {} entries, key {} bytes, value {} bytes, flags {}",
            self.max_entries, self.key_size, self.value_size, self.flags
        )
    }
}

/// A map that the programs use.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    pub shape: Shape,
    /// What its bytes mean,
    pub layout: u64,
    /// and the higher number of key and value.
    pub number: u32,
    /// Of the key and of the value.
    pub fields: [&'static [Field]; 2],
}

impl Expected {
    pub fn place(&self) -> Place<'static> {
        Place {
            name: self.shape.name,
            number: self.number,
        }
    }

    /// The fields of one part, which follow each other without a gap.
    pub fn spans(&self, part: u32) -> Vec<(u64, FieldSpan)> {
        let (fields, size) = match part {
            OF_KEY => (self.fields[0], self.shape.key_size),
            _ => (self.fields[1], self.shape.value_size),
        };
        let mut fields = fields.to_vec();
        fields.sort_by_key(|field| field.offset);
        let ends = fields.iter().skip(1).map(|field| field.offset);
        let ends: Vec<u32> = ends.chain([size]).collect();
        let span = |(field, end): (&Field, u32)| {
            let len = end - field.offset;
            let offset = field.offset;
            (field.name, FieldSpan { offset, len })
        };
        fields.iter().zip(ends).map(span).collect()
    }

    /// Where it is pinned, below the directory of pins.
    pub fn path(&self, directory: &Path) -> PathBuf {
        match self.number {
            1 => directory.join(self.shape.name),
            number => directory
                .join(generation_directory(number))
                .join(self.shape.name),
        }
    }
}

/// Where maps are that a generation changed.
pub fn generation_directory(number: u32) -> String {
    format!("v{number}")
}

/// Whose directory that is, of any version; none if a name below the directory of pins is not one.
pub fn generation_of(name: &str) -> Option<u32> {
    let number = name.strip_prefix('v')?.parse().ok()?;
    (generation_directory(number) == name).then_some(number)
}

fn map<K: Layout, V: Layout>(
    name: &'static str,
    map_type: u32,
    max_entries: u32,
    flags: u32,
) -> Expected {
    let shape = Shape {
        name,
        map_type,
        key_size: size_of::<K>() as u32,
        value_size: size_of::<V>() as u32,
        max_entries,
        flags,
    };
    Expected {
        shape,
        layout: layout::both(K::LAYOUT, V::LAYOUT),
        number: K::NUMBER.max(V::NUMBER),
        fields: [K::FIELDS, V::FIELDS],
    }
}

/// A number that is another one if two versions differ in a map or in what they mean by one: the
/// programs of the one cannot be used by the agent of the other then.
pub fn layout() -> u64 {
    let all = expected(&DatapathConfig::default());
    all.iter().fold(0, |hash, map| {
        let hash = layout::field(hash, map.shape.name, 0);
        let hash = layout::field(hash, &map.shape.to_string(), 0);
        layout::both(hash, map.layout)
    })
}

/// An LPM trie's key: the length of the prefix comes first.
type Prefix = (u32, Addr);
type GuardedPrefix = (u32, SourceKey);

/// Whether a pin of that name is one of our maps, or was one.
pub fn is_map(name: &str) -> bool {
    let expected = expected(&DatapathConfig::default());
    RETIRED.contains(&name) || expected.iter().any(|map| map.shape.name == name)
}

pub fn expected(config: &DatapathConfig) -> Vec<Expected> {
    let (connections, aliases) = config.table_sizes();
    let services = &config.services;
    vec![
        map::<u32, NodeConfig>("CONFIG", ARRAY, 1, 0),
        map::<Addr, Endpoint>("ENDPOINTS", HASH, 2 * MAX_PODS, NO_PREALLOC),
        map::<u32, PodLink>("POD_LINKS", HASH, MAX_PODS, NO_PREALLOC),
        map::<u32, PodCounters>("POD_COUNTERS", PERCPU_HASH, MAX_PODS, NO_PREALLOC),
        map::<u32, PodPlace>("POD_PLACES", PERCPU_ARRAY, PLACES, 0),
        map::<u32, u64>("DROPS", PERCPU_ARRAY, MAX_DROP_REASONS, 0),
        map::<Ends, Connection>("CONNECTIONS", HASH, connections, 0),
        map::<Tuple, Alias>("ALIASES", HASH, aliases, 0),
        map::<FragmentKey, Fragment>("FRAGMENTS", LRU_HASH, MAX_FRAGMENTS, 0),
        map::<EarlyKey, EarlyFragment>("EARLY_FRAGMENTS", LRU_HASH, MAX_EARLY_FRAGMENTS, 0),
        map::<u32, Share>("SHARES", HASH, MAX_PODS + OTHER_SHARES, NO_PREALLOC),
        map::<u32, Limits>("LIMITS", ARRAY, 1, 0),
        map::<u32, u32>("FLOW_EPOCHS", ARRAY, FLOW_EPOCHS, 0),
        map::<(), Finished>("FINISHED", QUEUE, MAX_FINISHED, 0),
        map::<Prefix, u8>("NON_MASQUERADE", LPM_TRIE, MAX_NON_MASQUERADE, NO_PREALLOC),
        map::<Addr, Node>("NODES", HASH, MAX_NODE_ADDRESSES, NO_PREALLOC),
        map::<Prefix, Node>("POD_RANGES", LPM_TRIE, MAX_POD_RANGES, NO_PREALLOC),
        map::<u32, Overlay>("OVERLAY", ARRAY, 1, 0),
        map::<u32, Native>("NATIVE", ARRAY, 1, 0),
        map::<u32, u32>("CHECKED_LINKS", ARRAY, CHECKED_LINKS, 0),
        map::<Addr, NextHop>("NEXT_HOPS", HASH, MAX_NEXT_HOPS, NO_PREALLOC),
        map::<Addr, Addr>("NATIVE_V6", HASH, MAX_NEXT_HOPS, NO_PREALLOC),
        map::<Addr, PeerCounters>("PEER_COUNTERS", PERCPU_HASH, MAX_PEER_COUNTERS, NO_PREALLOC),
        map::<Addr, NativeCounters>(
            "NATIVE_COUNTERS",
            PERCPU_HASH,
            MAX_PEER_COUNTERS,
            NO_PREALLOC,
        ),
        map::<u32, PeerPlace>("PEER_PLACES", PERCPU_ARRAY, PLACES, 0),
        map::<u32, NativePlace>("NATIVE_PLACES", PERCPU_ARRAY, PLACES, 0),
        map::<u32, u32>("PATH_MTU", ARRAY, 1, 0),
        map::<u32, u32>("UPLINK_MTU", ARRAY, 1, 0),
        map::<Prefix, u8>(
            "NON_MASQUERADE_BEFORE",
            LPM_TRIE,
            MAX_NON_MASQUERADE_BEFORE,
            NO_PREALLOC,
        ),
        map::<u32, Uplink>("UPLINKS", HASH, MAX_UPLINKS, NO_PREALLOC),
        map::<u32, u64>("HOST_PORTS", ARRAY, HOST_PORT_WORDS, 0),
        map::<Tuple, TakenPorts>("PORT_BITMAPS", LRU_HASH, MAX_PORT_BITMAPS, 0),
        map::<u32, TakenPorts>("RESERVED_PORTS", ARRAY, PORT_TABLES, 0),
        map::<FrontendKey, Frontend>("FRONTENDS", HASH, services.frontends, NO_PREALLOC),
        map::<u32, Set>("SETS", ARRAY, services.sets, MMAPABLE),
        map::<u32, Slot>("SLOTS", ARRAY, services.slots, MMAPABLE),
        map::<u32, Backend>("BACKENDS", ARRAY, services.backends, MMAPABLE),
        map::<AffinityKey, Affinity>("AFFINITY", LRU_HASH, MAX_AFFINITIES, 0),
        map::<GuardedPrefix, u8>("SOURCE_RANGES", LPM_TRIE, MAX_SOURCE_RANGES, NO_PREALLOC),
        map::<Prefix, RangeOf>("SERVICE_RANGES", LPM_TRIE, MAX_SERVICE_RANGES, NO_PREALLOC),
        map::<u64, NetNs>("NETNS", HASH, MAX_NETNS, NO_PREALLOC),
        map::<i32, ServiceSocket>(SERVICE_SOCKETS, SK_STORAGE, 0, NO_PREALLOC),
        map::<u64, ServiceSocket>("STREAM_FRONTENDS", LRU_HASH, MAX_STREAM_FRONTENDS, 0),
        map::<SocketKey, SocketFrontend>("SOCKET_FRONTENDS", LRU_HASH, MAX_SOCKET_FRONTENDS, 0),
        map::<u64, MapRecord>("LAYOUTS", HASH, MAX_MAPS, NO_PREALLOC),
        map::<FieldKey, FieldSpan>("LAYOUT_FIELDS", HASH, MAX_FIELDS, NO_PREALLOC),
        map::<Addr, AcceleratedPod>("ACCELERATED_PODS", HASH, 2 * MAX_PODS, NO_PREALLOC),
        map::<u64, AcceleratedPod>("LOOPBACK_PODS", HASH, MAX_PODS, NO_PREALLOC),
        map::<u64, u32>("SOCKETS", SOCKHASH, MAX_SOCKETS, 0),
        map::<i32, SocketState>(SOCKET_STATES, SK_STORAGE, 0, NO_PREALLOC),
        map::<ConnectionKey, Enrolled>("ENROLLED", HASH, MAX_SOCKETS, NO_PREALLOC),
        map::<ServerKey, Traffic>("SERVER_TRAFFIC", LRU_HASH, MAX_SERVERS, 0),
        map::<u32, AccelerationCounters>(
            "ACCELERATION_COUNTERS",
            PERCPU_HASH,
            MAX_PODS,
            NO_PREALLOC,
        ),
        map::<ChargeKey, Charge>("QUEUE_CHARGES", HASH, MAX_CHARGES, NO_PREALLOC),
        map::<u32, Account>("QUEUE_ACCOUNTS", HASH, MAX_PODS + 1, NO_PREALLOC),
        map::<u32, Budget>("QUEUE_BUDGETS", HASH, MAX_PODS + 1, NO_PREALLOC),
        map::<u32, u32>("ACCELERATION_EPOCH", ARRAY, 1, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_common::abi::layout::OF_VALUE;

    #[test]
    fn fields_take_all_bytes() {
        for map in expected(&DatapathConfig::default()) {
            for (part, size) in [
                (OF_KEY, map.shape.key_size),
                (OF_VALUE, map.shape.value_size),
            ] {
                let spans = map.spans(part);
                let all: u32 = spans.iter().map(|(_, span)| span.len).sum();
                assert!(
                    spans.is_empty() || all == size,
                    "{}: {spans:?}",
                    map.shape.name
                );
            }
        }
    }

    /// What each map's layout was under each number, for as long as there may be one on a node.
    const WRITTEN_DOWN: &str = include_str!("layouts.txt");

    #[test]
    fn a_layout_that_changed_has_another_number() {
        let mut missing = Vec::new();
        for map in expected(&DatapathConfig::default()) {
            let start = format!("{} {} ", map.shape.name, map.number);
            let line = format!("{start}{:016x}", map.layout);
            match WRITTEN_DOWN.lines().find(|line| line.starts_with(&start)) {
                Some(written) => assert_eq!(
                    written, line,
                    "its layout is another one: raise the number of its key or value in common/src/abi to \
                     the next generation, and say in maps/migrations how its entries are carried"
                ),
                None => missing.push(line),
            }
        }
        assert!(
            missing.is_empty(),
            "add to maps/layouts.txt:\n{}",
            missing.join("\n")
        );
    }

    /// They are read before it is known what anything means.
    #[test]
    fn what_tells_of_layouts_never_changes_its_own() {
        let all = expected(&DatapathConfig::default());
        for name in ["CONFIG", "LAYOUTS", "LAYOUT_FIELDS"] {
            let map = all.iter().find(|map| map.shape.name == name);
            assert_eq!(map.map(|map| map.number), Some(1), "{name}");
        }
    }

    #[test]
    fn a_generation_has_one_directory() {
        assert_eq!(generation_of(&generation_directory(12)), Some(12));
        for name in ["v", "v01", "v-1", "V2", "v2_next", "2", "links"] {
            assert_eq!(generation_of(name), None, "{name}");
        }
    }
}
