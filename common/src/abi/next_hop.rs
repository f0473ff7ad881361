//! Other nodes that a pod's packets are sent to straight from the pod's link, past the routes and the VXLAN device.
//!
//! Map `NEXT_HOPS`, hash: a node's tunnel address ([`Addr`]) → [`NextHop`]. A node that is not in it is reached by the
//! kernel's way, and so are all while no agent has looked which way its routes lead.
//!
//! Map `NATIVE_V6`, hash: the same → the node's IPv6 address on the link ([`Addr`]), where its tunnel address is IPv4 and packets
//! go there without a tunnel: the kernel gives IPv6 packets to no IPv4 address. Without one they are in tunnels.

use super::{Addr, map_type};

/// Nodes, by their tunnel addresses.
pub const MAX_NEXT_HOPS: u32 = 65_536;

/// The way to another node.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// Whom the frame is for on the uplink: a router, or the node itself.
    pub gateway: Addr,
    /// Index of the uplink.
    pub ifindex: u32,
    /// MAC address of the other node's VXLAN device; [`NATIVE`] if packets go there as they are, [`TRIED`] if none may go there
    /// but what finds out whether they could,
    pub remote_mac: [u8; 6],
    /// and of this node's: who sends to it writes it into the inner header.
    pub own_mac: [u8; 6],
}

/// No device has it: packets go without a tunnel, which needs none.
pub const NATIVE: [u8; 6] = [0; 6];

/// Nor this one: the agent's requests without a tunnel go there so, and all else by the kernel's way.
pub const TRIED: [u8; 6] = [0xff; 6];

map_type!(NextHop, 32, 2, [gateway, ifindex, remote_mac, own_mac]);
