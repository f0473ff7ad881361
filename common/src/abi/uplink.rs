//! Ways out of the node.
//!
//! Map `UPLINKS`, hash: index of the interface (u32) → [`Uplink`].

use super::{Addr, map_type};

pub const MAX_UPLINKS: u32 = 256;

/// What the programs need to know of an uplink.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// IPv4 source of what is masqueraded here, mapped; [`Addr::UNSPECIFIED`]: none is.
    pub v4: Addr,
    /// IPv6 source, or [`Addr::UNSPECIFIED`].
    pub v6: Addr,
    /// Length of the link's header in front of the IP header: 14 for Ethernet, 0 for a layer-3 device
    /// (WireGuard, tun, ppp).
    pub header_len: u32,
    /// Zero.
    pub pad: u32,
}
map_type!(Uplink, 40, 2, [v4, v6, header_len, pad]);
