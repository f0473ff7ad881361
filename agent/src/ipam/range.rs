//! The ranges that pods of this node get their addresses from.
//!
//! Of each range these are never given out: the network address (IPv6: the subnet-router anycast
//! address, RFC 4291 §2.6.1), the first host address (the node's own, on its VXLAN device) and
//! the IPv4 broadcast address. A range where nothing remains (a /31, a /127, a single address)
//! is refused, and so are ranges that overlap.
//!
//! Limit: the first [`WALKED`] addresses of a range are given out by themselves, a /64 is not
//! enumerated; the others can be asked for.

use ipnet::IpNet;
use std::net::IpAddr;

/// How many addresses of a range are given out without being asked for, reserved ones included.
pub const WALKED: u128 = 65_536;

/// A range with at least one address for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range(IpNet);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    #[error("pod range {0} has bits beyond its prefix, did you mean {net}", net = .0.trunc())]
    HostBits(IpNet),
    #[error("pod range {0} has no room for the node and a pod")]
    TooSmall(IpNet),
    #[error("pod ranges {0} and {1} overlap")]
    Overlap(IpNet, IpNet),
}

impl Range {
    /// # Errors
    /// If the prefix is not a network or too small for the node and a pod.
    pub fn new(net: IpNet) -> Result<Self, RangeError> {
        if net != net.trunc() {
            return Err(RangeError::HostBits(net));
        }
        if net.max_prefix_len() - net.prefix_len() < 2 {
            return Err(RangeError::TooSmall(net));
        }
        Ok(Self(net))
    }

    /// Checks all ranges of a node together.
    ///
    /// # Errors
    /// As [`Range::new`], and if two overlap.
    pub fn all(nets: &[IpNet]) -> Result<Vec<Self>, RangeError> {
        for (i, a) in nets.iter().enumerate() {
            for b in &nets[..i] {
                if a.contains(b) || b.contains(a) {
                    return Err(RangeError::Overlap(*b, *a));
                }
            }
        }
        nets.iter().copied().map(Self::new).collect()
    }

    pub fn cidr(&self) -> IpNet {
        self.0
    }

    pub fn is_ipv4(&self) -> bool {
        self.0.addr().is_ipv4()
    }

    /// How many pods can get an address without asking for one.
    pub fn capacity(&self) -> u64 {
        let (first, last) = self.usable();
        (last - first + 1).min(WALKED - 2) as u64
    }

