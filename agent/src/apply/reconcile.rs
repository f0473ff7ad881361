//! The difference between what a kernel table should hold and what it holds.
//!
//! A table is described by [`Table`]: how it is listed, when an entry is right, which entries
//! are Sinabro's, and the requests that set and remove one. [`steps`] lists it and compares;
//! the caller orders the steps of several tables and executes them.

use sinabro_netlink::{Conn, Request, Result};
use std::{collections::BTreeMap, time::Duration};

/// A kernel table that the plan has a say in.
pub trait Table {
    type Key: Ord + Clone;
    type Want;
    type Have;

    /// What the kernel holds; may list entries that are not Sinabro's.
    ///
    /// # Errors
    /// Those of the dump.
    fn list(&self, conn: &mut Conn) -> Result<Vec<(Self::Key, Self::Have)>>;

    /// Whether the kernel's entry is what is wanted.
    fn same(&self, key: &Self::Key, want: &Self::Want, have: &Self::Have) -> bool;

    /// Whether the entry may be removed.
    fn ours(&self, have: &Self::Have) -> bool;

    /// Sets an entry; `replaces` if the table holds another one under this key.
    fn put(&self, key: &Self::Key, want: &Self::Want, replaces: bool) -> Request;

    fn remove(&self, key: &Self::Key, have: &Self::Have) -> Request;

    /// What the table holds once the entry was set.
    fn entry(&self, key: &Self::Key, want: &Self::Want) -> Self::Have;

    /// Whether the kernel's word that an entry was set or removed is what is wanted, so that no look
    /// at the table is worth it: nearly all that it says is an echo of what was just done here.
    fn expected(
        &self,
        want: &BTreeMap<Self::Key, Self::Want>,
        key: &Self::Key,
        entry: &Self::Have,
        removed: bool,
    ) -> bool {
        match (want.get(key), removed) {
            (Some(want), false) => self.same(key, want, entry),
            (Some(_), true) => false,
            (None, false) => !self.ours(entry),
            (None, true) => true,
        }
    }
}

/// Requests that make a table match, each with the key it concerns.
#[derive(Debug)]
pub struct Steps<K> {
    pub put: Vec<(K, Request)>,
    pub remove: Vec<(K, Request)>,
}

/// Lists a table and says what is to be done.
///
/// # Errors
/// Those of the listing.
pub fn steps<T: Table>(
    table: &T,
    conn: &mut Conn,
    want: &BTreeMap<T::Key, T::Want>,
) -> Result<Steps<T::Key>> {
    let have = table.list(conn)?;
    let same = |key: &_, want: &_, have: &_| table.same(key, want, have);
    let diff = diff(want, &have, same, |have| table.ours(have));
    let put = diff.put.into_iter().map(|(key, want, replaces)| {
        let request = table.put(key, want, replaces);
        (key.clone(), request)
    });
    let remove = diff.remove.into_iter().map(|(key, have)| {
        let request = table.remove(key, have);
        (key.clone(), request)
    });
    Ok(Steps {
        put: put.collect(),
        remove: remove.collect(),
    })
}

/// Says what is to be done where the table holds exactly what was wanted `before`: nothing is listed.
pub fn steps_from<T: Table>(
    table: &T,
    before: &BTreeMap<T::Key, T::Want>,
    want: &BTreeMap<T::Key, T::Want>,
) -> Steps<T::Key>
where
    T::Want: PartialEq,
{
    let diff = changes(before, want);
    let put = diff.put.into_iter().map(|(key, want, replaces)| {
        let request = table.put(key, want, replaces);
        (key.clone(), request)
    });
    let remove = diff.remove.into_iter().map(|(key, before)| {
        let request = table.remove(key, &table.entry(key, before));
        (key.clone(), request)
    });
    Steps {
        put: put.collect(),
        remove: remove.collect(),
    }
}

/// The difference of what is wanted to what was: one walk along both.
pub fn changes<'a, K: Ord, W: PartialEq>(
    before: &'a BTreeMap<K, W>,
    want: &'a BTreeMap<K, W>,
) -> Diff<'a, K, W, W> {
    let (mut put, mut remove) = (Vec::new(), Vec::new());
    let mut old = before.iter().peekable();
    for (key, want) in want {
        while let Some(gone) = old.next_if(|(old, _)| *old < key) {
            remove.push(gone);
        }
        match old.next_if(|(old, _)| *old == key) {
            Some((_, before)) if before == want => {}
            before => put.push((key, want, before.is_some())),
        }
    }
    remove.extend(old);
    Diff { put, remove }
}

/// Which entries to set and which to remove.
#[derive(Debug)]
pub struct Diff<'a, K, W, H> {
    /// With whether the table holds another entry under the key.
    pub put: Vec<(&'a K, &'a W, bool)>,
    pub remove: Vec<(&'a K, &'a H)>,
}

