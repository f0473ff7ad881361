//! Settings of this node that the programs read.
//!
//! - map `CONFIG`, array of one: 0 → [`NodeConfig`];
//! - map `NON_MASQUERADE`, LPM trie: prefix over [`Addr`] (an IPv4 prefix of length n has
//!   length 96 + n) → u8: destinations that keep the pod's own source address.

use super::{Addr, map_type};

/// Masquerade is on.
pub const FLAG_MASQUERADE: u32 = 1 << 0;
/// Same-node pairs are delivered by `bpf_redirect_peer`: without it, as before the node's settings
/// are there, by the stack.
pub const FLAG_REDIRECT_PEER: u32 = 1 << 1;
/// The agent keeps `NODES`, `POD_RANGES` and `OVERLAY`: tunnels are checked. An agent of the first
/// version does not set it, so programs of a later one that it finds attached let tunnels pass.
pub const FLAG_TUNNELS: u32 = 1 << 2;
/// The VXLAN device takes only what has the stamp. It follows [`FLAG_TUNNELS`], with which the
/// uplinks begin to stamp: what they let in before has none, and is on its way to the device.
pub const FLAG_STAMPED: u32 = 1 << 3;

/// Entries of `NON_MASQUERADE`: pod ranges of all nodes and what the user listed.
pub const MAX_NON_MASQUERADE: u32 = 16384;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// IPv4 source of masqueraded packets (the uplink's address), mapped; unspecified: none.
    pub masquerade_v4: Addr,
    /// IPv6 counterpart; unspecified until IPv6 masquerade exists.
    pub masquerade_v6: Addr,
    /// First translated port (or ICMP echo id), host order.
    pub nat_port_min: u16,
    /// Last translated port, inclusive, host order.
    pub nat_port_max: u16,
    /// `FLAG_*`.
    pub flags: u32,
}
map_type!(
    NodeConfig,
    40,
    1,
    [
        masquerade_v4,
        masquerade_v6,
        nat_port_min,
        nat_port_max,
        flags
    ]
);
