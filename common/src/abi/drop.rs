//! Why the data path dropped a packet.
//!
//! Map `DROPS`, per-CPU array: [`DropReason`] as u32 → count (u64). Numbers are part of the
//! interface (metrics, dashboards): a reason no longer used keeps its number.
//!
//! Ring buffer `DROP_EVENTS`, one for each object and not pinned: a [`DropEvent`] for some of the packets
//! that were dropped, at most [`EVENTS_PER_SECOND`] of a reason on a CPU. What is left out is counted.

use super::map_type;

/// Slots of the `DROPS` map; room for reasons to come.
pub const MAX_DROP_REASONS: u32 = 64;

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $label:literal, $text:literal;)*) => {
        /// A numbered reason; see each variant.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum DropReason { $($(#[$doc])* $name = $number,)* }

        impl DropReason {
            /// Every reason, in the order of its number.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The reason of a number.
            pub fn of(number: u32) -> Option<Self> {
                Self::ALL.iter().copied().find(|reason| *reason as u32 == number)
            }

            /// Value of the metric label `reason`.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)* }
            }

            /// One sentence for people.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

drop_reasons! {
    /// Source MAC address is not the pod's.
    SourceMac = 1, "source_mac", "a pod sent from a MAC address that is not its own";
    /// Source IP address (or ARP sender) is not the pod's.
    SourceAddr = 2, "source_address", "a pod sent from an IP address that is not its own";
    /// Headers are cut short or contradict themselves.
    Malformed = 3, "malformed", "packet headers are truncated or contradict themselves";
    /// The link has a program but no record: the pod is being set up or torn down.
    UnknownLink = 4, "unknown_link", "packet on a pod link that has no endpoint record";
    /// No translated port was free for this destination.
    NatPortsExhausted = 5, "nat_ports_exhausted", "no masquerade port is free for this destination";
    /// The translation table is full.
    NatTableFull = 6, "nat_table_full", "the table of connections is full";
    /// The kernel refused to make one packet of another.
    NatFragment = 7, "nat_fragment", "a fragment that came in before the first could not be put behind it";
    /// The protocol cannot be masqueraded.
    NatProtocol = 8, "nat_protocol", "this IP protocol cannot be masqueraded";
    /// Rewriting the packet failed in the kernel.
    RewriteFailed = 9, "rewrite_failed", "the kernel refused to rewrite the packet";
    /// UDP to the tunnel port of a node, not from the node itself.
    EncapProhibited = 10, "encap_prohibited", "a pod sent a tunnel packet to a node";
    /// Outer source address is no other node's.
    TunnelSource = 11, "tunnel_source", "a tunnel packet came from an address that is no node's";
    /// The tunnel packet itself is a fragment.
    TunnelFragment = 12, "tunnel_fragment", "a tunnel packet came in fragments, see MTU";
    /// Inner source address belongs to another node, or to nobody that a pod could hear.
    TunnelInner = 13, "tunnel_inner_source", "a packet in a tunnel has a source that is not of the node that sent it";
    /// Reached the VXLAN device without being checked on the uplink.
    TunnelUnchecked = 14, "tunnel_unchecked", "a tunnel packet did not come by an uplink";
    /// Inner destination is neither a pod of this node nor the node's own.
    TunnelDestination = 15, "tunnel_destination", "a packet in a tunnel is for no pod of this node";
    /// Source address is in a pod range, but the packet came outside a tunnel.
    PodSource = 16, "pod_source", "a packet from a pod's address came in outside the overlay";
    /// ICMPv6 router advertisement, or redirect of either family, from a pod.
    RouterMessage = 17, "router_message", "a pod sent a router advertisement or a redirect";
    /// Destination is a loopback address, which on the other side of the link is the node's.
    Loopback = 18, "loopback", "a pod sent to a loopback address of its node";
    /// Its entry is on its way to a map of another layout.
    NatCarried = 19, "nat_carried", "a masqueraded connection was being carried to another layout of the table";
    /// The pod has as many connections, or unanswered ones, as it may while there is no more room.
    ConnectionShare = 20, "connection_share", "a pod has more than its share of the table of connections";
    /// The Service has no endpoint anywhere.
    ServiceNoEndpoint = 21, "service_no_endpoint", "a packet to a Service that has no endpoint";
    /// The address is a Service's, but no Service has this port of it, or no connection has this segment.
    ServiceNoPort = 22, "service_no_port", "a packet to an unused port of a Service's address, or of no connection with it";
    /// The Service has endpoints, but none that this client may have.
    ServiceNotHere = 23, "service_not_here", "a packet to a Service whose endpoints are all for others, by its traffic policy";
    /// Every endpoint that was tried has a connection of the same client's port.
    ServiceClash = 24, "service_clash", "a client's port has connections with each of the Service's endpoints that were tried";
    /// A fragment to a Service's address whose first was not seen.
    ServiceFragment = 25, "service_fragment", "a fragment to a Service's address came before the first of its packet";
    /// The client's address is in none of the Service's ranges.
    ServiceSourceRange = 26, "service_source_range", "a client sent to a load balancer's address that its Service's loadBalancerSourceRanges keep from it";
    /// The address is of a range that only Services have, and no Service's.
    ServiceUnallocated = 27, "service_unallocated", "a packet to an address of the Services' ranges that no Service has";
}

/// Bytes of a packet in its event: the longest headers that a program looks into, those of a packet within
/// an ICMPv6 error among them.
pub const EVENT_HEAD: usize = 128;
/// Events of one reason in a second on one CPU.
pub const EVENTS_PER_SECOND: u32 = 10;
/// Bytes of a ring buffer: of its events, too.
pub const EVENT_BYTES: u32 = 32 * 1024;

/// The program that dropped a packet.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    PodOut = 1,
    PodIn = 2,
    UplinkOut = 3,
    UplinkIn = 4,
    OverlayIn = 5,
    OverlayOut = 6,
}

