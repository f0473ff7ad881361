//! Traffic counters.
//!
//! Map `POD_COUNTERS`, per-CPU hash: host-side interface index (u32) → [`PodCounters`].

use super::map_type;

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
