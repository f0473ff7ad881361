//! Prefixes as tries have them: of IPv4 among those of IPv6.

use ipnet::{IpNet, Ipv6Net};
use sinabro_common::abi::Addr;
use std::net::Ipv6Addr;

/// Length, and an [`Addr`] without host bits.
pub type Prefix = (u32, [u8; 16]);

/// Where IPv4 addresses are among those of IPv6 (RFC 4291 §2.5.5.2): in the map, and never on the wire.
const MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);

/// A trie's entries for a prefix. One of IPv6 that holds [`MAPPED`], such as `::/0`, is all that it has
/// beside that: each half of it that the way down to there leaves aside.
pub fn prefixes(net: &IpNet) -> Vec<Prefix> {
    let IpNet::V6(v6) = net else {
        return vec![prefix(net)];
    };
    if !v6.contains(&MAPPED) {
        return vec![prefix(net)];
    }
    let way = MAPPED.network().to_bits();
    let beside = |len: u8| {
        let turned = way ^ 1 << (128 - u32::from(len));
        let net = Ipv6Net::new_assert(turned.into(), len).trunc();
        prefix(&IpNet::V6(net))
    };
    (v6.prefix_len() + 1..=MAPPED.prefix_len())
        .map(beside)
        .collect()
}

/// Of the mapped address.
pub fn prefix(prefix: &IpNet) -> Prefix {
    let mapped = match prefix {
        IpNet::V4(_) => 96,
        IpNet::V6(_) => 0,
    };
    (
        mapped + u32::from(prefix.prefix_len()),
        Addr::from(prefix.network()).0,
    )
}

/// What [`prefix`] was given.
pub fn net((len, addr): &Prefix) -> Option<IpNet> {
    let (address, mapped) = match Addr(*addr).as_v4() {
        Some(v4) if *len >= 96 => (v4.into(), 96),
        _ => (Ipv6Addr::from(*addr).into(), 0),
    };
    IpNet::new(address, u8::try_from(*len - mapped).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::IpAddr;

    fn holds(entries: &[Prefix], address: IpAddr) -> bool {
        let bits = u128::from_be_bytes(Addr::from(address).0);
        entries.iter().any(|(len, net)| {
            let host = 128 - len;
            bits.checked_shr(host) == u128::from_be_bytes(*net).checked_shr(host)
        })
    }

    #[test]
    fn all_of_ipv6_is_nothing_of_ipv4() {
        let all = prefixes(&"::/0".parse().unwrap());
        assert_eq!(all.len(), 96);
        for address in [
            "::",
            "::1",
            "2001:db8::1",
            "::fffe:0:0",
            "::1:0:0:0",
            "ff02::1",
        ] {
            assert!(holds(&all, address.parse().unwrap()), "{address}");
        }
        for address in ["0.0.0.0", "192.0.2.1", "255.255.255.255"] {
            assert!(!holds(&all, address.parse().unwrap()), "{address}");
        }
        assert_eq!(
            prefixes(&"0.0.0.0/0".parse().unwrap()),
            [(96, Addr::v4([0; 4]).0)]
        );
        assert_eq!(prefixes(&"fd00::/8".parse().unwrap()).len(), 1);
    }

    #[test]
    fn prefixes_are_of_the_mapped_address_and_have_no_host_bits() {
        let (len, addr) = prefix(&"10.1.2.3/16".parse().unwrap());
        assert_eq!((len, Addr(addr)), (112, Addr::v4([10, 1, 0, 0])));
        let (len, addr) = prefix(&"fd00:1::1/32".parse().unwrap());
        assert_eq!(len, 32);
        assert_eq!(addr[..5], [0xfd, 0, 0, 1, 0]);
        assert_eq!(addr[15], 0);
        for text in [
            "10.1.0.0/16",
            "0.0.0.0/0",
            "fd00::/8",
            "::/0",
            "::ffff:0:0/95",
        ] {
            let net: IpNet = text.parse().unwrap();
            assert_eq!(super::net(&prefix(&net)), Some(net.trunc()));
        }
    }

    proptest! {
        #[test]
        fn a_prefix_holds_the_addresses_of_its_family_that_it_names(
            bits: u128, len in 0u8..=96, other: u128, v4: [u8; 4], near in 0u32..128,
        ) {
            // Around the mapped addresses, too.
            for start in [bits, MAPPED.network().to_bits()] {
                let net = Ipv6Net::new_assert(start.into(), len).trunc();
                if MAPPED.contains(&net) {
                    continue;
                }
                let entries = prefixes(&IpNet::V6(net));
                for address in [other, start ^ 1 << near].map(std::net::Ipv6Addr::from) {
                    if address.to_ipv4_mapped().is_none() {
                        prop_assert_eq!(holds(&entries, address.into()), net.contains(&address), "{} {}", net, address);
                    }
                }
                prop_assert!(!holds(&entries, v4.into()));
            }
        }
    }
}
