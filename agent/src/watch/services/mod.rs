//! Where facts about Services come from: what is known of each by its name, and the names of those that changed.
//!
//! - [`file`](self::file): a file of Services and EndpointSlices;
//! - [`kubernetes`]: the Kubernetes API;
//! - [`store`], `packed`, `slice_name`: what is known, by name;
//! - [`ranges`]: which addresses are Services' alone;
//! - [`objects`], [`parse`]: what the API's objects say of it.
//!
//! As of nodes, a source decides nothing and keeps the last good facts while it cannot be read.

pub mod file;
pub mod kubernetes;
pub mod objects;
mod packed;
pub mod parse;
pub mod ranges;
mod slice_name;
pub mod store;

#[cfg(test)]
mod tests;

pub use file::spawn as spawn_file;
pub use kubernetes::spawn as spawn_kubernetes;
pub use store::Store;

use crate::plan::services::ServiceName;
use ipnet::IpNet;
use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::{sync::watch, task::JoinHandle, time::sleep};

/// Changes that follow one another this quickly are told as one: a rollout changes slices one after the other.
pub const PAUSE: Duration = Duration::from_millis(5);

/// A running source.
#[derive(Debug)]
pub struct ServicesSource {
    /// What it is, for people.
    pub from: String,
    /// As long as this is there, the source goes on.
    pub changes: Changes,
    pub store: Arc<Store>,
    pub health: watch::Receiver<Health>,
    /// Addresses that are Services' alone, as far as that is known.
    pub ranges: watch::Receiver<BTreeSet<IpNet>>,
    pub task: JoinHandle<()>,
}

/// Whether the source can be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Why the facts may be out of date, while it lasts.
    pub problem: Option<String>,
    /// Since when.
    pub stale_since: Option<SystemTime>,
}

/// Tells which Services changed.
#[derive(Debug)]
pub struct Changes {
    store: Arc<Store>,
    news: watch::Receiver<()>,
}

impl Changes {
    fn of(store: &Arc<Store>) -> Self {
        Self {
            news: store.news(),
            store: store.clone(),
        }
    }

    /// Waits for changes, and gives the names of what changed since the last time, each once. Of what is gone
    /// [`Store::get`] knows nothing.
    ///
    /// The first time it has the names of all Services, once all of them and all of their endpoints were read: what
    /// was there before and is not among them is gone. So it may be empty. Nothing is lost if this is dropped while
    /// it waits.
    pub async fn next(&mut self) -> BTreeSet<ServiceName> {
        loop {
            if self.store.has_changed() {
                sleep(PAUSE).await;
                if let Some(changed) = self.store.take_changed() {
                    return changed;
                }
            }
            // The store, which is here, has the sender: this cannot fail.
            let _ = self.news.changed().await;
        }
    }
}
