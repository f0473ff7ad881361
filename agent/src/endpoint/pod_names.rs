//! Which pod has an address, and which a link.

use super::EndpointRecord;
use sinabro_common::abi::Addr;
use std::{collections::HashMap, sync::Arc};

/// The pods of a moment, `namespace/name`.
#[derive(Default)]
pub struct PodNames {
    by_address: HashMap<Addr, Arc<str>>,
    by_ifindex: HashMap<u32, Arc<str>>,
}

impl PodNames {
    pub fn of<'a>(records: impl IntoIterator<Item = &'a EndpointRecord>) -> Self {
        let mut names = Self::default();
        for record in records {
            let name: Arc<str> = record.pod.display(&record.owner).into();
            for &address in &record.addresses {
                names.by_address.insert(address.into(), name.clone());
            }
            names.by_ifindex.insert(record.ifindex, name);
        }
        names
    }

    pub fn at(&self, address: Addr) -> Option<&str> {
        self.by_address.get(&address).map(|name| &**name)
    }

    /// Whose host-side link an interface is.
    pub fn behind(&self, ifindex: u32) -> Option<&str> {
        self.by_ifindex.get(&ifindex).map(|name| &**name)
    }

    /// Whether a pod of this name is there.
    pub fn has(&self, name: &str) -> bool {
        self.by_ifindex.values().any(|known| **known == *name)
    }

    /// Every link and its pod.
    pub fn links(&self) -> impl Iterator<Item = (u32, &str)> {
        self.by_ifindex
            .iter()
            .map(|(&ifindex, name)| (ifindex, &**name))
    }
}

/// A pod's record, as far as its name matters.
#[cfg(test)]
pub(crate) fn record(
    ifindex: u32,
    pod: sinabro_common::api::PodRef,
    addresses: &[&str],
) -> EndpointRecord {
    use sinabro_common::api::{Mac, Owner};
    EndpointRecord {
        owner: Owner {
            container_id: format!("c{ifindex}"),
            ifname: "eth0".into(),
        },
        network: "pods".into(),
        netns: String::new(),
        pod,
        link: format!("snb{ifindex}"),
        ifindex,
        mac: Mac([2; 6]),
        host_mac: Mac([2; 6]),
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        mtu: 1450,
        local: None,
        acceleration: None,
        netns_cookie: None,
        host_ports: None,
        service_translation: None,
    }
}
