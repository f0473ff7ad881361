//! Masquerade state.
//!
//! Map `NAT`, hash: [`NatKey`] → [`NatEntry`], two entries per flow:
//! - *forward*, keyed by the packet as the pod sent it: the source it is given;
//! - *reverse*, keyed by the reply as the uplink receives it: the destination it is given.
//!
//! Whoever inserts the reverse key first owns the translated port: two pods can never share
//! one towards the same destination. The agent expires a flow by its forward entry and removes
//! both (see [`crate::algo::ct_state`] for lifetimes).

use super::{Addr, map_type};

/// Flows times two.
pub const MAX_NAT_ENTRIES: u32 = 131_072;

/// A packet's addresses as they are on the wire.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NatKey {
    pub src: Addr,
    pub dst: Addr,
    /// Network order; the echo id for ICMP (in both port fields of an echo flow).
    pub src_port: [u8; 2],
    /// Network order.
    pub dst_port: [u8; 2],
    /// IP protocol number.
    pub proto: u8,
    /// Zero.
    pub pad: [u8; 3],
}
map_type!(NatKey, 40);

/// Keyed by what the pod sent; rewrites the source.
pub const KIND_FORWARD: u8 = 1;
/// Keyed by the reply; rewrites the destination.
pub const KIND_REVERSE: u8 = 2;
/// Keyed by what the pod sends in reply to a connection that came in from outside to the pod's
/// own address: leaves the source as it is.
pub const KIND_DIRECT: u8 = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NatEntry {
    /// The address to write.
    pub addr: Addr,
    /// The port (or echo id) to write, network order.
    pub port: [u8; 2],
    /// `KIND_*`.
    pub kind: u8,
    /// [`crate::algo::ct_state`] bits seen in this entry's direction.
    pub state: u8,
    /// Zero.
    pub pad: [u8; 4],
    /// `bpf_ktime_get_ns` of the last packet in this entry's direction.
    pub last_seen_ns: u64,
}
map_type!(NatEntry, 32);

impl NatKey {
    /// The key of replies to a flow once its source has become `addr`:`port`.
    #[inline(always)]
    pub const fn reply_to(&self, addr: Addr, port: [u8; 2]) -> Self {
        Self {
            src: self.dst,
            dst: addr,
            src_port: self.dst_port,
            dst_port: port,
            proto: self.proto,
            pad: [0; 3],
        }
    }
}
