//! Destinations that pods reach under their own address.
//!
//! Every node's pod ranges, and what the settings name. Nodes' own addresses are not among them:
//! a packet with a pod's address as its source means nothing on the underlay between nodes
//! (reverse path filters drop it there), so it is masqueraded like any other that leaves.

use super::facts::{Facts, cidr_fault};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::collections::BTreeSet;

/// Prefixes whose destinations are not masqueraded, aggregated.
///
/// Also counts the ranges of nodes that the overlay leaves out, as long as the range itself is
/// sound: what cannot be delivered must not be sent to the outside instead.
pub fn non_masquerade(facts: &Facts, configured: &[IpNet]) -> BTreeSet<IpNet> {
    let known = facts.nodes.values().flat_map(|node| &node.pod_cidrs);
    let sound = known.filter(|cidr| cidr_fault(**cidr).is_none());
    let (mut v4, mut v6) = (Vec::new(), Vec::new());
    for cidr in sound.chain(configured) {
        match cidr.trunc() {
            IpNet::V4(net) => v4.push(net),
            IpNet::V6(net) => v6.push(net),
        }
    }
    let v4 = Ipv4Net::aggregate(&v4).into_iter().map(IpNet::V4);
    let v6 = Ipv6Net::aggregate(&v6).into_iter().map(IpNet::V6);
    v4.chain(v6).collect()
}
