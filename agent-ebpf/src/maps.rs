//! Every map but those of `acceleration`, pinned by its name. Layouts and meaning:
//! `sinabro_common::abi`.
//!
//! Every object has every map declared here, used or not.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap},
};
use sinabro_common::abi::{
    Addr,
    config::{MAX_NON_MASQUERADE, NodeConfig},
    connection::HOST_PORT_WORDS,
    counters::PodCounters,
    drop::MAX_DROP_REASONS,
    endpoint::{Endpoint, MAX_PODS, PodLink},
    flow::{FlowKey, MAX_STACK_FLOWS},
    layout::{FieldKey, FieldSpan, MAX_FIELDS, MAX_MAPS, MapRecord},
    nat::{MAX_NAT_ENTRIES, NatEntry, NatKey},
    node::{MAX_NODE_ADDRESSES, MAX_POD_RANGES, Node, Overlay},
    uplink::{MAX_UPLINKS, Uplink},
};

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
pub static DROPS: PerCpuArray<u64> = PerCpuArray::pinned(MAX_DROP_REASONS, 0);

#[map]
pub static STACK_FLOWS: LruHashMap<FlowKey, u8> = LruHashMap::pinned(MAX_STACK_FLOWS, 0);

#[map]
pub static NAT: HashMap<NatKey, NatEntry> = HashMap::pinned(MAX_NAT_ENTRIES, 0);

#[map]
pub static NON_MASQUERADE: LpmTrie<Addr, u8> = LpmTrie::pinned(MAX_NON_MASQUERADE, 0);

#[map]
pub static NODES: HashMap<Addr, Node> = HashMap::pinned(MAX_NODE_ADDRESSES, BPF_F_NO_PREALLOC);

#[map]
pub static POD_RANGES: LpmTrie<Addr, Node> = LpmTrie::pinned(MAX_POD_RANGES, BPF_F_NO_PREALLOC);

#[map]
pub static OVERLAY: Array<Overlay> = Array::pinned(1, 0);

#[map]
pub static PATH_MTU: Array<u32> = Array::pinned(1, 0);

#[map]
pub static UPLINKS: HashMap<u32, Uplink> = HashMap::pinned(MAX_UPLINKS, BPF_F_NO_PREALLOC);

#[map]
pub static HOST_PORTS: Array<u64> = Array::pinned(HOST_PORT_WORDS, 0);

#[map]
pub static LAYOUTS: HashMap<u64, MapRecord> = HashMap::pinned(MAX_MAPS, BPF_F_NO_PREALLOC);

#[map]
pub static LAYOUT_FIELDS: HashMap<FieldKey, FieldSpan> =
    HashMap::pinned(MAX_FIELDS, BPF_F_NO_PREALLOC);
