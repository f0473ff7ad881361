//! Makes an entry of one layout an entry of another by the names of its fields, where nobody could write
//! a function for it: of a version that came later.

use super::shape::Expected;
use sinabro_common::abi::layout::{FieldSpan, OF_KEY, OF_VALUE};
use std::{collections::BTreeMap, ops::Range};

/// Where the bytes of a key and of a value come from; the others are zero.
#[derive(Debug, PartialEq, Eq)]
pub struct Moves {
    key: Part,
    value: Part,
}

#[derive(Debug, PartialEq, Eq)]
struct Part {
    size: usize,
    moves: Vec<(Range<usize>, Range<usize>)>,
}

impl Moves {
    /// None if they are not alike: keys need the same fields, values one at least, and a field is as
    /// long in both.
    pub fn new(from: [BTreeMap<u64, FieldSpan>; 2], to: &Expected) -> Option<Self> {
        let [from_key, from_value] = from;
        let info = to.shape.info();
        let (key, value) = (to.spans(OF_KEY), to.spans(OF_VALUE));
        let moves = Self {
            key: Part::new(&from_key, &key, info.key_size)?,
            value: Part::new(&from_value, &value, info.value_size)?,
        };
        let same_keys = [from_key.len(), key.len()] == [moves.key.moves.len(); 2];
        (same_keys && !key.is_empty() && !moves.value.moves.is_empty()).then_some(moves)
    }

    /// None if it is shorter than its fields say.
    pub fn entry(&self, key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
        Some((self.key.of(key)?, self.value.of(value)?))
    }
}

impl Part {
    fn new(from: &BTreeMap<u64, FieldSpan>, to: &[(u64, FieldSpan)], size: u32) -> Option<Self> {
        let mut moves = Vec::new();
        for (name, to) in to {
            let Some(from) = from.get(name) else {
                continue;
            };
            if from.len != to.len {
                return None;
            }
            moves.push((range(from)?, range(to)?));
        }
        let size = size as usize;
        Some(Self { size, moves })
    }

    fn of(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut made = vec![0; self.size];
        for (from, to) in &self.moves {
            made.get_mut(to.clone())?
                .copy_from_slice(bytes.get(from.clone())?);
        }
        Some(made)
    }
}

fn range(span: &FieldSpan) -> Option<Range<usize>> {
    let end = span.offset.checked_add(span.len)?;
    Some(span.offset as usize..end as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::{DatapathConfig, maps::shape};
    use proptest::{collection::vec, prelude::*};

    fn map_of(name: &str) -> Expected {
        let all = shape::expected(&DatapathConfig::default());
        *all.iter().find(|map| map.shape.name == name).unwrap()
    }

    fn fields(map: &Expected) -> [BTreeMap<u64, FieldSpan>; 2] {
        [OF_KEY, OF_VALUE].map(|part| map.spans(part).into_iter().collect())
    }

    fn shifted(fields: &BTreeMap<u64, FieldSpan>, by: u32) -> BTreeMap<u64, FieldSpan> {
        let shift = |span: &FieldSpan| FieldSpan {
            offset: span.offset + by,
            ..*span
        };
        fields
            .iter()
            .map(|(name, span)| (*name, shift(span)))
            .collect()
    }

    proptest! {
        #[test]
        fn fields_are_found_wherever_they_are(
            key in vec(any::<u8>(), 40), value in vec(any::<u8>(), 40), by in 0u32..9,
        ) {
            let map = map_of("ALIASES");
            let [of_key, of_value] = fields(&map);
            let moves = Moves::new([of_key, shifted(&of_value, by)], &map).unwrap();
            let later = [vec![7; by as usize], value.clone()].concat();
            prop_assert_eq!(moves.entry(&key, &later), Some((key.clone(), value)));
            prop_assert_eq!(moves.entry(&key, &later[..later.len() - 1]), None);
        }

        #[test]
        fn garbage_is_refused_or_harmless(
            names in vec((0u64..4, any::<u32>(), any::<u32>()), 0..6),
            key in vec(any::<u8>(), 0..64), value in vec(any::<u8>(), 0..64),
        ) {
            let map = map_of("ALIASES");
            let [of_key, of_value] = fields(&map);
            let known: Vec<u64> = of_value.keys().copied().collect();
            let garbage = names.into_iter().map(|(name, offset, len)| {
                (known[name as usize], FieldSpan { offset, len })
            });
            if let Some(moves) = Moves::new([of_key, garbage.collect()], &map)
                && let Some((key, value)) = moves.entry(&key, &value)
            {
                prop_assert_eq!((key.len(), value.len()), (40, 40));
            }
        }
    }

    #[test]
    fn what_an_earlier_version_does_not_know_is_dropped_and_what_it_misses_is_zero() {
        let map = map_of("ALIASES");
        let [of_key, mut of_value] = fields(&map);
        let (&gone, _) = of_value.iter().find(|(_, span)| span.len == 16).unwrap();
        let span = of_value.remove(&gone).unwrap();
        of_value.insert(1, FieldSpan { offset: 32, len: 8 });
        let moves = Moves::new([of_key.clone(), of_value.clone()], &map).unwrap();
        let (_, value) = moves.entry(&[1; 40], &[1; 40]).unwrap();
        assert_eq!(value.iter().filter(|&&byte| byte == 0).count(), 16);

        // Another length is another meaning, and keys are equal or no keys.
        of_value.insert(gone, FieldSpan { len: 4, ..span });
        assert_eq!(Moves::new([of_key.clone(), of_value.clone()], &map), None);
        of_value.remove(&gone);
        let mut more = of_key.clone();
        more.insert(1, FieldSpan { offset: 40, len: 4 });
        assert_eq!(Moves::new([more, of_value.clone()], &map), None);
        let mut less = of_key;
        less.pop_first();
        assert_eq!(Moves::new([less, of_value], &map), None);
    }
}
