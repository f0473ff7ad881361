//! Traffic counters. Programs write no key of theirs: what has no entry is not counted.
//!
//! - map `POD_COUNTERS`, per-CPU hash: host-side interface index (u32) → [`PodCounters`];
//! - map `PEER_COUNTERS`, per-CPU hash: another node's tunnel address ([`Addr`](super::Addr)) → [`PeerCounters`];
//! - map `NATIVE_COUNTERS`, per-CPU hash: the same → [`NativeCounters`]. It is empty where packets are in tunnels alone.
//!
//! By [`Addr::UNSPECIFIED`](super::Addr::UNSPECIFIED), which no program looks up, agents keep in both what nodes had that
//! are gone.

use super::{map_type, next_hop::MAX_NEXT_HOPS};

/// One for each other node, and one for those that are gone.
pub const MAX_PEER_COUNTERS: u32 = MAX_NEXT_HOPS + 1;

/// What one pod sent and received, as seen by the pod: `tx` left it, `rx` reached it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodCounters {
    pub tx_packets: u64,
    /// Bytes of whole frames, Ethernet header included.
    pub tx_bytes: u64,
    pub rx_packets: u64,
    /// Bytes of whole frames, Ethernet header included.
    pub rx_bytes: u64,
}
map_type!(
    PodCounters,
    32,
    1,
    [tx_packets, tx_bytes, rx_packets, rx_bytes]
);

impl core::ops::AddAssign for PodCounters {
    fn add_assign(&mut self, other: Self) {
        self.tx_packets += other.tx_packets;
        self.tx_bytes += other.tx_bytes;
        self.rx_packets += other.rx_packets;
        self.rx_bytes += other.rx_bytes;
    }
}

/// Tunnel packets between this node and another, by their way: past the stack, or by the kernel's VXLAN device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounters {
    pub direct_tx: u64,
    pub direct_rx: u64,
    pub kernel_tx: u64,
    pub kernel_rx: u64,
}
map_type!(
    PeerCounters,
    32,
    2,
    [direct_tx, direct_rx, kernel_tx, kernel_rx]
);

impl core::ops::AddAssign for PeerCounters {
    fn add_assign(&mut self, other: Self) {
        self.direct_tx += other.direct_tx;
        self.direct_rx += other.direct_rx;
        self.kernel_tx += other.kernel_tx;
        self.kernel_rx += other.kernel_rx;
    }
}

/// Packets between pods of this node and of another that are in no tunnel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NativeCounters {
    pub tx: u64,
    pub rx: u64,
}
map_type!(NativeCounters, 16, 2, [tx, rx]);

impl core::ops::AddAssign for NativeCounters {
    fn add_assign(&mut self, other: Self) {
        self.tx += other.tx;
        self.rx += other.rx;
    }
}
