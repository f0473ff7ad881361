//! `CONNECTIONS` with its first field last, which stands for any change of a later version in tests of upgrades.

use super::{Expected, Migration};
use sinabro_common::abi::{
    connection::{Connection, ConnectionKey},
    layout::{Layout as _, both, field, start},
};

pub const CONNECTIONS: Migration = Migration {
    map: "CONNECTIONS",
    earlier: |present| Expected {
        layout: both(ConnectionKey::LAYOUT, EARLIER),
        number: 2,
        fields: [&[], &[]],
        ..present
    },
    up,
    down,
};

/// `Connection` as the second generation had it.
const EARLIER: u64 = {
    let hash = field(start("Connection", SIZE, 2), "last_seen_ns", 0);
    let hash = field(field(hash, "began_ns", 8), "nat", 16);
    let hash = field(field(hash, "frontend", 32), "nat_port", 48);
    let hash = field(field(hash, "frontend_port", 50), "states", 52);
    let hash = field(field(hash, "flags", 54), "payer", 56);
    let hash = field(field(hash, "endpoint", 60), "endpoint_generation", 64);
    let hash = field(field(hash, "policy_epochs", 68), "seen_ticks", 76);
    field(field(hash, "verdicts", 80), "pad", 82)
};
const SIZE: usize = size_of::<Connection>();
/// The field that moves.
const TIME: usize = size_of::<u64>();

fn up(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (time, rest) = sized(key, value)?.split_at(TIME);
    Some((key.to_vec(), [rest, time].concat()))
}

fn down(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (rest, time) = sized(key, value)?.split_at(SIZE - TIME);
    Some((key.to_vec(), [time, rest].concat()))
}

fn sized<'a>(key: &[u8], value: &'a [u8]) -> Option<&'a [u8]> {
    ((key.len(), value.len()) == (size_of::<ConnectionKey>(), SIZE)).then_some(value)
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
        let of_name = |map: &&Expected| map.shape.name == CONNECTIONS.map;
        let present = *all.iter().find(of_name).unwrap();
        let earlier = (CONNECTIONS.earlier)(present);
        assert_eq!((earlier.layout, earlier.number), (present.layout, 2));
        assert_eq!(earlier.shape, present.shape);
    }

    proptest! {
        #[test]
        fn an_entry_goes_up_and_comes_back(
            key in vec(any::<u8>(), size_of::<ConnectionKey>()),
            value in vec(any::<u8>(), SIZE),
        ) {
            let (up_key, up_value) = up(&key, &value).unwrap();
            prop_assert_eq!(&up_key, &key);
            prop_assert_eq!(&up_value[SIZE - TIME..], &value[..TIME]);
            prop_assert_eq!(down(&up_key, &up_value), Some((key, value)));
        }

        #[test]
        fn garbage_becomes_nothing(
            key in vec(any::<u8>(), 0..64),
            value in vec(any::<u8>(), 0..128),
        ) {
            let fits = key.len() == size_of::<ConnectionKey>() && value.len() == SIZE;
            for convert in [up as super::super::Convert, down] {
                prop_assert_eq!(convert(&key, &value).is_some(), fits);
            }
        }
    }
}