    /// Why an address cannot be given to a pod, if it cannot.
    pub fn fault(&self, address: IpAddr) -> Option<&'static str> {
        if !self.0.contains(&address) {
            return Some("is outside the range");
        }
        let offset = bits(address) - bits(self.0.network());
        let (_, last) = self.usable();
        match offset {
            0 => Some("is the range's network address"),
            1 => Some("is the node's own in the range"),
            _ if offset > last => Some("is the range's broadcast address"),
            _ => None,
        }
    }

    /// The address at `offset` from the range's start, if pods get it without asking.
    pub fn walked(&self, offset: u128) -> Option<IpAddr> {
        let (first, last) = self.usable();
        if offset < first || offset > last || offset >= WALKED {
            return None;
        }
        let address = bits(self.0.network()) + offset;
        Some(match self.0 {
            // Within an IPv4 prefix, so within 32 bits.
            IpNet::V4(_) => IpAddr::V4((address as u32).into()),
            IpNet::V6(_) => IpAddr::V6(address.into()),
        })
    }

    /// First and last usable offset.
    fn usable(&self) -> (u128, u128) {
        let host_bits = u32::from(self.0.max_prefix_len() - self.0.prefix_len());
        // `::/0` has 2^128 addresses, one more than fits.
        let last = 1u128.checked_shl(host_bits).map_or(u128::MAX, |n| n - 1);
        (2, if self.is_ipv4() { last - 1 } else { last })
    }

    /// Offset of the first address that a pod can have.
    pub fn first_offset(&self) -> u128 {
        self.usable().0
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => u32::from(a).into(),
        IpAddr::V6(a) => a.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv4Addr;

    fn range(text: &str) -> Range {
        Range::new(text.parse().unwrap()).unwrap()
    }

    fn walk(range: &Range) -> Vec<String> {
        let offsets = range.first_offset()..WALKED;
        offsets
            .map_while(|o| range.walked(o))
            .map(|a| a.to_string())
            .collect()
    }

    #[test]
    fn network_node_and_broadcast_addresses_are_kept_out() {
        assert_eq!(
            walk(&range("10.0.0.0/29")),
            ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]
        );
        assert_eq!(walk(&range("10.0.0.0/30")), ["10.0.0.2"]);
        assert_eq!(walk(&range("fd00::/126")), ["fd00::2", "fd00::3"]);
        for (address, word) in [
            ("10.0.0.0", "network"),
            ("10.0.0.1", "node"),
            ("10.0.0.7", "broadcast"),
            ("10.0.0.8", "outside"),
            ("fd00::2", "outside"),
        ] {
            let fault = range("10.0.0.0/29").fault(address.parse().unwrap());
            assert!(
                fault.is_some_and(|f| f.contains(word)),
                "{address}: {fault:?}"
            );
        }
        // IPv6 has no broadcast.
        assert_eq!(range("fd00::/126").fault("fd00::3".parse().unwrap()), None);
    }

    #[test]
    fn ranges_without_room_are_refused() {
        for text in ["10.0.0.0/31", "10.0.0.0/32", "fd00::/127", "fd00::/128"] {
            let net = text.parse().unwrap();
            assert_eq!(Range::new(net), Err(RangeError::TooSmall(net)));
        }
        let net = "10.0.0.1/24".parse().unwrap();
        assert_eq!(Range::new(net), Err(RangeError::HostBits(net)));
    }

    #[test]
    fn overlapping_ranges_are_refused() {
        let nets =
            |texts: &[&str]| -> Vec<IpNet> { texts.iter().map(|t| t.parse().unwrap()).collect() };
        for bad in [
            ["10.0.0.0/8", "10.1.0.0/16"],
            ["10.1.0.0/16", "10.0.0.0/8"],
            ["fd00::/64", "fd00::/64"],
        ] {
            assert!(
                matches!(Range::all(&nets(&bad)), Err(RangeError::Overlap(..))),
                "{bad:?}"
            );
        }
        assert_eq!(
            Range::all(&nets(&["10.0.0.0/24", "10.0.1.0/24", "fd00::/64"]))
                .unwrap()
                .len(),
            3
        );
    }

    #[test]
    fn huge_ranges_are_walked_in_part_and_asked_for_in_full() {
        for text in ["fd00::/64", "::/0", "0.0.0.0/0", "10.0.0.0/8"] {
            let range = range(text);
            assert_eq!(range.capacity(), 65_534, "{text}");
            assert_eq!(range.walked(WALKED), None);
            assert!(range.walked(WALKED - 1).is_some());
        }
        assert_eq!(
            range("fd00::/64").fault("fd00::ffff:ffff".parse().unwrap()),
            None
        );
        assert_eq!(range("10.0.0.0/16").capacity(), 65_533);
    }

    proptest! {
        /// Every prefix, both families: what is walked is usable, inside, and as many as said.
        #[test]
        fn walked_addresses_are_usable(bits: u128, prefix in 0u8..=128, v4: bool) {
            let net = if v4 {
                IpNet::new(Ipv4Addr::from(bits as u32).into(), prefix.min(32)).unwrap()
            } else {
                IpNet::new(IpAddr::V6(bits.into()), prefix).unwrap()
            };
            let Ok(range) = Range::new(net.trunc()) else {
                prop_assert!(net.max_prefix_len() - net.prefix_len() < 2);
                return Ok(());
            };
            let last = u128::from(range.capacity()) + 1;
            for offset in [2, 3.min(last), last / 2 + 1, last] {
                let address = range.walked(offset).unwrap();
                prop_assert_eq!(range.fault(address), None);
            }
            prop_assert_eq!(range.walked(0), None);
            prop_assert_eq!(range.walked(1), None);
            prop_assert_eq!(range.walked(last + 1), None);
        }
    }
}
