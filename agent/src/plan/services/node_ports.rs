//! Which of a node's addresses have the node ports of Services.

use ipnet::IpNet;
use std::{collections::BTreeSet, net::IpAddr};

/// As kube-proxy's `--nodeport-addresses` has it. Loopback addresses are no part of it: what the node's own processes send there
/// is always led to Services, and nobody else can send there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// The first of each family that the cluster knows the node by.
    #[default]
    Primary,
    /// Every one that other machines may send to.
    All,
    /// Those of the node that are in one of these.
    Within(Vec<IpNet>),
}

impl NodePortAddresses {
    /// Those of a node that the cluster knows by `known` and whose devices have `present`.
    pub fn of(&self, known: &[IpAddr], present: &[IpAddr]) -> BTreeSet<IpAddr> {
        match self {
            Self::Primary => {
                let first = |v4| known.iter().find(|address| address.is_ipv4() == v4);
                [true, false]
                    .into_iter()
                    .filter_map(first)
                    .copied()
                    .collect()
            }
            Self::All => filtered(present, |address| match address {
                IpAddr::V4(v4) => !v4.is_link_local(),
                IpAddr::V6(_) => true,
            }),
            Self::Within(ranges) => filtered(present, |address| {
                ranges.iter().any(|range| range.contains(address))
            }),
        }
    }
}

/// Those that mean the same whoever sends to them by whichever device, and are wanted.
fn filtered(present: &[IpAddr], is_wanted: impl Fn(&IpAddr) -> bool) -> BTreeSet<IpAddr> {
    let is_plain = |address: &&IpAddr| match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_multicast() && !v4.is_unspecified(),
        // RFC 4007 §6: of a link-local address only the device says which one it is.
        IpAddr::V6(v6) => {
            !v6.is_loopback()
                && !v6.is_multicast()
                && !v6.is_unspecified()
                && !v6.is_unicast_link_local()
        }
    };
    let wanted = present.iter().filter(is_plain).copied();
    wanted.filter(is_wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn node_ports_are_at_the_addresses_that_were_asked_for() {
        let known = all(&["192.0.2.1", "2001:db8::1", "192.0.2.2"]);
        let present = all(&[
            "127.0.0.1",
            "::1",
            "192.0.2.1",
            "10.0.0.1",
            "169.254.20.10",
            "2001:db8::1",
            "fd00::1",
            "fe80::1",
        ]);
        let of = |which: NodePortAddresses| Vec::from_iter(which.of(&known, &present));
        assert_eq!(
            of(NodePortAddresses::Primary),
            all(&["192.0.2.1", "2001:db8::1"])
        );
        assert_eq!(
            of(NodePortAddresses::All),
            all(&["10.0.0.1", "192.0.2.1", "2001:db8::1", "fd00::1"])
        );
        let ranges = ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "::/0"];
        let ranges = ranges.map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(
            of(NodePortAddresses::Within(ranges)),
            all(&["10.0.0.1", "169.254.20.10", "2001:db8::1", "fd00::1"])
        );
        let none = NodePortAddresses::Primary.of(&[], &present);
        assert!(none.is_empty());
    }
}
