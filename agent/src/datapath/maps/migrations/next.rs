//! `NAT` with the time in front, which stands for any change of a later version in tests of upgrades.

use super::{Expected, Migration};
use sinabro_common::abi::{
    layout::{Layout as _, both, field, start},
    nat::{KIND_FORWARD, KIND_INBOUND, NatEntry, NatKey},
};

pub const NAT: Migration = Migration {
    map: "NAT",
    earlier: |present| Expected {
        layout: both(NatKey::LAYOUT, EARLIER),
        number: 1,
        fields: [&[], &[]],
        ..present
    },
    up,
    down,
};

/// `NatEntry` as the first generation had it.
const EARLIER: u64 = {
    let hash = field(start("NatEntry", SIZE, 1), "addr", 0);
    let hash = field(field(hash, "port", 16), "kind", 18);
    let hash = field(field(hash, "state", 19), "peer_state", 20);
    field(field(hash, "pad", 21), "last_seen_ns", TIME)
};
const SIZE: usize = size_of::<NatEntry>();
/// Where it had its last field.
const TIME: usize = SIZE - size_of::<u64>();
const KIND: usize = 18;

fn up(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (entry, time) = sized(key, value)?.split_at(TIME);
    is_known(entry[KIND]).then(|| (key.to_vec(), [time, entry].concat()))
}

fn down(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (time, entry) = sized(key, value)?.split_at(SIZE - TIME);
    is_known(entry[KIND]).then(|| (key.to_vec(), [entry, time].concat()))
}

fn sized<'a>(key: &[u8], value: &'a [u8]) -> Option<&'a [u8]> {
    ((key.len(), value.len()) == (size_of::<NatKey>(), SIZE)).then_some(value)
}

fn is_known(kind: u8) -> bool {
    (KIND_FORWARD..=KIND_INBOUND).contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    /// What it is carried from is what this version has.
    #[cfg(not(feature = "layout-next"))]
    #[test]
    fn the_earlier_layout_is_the_present_one() {
        use crate::datapath::{DatapathConfig, maps::shape};
        let all = shape::expected(&DatapathConfig::default());
        let present = *all.iter().find(|map| map.shape.name == NAT.map).unwrap();
        let earlier = (NAT.earlier)(present);
        assert_eq!((earlier.layout, earlier.number), (present.layout, 1));
        assert_eq!(earlier.shape, present.shape);
    }

    proptest! {
        #[test]
        fn an_entry_goes_up_and_comes_back(
            key in vec(any::<u8>(), size_of::<NatKey>()),
            value in vec(any::<u8>(), SIZE),
            kind in KIND_FORWARD..=KIND_INBOUND,
        ) {
            let mut value = value;
            value[KIND] = kind;
            let (up_key, up_value) = up(&key, &value).unwrap();
            prop_assert_eq!(&up_key, &key);
            prop_assert_eq!(&up_value[..8], &value[TIME..]);
            prop_assert_eq!(up_value[8 + KIND], kind);
            prop_assert_eq!(down(&up_key, &up_value), Some((key, value)));
        }

        #[test]
        fn garbage_becomes_nothing(
            key in vec(any::<u8>(), 0..64),
            value in vec(any::<u8>(), 0..64),
        ) {
            let fits = key.len() == size_of::<NatKey>() && value.len() == SIZE;
            for (convert, kind) in [(up as super::super::Convert, KIND), (down, 8 + KIND)] {
                let known = fits && is_known(value[kind]);
                prop_assert_eq!(convert(&key, &value).is_some(), known);
            }
        }
    }
}
