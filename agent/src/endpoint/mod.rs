//! Pods of this node: from leased addresses to a live endpoint and back.
//!
//! [`Endpoints`] ties the pieces of one pod together: its leases ([`crate::ipam`]), its link, its
//! programs ([`crate::datapath`]) and its record. Up: lease → (the plugin makes the link) →
//! record → programs. Down ([`release`]): programs and maps → link → record → lease. So an address
//! is out of the data path before anybody can get it again, and whatever the agent is killed
//! between, [`restore`] and [`gc`] find from the files and the kernel alone.
//!
//! Methods block. Callers hold the pod link's [`locks::Guard`].

pub mod gc;
pub mod locks;
pub(crate) mod pod_names;
pub mod programs;
pub mod record;
pub mod release;
pub mod restore;

pub use locks::{Guard, Locks};
pub use pod_names::PodNames;
pub use programs::{PodPrograms, Programs};
pub use record::{EndpointRecord, attachment};

use crate::{
    apply::PodRoute,
    chain::Chain,
    datapath::DatapathError,
    ipam::{Allocator, IpamError},
    state_file::FileError,
};
use record::Records;
use sinabro_common::{
    api::{HostPort, Mac, Owner},
    fail_point::fail_point,
    names,
};
use sinabro_netlink::{Conn, ResultExt, link};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::sync::watch;

