//! Traffic counters. Programs write no key of theirs: what has no entry is not counted.
//!
//! - map `POD_COUNTERS`, per-CPU hash: host-side interface index (u32) → [`PodCounters`];
//! - map `PEER_COUNTERS`, per-CPU hash: another node's tunnel address ([`Addr`](super::Addr)) → [`PeerCounters`];
//! - map `NATIVE_COUNTERS`, per-CPU hash: the same → [`NativeCounters`]. It is empty where packets are in tunnels alone.
//!
//! By [`Addr::UNSPECIFIED`](super::Addr::UNSPECIFIED), which no program looks up, agents keep in both what nodes had that
//! are gone.
//!
//! Those lookups are a quarter of what programs take for a packet of a busy flow. So of those that have one place the first one is
//! counted there, found by a load, and only the others in the hash. What each had is the sum of both:
//!
//! - maps `POD_PLACES`, `PEER_PLACES`, `NATIVE_PLACES`, per-CPU arrays of [`PLACES`]: [place](Owner::place) → [`Place`], free if its
//!   owner is zeros. Written by agents alone, on all CPUs, but for the counters.

use super::{Addr, map_type, next_hop::MAX_NEXT_HOPS};

/// Of each kind of counters: more than most nodes have pods, and 60 KB for each CPU in all.
pub const PLACES: u32 = 512;

/// Whose counters they are.
pub trait Owner: Copy + Ord {
    /// Nobody's: zeros, before all others in order.
    const NONE: Self;

    /// Less than [`PLACES`].
    fn place(&self) -> u32;
}

/// A pod, by its host-side interface index: those of a node are mostly in a row.
impl Owner for u64 {
    const NONE: Self = 0;

    #[inline(always)]
    fn place(&self) -> u32 {
        *self as u32 % PLACES
    }
}

/// Another node, by its tunnel address: those differ in their last bits.
impl Owner for Addr {
    const NONE: Self = Self::UNSPECIFIED;

    #[inline(always)]
    fn place(&self) -> u32 {
        let [.., high, low] = self.0;
        u32::from(u16::from_be_bytes([high, low])) % PLACES
    }
}

/// Counters of one of those that have a place.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<O, C> {
    /// [`Owner::NONE`]: the place is free.
    pub owner: O,
    pub counters: C,
}

pub type PodPlace = Place<u64, PodCounters>;
pub type PeerPlace = Place<Addr, PeerCounters>;
pub type NativePlace = Place<Addr, NativeCounters>;
map_type!(PodPlace, 40, 2, [owner, counters]);
map_type!(PeerPlace, 48, 2, [owner, counters]);
map_type!(NativePlace, 32, 2, [owner, counters]);

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
