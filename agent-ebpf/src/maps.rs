//! Every map but those of programs on sockets, pinned by its name. Layouts and meaning:
//! `sinabro_common::abi`.
//!
//! Every object has every map declared here, used or not.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, Queue},
};
use sinabro_common::abi::{
    Addr,
    config::{MAX_NON_MASQUERADE, MAX_NON_MASQUERADE_BEFORE, NodeConfig},
    connection::{
        ALIASES_EACH, Alias, Connection, ConnectionKey, Finished, Fragment, FragmentKey,
        HOST_PORT_WORDS, Limits, MAX_CONNECTIONS, MAX_FINISHED, MAX_FRAGMENTS, MAX_PORT_BITMAPS,
        OTHER_SHARES, PORT_TABLES, Share, TakenPorts, Tuple,
    },
    counters::{
        MAX_PEER_COUNTERS, NativeCounters, NativePlace, PLACES, PeerCounters, PeerPlace,
        PodCounters, PodPlace,
    },
    drop::MAX_DROP_REASONS,
    endpoint::{Endpoint, MAX_PODS, PodLink},
    flow,
    fragment::{EarlyFragment, EarlyKey, MAX_EARLY_FRAGMENTS},
    layout::{FieldKey, FieldSpan, MAX_FIELDS, MAX_MAPS, MapRecord},
    next_hop::{MAX_NEXT_HOPS, NextHop},
    node::{MAX_NODE_ADDRESSES, MAX_POD_RANGES, Native, Node, Overlay},
    service::{
        Affinity, AffinityKey, Backend, Frontend, FrontendKey, MAX_AFFINITIES, MAX_BACKENDS,
        MAX_FRONTENDS, MAX_SERVICE_RANGES, MAX_SETS, MAX_SLOTS, MAX_SOURCE_RANGES, RangeOf, Set,
        Slot, SourceKey,
    },
    uplink::{self, MAX_UPLINKS, Uplink},
};

/// What a map says of a key that is there where it may not be.
pub const EEXIST: i32 = -17;

#[map]
pub static CONFIG: Array<NodeConfig> = Array::pinned(1, 0);

#[map]
pub static ENDPOINTS: HashMap<Addr, Endpoint> = HashMap::pinned(2 * MAX_PODS, BPF_F_NO_PREALLOC);

#[map]
pub static POD_LINKS: HashMap<u32, PodLink> = HashMap::pinned(MAX_PODS, BPF_F_NO_PREALLOC);

#[map]
pub static POD_COUNTERS: PerCpuHashMap<u32, PodCounters> =
    PerCpuHashMap::pinned(MAX_PODS, BPF_F_NO_PREALLOC);

#[map]
pub static POD_PLACES: PerCpuArray<PodPlace> = PerCpuArray::pinned(PLACES, 0);

#[map]
pub static DROPS: PerCpuArray<u64> = PerCpuArray::pinned(MAX_DROP_REASONS, 0);

#[map]
pub static CONNECTIONS: HashMap<ConnectionKey, Connection> = HashMap::pinned(MAX_CONNECTIONS, 0);

#[map]
pub static ALIASES: HashMap<Tuple, Alias> = HashMap::pinned(ALIASES_EACH * MAX_CONNECTIONS, 0);

#[map]
pub static FRAGMENTS: LruHashMap<FragmentKey, Fragment> = LruHashMap::pinned(MAX_FRAGMENTS, 0);

#[map]
pub static EARLY_FRAGMENTS: LruHashMap<EarlyKey, EarlyFragment> =
    LruHashMap::pinned(MAX_EARLY_FRAGMENTS, 0);

/// One for each pod, one for the host's own, one for clients outside and one for all.
#[map]
pub static SHARES: HashMap<u32, Share> =
    HashMap::pinned(MAX_PODS + OTHER_SHARES, BPF_F_NO_PREALLOC);

#[map]
pub static FINISHED: Queue<Finished> = Queue::pinned(MAX_FINISHED, 0);

#[map]
pub static FLOW_EPOCHS: Array<u32> = Array::pinned(flow::FLOW_EPOCHS, 0);

#[map]
pub static LIMITS: Array<Limits> = Array::pinned(1, 0);

#[map]
pub static NON_MASQUERADE: LpmTrie<Addr, u8> = LpmTrie::pinned(MAX_NON_MASQUERADE, 0);

