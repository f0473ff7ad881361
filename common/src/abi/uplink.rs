//! Ways out of the node.
//!
//! - map `UPLINKS`, hash: index of the interface (u32) → [`Uplink`];
//! - map `CHECKED_LINKS`, array of one: 0 → [`CheckedLinks`].

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

/// Interfaces by which most packets come whose sources were checked, other than pods' links.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckedLinks {
    /// Index of the VXLAN device; zero until there is one.
    pub overlay: u32,
    /// Indexes of the first uplinks; zero where there are fewer. A hint: all are in `UPLINKS`.
    pub uplinks: [u32; 3],
}
map_type!(CheckedLinks, 16, 2, [overlay, uplinks]);
