//! Ways out of the node.
//!
//! - map `UPLINKS`, hash: index of the interface (u32) → [`Uplink`];
//! - map `CHECKED_LINKS`, array of [`CHECKED_LINKS`]: [place](checked_place) → index of an interface (u32) that has this
//!   place, of those by which packets come whose sources are checked: pods' links as they are, uplinks and the VXLAN device
//!   with [`NOT_OF_POD`]. Zero: of none. A hint for most: the last one has the place. [`OVERLAY_PLACE`] → index of the VXLAN
//!   device; zero until there is one.

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

/// For links: more than most nodes have. A power of two, as a division takes longer than all else that is done here.
const LINK_PLACES: u32 = 512;

/// No other link's.
pub const OVERLAY_PLACE: u32 = LINK_PLACES;

pub const CHECKED_LINKS: u32 = LINK_PLACES + 1;

/// Set in `CHECKED_LINKS` where a link is no pod's. No index has it: they are positive numbers of 32 bits.
pub const NOT_OF_POD: u32 = 1 << 31;

/// Where a link is among those whose sources are checked.
#[inline(always)]
pub const fn checked_place(ifindex: u32) -> u32 {
    ifindex % LINK_PLACES
}
