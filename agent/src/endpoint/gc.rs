//! Garbage collection: frees what belongs to no pod any more, at start and every minute.
//!
//! A pod's veth dies with its network namespace, so a sandbox exists as long as its link does:
//! - an endpoint whose link is gone is taken down;
//! - a lease without an endpoint and without an ADD under way is freed, its link deleted;
//! - a pod link without an endpoint and without an ADD under way is deleted.
//!
//! Whoever's lock is held is left alone until the next round. Each look at the kernel happens
//! after the look at the books that it is compared with: a link is made before its endpoint, so
//! an endpoint that was already in the books and has no link now has lost it.
//!
//! Also here: the deletes that the plugin queued while the agent was away, and the CNI verb GC.

use super::{EndpointError, Endpoints, delete_links, restore::pod_links};
use crate::{
    chain::Chain,
    state_file::{self, read_small},
};
use sinabro_common::{api::Owner, atomic_file::is_temporary, fail_point::fail_point, names};
use std::{
    collections::{BTreeSet, HashSet},
    fs, io,
    path::Path,
};

/// What one round removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    pub endpoints: Vec<Owner>,
    pub leases: Vec<Owner>,
    pub links: Vec<String>,
    pub deletes: Vec<Owner>,
}

impl Endpoints {
    /// One round. What fails is logged and tried again in the next.
    pub fn collect(&self) -> Collected {
        let mut collected = Collected {
            deletes: self.drain_deletes(),
            ..Collected::default()
        };
        if let Err(error) = self.sweep(&mut collected) {
            tracing::error!("cannot look for garbage: {}", Chain(&error));
        }
        self.ipam.recheck();
        self.mend();
        collected
    }

    fn sweep(&self, collected: &mut Collected) -> Result<(), EndpointError> {
        let endpoints = self.all();
        let leases: BTreeSet<_> = self.ipam.leases().into_iter().map(|l| l.owner).collect();
        let links = pod_links()?;

        for record in endpoints {
            let found = links.get(&record.link);
            if found.is_some_and(|link| link.index == record.ifindex) {
                continue;
            }
            let Some(_guard) = self.locks.try_lock(&record.link) else {
                continue;
            };
            // Since then it may have been released and even made again.
            if self.get(&record.owner).as_ref() == Some(&record) && self.free(&record.owner) {
                collected.endpoints.push(record.owner);
            }
        }
        for owner in leases {
            let Some(_guard) = self.locks.try_lock(&owner.link()) else {
                continue;
            };
            if self.get(&owner).is_none() && self.ipam.has(&owner) && self.free(&owner) {
                collected.leases.push(owner);
            }
        }
        for name in links.into_keys() {
            let Some(_guard) = self.locks.try_lock(&name) else {
                continue;
            };
            if self.live().contains_key(&name) || self.leased_link(&name) {
                continue;
            }
            match delete_links(std::slice::from_ref(&name)) {
                // It went with its lease, or by itself.
                Ok(0) => {}
                Ok(_) => collected.links.push(name),
                Err(error) => tracing::error!("{}", Chain(&error)),
            }
        }
        Ok(())
    }

    fn leased_link(&self, name: &str) -> bool {
        self.ipam
            .leases()
            .iter()
            .any(|lease| lease.owner.link() == name)
    }

    /// Releases an owner whose lock the caller holds; says whether it worked.
    fn free(&self, owner: &Owner) -> bool {
        match self.release(owner) {
            Ok(_) => true,
            Err(error) => {
                tracing::error!("cannot free {owner}: {}", Chain(&error));
                false
            }
        }
    }

    /// The CNI verb GC: removes every attachment of a network that is not among the valid ones,
    /// and returns what was removed.
    pub fn retain(&self, network: &str, valid: &[Owner]) -> Vec<Owner> {
        let valid: HashSet<_> = valid.iter().collect();
        let endpoints = self.all().into_iter();
        let of_endpoints = endpoints.filter(|r| r.network == network).map(|r| r.owner);
        let leases = self.ipam.leases().into_iter();
        let of_leases = leases.filter(|l| l.network == network).map(|l| l.owner);
        let present: BTreeSet<_> = of_endpoints.chain(of_leases).collect();
        let stale = present.into_iter().filter(|owner| !valid.contains(owner));
        stale
            .filter(|owner| {
                let guard = self.locks.try_lock(&owner.link());
                let freed = guard.is_some() && self.free(owner);
                fail_point("collected");
                freed
            })
            .collect()
    }

    /// Carries out the deletes that the plugin queued, and returns them.
    pub fn drain_deletes(&self) -> Vec<Owner> {
        let entries = match fs::read_dir(&self.deletes) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                tracing::error!("cannot list {}: {error}", self.deletes.display());
                return Vec::new();
            }
        };
        let mut drained = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // Of a killed agent or plugin: the delete was not answered, the runtime asks again.
            if is_temporary(name.as_ref()) {
                if let Err(error) = state_file::remove(&entry.path()) {
                    tracing::error!("{}", Chain(&error));
                }
                continue;
            }
            let Some(link) = name
                .strip_suffix(".json")
                .filter(|link| names::is_pod_link(link))
            else {
                continue;
            };
            let Some(_guard) = self.locks.try_lock(link) else {
                continue;
            };
            match self.carry_out(&entry.path(), link) {
                Ok(owner) => drained.extend(owner),
                Err(error) => tracing::error!(
                    "cannot carry out the queued delete of {link}, will try again: {}",
                    Chain(&error)
                ),
            }
        }
        drained
    }

    /// Carries out the queued delete of one attachment, if there is one. The caller holds the
    /// link's lock.
    ///
    /// # Errors
    /// If it cannot be carried out. It stays queued, so what were added now would be taken down
    /// by the next round.
    pub fn drain_delete(&self, owner: &Owner) -> Result<(), EndpointError> {
        let link = owner.link();
        let path = self.deletes.join(format!("{link}.json"));
        self.carry_out(&path, &link).map(drop)
    }

    fn carry_out(&self, path: &Path, link: &str) -> Result<Option<Owner>, EndpointError> {
        let owner = match read_delete(path, link) {
            Ok(Some(owner)) => owner,
            // None, or carried out since it was listed.
            Ok(None) => return Ok(None),
            Err(reason) => {
                // The collection frees the pod all the same once its link is gone.
                tracing::error!("queued delete {} {reason}", path.display());
                let mut aside = path.to_owned().into_os_string();
                aside.push(".bad");
                if let Err(error) = fs::rename(path, aside) {
                    tracing::error!("cannot set {} aside: {error}", path.display());
                }
                return Ok(None);
            }
        };
        self.release(&owner)?;
        self.forget_delete(&owner)?;
        Ok(Some(owner))
    }
}

/// A queued delete, if there is one.
fn read_delete(path: &Path, link: &str) -> Result<Option<Owner>, String> {
    let text = match read_small(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|error| format!("cannot be read: {error}"))?,
    };
    parse_delete(&text, link).map(Some)
}

/// The content of the queued delete of a link.
///
/// # Errors
/// Why it is none.
pub fn parse_delete(text: &[u8], link: &str) -> Result<Owner, String> {
    let owner: Owner = serde_json::from_slice(text)
        .map_err(|error| format!("does not name an attachment: {error}"))?;
    match owner.link() {
        own if own == link => Ok(owner),
        own => Err(format!("is of another link, {owner} has {own}")),
    }
}
