//! Which Service has a frontend. With IPv4 an entry takes 24 bytes instead of 40, and each Service has two or more.

use crate::plan::services::ServiceName;
use sinabro_common::abi::service::FrontendKey;
use std::collections::HashMap;

/// Services by frontend.
#[derive(Debug, Default)]
pub struct Owners {
    v4: HashMap<OfIpv4, ServiceName>,
    others: HashMap<FrontendKey, ServiceName>,
}

/// A [`FrontendKey`] of IPv4: address, port and protocol.
type OfIpv4 = ([u8; 4], [u8; 2], u8);

impl Owners {
    pub fn len(&self) -> usize {
        self.v4.len() + self.others.len()
    }

    pub fn get(&self, key: &FrontendKey) -> Option<&ServiceName> {
        match of_ipv4(key) {
            Some(v4) => self.v4.get(&v4),
            None => self.others.get(key),
        }
    }

    /// Has this Service have it, unless one has.
    pub fn put(&mut self, key: &FrontendKey, name: &ServiceName) {
        match of_ipv4(key) {
            Some(v4) => self.v4.entry(v4).or_insert_with(|| name.clone()),
            None => self.others.entry(*key).or_insert_with(|| name.clone()),
        };
    }

    pub fn remove(&mut self, key: &FrontendKey) {
        match of_ipv4(key) {
            Some(v4) => self.v4.remove(&v4),
            None => self.others.remove(key),
        };
    }
}

fn of_ipv4(key: &FrontendKey) -> Option<OfIpv4> {
    let FrontendKey {
        addr,
        port,
        proto,
        pad: 0,
    } = *key
    else {
        return None;
    };
    Some((addr.as_v4()?, port, proto))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_common::abi::Addr;

    #[test]
    fn each_frontend_has_an_owner_of_its_own() {
        assert!(size_of::<(OfIpv4, ServiceName)>() <= 24);
        let mut owners = Owners::default();
        let mapped = "::ffff:10.0.0.1".parse::<std::net::Ipv6Addr>().unwrap();
        let addresses = [
            Addr::v4([10, 0, 0, 1]),
            Addr::v4([10, 0, 0, 2]),
            // Of the same last four bytes.
            Addr::v6([10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 1]),
            Addr::v6([0; 16]),
        ];
        assert_eq!(Addr::v6(mapped.octets()), addresses[0]);
        let key = |addr, port, proto| FrontendKey {
            addr,
            port,
            proto,
            pad: 0,
        };
        let keys = addresses.iter().flat_map(|addr| {
            let of = [([0, 0], 0), ([0, 80], 6), ([0, 80], 17), ([80, 0], 6)];
            of.map(|(port, proto)| key(*addr, port, proto))
        });
        let keys: Vec<_> = keys.collect();
        let name = |at: usize| ServiceName::new("default", &at.to_string());
        let other = ServiceName::new("other", "late");
        for (at, key) in keys.iter().enumerate() {
            assert_eq!(owners.get(key), None);
            owners.put(key, &name(at));
            owners.put(key, &other);
        }
        assert_eq!(owners.len(), keys.len());
        for (at, key) in keys.iter().enumerate() {
            assert_eq!(owners.get(key), Some(&name(at)));
            owners.remove(key);
            assert_eq!(owners.get(key), None);
            assert_eq!(owners.len(), keys.len() - at - 1);
        }
    }
}