/// Compares. A key may be listed several times: one entry that is right is kept, further ones
/// of ours are removed; if none is right, setting it replaces the first.
pub fn diff<'a, K: Ord, W, H>(
    want: &'a BTreeMap<K, W>,
    have: &'a [(K, H)],
    same: impl Fn(&K, &W, &H) -> bool,
    ours: impl Fn(&H) -> bool,
) -> Diff<'a, K, W, H> {
    let mut by_key: BTreeMap<&K, Vec<&H>> = BTreeMap::new();
    for (key, entry) in have {
        by_key.entry(key).or_default().push(entry);
    }
    let mut put = Vec::new();
    for (key, want) in want {
        let entries = by_key.get_mut(key);
        let replaces = entries.is_some();
        let right = entries.and_then(|entries| {
            let right = entries.iter().position(|have| same(key, want, have));
            // What stays in the list is removed below.
            entries.remove(right.unwrap_or(0));
            right
        });
        if right.is_none() {
            put.push((key, want, replaces));
        }
    }
    let rest = by_key
        .into_iter()
        .flat_map(|(key, entries)| entries.into_iter().map(move |entry| (key, entry)));
    let remove = rest.filter(|(_, entry)| ours(entry)).collect();
    Diff { put, remove }
}

/// How long to wait before trying again: doubles with every failure up to a cap.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    failures: u32,
}

impl Backoff {
    pub const fn new(first: Duration, cap: Duration) -> Self {
        Self {
            first,
            cap,
            failures: 0,
        }
    }

    /// The wait after one more failure.
    pub fn failed(&mut self) -> Duration {
        let factor = 1u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        self.failures = self.failures.saturating_add(1);
        self.first.saturating_mul(factor).min(self.cap)
    }

    pub fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    #[test]
    fn backoff_doubles_up_to_its_cap_and_starts_anew() {
        let second = Duration::from_secs(1);
        let mut backoff = Backoff::new(second, second * 5);
        let waits: Vec<_> = (0..70).map(|_| backoff.failed().as_secs()).collect();
        assert_eq!(waits[..5], [1, 2, 4, 5, 5]);
        assert!(waits[5..].iter().all(|w| *w == 5));
        backoff.succeeded();
        assert_eq!(backoff.failed(), second);
    }

    /// An entry: its value and whether Sinabro made it.
    type Entry = (u8, bool);

    /// What a table holds after the steps: setting replaces the first entry of the key.
    fn applied(want: &BTreeMap<u8, u8>, have: &[(u8, Entry)]) -> (Vec<(u8, Entry)>, usize) {
        let diff = diff(want, have, |_, w, h| *w == h.0, |h| h.1);
        let mut table = have.to_vec();
        for (key, entry) in &diff.remove {
            let at = table.iter().rposition(|(k, e)| (k, e) == (key, entry));
            table.remove(at.unwrap());
        }
        for (key, want, replaces) in &diff.put {
            let at = table.iter().position(|(k, _)| k == *key);
            assert_eq!(at.is_some(), *replaces);
            match at {
                Some(at) => table[at].1 = (**want, true),
                None => table.push((**key, (**want, true))),
            }
        }
        (table, diff.put.len() + diff.remove.len())
    }

    proptest! {
        #[test]
        fn the_way_from_one_plan_to_the_next_is_what_a_look_at_the_table_would_find(
            plans in vec(proptest::collection::btree_map(0u8..12, 0u8..3, 0..12), 2..8),
        ) {
            for pair in plans.windows(2) {
                let (before, want) = (&pair[0], &pair[1]);
                let have: Vec<(u8, u8)> = before.iter().map(|(k, w)| (*k, *w)).collect();
                let looked = diff(want, &have, |_, w, h| w == h, |_| true);
                let walked = changes(before, want);
                prop_assert_eq!(&walked.put, &looked.put);
                prop_assert_eq!(&walked.remove, &looked.remove);
            }
        }

        #[test]
        fn applying_the_difference_makes_the_table_match(
            want in proptest::collection::btree_map(0u8..12, 0u8..3, 0..12),
            have in vec((0u8..12, (0u8..3, any::<bool>())), 0..16),
        ) {
            let (table, _) = applied(&want, &have);
            for (key, value) in &want {
                prop_assert!(table.iter().any(|(k, e)| k == key && e.0 == *value));
            }
            // Ours and not wanted is gone; what is not ours and not wanted is as before.
            for (key, (_, ours)) in &table {
                prop_assert!(want.contains_key(key) || !ours);
            }
            let foreign = |t: &[(u8, Entry)]| {
                let mut f: Vec<_> = t.iter().filter(|(k, e)| !e.1 && !want.contains_key(k)).copied().collect();
                f.sort();
                f
            };
            prop_assert_eq!(foreign(&table), foreign(&have));
            // A second pass has nothing to do.
            prop_assert_eq!(applied(&want, &table).1, 0);
        }
    }
}
