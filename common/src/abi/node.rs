//! The nodes of the cluster, as their tunnels are judged by.
//!
//! - map `NODES`, hash: every address of every node ([`Addr`]) → [`Node`];
//! - map `POD_RANGES`, LPM trie: pod range (prefix over [`Addr`] as in [`super::config`]) →
//!   [`Node`];
//! - map `OVERLAY`, array of one: 0 → [`Overlay`], this node's end of the tunnels;
//! - map `NATIVE`, array of one: 0 → [`Native`], whether packets are taken without a tunnel, too.
//!
//! A node's tunnel address stands for the node: no two have the same. This node is among them.

use super::{Addr, map_type};

/// Addresses of nodes, some for each.
pub const MAX_NODE_ADDRESSES: u32 = 131_072;
/// Pod ranges, one or two for each node.
pub const MAX_POD_RANGES: u32 = 65_536;

/// A node, by an address or a pod range of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Where its tunnels begin and end.
    pub tunnel: Addr,
    /// None yet.
    pub flags: u32,
}
map_type!(Node, 20, 1, [tunnel, flags]);

/// This node's end of the tunnels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlay {
    /// This node's tunnel address; unspecified until the overlay is known.
    pub local: Addr,
    /// Addresses of the VXLAN device, [`Addr::UNSPECIFIED`] where there are fewer.
    pub gateways: [Addr; 2],
    /// A secret of this node, written over the inner source MAC address of every tunnel packet
    /// that was checked on the uplink. Whoever does not know it cannot bring a packet to the
    /// VXLAN device by another way.
    pub stamp: [u8; 6],
    /// UDP port of the tunnels, network order.
    pub port: [u8; 2],
    /// The VXLAN header of every packet of this overlay: flags and VNI (RFC 7348 §5).
    pub vxlan: [u8; 8],
}
map_type!(Overlay, 64, 1, [local, gateways, stamp, port, vxlan]);

impl Overlay {
    /// What packets are marked with that leave by an uplink as they are. A pod cannot mark what it sends: the kernel takes marks off on
    /// the way out of a network namespace. It is of the stamp, which nobody knows, so that no rule of the node's has it by chance.
    #[must_use]
    pub fn mark(&self) -> u32 {
        let [_, _, a, b, c, d] = self.stamp;
        u32::from_ne_bytes([a, b, c, d]) | 1
    }

    /// What requests are marked with that are to get to another node without a tunnel or not at all. As [`Self::mark`], but these pass
    /// the node's rules: kubelet's and kube-proxy's have a bit each for what is to be dropped and to be masqueraded. The lowest bit is
    /// not set, so that no stamp makes the two marks equal.
    #[must_use]
    pub fn mark_of_requests(&self) -> u32 {
        self.mark() & !(KUBERNETES_MARKS | 1) | 2
    }
}

/// `KUBE-MARK-MASQ` and `KUBE-MARK-DROP` (`iptablesMasqueradeBit`, `iptablesDropBit` of kubelet and kube-proxy).
const KUBERNETES_MARKS: u32 = 0x4000 | 0x8000;

/// What becomes of packets from pods of other nodes that come without a tunnel (`routing: native`) and are not delivered past
/// the stack: they go into the VXLAN device as if they had come out of one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Native {
    /// Index of the VXLAN device; zero: no such packet is taken.
    pub device: u32,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Zero.
    pub pad: [u8; 2],
}
map_type!(Native, 12, 2, [device, mac, pad]);

/// The header of packets of one VNI, as Linux sends it and demands it.
pub const fn vxlan_header(vni: u32) -> [u8; 8] {
    let [_, a, b, c] = vni.to_be_bytes();
    [0x08, 0, 0, 0, a, b, c, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_of_the_stamp_and_no_rule_of_kubernetes_minds_those_of_requests() {
        let of = |stamp| Overlay {
            local: Addr::UNSPECIFIED,
            gateways: [Addr::UNSPECIFIED; 2],
            stamp,
            port: [0; 2],
            vxlan: vxlan_header(1),
        };
        assert_ne!(of([0; 6]).mark(), 0);
        assert_ne!(of([0; 6]).mark_of_requests(), 0);
        let [one, other] = [of([0xff; 6]), of([0xff, 0xff, 0xff, 1, 0xff, 0xff])];
        assert_ne!(one.mark(), other.mark());
        for overlay in [one, other] {
            let mark = overlay.mark_of_requests();
            assert_eq!(mark | 0xc003, overlay.mark() | 0xc003);
            assert_eq!(mark & 0xc000, 0);
        }
        // Whatever the stamp: one mark says that the stack has not seen the packet, the other is the stack's.
        for stamp in [[0; 6], [0xff; 6], [0, 0, 3, 0, 0, 3], [0x3f; 6]] {
            assert_ne!(of(stamp).mark(), of(stamp).mark_of_requests());
        }
    }
}
