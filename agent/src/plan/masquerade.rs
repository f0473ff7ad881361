//! What pods send out of the cluster gets the node's address; which destinations see the pods' own.
//!
//! Never masqueraded are every node's pod ranges, multicast and broadcast. The rest is a choice
//! ([`Masquerading`]), in which only what is sure to work without is left out by default:
//!
//! - nodes: a packet with a pod's address as its source means nothing on the underlay between nodes
//!   (reverse path filters drop it there), so it is masqueraded like any other that leaves;
//! - IPv4 link-local: what a cloud has at 169.254.169.254, resolver and metadata, answers the node
//!   alone. What a pod asks there never gets an answer to its own address (RFC 3927 §2.7: routers
//!   forward none);
//! - IPv6 link-local: no router forwards it (RFC 4291 §2.5.6), the node included.

use super::facts::{Facts, cidr_fault};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sinabro_common::abi::config::MAX_NON_MASQUERADE;
use std::{collections::BTreeSet, fmt, net::IpAddr};

/// Destinations that can be named, in prefixes that do not hold each other. What the data path has room for
/// beyond that is for pods' ranges.
pub const MAX_CIDRS: usize = 4096;

/// Destinations that the data path is given: a prefix of IPv6 which also holds IPv4's place among IPv6
/// addresses, of which there can be one, becomes up to 96 there.
const MAX_DESTINATIONS: usize = MAX_NON_MASQUERADE as usize - 96;

/// Multicast, and the broadcast of the link.
const NEVER: [IpNet; 3] = [
    v4([224, 0, 0, 0], 4),
    v4([255, 255, 255, 255], 32),
    v6(0xff00, 8),
];
const LINK_LOCAL_V4: IpNet = v4([169, 254, 0, 0], 16);
const LINK_LOCAL_V6: IpNet = v6(0xfe80, 10);

const fn v4([a, b, c, d]: [u8; 4], len: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(
        std::net::Ipv4Addr::new(a, b, c, d),
        len,
    ))
}

const fn v6(first: u16, len: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(
        std::net::Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, 0),
        len,
    ))
}

/// What is masqueraded, as people choose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Masquerading {
    /// Destinations that see the pods' own addresses.
    pub non_masquerade_cidrs: Vec<IpNet>,
    /// Whether it is done towards 169.254.0.0/16.
    pub link_local: bool,
    /// Towards fe80::/10.
    pub link_local_ipv6: bool,
    /// Towards the nodes' own addresses.
    pub nodes: bool,
}

impl Default for Masquerading {
    fn default() -> Self {
        Self {
            non_masquerade_cidrs: Vec::new(),
            link_local: true,
            link_local_ipv6: false,
            nodes: true,
        }
    }
}

/// What takes the place of settings, where it says something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    pub non_masquerade_cidrs: Option<Vec<IpNet>>,
    pub link_local: Option<bool>,
    pub link_local_ipv6: Option<bool>,
}

impl Masquerading {
    pub fn with(self, overrides: &Overrides) -> Self {
        let cidrs = overrides.non_masquerade_cidrs.clone();
        Self {
            non_masquerade_cidrs: cidrs.unwrap_or(self.non_masquerade_cidrs),
            link_local: overrides.link_local.unwrap_or(self.link_local),
            link_local_ipv6: overrides.link_local_ipv6.unwrap_or(self.link_local_ipv6),
            nodes: self.nodes,
        }
    }
}

/// Whether IPv6 is masqueraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasqueradeIpv6 {
    /// Where the pods' own addresses lead nowhere outside: unique local ones (RFC 4193).
    Auto,
    On,
    Off,
}

impl MasqueradeIpv6 {
    /// Whether it is for pods with addresses from these ranges.
    pub fn applies(self, pod_cidrs: &[IpNet]) -> bool {
        let mut ranges = pod_cidrs.iter().filter_map(|cidr| match cidr {
            IpNet::V6(net) => Some(net.network()),
            IpNet::V4(_) => None,
        });
        match self {
            Self::Auto => ranges.any(|address| address.is_unique_local()),
            Self::On => ranges.next().is_some(),
            Self::Off => false,
        }
    }
}

impl fmt::Display for MasqueradeIpv6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

/// What a pod's UDP port has outside (RFC 4787 §4.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UdpMapping {
    /// A port for each remote address and port.
    #[default]
    AddressAndPortDependent,
    /// One for all of them.
    EndpointIndependent,
}

impl UdpMapping {
    pub const EVERY: [Self; 2] = [Self::AddressAndPortDependent, Self::EndpointIndependent];
}

impl fmt::Display for UdpMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AddressAndPortDependent => "address-and-port-dependent",
            Self::EndpointIndependent => "endpoint-independent",
        })
    }
}

