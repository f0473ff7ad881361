//! Carries the entries of a map to another one while programs write to either.
//!
//! It goes over the old map again and again: the first time everything is new, later what was written
//! since. What the new map has by then of its own stays, for the programs that wrote it saw later
//! packets. What programs removed from the old map between two passes stays in the new one, as what no
//! program removes does: the agent sweeps both.

use super::raw_map::{Put, RawMap};
use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    io,
};

/// Makes an entry of the new map of one of the old; none if it means nothing.
pub type Convert = dyn Fn(&[u8], &[u8]) -> Option<(Vec<u8>, Vec<u8>)> + Send;

pub struct Carry {
    /// The map's name, for people.
    pub name: &'static str,
    from: RawMap,
    to: RawMap,
    convert: Box<Convert>,
    /// By the key: an entry as it was found, and as it was written. Hashes that nobody outside can
    /// foresee, for the keys are pods' to choose.
    seen: HashMap<u64, Seen>,
    hasher: RandomState,
    pub carried: u64,
    /// What there was no room for.
    pub lost: u64,
    /// What means nothing.
    pub garbage: u64,
}

#[derive(Clone, Copy)]
struct Seen {
    old: u64,
    /// None if it was not written.
    new: Option<u64>,
}

impl Carry {
    pub fn new(name: &'static str, from: RawMap, to: RawMap, convert: Box<Convert>) -> Self {
        Self {
            name,
            from,
            to,
            convert,
            seen: HashMap::new(),
            hasher: RandomState::new(),
            carried: 0,
            lost: 0,
            garbage: 0,
        }
    }

    /// Carries what was written since the last pass, and returns how many entries that were.
    pub fn pass(&mut self) -> io::Result<u64> {
        let Self {
            from,
            to,
            convert,
            seen,
            hasher,
            ..
        } = self;
        let (mut carried, mut lost, mut garbage) = (0, 0, 0);
        let mut each = |key: &[u8], value: &[u8]| -> io::Result<()> {
            let (id, old) = (hasher.hash_one(key), hasher.hash_one(value));
            let before = seen.get(&id).copied();
            if before.is_some_and(|before| before.old == old) {
                return Ok(());
            }
            let mut found = Seen { old, new: None };
            match convert(key, value) {
                None => garbage += 1,
                Some((key, value)) => match write(to, before, hasher, &key, &value) {
                    Ok(true) => {
                        found.new = Some(hasher.hash_one(&value[..]));
                        carried += 1;
                    }
                    Ok(false) => {}
                    Err(error) if is_full(&error) => lost += 1,
                    Err(error) => return Err(error),
                },
            }
            seen.insert(id, found);
            Ok(())
        };
        let mut failed = None;
        from.for_each(|key, value| {
            if failed.is_none() {
                failed = each(key, value).err();
            }
        })?;
        self.carried += carried;
        self.lost += lost;
        self.garbage += garbage;
        failed.map_or(Ok(carried), Err)
    }
}

/// Whether it was written, and is not the new programs' own.
fn write(
    to: &RawMap,
    before: Option<Seen>,
    hasher: &RandomState,
    key: &[u8],
    value: &[u8],
) -> io::Result<bool> {
    let Some(written) = before.and_then(|before| before.new) else {
        return to.put(key, value, Put::New);
    };
    match to.get(key)? {
        Some(now) if hasher.hash_one(&now[..]) == written => to.put(key, value, Put::Any),
        _ => Ok(false),
    }
}

