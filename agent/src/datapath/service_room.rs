//! How large the maps of Services are.

use super::{DatapathConfig, maps::shape, raw_map::RawMap};
use sinabro_common::abi::service::MAX_BACKENDS;
use std::path::Path;

/// Entries of the maps of Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRoom {
    pub frontends: u32,
    pub sets: u32,
    pub slots: u32,
    pub backends: u32,
}

impl ServiceRoom {
    /// For a node whose Services somebody else translates.
    pub const NONE: Self = Self {
        frontends: 1,
        sets: 1,
        slots: 1,
        backends: 1,
    };

    /// For so many endpoints, a port of a pod each, and for as many frontends and sets. Slots are twice as many: an
    /// endpoint may be in several sets, and a set that changes has two places for a while.
    pub const fn of_endpoints(endpoints: u32) -> Self {
        Self {
            frontends: endpoints,
            sets: endpoints,
            slots: endpoints.saturating_mul(2),
            backends: endpoints,
        }
    }

    /// What is pinned, if any Service is published there; none otherwise.
    pub fn in_use(bpf_dir: &Path) -> Option<Self> {
        let expected = shape::expected(&DatapathConfig::default());
        let open = |name| {
            let map = expected.iter().find(|map| map.shape.name == name)?;
            RawMap::open(&map.path(bpf_dir)).ok()
        };
        let frontends = open("FRONTENDS")?;
        let mut is_any = false;
        frontends.some(None, 1, |_, _| is_any = true).ok()?;
        let entries = |name| Some(open(name)?.info().max_entries);
        is_any.then_some(Self {
            frontends: frontends.info().max_entries,
            sets: entries("SETS")?,
            slots: entries("SLOTS")?,
            backends: entries("BACKENDS")?,
        })
    }

    /// At least as large as the other. What is published stays where it is: a map that is smaller than it was could
    /// not take it over.
    #[must_use]
    pub fn at_least(&self, other: &Self) -> Self {
        Self {
            frontends: self.frontends.max(other.frontends),
            sets: self.sets.max(other.sets),
            slots: self.slots.max(other.slots),
            backends: self.backends.max(other.backends),
        }
    }
}

impl Default for ServiceRoom {
    fn default() -> Self {
        Self::of_endpoints(MAX_BACKENDS)
    }
}