/// Prefixes whose destinations are not masqueraded, aggregated, and how many did not fit.
///
/// Also counts the ranges of nodes that the overlay leaves out, as long as the range itself is
/// sound: what cannot be delivered must not be sent to the outside instead. Where not all fit, those are
/// left out that are needed least: pods' ranges, which are reached through tunnels.
pub fn non_masquerade(facts: &Facts, choice: &Masquerading) -> (BTreeSet<IpNet>, usize) {
    let link_local = [
        (choice.link_local, LINK_LOCAL_V4),
        (choice.link_local_ipv6, LINK_LOCAL_V6),
    ];
    let link_local = link_local.into_iter().filter(|(is, _)| !is);
    let nodes = facts.nodes.values().filter(|_| !choice.nodes);
    let addresses = nodes.flat_map(|node| node.addresses.iter().copied().filter(is_unicast));
    let chosen = NEVER
        .into_iter()
        .chain(link_local.map(|(_, net)| net))
        .chain(choice.non_masquerade_cidrs.iter().copied())
        .chain(addresses.map(IpNet::from));
    let chosen: Vec<IpNet> = chosen.collect();

    let known = facts.nodes.values().flat_map(|node| &node.pod_cidrs);
    let sound = known.filter(|cidr| cidr_fault(**cidr).is_none()).copied();
    let sound: Vec<IpNet> = sound.collect();
    let all = aggregate(chosen.iter().chain(&sound).copied());
    let left_out = all.len().saturating_sub(MAX_DESTINATIONS);
    if left_out == 0 {
        return (all, 0);
    }
    let mut kept = aggregate(chosen);
    let rest = aggregate(sound);
    let room = MAX_DESTINATIONS.saturating_sub(kept.len());
    kept.extend(rest.into_iter().take(room));
    (kept.into_iter().take(MAX_DESTINATIONS).collect(), left_out)
}

/// An address that a node has is its own business, and its faults are told elsewhere.
fn is_unicast(address: &IpAddr) -> bool {
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast())
}

/// The fewest prefixes that hold the same addresses.
pub fn aggregate(nets: impl IntoIterator<Item = IpNet>) -> BTreeSet<IpNet> {
    let (mut v4, mut v6) = (Vec::new(), Vec::new());
    for net in nets {
        match net.trunc() {
            IpNet::V4(net) => v4.push(net),
            IpNet::V6(net) => v6.push(net),
        }
    }
    let v4 = Ipv4Net::aggregate(&v4).into_iter().map(IpNet::V4);
    let v6 = Ipv6Net::aggregate(&v6).into_iter().map(IpNet::V6);
    v4.chain(v6).collect()
}

