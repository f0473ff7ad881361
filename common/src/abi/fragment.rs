//! Fragments that came in before the first of their packet.
//!
//! - map `EARLY_FRAGMENTS`, LRU hash: [`EarlyKey`] → [`EarlyFragment`]: the fragment itself, until the one in front of it
//!   has gone to its pod. At offset zero, where no fragment but the first can be, an empty one says that the first has come and
//!   that the packet is no pod's.
//!
//! Invariant: whoever removes an entry is the only one who sends what was in it.

use super::{connection::FragmentKey, map_type};

/// Fragments that wait at a time: of 50 datagrams of 60,000 bytes.
pub const MAX_EARLY_FRAGMENTS: u32 = 2048;
/// Bytes of a fragment that can be kept; links between machines that do not know each other have an MTU of 1,500.
pub const EARLY_BYTES: usize = 1536;

/// Which fragment of which packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EarlyKey {
    pub packet: FragmentKey,
    /// Where in the packet it begins, in units of eight bytes, host order.
    pub offset: u32,
}
map_type!(EarlyKey, 44, 2, [packet, offset]);

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyFragment {
    /// When it came, `bpf_ktime_get_ns`.
    pub seen_ns: u64,
    /// How many of `bytes` it has; zero: the packet is no pod's.
    pub len: u32,
    /// Zero.
    pub pad: u32,
    /// The packet as it came, from its IP header on.
    pub bytes: [u8; EARLY_BYTES],
}
map_type!(EarlyFragment, 1552, 2, [seen_ns, len, pad, bytes]);
