//! Which source and destination addresses a rule of nf_tables compares, as far as that is plain: native expressions, which
//! iptables-nft writes, too, with one network.
//!
//! Numbers are those of linux/netfilter/nf_tables.h.

use crate::{
    nft::{Family, find, numbers},
    wire::Garbage,
};
use ipnet::IpNet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// NFT_PAYLOAD_NETWORK_HEADER, and where addresses are in one: the source, then the destination behind it.
const NETWORK: u32 = 1;
const V4: (u32, u32) = (12, 4);
const V6: (u32, u32) = (8, 16);
/// NFTA_DATA_VALUE.
const VALUE: u16 = 1;

/// Comparisons that a packet has to pass for a rule to do anything with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses(Vec<(IpNet, bool)>);

impl Addresses {
    /// Whether no packet from one of these ranges to another of the same family meets the rule. Of no range at all nothing is known.
    #[must_use]
    pub fn exclude(&self, ranges: &[IpNet]) -> bool {
        !ranges.is_empty()
            && self.0.iter().any(|(net, is_in)| {
                let same = |range: &&IpNet| range.addr().is_ipv4() == net.addr().is_ipv4();
                let mut of_family = ranges.iter().filter(same);
                match is_in {
                    true => !of_family.any(|range| net.contains(range) || range.contains(net)),
                    false => of_family.all(|range| net.contains(range)),
                }
            })
    }
}

/// What has been read of a rule's expressions.
pub(crate) struct Reader {
    family: Family,
    /// The register that has the beginning of an address, whether it is one of IPv4, and how many of its bits count.
    loaded: Option<(u32, bool, u8)>,
    found: Addresses,
}

impl Reader {
    pub(crate) fn new(family: Family) -> Self {
        Self {
            family,
            loaded: None,
            found: Addresses::default(),
        }
    }

    /// The next expression, by its name and data.
    pub(crate) fn read(&mut self, name: &str, data: &[u8]) -> Result<(), Garbage> {
        match name {
            "payload" => {
                let [register, base, offset, length] = numbers(data, [1, 2, 3, 4])?;
                let v4 = self.beginning(base, offset, length);
                self.loaded = v4.map(|v4| (register, v4, (length * 8) as u8));
            }
            "bitwise" => {
                let [from, to] = numbers(data, [1, 2])?;
                self.loaded = match self.loaded {
                    Some((register, v4, bits)) if register == from => {
                        mask(data, bits)?.map(|bits| (to, v4, bits))
                    }
                    _ => None,
                };
            }
            "cmp" => {
                let [register, operator] = numbers(data, [1, 2])?;
                if let Some((loaded, v4, bits)) = self.loaded
                    && loaded == register
                    && operator <= 1
                    && let Some(net) = net(data, v4, bits)?
                {
                    self.found.0.push((net, operator == 0));
                }
            }
            // It may have loaded something else into the register.
            _ => self.loaded = None,
        }
        Ok(())
    }

    /// Whether the field is the beginning of an IPv4 address, or of an IPv6 address.
    fn beginning(&self, base: u32, offset: u32, length: u32) -> Option<bool> {
        let is = |family, (source, len): (u32, u32)| {
            let known = self.family == Family::INET || self.family == family;
            let at = offset == source || offset == source + len;
            known && base == NETWORK && at && (1..=len).contains(&length)
        };
        match (is(Family::IP, V4), is(Family::IP6, V6)) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    }

    pub(crate) fn addresses(self) -> Addresses {
        self.found
    }
}

/// How many of `bits` are left, if they are the first and nothing else is done to them.
fn mask(data: &[u8], bits: u8) -> Result<Option<u8>, Garbage> {
    let mask = value(data, 4)?.unwrap_or_default();
    let xor = value(data, 5)?.unwrap_or_default();
    let ones: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    let first = padded(mask).leading_ones();
    let is_plain = mask.len() * 8 == bits.into() && xor.iter().all(|byte| *byte == 0);
    Ok((is_plain && ones == first).then_some(first as u8))
}

fn net(data: &[u8], v4: bool, bits: u8) -> Result<Option<IpNet>, Garbage> {
    let Some(value) = value(data, 3)? else {
        return Ok(None);
    };
    let padded = padded(value);
    let address = match v4 {
        true => IpAddr::V4(Ipv4Addr::from_bits((padded >> 96) as u32)),
        false => IpAddr::V6(Ipv6Addr::from_bits(padded)),
    };
    Ok(IpNet::new(address, bits).ok())
}

/// NFTA_DATA_VALUE of an attribute.
fn value(data: &[u8], kind: u16) -> Result<Option<&[u8]>, Garbage> {
    let Some(data) = find(data, kind)? else {
        return Ok(None);
    };
    Ok(find(data.value, VALUE)?.map(|value| value.value))
}

/// With zeros behind.
fn padded(bytes: &[u8]) -> u128 {
    let mut all = [0; 16];
    let len = bytes.len().min(16);
    all[..len].copy_from_slice(&bytes[..len]);
    u128::from_be_bytes(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_excludes_pods_that_it_has_none_of() {
        let nets = |all: &[&str]| all.iter().map(|n| n.parse().unwrap()).collect::<Vec<_>>();
        let pods = nets(&["10.1.0.0/24", "10.2.0.0/24", "fd00:1::/64"]);
        for (net, is_in, excludes) in [
            ("127.0.0.11/32", true, true),
            ("10.1.0.7/32", true, false),
            ("10.0.0.0/8", true, false),
            ("10.0.0.0/8", false, true),
            ("10.1.0.0/24", false, false),
            ("192.0.2.0/24", false, false),
            ("fd00:2::/64", true, true),
            ("fd00:1::5/128", true, false),
            ("fd00::/16", false, true),
        ] {
            let addresses = Addresses(vec![(net.parse().unwrap(), is_in)]);
            assert_eq!(addresses.exclude(&pods), excludes, "{net} {is_in}");
            assert!(!addresses.exclude(&[]) && !Addresses::default().exclude(&pods));
        }
        let both = Addresses(vec![
            ("10.0.0.0/8".parse().unwrap(), true),
            ("10.0.0.0/8".parse().unwrap(), false),
        ]);
        assert!(both.exclude(&pods), "masquerades what leaves the cluster");
    }
}
