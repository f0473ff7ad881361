//! The way down: out of the data path → link → record → leases.
//!
//! The kernel takes some 20 ms to delete a link, nearly all of it spent waiting for RCU grace
//! periods, and as long for fifty at once as for one. So a DEL is carried out in two steps:
//!
//! 1. [`Endpoints::begin_release`]: the delete is written down in the queue that the plugin uses
//!    too, and the pod leaves the data path, which drops what it sends from here on. Then the
//!    plugin has its answer.
//! 2. [`Endpoints::finish_releases`]: the links of all that wait are deleted together, and only
//!    then are their addresses free. [`Reaper`] does it at once; if the agent is killed before,
//!    the next one finds the queue.
//!
//! The attachment's lock is held until the end of step 2, so a new ADD of the same one waits.

use super::{EndpointError, Endpoints, Guard, delete_links};
use crate::chain::Chain;
use sinabro_common::{api::Owner, atomic_file::AtomicFile, fail_point::fail_point};
use std::{fs, io, sync::Arc};
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
};

impl Endpoints {
    /// Takes a pod down, whatever of it is there, and waits for it. Idempotent. Returns whether
    /// there was an endpoint or a lease.
    ///
    /// # Errors
    /// If a step fails; those before it are done, and the address stays leased.
    pub fn release(&self, owner: &Owner) -> Result<bool, EndpointError> {
        self.check_collision(owner)?;
        self.disconnect(owner)?;
        delete_links(&[owner.link()])?;
        self.free_books(owner)
    }

    /// First step of a delete. Returns whether the second one is left to be done. Where the
    /// delete cannot be written down, as in a full file system, both are done at once.
    ///
    /// # Errors
    /// If the data path keeps the pod, or a step done at once fails.
    pub fn begin_release(&self, owner: &Owner) -> Result<bool, EndpointError> {
        self.check_collision(owner)?;
        let known = self.get(owner).is_some() || self.ipam.has(owner);
        if !known && !super::link_exists(&owner.link())? {
            return Ok(false);
        }
        if let Err(error) = self.write_delete(owner) {
            tracing::warn!("deleting {owner} at once: {}", Chain(&error));
            self.release(owner)?;
            return Ok(false);
        }
        fail_point("delete-written");
        self.disconnect(owner)?;
        fail_point("disconnected");
        Ok(true)
    }

    /// Second step, for all that wait. What fails is logged; it stays in the queue, which is
    /// gone through again every minute.
    pub fn finish_releases(&self, owners: &[&Owner]) {
        let links: Vec<_> = owners.iter().map(|owner| owner.link()).collect();
        if let Err(error) = delete_links(&links) {
            tracing::error!("cannot delete pod links, will try again: {}", Chain(&error));
            return;
        }
        fail_point("links-deleted");
        for owner in owners {
            let freed = self.free_books(owner);
            fail_point("leases-released");
            match freed.and_then(|_| self.forget_delete(owner)) {
                Ok(()) => tracing::info!(pod = %owner, "pod deleted"),
                Err(error) => {
                    tracing::error!("cannot free {owner}, will try again: {}", Chain(&error));
                }
            }
        }
    }

    fn disconnect(&self, owner: &Owner) -> Result<(), EndpointError> {
        if let Some(record) = self.get(owner) {
            self.programs.detach(&record)?;
        }
        Ok(())
    }

    /// Record and leases; the link is gone.
    fn free_books(&self, owner: &Owner) -> Result<bool, EndpointError> {
        let record = self.get(owner);
        if let Some(record) = &record {
            self.forget(&record.link)?;
        }
        fail_point("record-removed");
        let freed = self.ipam.release(owner)?;
        Ok(record.is_some() || !freed.is_empty())
    }

    /// As the plugin does when there is no agent.
    fn write_delete(&self, owner: &Owner) -> Result<(), EndpointError> {
        let link = owner.link();
        let path = self.deletes.join(format!("{link}.json"));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.deletes)?;
            AtomicFile::new(&path).replace(&serde_json::to_vec(owner)?)
        };
        write().map_err(|source| EndpointError::Queue { path, source })
    }

    pub(super) fn forget_delete(&self, owner: &Owner) -> Result<(), EndpointError> {
        let path = self.deletes.join(format!("{}.json", owner.link()));
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(EndpointError::Queue { path, source })
            }
            _ => Ok(()),
        }
    }
}

/// Takes over begun deletes. Clones share the queue.
#[derive(Clone)]
pub struct Reaper {
    queue: mpsc::UnboundedSender<(Guard, Owner)>,
    deletes: watch::Sender<Deletes>,
}

/// How many were handed over and are not finished, and how many are.
#[derive(Clone, Copy, Debug, Default)]
struct Deletes {
    pending: usize,
    finished: u64,
}

impl Reaper {
    /// Starts the task that finishes deletes. It ends when every clone is dropped.
    pub fn start(endpoints: Arc<Endpoints>) -> Self {
        let (queue, mut begun) = mpsc::unbounded_channel::<(Guard, Owner)>();
        let deletes = watch::Sender::new(Deletes::default());
        let done = deletes.clone();
        tokio::spawn(async move {
            let mut batch = Vec::new();
            while begun.recv_many(&mut batch, 256).await > 0 {
                let (endpoints, work) = (endpoints.clone(), std::mem::take(&mut batch));
                let count = work.len();
                let finished = spawn_blocking(move || {
                    let owners: Vec<_> = work.iter().map(|(_, owner)| owner).collect();
                    endpoints.finish_releases(&owners);
                });
                if let Err(error) = finished.await {
                    tracing::error!("deleting pods failed, will try again: {error}");
                }
                done.send_modify(|deletes| {
                    deletes.pending -= count;
                    deletes.finished += count as u64;
                });
            }
        });
        Self { queue, deletes }
    }

    /// Hands over a delete that was begun.
    pub fn take(&self, guard: Guard, owner: Owner) {
        self.deletes.send_modify(|deletes| deletes.pending += 1);
        if self.queue.send((guard, owner)).is_err() {
            // The task is gone, the agent stops: the queue on disk has it.
            self.deletes.send_modify(|deletes| deletes.pending -= 1);
        }
    }

    /// Whether deletes are under way, whose addresses will be free soon: then how many are
    /// finished already.
    pub fn under_way(&self) -> Option<u64> {
        let deletes = *self.deletes.borrow();
        (deletes.pending > 0).then_some(deletes.finished)
    }

    /// Waits until more are finished than that, or none is left.
    pub async fn progress(&self, finished: u64) {
        let mut deletes = self.deletes.subscribe();
        // An error means that the agent stops.
        let _ = deletes
            .wait_for(|now| now.pending == 0 || now.finished > finished)
            .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_delete_that_finishes_is_progress_however_many_come_after_it() {
        let reaper = Reaper {
            queue: mpsc::unbounded_channel().0,
            deletes: watch::Sender::default(),
        };
        assert_eq!(reaper.under_way(), None);
        let set = |pending, finished| {
            reaper.deletes.send_replace(Deletes { pending, finished });
        };
        set(1, 7);
        let before = reaper.under_way().unwrap();
        set(6, 7);
        let waits = timeout(Duration::from_millis(1), reaper.progress(before));
        assert!(waits.await.is_err());
        // One is finished, five more have come: an address is free.
        set(5, 8);
        reaper.progress(before).await;
        set(0, 8);
        assert_eq!(reaper.under_way(), None);
        reaper.progress(8).await;
    }
}
