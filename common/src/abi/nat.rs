//! Masquerade state.
//!
//! Map `NAT`, hash: [`NatKey`] → [`NatEntry`], two entries per flow:
//! - *forward*, keyed by the packet as the pod sent it: the source it is given;
//! - *reverse*, keyed by the reply as the uplink receives it: the destination it is given.
//!
//! Whoever inserts the reverse key first owns the translated port: two pods can never share
//! one towards the same destination. The agent expires a flow by its forward entry and removes
//! both (see [`crate::algo::ct_state`] for lifetimes).

use super::{Addr, map_type};

/// Flows times two.
pub const MAX_NAT_ENTRIES: u32 = 131_072;

/// A packet's addresses as they are on the wire.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NatKey {
    pub src: Addr,
    pub dst: Addr,
    /// Network order; the echo id for ICMP (in both port fields of an echo flow).
    pub src_port: [u8; 2],
    /// Network order.
    pub dst_port: [u8; 2],
    /// IP protocol number.
    pub proto: u8,
    /// Zero.
    pub pad: [u8; 3],
}
map_type!(NatKey, 40, 1, [src, dst, src_port, dst_port, proto, pad]);

/// Keyed by what the pod sent; rewrites the source.
pub const KIND_FORWARD: u8 = 1;
/// Keyed by the reply; rewrites the destination.
pub const KIND_REVERSE: u8 = 2;
/// Keyed by what the pod sends in reply to a connection that came in from outside to the pod's
/// own address: leaves the source as it is.
pub const KIND_INBOUND: u8 = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NatEntry {
    #[cfg(feature = "layout-next")]
    pub last_seen_ns: u64,
    /// The address to write.
    pub addr: Addr,
    /// The port (or echo id) to write, network order.
    pub port: [u8; 2],
    /// `KIND_*`.
    pub kind: u8,
    /// [`crate::algo::ct_state`] bits seen in this entry's direction.
    pub state: u8,
    /// The same of the other direction where no second entry has them ([`KIND_INBOUND`]), else
    /// zero.
    pub peer_state: u8,
    /// Zero.
    pub pad: [u8; 3],
    /// `bpf_ktime_get_ns` of the last packet in this entry's direction.
    #[cfg(not(feature = "layout-next"))]
    pub last_seen_ns: u64,
}
#[cfg(not(feature = "layout-next"))]
map_type!(
    NatEntry,
    32,
    1,
    [addr, port, kind, state, peer_state, pad, last_seen_ns]
);
#[cfg(feature = "layout-next")]
map_type!(
    NatEntry,
    32,
    2,
    [last_seen_ns, addr, port, kind, state, peer_state, pad]
);

const PROTO_ICMP: u8 = 1;

impl NatKey {
    /// The key of replies to a flow once its source has become `addr`:`port`.
    #[inline(always)]
    pub const fn reply_to(&self, addr: Addr, port: [u8; 2]) -> Self {
        Self {
            src: self.dst,
            dst: addr,
            // An echo message has one id, and the reply has its request's (RFC 792).
            src_port: if self.proto == PROTO_ICMP {
                port
            } else {
                self.dst_port
            },
            dst_port: port,
            proto: self.proto,
            pad: [0; 3],
        }
    }

    /// The forward key of the flow whose reverse entry has this key and gives replies back to
    /// `addr`:`port`; the inverse of [`Self::reply_to`].
    #[inline(always)]
    pub const fn sent_by(&self, addr: Addr, port: [u8; 2]) -> Self {
        Self {
            src: addr,
            dst: self.src,
            src_port: port,
            dst_port: if self.proto == PROTO_ICMP {
                port
            } else {
                self.src_port
            },
            proto: self.proto,
            pad: [0; 3],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_reply_leads_back_to_its_flow(
            src: [u8; 4], dst: [u8; 4], node: [u8; 4],
            ports: [u8; 2], dst_port: [u8; 2], given: [u8; 2], proto: u8,
        ) {
            let echo = proto == PROTO_ICMP;
            let key = NatKey {
                src: Addr::v4(src),
                dst: Addr::v4(dst),
                src_port: ports,
                dst_port: if echo { ports } else { dst_port },
                proto,
                pad: [0; 3],
            };
            let reply = key.reply_to(Addr::v4(node), given);
            prop_assert_eq!((reply.src, reply.dst, reply.dst_port), (key.dst, Addr::v4(node), given));
            prop_assert_eq!(reply.src_port, if echo { given } else { dst_port });
            prop_assert_eq!(reply.sent_by(key.src, key.src_port), key);
        }
    }
}
