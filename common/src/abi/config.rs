//! Settings of this node that the programs read.
//!
//! - map `CONFIG`, array of one: 0 → [`NodeConfig`];
//! - map `PATH_MTU`, array of one: 0 → u32: MTU of every way out of the node: that inside of tunnels; zero until it is known;
//! - map `UPLINK_MTU`, array of one: 0 → u32: MTU of the ways out that are no tunnels, as pods have it in their routes, which is
//!   more where packets go to other nodes without one; zero: as `PATH_MTU`;
//! - map `NON_MASQUERADE`, LPM trie: prefix over [`Addr`] (an IPv4 prefix of length n has
//!   length 96 + n) → u8: destinations that keep the pod's own source address;
//! - map `NON_MASQUERADE_BEFORE`, LPM trie of the same form: destinations that were in `NON_MASQUERADE` since
//!   the node was booted and are not any more. TCP connections from then go on as they began.

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

/// Masqueraded flows are being carried to a map of another layout: a connection that the programs do
/// not find is on its way, and its packets are dropped instead of taken for another's. TCP sends
/// them again.
pub const FLAG_CARRYING: u32 = 1 << 4;

/// Pods' packets of protocols without ports (GRE, ESP, IPIP, 6in4) are masqueraded, too. A node's address has one such flow
/// towards each remote address, so a pod that has it takes it from the node. Programs that do not know the flag masquerade them.
pub const FLAG_MASQUERADE_PORTLESS: u32 = 1 << 13;

/// Packets between pods of two nodes take the fast path, except those of connections that have a
/// record with `FLAG_STACK`. Implies [`FLAG_RECORD_STACK`].
pub const FLAG_BESIDE_PROXY: u32 = 1 << 14;

/// Each connection between pods of two nodes that the stack forwards, and may translate, gets a record with `FLAG_STACK`. Where Services
/// are translated here alone, only while [`FLAG_BESIDE_PROXY_DRAINS`] is set.
pub const FLAG_RECORD_STACK: u32 = 1 << 15;

/// With [`FLAG_BESIDE_PROXY`]: the fast path between nodes drains. What has no record goes by the stack and gets one. Only TCP segments
/// for which conntrack creates no entry (SYN-ACK, FIN, RST) take the fast path yet, until they have a record. The record of a Service that
/// is translated here gets `FLAG_TRACKED` instead.
pub const FLAG_BESIDE_PROXY_DRAINS: u32 = 1 << 16;

/// `nf_conntrack_tcp_loose` is 0: conntrack creates no entry for a TCP connection that it has not seen begin. Such a connection takes the
/// fast path for as long as that drains.
pub const FLAG_CONNTRACK_STRICT: u32 = 1 << 17;

/// Programs of two layouts run, each with a table of its own: a connection between pods of this node that has no record here may
/// have one there, and keeps to the stack.
pub const FLAG_MIXED: u32 = 1 << 12;

/// Packets on some uplink begin with their IP header: the programs look up on which.
pub const FLAG_LAYER3_UPLINKS: u32 = 1 << 5;

/// A pod's UDP port has one port outside, whatever it sends to (RFC 4787 §4.1): endpoint-independent mapping. Without
/// it each connection gets a port by itself.
pub const FLAG_ENDPOINT_INDEPENDENT: u32 = 1 << 6;

/// Services are translated here: `abi::service`.
pub const FLAG_SERVICES: u32 = 1 << 7;
/// With [`FLAG_SERVICES`]: others, such as kube-proxy, have connections that began before. A segment of TCP that begins none
/// and is none of ours is theirs. (Of datagrams nobody can see what they begin: `abi::service` has how these are left.)
pub const FLAG_HANDOVER: u32 = 1 << 8;
/// With [`FLAG_SERVICES`]: no connection begins that is translated here. Those that are there go on.
pub const FLAG_DRAINING: u32 = 1 << 9;

/// With [`FLAG_SERVICES`] alone of the three: what pods of this node send out of the cluster, and what answers it, goes past the
/// stack, by the kernel's routes and neighbours, but without netfilter.
pub const FLAG_FORWARD: u32 = 1 << 10;

/// The kernel drops what a program puts into an interface if it is larger than the interface's MTU, as those before Linux 5.12 do.
pub const FLAG_INGRESS_MTU: u32 = 1 << 11;

/// The highest byte of the flags: the layout generation ([`super::layout::Place`]) of the programs that
/// run; zero until any do, as good as the first, whose maps are in no generation's directory.
const GENERATION_SHIFT: u32 = 24;

/// Entries of `NON_MASQUERADE`: pod ranges of all nodes and what the user listed.
pub const MAX_NON_MASQUERADE: u32 = 16384;

/// Entries of `NON_MASQUERADE_BEFORE`.
pub const MAX_NON_MASQUERADE_BEFORE: u32 = 4096;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// Source of masqueraded IPv4 packets by the first uplink that has one, mapped; unspecified: none are
    /// masqueraded, by whichever uplink.
    pub masquerade_v4: Addr,
    /// IPv6 counterpart.
    pub masquerade_v6: Addr,
    /// First translated port (or ICMP echo id), host order.
    pub nat_port_min: u16,
    /// Last translated port, inclusive, host order.
    pub nat_port_max: u16,
    /// `FLAG_*`, and the generation.
    pub flags: u32,
}

impl NodeConfig {
    /// The layout generation of the programs that run.
    pub const fn generation(&self) -> u32 {
        match self.flags >> GENERATION_SHIFT {
            0 => 1,
            generation => generation,
        }
    }

    pub const fn with_generation(self, generation: u32) -> Self {
        let flags = self.flags & ((1 << GENERATION_SHIFT) - 1);
        Self {
            flags: flags | generation << GENERATION_SHIFT,
            ..self
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_is_beside_the_flags_and_zero_is_the_first() {
        let config = |flags| NodeConfig {
            masquerade_v4: Addr::UNSPECIFIED,
            masquerade_v6: Addr::UNSPECIFIED,
            nat_port_min: 0,
            nat_port_max: 0,
            flags,
        };
        assert_eq!(config(FLAG_CARRYING).generation(), 1);
        let later = config(FLAG_CARRYING | FLAG_MASQUERADE).with_generation(7);
        assert_eq!(later.generation(), 7);
        let earlier = later.with_generation(2);
        assert_eq!(earlier.generation(), 2);
        let of_programs = earlier.flags & (FLAG_CARRYING | FLAG_MASQUERADE | FLAG_STAMPED);
        assert_eq!(of_programs, FLAG_CARRYING | FLAG_MASQUERADE);
    }
}
