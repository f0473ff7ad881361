//! Between pods and what is outside of the cluster without the stack: from a pod's link to the uplink ([`leave`]), from the uplink
//! into the pod ([`arrive`]). Routes are the kernel's, and neighbours; netfilter, and its tracking of connections, sees neither
//! direction.
//!
//! The uplink's own programs see each packet as if the stack had sent it: all of [`crate::nat`] is as it was. What needs no more than
//! the translation that its record has gets it at the pod's link, so that its headers are read once.
//!
//! Taken are connections that have a record here and so are not netfilter's: what the uplink masquerades, and what clients outside
//! have with Services. Left to the stack is what has none (whoever came by a `hostPort`, or to a pod's own address),
//! and what a router has to handle ([`deliver::is_plain`](crate::stage::deliver::is_plain)).

pub mod arrive;
pub mod leave;

use crate::overlay;
use sinabro_common::abi::config::{FLAG_FORWARD, NodeConfig};

/// Whether packets may go past the stack here.
#[inline(always)]
pub fn takes(config: &NodeConfig) -> bool {
    config.flags & FLAG_FORWARD != 0 && overlay::takes(config)
}

/// BPF_FIB_LKUP_RET_SUCCESS: a plain route that leads on, and a neighbour that is known.
pub const LEADS_ON: i64 = 0;

/// What the kernel's routes are asked, and what they say: `struct bpf_fib_lookup` (linux/bpf.h).
#[repr(C)]
pub struct Way {
    /// AF_INET or AF_INET6; of the next hop, when answered.
    pub family: u8,
    pub proto: u8,
    pub src_port: [u8; 2],
    pub dst_port: [u8; 2],
    /// Zero: the packet's own length is compared with the MTU.
    pub len: u16,
    /// The interface that the packet came by; which it leaves by, when answered.
    pub ifindex: u32,
    /// Of IPv4, its type of service in the first byte.
    pub service: [u8; 4],
    /// IPv4 addresses are in the first four bytes.
    pub src: [u8; 16],
    /// The next hop, when answered.
    pub dst: [u8; 16],
    pub vlan: [u8; 4],
    macs: [[u8; 6]; 2],
}
