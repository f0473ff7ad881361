//! Why the data path dropped a packet.
//!
//! Map `DROPS`, per-CPU array: [`DropReason`] as u32 → count (u64). Numbers are part of the
//! interface (metrics, dashboards): a reason no longer used keeps its number.

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
    NatTableFull = 6, "nat_table_full", "the masquerade table is full";
    /// A fragment without ports cannot be masqueraded.
    NatFragment = 7, "nat_fragment", "an IP fragment cannot be masqueraded";
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
}

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
