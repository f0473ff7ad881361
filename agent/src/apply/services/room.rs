//! Which entries of a table are free. What is let go rests for a while, until no program that saw it in use can still
//! be running.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

/// A program runs for microseconds; this is for one whose processor was taken away from it. Where room is short, the
/// end of all programs is waited for instead.
pub const REST: Duration = Duration::from_secs(5);

/// Single entries.
#[derive(Debug)]
pub struct Ids {
    /// None from here on was ever taken.
    next: u32,
    end: u32,
    free: Vec<u32>,
    resting: VecDeque<(Instant, u32)>,
}

impl Ids {
    /// All from `begin` to before `end`, but for those in use.
    pub fn without(begin: u32, end: u32, in_use: impl Fn(u32) -> bool) -> Self {
        let last = (begin..end).rev().find(|&id| in_use(id));
        let next = last.map_or(begin, |last| last + 1);
        Self {
            next,
            end,
            // The lowest is the first to go.
            free: (begin..next).rev().filter(|&id| !in_use(id)).collect(),
            resting: VecDeque::new(),
        }
    }

    /// One for whoever asks; none if all are taken or rest.
    pub fn take(&mut self, now: Instant) -> Option<u32> {
        while let Some((since, id)) = self.resting.front().copied() {
            if now.saturating_duration_since(since) < REST {
                break;
            }
            self.resting.pop_front();
            self.free.push(id);
        }
        self.free.pop().or_else(|| {
            let fresh = (self.next < self.end).then_some(self.next)?;
            self.next += 1;
            Some(fresh)
        })
    }

    /// Nobody has seen it.
    pub fn give_back(&mut self, id: u32) {
        self.free.push(id);
    }

    pub fn rest(&mut self, now: Instant, id: u32) {
        self.resting.push_back((now, id));
    }

    /// Ends the rest of all: no program runs any more that saw them in use.
    pub fn end_rest(&mut self) {
        self.free.extend(self.resting.drain(..).map(|(_, id)| id));
    }

    /// How many nobody can have now, and how many of these only rest.
    pub fn taken(&self, begin: u32) -> (u32, u32) {
        let taken = self.next.saturating_sub(begin) - self.free.len() as u32;
        (taken, self.resting.len() as u32)
    }
}

/// Entries side by side.
#[derive(Debug)]
pub struct Ranges {
    /// Length by base. No two of them touch.
    by_base: BTreeMap<u32, u32>,
    /// The same, the smallest first.
    by_len: BTreeSet<(u32, u32)>,
    resting: VecDeque<(Instant, u32, u32)>,
    end: u32,
}

impl Ranges {
    pub fn new(end: u32) -> Self {
        let mut ranges = Self {
            by_base: BTreeMap::new(),
            by_len: BTreeSet::new(),
            resting: VecDeque::new(),
            end,
        };
        ranges.put(0, end);
        ranges
    }

    /// The base of so many, at least one, from the smallest range that has them.
    pub fn take(&mut self, now: Instant, len: u32) -> Option<u32> {
        while let Some((since, base, len)) = self.resting.front().copied() {
            if now.saturating_duration_since(since) < REST {
                break;
            }
            self.resting.pop_front();
            self.give_back(base, len);
        }
        let (found, base) = self.by_len.range((len, 0)..).next().copied()?;
        self.cut(base, found, base, len);
        Some(base)
    }

    /// Takes exactly these; false if one of them is taken.
    pub fn claim(&mut self, base: u32, len: u32) -> bool {
        let before = self.by_base.range(..=base).next_back();
        let Some((&from, &found)) = before else {
            return false;
        };
        let fits = base.checked_add(len).is_some_and(|end| end <= from + found);
        if fits {
            self.cut(from, found, base, len);
        }
        fits
    }

    fn cut(&mut self, from: u32, found: u32, base: u32, len: u32) {
        self.by_base.remove(&from);
        self.by_len.remove(&(found, from));
        self.put(from, base - from);
        self.put(base + len, from + found - base - len);
    }

    /// Nobody has seen them.
    pub fn give_back(&mut self, mut base: u32, mut len: u32) {
        if let Some((&before, &its)) = self.by_base.range(..base).next_back()
            && before + its == base
        {
            self.by_base.remove(&before);
            self.by_len.remove(&(its, before));
            (base, len) = (before, its + len);
        }
        if let Some(after) = self.by_base.remove(&(base + len)) {
            self.by_len.remove(&(after, base + len));
            len += after;
        }
        self.put(base, len);
    }

    pub fn rest(&mut self, now: Instant, base: u32, len: u32) {
        self.resting.push_back((now, base, len));
    }

    /// As [`Ids::end_rest`].
    pub fn end_rest(&mut self) {
        while let Some((_, base, len)) = self.resting.pop_front() {
            self.give_back(base, len);
        }
    }

    /// As [`Ids::taken`].
    pub fn taken(&self) -> (u32, u32) {
        let free: u32 = self.by_base.values().sum();
        (
            self.end - free,
            self.resting.iter().map(|(.., len)| len).sum(),
        )
    }

    fn put(&mut self, base: u32, len: u32) {
        if len > 0 {
            self.by_base.insert(base, len);
            self.by_len.insert((len, base));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    #[test]
    fn what_is_let_go_rests() {
        let begin = Instant::now();
        let mut ids = Ids::without(1, 4, |id| id == 2);
        assert_eq!((ids.take(begin), ids.take(begin)), (Some(1), Some(3)));
        assert_eq!(ids.take(begin), None);
        ids.rest(begin, 2);
        assert_eq!(ids.taken(1), (3, 1));
        assert_eq!(ids.take(begin + REST - Duration::from_nanos(1)), None);
        assert_eq!(ids.take(begin + REST), Some(2));

        let mut ranges = Ranges::new(8);
        assert_eq!(ranges.take(begin, 8), Some(0));
        ranges.rest(begin, 2, 3);
        assert_eq!(ranges.taken(), (8, 3));
        assert_eq!(ranges.take(begin + REST - Duration::from_nanos(1), 1), None);
        assert_eq!(ranges.take(begin + REST, 2), Some(2));
        assert!(!ranges.claim(4, 2) && ranges.claim(4, 1) && !ranges.claim(4, 1));
        assert!(!ranges.claim(u32::MAX, 2));
    }

    proptest! {
        /// Against one flag for each entry.
        #[test]
        fn ranges_never_overlap_and_come_together_again(steps in vec((any::<bool>(), 1..20u32), 1..200)) {
            const END: u32 = 100;
            let now = Instant::now();
            let mut ranges = Ranges::new(END);
            let mut taken: Vec<(u32, u32)> = Vec::new();
            for (take, n) in steps {
                if take {
                    match ranges.take(now, n) {
                        Some(base) => {
                            prop_assert!(base + n <= END);
                            prop_assert!(taken.iter().all(|&(b, l)| base + n <= b || b + l <= base));
                            taken.push((base, n));
                        }
                        None => {
                            // There is no gap of that length.
                            let free = |at: u32| taken.iter().all(|&(b, l)| at < b || b + l <= at);
                            let gap = (0..=END - n).any(|base| (base..base + n).all(free));
                            prop_assert!(!gap);
                        }
                    }
                } else if !taken.is_empty() {
                    let (base, len) = taken.swap_remove(n as usize % taken.len());
                    ranges.give_back(base, len);
                }
            }
            for (base, len) in taken {
                ranges.give_back(base, len);
            }
            prop_assert_eq!(ranges.take(now, END), Some(0));
        }
    }
}
