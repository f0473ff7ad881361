//! Pods of this node.
//!
//! - map `ENDPOINTS`, hash: pod address ([`Addr`]) → [`Endpoint`], read to deliver;
//! - map `POD_LINKS`, hash: host-side interface index (u32) → [`PodLink`], read to check that a
//!   pod speaks for itself.

use super::{Addr, map_type};

/// Upper bound of pods on a node, each with an address of either family.
pub const MAX_PODS: u32 = 4096;

/// Where a pod's address is found on this node.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Host-side veth; `bpf_redirect_peer` takes it and delivers inside the pod.
    pub ifindex: u32,
    /// The link's MTU in the upper half, zero where an agent wrote it that did not say, and [flags](NO_HOST_PORTS).
    pub flags: u32,
    /// The pod's own MAC address, destination of what is delivered.
    pub mac: [u8; 6],
    /// The host side's MAC address, source of what is delivered.
    pub host_mac: [u8; 6],
}
map_type!(Endpoint, 20, 1, [ifindex, flags, mac, host_mac]);

/// In [`Endpoint::flags`]: no port of the node is led to the pod by others, but for ports of TCP. So a datagram of the pod's that has no record
/// is no answer that the node's stack is to translate.
pub const NO_HOST_PORTS: u32 = 1;

impl Endpoint {
    /// The flags of an endpoint, with the MTU of its link.
    pub const fn flags_of(mtu: u32, flags: u32) -> u32 {
        match mtu {
            0..=0xffff => mtu << 16 | flags,
            // No packet is larger.
            _ => flags,
        }
    }

    /// The MTU of the link; zero if it is not known.
    #[inline(always)]
    pub const fn mtu(&self) -> u32 {
        self.flags >> 16
    }
}

/// What a pod may send from.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodLink {
    /// IPv4 address mapped, or [`Addr::UNSPECIFIED`] where the pod has none.
    pub v4: Addr,
    /// IPv6 address, or [`Addr::UNSPECIFIED`] where the pod has none.
    pub v6: Addr,
    /// The pod's own MAC address.
    pub mac: [u8; 6],
    /// [The pod's network namespace](Self::netns). The name is that of this layout in 0.1.0, whose agents write zeros: another name would
    /// be another layout, whose entries have to be carried.
    pub pad: [u8; 2],
}
map_type!(PodLink, 40, 1, [v4, v6, mac, pad]);

impl PodLink {
    /// An id of a network namespace as it is in [`Self::pad`]: plus one, in the machine's byte order. Zero: not known.
    pub fn pad_of(id: Option<u32>) -> [u8; 2] {
        let more = id.and_then(|id| u16::try_from(id.checked_add(1)?).ok());
        more.unwrap_or(0).to_ne_bytes()
    }

    /// The id of the pod's network namespace in the host's, if it is known.
    #[inline(always)]
    pub fn netns(&self) -> Option<u32> {
        u32::from(u16::from_ne_bytes(self.pad)).checked_sub(1)
    }
}
