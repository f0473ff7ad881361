//! At start: brings records, links and data path into agreement.
//!
//! A record whose link is there is live again; one whose link is gone is taken down and its
//! addresses freed. A record that cannot be read is rebuilt from the leases and the link, which
//! hold everything that is in it. Whatever else is in the data path is removed.

use super::{EndpointError, EndpointRecord, Endpoints, mac_of, record::BadRecord};
use crate::{
    chain::Chain,
    ipam::{LeaseRequest, file::Lease},
};
use sinabro_common::api::Mac;
use sinabro_netlink::{Conn, Link};
use std::{
    collections::{BTreeMap, HashSet},
    sync::atomic::Ordering,
};

/// What was found at start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    pub live: usize,
    /// Records whose link was gone.
    pub gone: usize,
    /// Records rebuilt from leases.
    pub rebuilt: usize,
    /// Live endpoints whose programs could not be attached.
    pub broken: usize,
}

impl Endpoints {
    /// Reads the records and makes the data path match. Nothing else may use the endpoints yet.
    ///
    /// # Errors
    /// If the records or links cannot be listed or the data path cannot be pruned; what concerns
    /// one endpoint is logged and counted instead.
    pub fn restore(&self) -> Result<Restored, EndpointError> {
        let (mut records, bad) = self.records.load()?;
        let links = pod_links()?;
        let mut restored = Restored::default();
        for bad in bad {
            tracing::error!("{}", bad.reason);
            self.records.set_aside(&bad.link)?;
            if let Some(record) = self.rebuild(&bad, &links) {
                tracing::warn!("rebuilt the record of {} from its leases", record.owner);
                self.records.write(&record)?;
                records.push(record);
                restored.rebuilt += 1;
            }
        }
        for record in records {
            match links.get(&record.link) {
                Some(link) if link.index == record.ifindex => self.revive(record, &mut restored),
                _ => {
                    tracing::info!(
                        "the link of {} is gone, its addresses are freed",
                        record.owner
                    );
                    let owner = record.owner.clone();
                    self.live().insert(record.link.clone(), record);
                    restored.gone += 1;
                    if let Err(error) = self.release(&owner) {
                        tracing::error!("cannot take down {owner}: {}", Chain(&error));
                    }
                }
            }
        }
        let live: HashSet<String> = self.live().keys().cloned().collect();
        for link in self.programs.retain(&live)? {
            tracing::info!("removed what was left of {link} in the data path");
        }
        restored.live = live.len();
        self.restored.store(true, Ordering::Relaxed);
        self.publish();
        Ok(restored)
    }

    fn revive(&self, record: EndpointRecord, restored: &mut Restored) {
        for &address in &record.addresses {
            let request = LeaseRequest {
                owner: record.owner.clone(),
                network: record.network.clone(),
                netns: record.netns.clone(),
                pod: record.pod.clone(),
                mac: Some(record.mac),
                addresses: Vec::new(),
            };
            if let Err(error) = self.ipam.reclaim(&request, address) {
                // The pod keeps working; the address is given to nobody else either.
                tracing::error!(
                    "no lease of {address} for {}: {}",
                    record.owner,
                    Chain(&error)
                );
            }
        }
        if let Err(error) = self.programs.attach(&record) {
            let problem = problem(&record, &error);
            tracing::error!("cannot attach the programs: {problem}");
            self.broken().insert(record.link.clone(), problem);
            restored.broken += 1;
        }
        self.live().insert(record.link.clone(), record);
    }

    /// What a record must have said, from the leases of its link's owner and the link itself.
    fn rebuild(&self, bad: &BadRecord, links: &BTreeMap<String, Link>) -> Option<EndpointRecord> {
        let link = links.get(&bad.link)?;
        let leases = self.ipam.leases();
        let of_link = |lease: &&Lease| lease.owner.link() == bad.link;
        let mut leases = leases.iter().filter(of_link);
        let first = leases.next()?;
        let addresses: Vec<_> = [first]
            .into_iter()
            .chain(leases)
            .map(|l| l.address)
            .collect();
        Some(EndpointRecord {
            owner: first.owner.clone(),
            network: first.network.clone(),
            netns: first.netns.clone(),
            pod: first.pod.clone(),
            link: bad.link.clone(),
            ifindex: link.index,
            mac: mac_of(first.mac, &addresses)?,
            host_mac: Mac(link.mac?),
            addresses,
            mtu: link.mtu,
            // Nothing else has them; the pod's connections go through the stack, and its packets are translated.
            local: None,
            acceleration: None,
            netns_cookie: None,
            host_ports: None,
            service_translation: None,
        })
    }

    /// Tries again to attach what could not be attached.
    pub(super) fn mend(&self) {
        let broken: Vec<_> = self.broken().keys().cloned().collect();
        for link in broken {
            let Some(_guard) = self.locks.try_lock(&link) else {
                continue;
            };
            let Some(record) = self.live().get(&link).cloned() else {
                continue;
            };
            let outcome = self.programs.attach(&record);
            match outcome {
                Ok(()) => {
                    tracing::info!("attached the programs of {}", record.owner);
                    self.broken().remove(&link);
                }
                Err(error) => {
                    self.broken().insert(link, problem(&record, &error));
                }
            }
        }
    }
}

fn problem(record: &EndpointRecord, error: &dyn std::error::Error) -> String {
    format!("pod {} on {}: {}", record.owner, record.link, Chain(error))
}

/// Every link of this namespace that could be a pod's, by name.
pub(super) fn pod_links() -> Result<BTreeMap<String, Link>, sinabro_netlink::Error> {
    let links = Conn::new()?.links()?.into_iter();
    let links = links.filter(|link| sinabro_common::names::is_pod_link(&link.name));
    Ok(links.map(|link| (link.name.clone(), link)).collect())
}