#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    #[error("link {ifindex} is not the host side of {owner}: {reason}")]
    WrongLink {
        ifindex: u32,
        owner: Owner,
        reason: String,
    },
    #[error("the link {link} of {owner} belongs to {other}")]
    Collision {
        link: String,
        owner: Owner,
        other: Owner,
    },
    #[error("the queued delete {} cannot be written or removed", path.display())]
    Queue { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Ipam(#[from] IpamError),
    #[error(transparent)]
    Record(#[from] FileError),
    #[error(transparent)]
    Netlink(#[from] sinabro_netlink::Error),
    #[error(transparent)]
    Datapath(#[from] DatapathError),
}

/// All pods of this node.
pub struct Endpoints {
    pub ipam: Allocator,
    pub locks: Locks,
    programs: Arc<dyn PodPrograms>,
    records: Records,
    deletes: PathBuf,
    /// By link.
    live: Mutex<BTreeMap<String, EndpointRecord>>,
    /// What went wrong with a live endpoint at restore, by link; retried by the collection.
    broken: Mutex<BTreeMap<String, String>>,
    routes: watch::Sender<Vec<PodRoute>>,
    /// Whether every pod is in `live`.
    restored: AtomicBool,
    /// What was reserved last.
    host_ports: Mutex<Option<BTreeSet<HostPort>>>,
}

impl Endpoints {
    /// Opens the state directory; nothing is read back before [`Endpoints::restore`].
    ///
    /// # Errors
    /// If a directory cannot be made.
    pub fn open(
        state_dir: &Path,
        ipam: Allocator,
        programs: Arc<dyn PodPrograms>,
    ) -> Result<Self, EndpointError> {
        Ok(Self {
            ipam,
            locks: Locks::default(),
            programs,
            records: Records::open(state_dir)?,
            deletes: state_dir.join(names::DELETES_DIR),
            live: Mutex::default(),
            broken: Mutex::default(),
            routes: watch::Sender::default(),
            restored: AtomicBool::default(),
            host_ports: Mutex::default(),
        })
    }

    /// The routes and neighbours that the live endpoints need, on every change.
    pub fn routes(&self) -> watch::Receiver<Vec<PodRoute>> {
        self.routes.subscribe()
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<String, EndpointRecord>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn broken(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The live endpoint of an owner.
    pub fn get(&self, owner: &Owner) -> Option<EndpointRecord> {
        let live = self.live();
        let record = live.get(&owner.link())?;
        (record.owner == *owner).then(|| record.clone())
    }

    /// Whether the owner has a live endpoint whose link is still the recorded one.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn is_intact(&self, owner: &Owner) -> Result<bool, EndpointError> {
        let Some(record) = self.get(owner) else {
            return Ok(false);
        };
        let link = Conn::new()?.link_by_name(&record.link).ignore_not_found()?;
        Ok(link.is_some_and(|link| link.index == record.ifindex))
    }

    pub fn all(&self) -> Vec<EndpointRecord> {
        self.live().values().cloned().collect()
    }

    pub fn count(&self) -> usize {
        self.live().len()
    }

    /// Live endpoints whose programs could not be attached, each with the reason.
    pub fn problems(&self) -> Vec<String> {
        self.broken().values().cloned().collect()
    }

    /// Refuses an owner whose link's name another one has.
    ///
    /// # Errors
    /// [`EndpointError::Collision`].
    pub fn check_collision(&self, owner: &Owner) -> Result<(), EndpointError> {
        let link = owner.link();
        match self.live().get(&link) {
            Some(record) if record.owner != *owner => Err(EndpointError::Collision {
                link,
                owner: owner.clone(),
                other: record.owner.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Makes a pod live: record, programs, maps. On an error it is as if it had not been tried.
    ///
    /// # Errors
    /// If the link is not the one that the owner should have, or a step fails.
    pub fn activate(&self, record: EndpointRecord) -> Result<(), EndpointError> {
        self.check_collision(&record.owner)?;
        check_link(&record)?;
        let before = self.get(&record.owner);
        if let Some(before) = &before
            && before.ifindex != record.ifindex
        {
            // Made again by a repeated ADD: the old link is gone, its entries are not.
            self.programs.detach(before)?;
        }
        self.records.write(&record)?;
        fail_point("record-written");
        if let Err(error) = self.programs.attach(&record) {
            if let Err(undo) = self.programs.detach(&record) {
                tracing::warn!(
                    "cannot undo the attachment of {}: {}",
                    record.owner,
                    Chain(&undo)
                );
            }
            self.forget(&record.link)?;
            return Err(error.into());
        }
        fail_point("attached");
        self.broken().remove(&record.link);
        self.live().insert(record.link.clone(), record);
        self.publish();
        Ok(())
    }

    fn forget(&self, link: &str) -> Result<(), EndpointError> {
        self.records.remove(link)?;
        self.broken().remove(link);
        self.live().remove(link);
        self.publish();
        Ok(())
    }

    fn publish(&self) {
        let route = |record: &EndpointRecord| PodRoute {
            addresses: record.addresses.clone(),
            ifindex: record.ifindex,
            mac: record.mac,
            mtu: record.link_mtu(),
        };
        // Built under the channel's lock: two changes at once cannot publish in the wrong order.
        self.routes.send_modify(|routes| {
            *routes = self.live().values().map(route).collect();
        });
        self.reserve_ports();
    }

    /// Keeps masqueraded connections off the ports that lead to pods. What fails is tried again with the next
    /// change of a pod.
    fn reserve_ports(&self) {
        if !self.restored.load(Ordering::Relaxed) {
            return;
        }
        let mut reserved = self
            .host_ports
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let of = |record: &EndpointRecord| record.host_ports.clone().unwrap_or_default();
        let ports: BTreeSet<HostPort> = self.live().values().flat_map(of).collect();
        if reserved.as_ref() == Some(&ports) {
            return;
        }
        match self.programs.reserve(&ports) {
            Ok(()) => *reserved = Some(ports),
            Err(error) => {
                tracing::error!(
                    "cannot keep connections off pods' host ports: {}",
                    Chain(&error)
                );
            }
        }
    }
}

/// The group that links are put into to be deleted together. No other link of the node is in it.
const DOOMED: u32 = 0x736e_6264;

/// Takes pods' links away, and their other ends with them; says how many were there. Links that
/// are not there are what is wanted.
pub(crate) fn delete_links(names: &[String]) -> Result<usize, sinabro_netlink::Error> {
    let mut conn = Conn::new()?;
    let mut doomed = Vec::new();
    for name in names {
        if let Some(found) = conn.link_by_name(name).ignore_not_found()? {
            doomed.push(found);
        }
    }
    match &doomed[..] {
        [] => {}
        [one] => {
            conn.execute(link::delete(one.index)).ignore_not_found()?;
        }
        many => {
            let marks = many
                .iter()
                .map(|found| link::set_group(found.index, DOOMED));
            for marked in conn.execute_each(marks) {
                marked.ignore_not_found()?;
            }
            conn.execute(link::delete_group(DOOMED))
                .ignore_not_found()?;
        }
    }
    Ok(doomed.len())
}

fn link_exists(name: &str) -> Result<bool, sinabro_netlink::Error> {
    let found = Conn::new()?.link_by_name(name).ignore_not_found()?;
    Ok(found.is_some())
}

/// Whether the link at the record's index is the host side of the record's pod.
fn check_link(record: &EndpointRecord) -> Result<(), EndpointError> {
    let wrong = |reason: String| EndpointError::WrongLink {
        ifindex: record.ifindex,
        owner: record.owner.clone(),
        reason,
    };
    let found = Conn::new()?
        .link_by_index(record.ifindex)
        .ignore_not_found()?;
    let Some(found) = found else {
        return Err(wrong("there is no such link".into()));
    };
    if found.name != record.link {
        return Err(wrong(format!(
            "its name is {}, not {}",
            found.name, record.link
        )));
    }
    if found.kind.as_deref() != Some("veth") {
        return Err(wrong("it is not a veth".into()));
    }
    if found.mac != Some(record.host_mac.0) {
        return Err(wrong(format!("its MAC address is not {}", record.host_mac)));
    }
    Ok(())
}

/// A pod's MAC address: the one asked for, or the one that follows from its first address (IPv4
/// sorts first).
pub fn mac_of(asked: Option<Mac>, addresses: &[IpAddr]) -> Option<Mac> {
    asked.or_else(|| Some(Mac(names::pod_mac(*addresses.iter().min()?))))
}

#[cfg(test)]
mod tests;