impl Hook {
    pub const ALL: [Self; 6] = [
        Self::PodOut,
        Self::PodIn,
        Self::UplinkOut,
        Self::UplinkIn,
        Self::OverlayIn,
        Self::OverlayOut,
    ];

    /// The hook of a number.
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hook| *hook as u8 == number)
    }

    /// The program's name.
    pub const fn label(self) -> &'static str {
        match self {
            Self::PodOut => "pod_out",
            Self::PodIn => "pod_in",
            Self::UplinkOut => "uplink_out",
            Self::UplinkIn => "uplink_in",
            Self::OverlayIn => "overlay_in",
            Self::OverlayOut => "overlay_out",
        }
    }
}

/// A packet that was dropped. What it was is read from its first bytes by whoever shows it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropEvent {
    /// `bpf_ktime_get_ns`.
    pub time_ns: u64,
    /// [`DropReason`].
    pub reason: u32,
    /// Interface whose program it was.
    pub ifindex: u32,
    /// Bytes of the packet,
    pub len: u32,
    /// and how many of those are in `head`.
    pub head_len: u32,
    /// Drops of this reason on this CPU since the last event of it.
    pub left_out: u32,
    /// EtherType as it is on the wire, as the kernel has it: a layer-3 device's packets have no header that
    /// says so.
    pub kind: [u8; 2],
    /// [`Hook`].
    pub hook: u8,
    /// Zero.
    pub pad: u8,
    pub head: [u8; EVENT_HEAD],
}
map_type!(
    DropEvent,
    160,
    1,
    [
        time_ns, reason, ifindex, len, head_len, left_out, kind, hook, pad, head
    ]
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_unique_and_fit_the_map() {
        for (i, a) in DropReason::ALL.iter().enumerate() {
            assert!((*a as u32) < MAX_DROP_REASONS);
            for b in &DropReason::ALL[i + 1..] {
                assert_ne!(*a as u32, *b as u32);
                assert_ne!(a.label(), b.label());
            }
        }
    }
}