#[map]
pub static NODES: HashMap<Addr, Node> = HashMap::pinned(MAX_NODE_ADDRESSES, BPF_F_NO_PREALLOC);

#[map]
pub static POD_RANGES: LpmTrie<Addr, Node> = LpmTrie::pinned(MAX_POD_RANGES, BPF_F_NO_PREALLOC);

#[map]
pub static OVERLAY: Array<Overlay> = Array::pinned(1, 0);

#[map]
pub static NATIVE: Array<Native> = Array::pinned(1, 0);

#[map]
pub static NEXT_HOPS: HashMap<Addr, NextHop> = HashMap::pinned(MAX_NEXT_HOPS, BPF_F_NO_PREALLOC);

#[map]
pub static NATIVE_V6: HashMap<Addr, Addr> = HashMap::pinned(MAX_NEXT_HOPS, BPF_F_NO_PREALLOC);

#[map]
pub static PEER_COUNTERS: PerCpuHashMap<Addr, PeerCounters> =
    PerCpuHashMap::pinned(MAX_PEER_COUNTERS, BPF_F_NO_PREALLOC);

#[map]
pub static NATIVE_COUNTERS: PerCpuHashMap<Addr, NativeCounters> =
    PerCpuHashMap::pinned(MAX_PEER_COUNTERS, BPF_F_NO_PREALLOC);

#[map]
pub static PEER_PLACES: PerCpuArray<PeerPlace> = PerCpuArray::pinned(PLACES, 0);

#[map]
pub static NATIVE_PLACES: PerCpuArray<NativePlace> = PerCpuArray::pinned(PLACES, 0);

#[map]
pub static PATH_MTU: Array<u32> = Array::pinned(1, 0);

#[map]
pub static UPLINK_MTU: Array<u32> = Array::pinned(1, 0);

#[map]
pub static NON_MASQUERADE_BEFORE: LpmTrie<Addr, u8> = LpmTrie::pinned(MAX_NON_MASQUERADE_BEFORE, 0);

#[map]
pub static UPLINKS: HashMap<u32, Uplink> = HashMap::pinned(MAX_UPLINKS, BPF_F_NO_PREALLOC);

#[map]
pub static CHECKED_LINKS: Array<u32> = Array::pinned(uplink::CHECKED_LINKS, 0);

#[map]
pub static HOST_PORTS: Array<u64> = Array::pinned(HOST_PORT_WORDS, 0);

#[map]
pub static PORT_BITMAPS: LruHashMap<Tuple, TakenPorts> = LruHashMap::pinned(MAX_PORT_BITMAPS, 0);

#[map]
pub static RESERVED_PORTS: Array<TakenPorts> = Array::pinned(PORT_TABLES, 0);

#[map]
pub static FRONTENDS: HashMap<FrontendKey, Frontend> =
    HashMap::pinned(MAX_FRONTENDS, BPF_F_NO_PREALLOC);

#[map]
pub static SETS: Array<Set> = Array::pinned(MAX_SETS, BPF_F_MMAPABLE);

#[map]
pub static SLOTS: Array<Slot> = Array::pinned(MAX_SLOTS, BPF_F_MMAPABLE);

#[map]
pub static BACKENDS: Array<Backend> = Array::pinned(MAX_BACKENDS, BPF_F_MMAPABLE);

#[map]
pub static AFFINITY: LruHashMap<AffinityKey, Affinity> = LruHashMap::pinned(MAX_AFFINITIES, 0);

#[map]
pub static SOURCE_RANGES: LpmTrie<SourceKey, u8> =
    LpmTrie::pinned(MAX_SOURCE_RANGES, BPF_F_NO_PREALLOC);

#[map]
pub static SERVICE_RANGES: LpmTrie<Addr, RangeOf> =
    LpmTrie::pinned(MAX_SERVICE_RANGES, BPF_F_NO_PREALLOC);

#[map]
pub static LAYOUTS: HashMap<u64, MapRecord> = HashMap::pinned(MAX_MAPS, BPF_F_NO_PREALLOC);

#[map]
pub static LAYOUT_FIELDS: HashMap<FieldKey, FieldSpan> =
    HashMap::pinned(MAX_FIELDS, BPF_F_NO_PREALLOC);
