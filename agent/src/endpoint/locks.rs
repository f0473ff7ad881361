//! One lock per pod link: requests for one attachment take turns, others never meet.
//!
//! An ADD holds its lock from Allocate until it is active or undone. So the lock also says that
//! an ADD is under way, and garbage collection leaves alone what it cannot lock.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// All locks that somebody holds or waits for.
#[derive(Clone, Debug, Default)]
pub struct Locks(Arc<Mutex<HashMap<String, Arc<AsyncMutex<()>>>>>);

/// A held lock.
#[derive(Debug)]
pub struct Guard {
    locks: Locks,
    link: String,
    held: Option<OwnedMutexGuard<()>>,
}

impl Locks {
    /// Waits for a link's lock.
    pub async fn lock(&self, link: &str) -> Guard {
        // Made before waiting, so that a wait that is given up cleans up too.
        let mut guard = self.guard(link);
        let lock = self.entry(link);
        guard.held = Some(lock.lock_owned().await);
        guard
    }

    /// Takes a link's lock if nobody has it.
    pub fn try_lock(&self, link: &str) -> Option<Guard> {
        let mut guard = self.guard(link);
        guard.held = Some(self.entry(link).try_lock_owned().ok()?);
        Some(guard)
    }

    fn guard(&self, link: &str) -> Guard {
        Guard {
            locks: self.clone(),
            link: link.to_owned(),
            held: None,
        }
    }

    fn entry(&self, link: &str) -> Arc<AsyncMutex<()>> {
        self.map().entry(link.to_owned()).or_default().clone()
    }

    fn map(&self) -> MutexGuard<'_, HashMap<String, Arc<AsyncMutex<()>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.held = None;
        let mut map = self.locks.map();
        // New references are made under the map's lock, so the count cannot rise now.
        if map
            .get(&self.link)
            .is_some_and(|lock| Arc::strong_count(lock) == 1)
        {
            map.remove(&self.link);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn one_link_at_a_time_and_nothing_is_left() {
        let locks = Locks::default();
        let a = locks.lock("a").await;
        assert!(locks.try_lock("a").is_none());
        let b = locks.try_lock("b").unwrap();
        let waiting = tokio::time::timeout(Duration::from_millis(1), locks.lock("a"));
        assert!(waiting.await.is_err());
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { drop(locks.lock("a").await) }
        });
        drop((a, b));
        waiter.await.unwrap();
        assert!(locks.map().is_empty());
    }
}