/// What a hash table says of an entry that it has no room for (`alloc_htab_elem`,
/// kernel/bpf/hashtab.c).
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::E2BIG | libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::{super::sys::MapInfo, *};
    use crate::datapath::maps::migrations::{self, same};
    use proptest::{collection::btree_map, prelude::*};
    use std::collections::BTreeMap;

    fn table(max_entries: u32, value_size: u32) -> RawMap {
        const NO_PREALLOC: u32 = 1;
        RawMap::create(&MapInfo {
            map_type: 1,
            key_size: 4,
            value_size,
            max_entries,
            map_flags: NO_PREALLOC,
            id: 0,
        })
        .unwrap()
    }

    fn put(map: &RawMap, key: u32, value: &[u8]) {
        map.put(&key.to_ne_bytes(), value, Put::Any).unwrap();
    }

    fn get(map: &RawMap, key: u32) -> Option<Vec<u8>> {
        map.get(&key.to_ne_bytes()).unwrap()
    }

    fn carry(from: &RawMap, to: &RawMap, convert: migrations::Convert) -> Carry {
        Carry::new(
            "TABLE",
            from.again().unwrap(),
            to.again().unwrap(),
            Box::new(convert),
        )
    }

    /// Twice as long, the other way round; nothing of what is odd.
    fn longer(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
        let back: Vec<u8> = value.iter().rev().copied().collect();
        value[0]
            .is_multiple_of(2)
            .then(|| (key.to_vec(), [value, &back].concat()))
    }

    #[test]
    fn what_the_old_programs_write_follows_and_what_the_new_ones_write_stays() {
        let (from, to) = (table(100, 1), table(100, 1));
        for key in 1..=5 {
            put(&from, key, &[1]);
        }
        let mut carry = carry(&from, &to, same);
        assert_eq!(carry.pass().unwrap(), 5);
        assert_eq!(carry.pass().unwrap(), 0);
        // Written by those of before, by the new ones, by both, and made by each.
        put(&from, 1, &[2]);
        put(&to, 2, &[3]);
        put(&from, 3, &[2]);
        put(&to, 3, &[3]);
        put(&from, 6, &[2]);
        put(&to, 7, &[3]);
        // Made by both, and ended by the new ones.
        put(&from, 8, &[2]);
        put(&to, 8, &[3]);
        assert_eq!(carry.pass().unwrap(), 2);
        let values: Vec<_> = (1..=8).map(|key| get(&to, key).unwrap()[0]).collect();
        assert_eq!(values, [2, 3, 3, 1, 1, 2, 3, 3]);
        put(&from, 8, &[4]);
        assert_eq!(carry.pass().unwrap(), 0);
        assert_eq!(get(&to, 8), Some(vec![3]));
    }

    #[test]
    fn a_smaller_table_takes_what_fits_and_the_rest_is_counted() {
        let (from, to) = (table(10_000, 1), table(100, 1));
        (0..5000).for_each(|key| put(&from, key, &[1]));
        let mut carry = carry(&from, &to, same);
        let carried = carry.pass().unwrap();
        // The kernel may give some more than it was asked for, one for each processor.
        assert!((100..200).contains(&carried), "{carried}");
        assert_eq!(carry.carried + carry.lost, 5000);
        assert_eq!(carry.pass().unwrap(), 0);
    }

    #[test]
    fn what_is_no_table_and_what_has_other_lengths_is_an_error() {
        let array = MapInfo {
            map_type: 2,
            key_size: 4,
            value_size: 1,
            max_entries: 1,
            map_flags: 0,
            id: 0,
        };
        let array = RawMap::create(&array).unwrap();
        let to = table(10, 2);
        assert!(carry(&array, &to, same).pass().is_err());
        let from = table(10, 1);
        put(&from, 1, &[1]);
        assert!(carry(&from, &to, same).pass().is_err());
        assert_eq!(get(&to, 1), None);
    }

    #[test]
    fn a_counter_has_a_value_for_each_processor() {
        let info = MapInfo {
            map_type: 5,
            key_size: 4,
            value_size: 12,
            max_entries: 10,
            map_flags: 1,
            id: 0,
        };
        let (from, to) = (
            RawMap::create(&info).unwrap(),
            RawMap::create(&info).unwrap(),
        );
        let cpus = aya::util::nr_cpus().unwrap();
        let value: Vec<u8> = (0..cpus * 16)
            .map(|at| if at % 16 < 12 { at as u8 } else { 0 })
            .collect();
        put(&from, 1, &value);
        assert_eq!(carry(&from, &to, same).pass().unwrap(), 1);
        assert_eq!(get(&to, 1), Some(value));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn all_of_it_arrives_whatever_it_is(
            first in btree_map(0u32..40, any::<u8>(), 0..40),
            second in btree_map(0u32..40, any::<u8>(), 0..40),
        ) {
            let (from, to) = (table(64, 1), table(64, 2));
            let mut carry = carry(&from, &to, longer);
            let mut whole = BTreeMap::new();
            for part in [first, second] {
                for (&key, &value) in &part {
                    put(&from, key, &[value]);
                    // What became garbage is as it was.
                    if value.is_multiple_of(2) {
                        whole.insert(key, vec![value, value]);
                    }
                }
                carry.pass().unwrap();
            }
            let mut found = BTreeMap::new();
            to.for_each_of(|key: u32, value: [u8; 2]| { found.insert(key, value.to_vec()); }).unwrap();
            prop_assert_eq!(found, whole);
        }
    }
}
