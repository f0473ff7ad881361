//! How large the packets are that the ways out of the node carry, in bytes from their IP header; zero until it is known.

use crate::maps::{PATH_MTU, UPLINK_MTU};

/// Inside of tunnels to other nodes: by every way.
#[inline(always)]
pub fn of_tunnels() -> u32 {
    PATH_MTU.get(0).copied().unwrap_or(0)
}

/// By an uplink as they are.
#[inline(always)]
pub fn of_uplinks() -> u32 {
    match UPLINK_MTU.get(0) {
        Some(mtu) if *mtu != 0 => *mtu,
        // Nobody has said so yet: as large as by every way.
        _ => of_tunnels(),
    }
}