/// As few prefixes as hold what these do.
///
/// # Errors
/// If they are more than can be had.
pub fn distinct(cidrs: Vec<IpNet>) -> Result<Vec<IpNet>, String> {
    let cidrs = aggregate(cidrs);
    match cidrs.len() {
        0..=MAX_CIDRS => Ok(cidrs.into_iter().collect()),
        len => Err(format!("{len} prefixes, there is room for {MAX_CIDRS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Node;
    use proptest::{collection::vec, prelude::*};

    fn node(name: &str, addresses: &[&str], cidrs: &[&str]) -> Node {
        Node {
            name: name.into(),
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            pod_cidrs: nets(cidrs),
            ..Node::default()
        }
    }

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn spared(choice: &Masquerading) -> String {
        let facts = Facts::new([
            node("a", &["192.0.2.1"], &["10.244.0.0/24", "fd00::/64"]),
            node(
                "b",
                &["192.0.2.9", "2001:db8::9", "127.0.0.1"],
                &["10.244.1.0/24", "0.0.0.0/0"],
            ),
        ]);
        let (prefixes, left_out) = non_masquerade(&facts, choice);
        assert_eq!(left_out, 0);
        let prefixes: Vec<_> = prefixes.iter().map(ToString::to_string).collect();
        prefixes.join(" ")
    }

    #[test]
    fn pods_see_pods_whatever_is_chosen() {
        const PODS: &str = "10.244.0.0/23";
        let by_default = spared(&Masquerading::default());
        assert_eq!(
            by_default,
            format!("{PODS} 224.0.0.0/4 255.255.255.255/32 fd00::/64 fe80::/10 ff00::/8")
        );
        let cidrs = Masquerading {
            // A larger one holds the pods'.
            non_masquerade_cidrs: nets(&["10.0.0.0/8", "10.244.0.0/24", "172.16.3.4/12"]),
            ..Masquerading::default()
        };
        assert!(
            spared(&cidrs).starts_with("10.0.0.0/8 172.16.0.0/12 224."),
            "{}",
            spared(&cidrs)
        );
    }

    #[test]
    fn link_local_and_nodes_are_choices() {
        let other = Masquerading {
            link_local: false,
            link_local_ipv6: true,
            nodes: false,
            ..Masquerading::default()
        };
        assert_eq!(
            spared(&other),
            "10.244.0.0/23 169.254.0.0/16 192.0.2.1/32 192.0.2.9/32 224.0.0.0/4 255.255.255.255/32 2001:db8::9/128 fd00::/64 ff00::/8"
        );
    }

    #[test]
    fn what_the_file_says_takes_the_place_of_settings_key_by_key() {
        let settings = Masquerading {
            non_masquerade_cidrs: nets(&["10.0.0.0/8"]),
            link_local: false,
            link_local_ipv6: true,
            nodes: false,
        };
        let with = |overrides| settings.clone().with(&overrides);
        assert_eq!(with(Overrides::default()), settings);
        let none = Overrides {
            non_masquerade_cidrs: Some(Vec::new()),
            ..Overrides::default()
        };
        assert_eq!(
            with(none),
            Masquerading {
                non_masquerade_cidrs: Vec::new(),
                ..settings.clone()
            }
        );
        let all = Overrides {
            non_masquerade_cidrs: Some(nets(&["172.16.0.0/12"])),
            link_local: Some(true),
            link_local_ipv6: Some(false),
        };
        let expected = Masquerading {
            non_masquerade_cidrs: nets(&["172.16.0.0/12"]),
            nodes: false,
            ..Masquerading::default()
        };
        assert_eq!(with(all), expected);
    }

    #[test]
    fn ipv6_is_masqueraded_by_itself_where_pods_have_unique_local_addresses() {
        let (unique, global) = (
            nets(&["10.0.0.0/24", "fd00:1::/64"]),
            nets(&["10.0.0.0/24", "2001:db8::/64"]),
        );
        let v4 = nets(&["10.0.0.0/24"]);
        for (choice, expected) in [
            (MasqueradeIpv6::Auto, [true, false, false]),
            (MasqueradeIpv6::On, [true, true, false]),
            (MasqueradeIpv6::Off, [false, false, false]),
        ] {
            assert_eq!(
                [&unique, &global, &v4].map(|cidrs| choice.applies(cidrs)),
                expected,
                "{choice}"
            );
        }
        assert!(MasqueradeIpv6::Auto.applies(&nets(&["fc00::/64"])));
        assert!(!MasqueradeIpv6::Auto.applies(&nets(&["fe80::/64"])));
    }

    #[test]
    fn what_was_chosen_comes_first_where_not_all_fits() {
        // Ranges that never join.
        let many = (0..20_000u32).map(|n| {
            let range = Ipv4Net::new((0x0a00_0000 + n * 512).into(), 24).unwrap();
            Node {
                name: format!("n{n}"),
                pod_cidrs: vec![range.into()],
                ..Node::default()
            }
        });
        let choice = Masquerading {
            non_masquerade_cidrs: nets(&["203.0.113.0/24", "2001:db8::/32"]),
            ..Masquerading::default()
        };
        let (prefixes, left_out) = non_masquerade(&Facts::new(many), &choice);
        assert_eq!(
            (prefixes.len(), left_out),
            (MAX_DESTINATIONS, 20_000 + 6 - MAX_DESTINATIONS)
        );
        assert!(
            choice
                .non_masquerade_cidrs
                .iter()
                .chain(&NEVER)
                .all(|net| prefixes.contains(net))
        );
    }

    #[test]
    fn a_list_may_be_as_long_as_there_is_room() {
        let list = |len: u32| {
            let all = (0..len).map(|n| Ipv4Net::new((n * 2).into(), 32).unwrap().into());
            distinct(all.collect())
        };
        assert_eq!(list(4096).unwrap().len(), MAX_CIDRS);
        assert!(list(4097).unwrap_err().contains("4097 prefixes"));
        // The same over and over is one.
        assert_eq!(
            distinct(vec![LINK_LOCAL_V4; 10_000]).unwrap(),
            [LINK_LOCAL_V4]
        );
    }

    proptest! {
        #[test]
        fn fewer_prefixes_hold_the_same_addresses(
            cidrs in vec((any::<[u8; 4]>(), 0u8..=32), 0..20), address: [u8; 4],
        ) {
            let cidrs: Vec<IpNet> = cidrs.into_iter().map(|(a, len)| IpNet::new(a.into(), len).unwrap()).collect();
            let held = |nets: &[IpNet]| nets.iter().any(|net| net.contains(&IpAddr::from(address)));
            let distinct = distinct(cidrs.clone()).unwrap();
            prop_assert_eq!(held(&distinct), held(&cidrs));
            prop_assert!(distinct.len() <= cidrs.len());
        }
    }
}
