//! How the entries of a map are carried from an earlier layout to the present one.
//!
//! The oldest layouts that an agent knows are those of release 0.1.0. A migration stays for as long as an
//! upgrade from its layout is possible; from an older one a map begins empty.

use super::shape::{self, Expected, Shape};
use crate::datapath::DatapathConfig;
use sinabro_common::abi::{
    connection::{Connection, ConnectionKey},
    layout::{Field, Layout as _},
};

/// Makes an entry of another; none if it is nothing that a program or an agent has written. What it is
/// given has the lengths of the map's, and nothing else is certain.
pub type Convert = fn(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)>;

#[derive(Clone, Copy)]
pub struct Migration {
    /// Of the present map,
    pub map: &'static str,
    /// the one that it takes the place of: another layout, or another map.
    pub earlier: fn(present: Expected) -> Expected,
    /// From there. The way back is by the names of fields.
    pub up: Convert,
}

/// Several may be for one map, and several from one.
pub const ALL: &[Migration] = &[Migration {
    map: "CONNECTIONS",
    earlier: |present| Expected {
        shape: Shape {
            value_size: CONNECTION_0_1,
            ..present.shape
        },
        layout: 0x6958_f75e_a2d4_e690,
        number: 2,
        fields: [ConnectionKey::FIELDS, FIELDS_0_1],
    },
    up: with_windows,
}];

/// Length of a record of release 0.1.0, which had the fields of today but for the last two.
const CONNECTION_0_1: u32 = 88;
const FIELDS_0_1: &[Field] = Connection::FIELDS.split_at(Connection::FIELDS.len() - 2).0;

/// Adds the windows of a record of release 0.1.0, of which nothing is known, and what is reserved.
fn with_windows(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    if (key.len(), value.len()) != (size_of::<ConnectionKey>(), CONNECTION_0_1 as usize) {
        return None;
    }
    let mut value = value.to_vec();
    value.resize(size_of::<Connection>(), 0);
    Some((key.to_vec(), value))
}

/// Maps that no program uses and that have no successor of their name. An agent of release 0.1.0 leaves
/// both as it ends.
pub const RETIRED: [&str; 2] = ["NAT", "STACK_FLOWS"];

/// The same layout, for a map of another size.
pub fn same(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    Some((key.to_vec(), value.to_vec()))
}

/// The layouts that an agent knows.
pub struct Known {
    /// Those of its own maps,
    pub maps: Vec<Expected>,
    /// and how entries of earlier ones become theirs.
    pub migrations: &'static [Migration],
}

impl Known {
    /// What this version knows.
    pub fn by(config: &DatapathConfig) -> Self {
        Self {
            maps: shape::expected(config),
            migrations: ALL,
        }
    }

    /// Its layout generation: that of the map that changed last.
    pub fn generation(&self) -> u32 {
        self.maps.iter().map(|map| map.number).max().unwrap_or(1)
    }

    /// The earlier maps of one, each with the function from it.
    pub fn earlier(&self, map: &Expected) -> impl Iterator<Item = (Expected, Convert)> {
        let of_map = self.migrations.iter();
        let of_map = of_map.filter(|migration| migration.map == map.shape.name);
        of_map.map(|migration| ((migration.earlier)(*map), migration.up))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::maps::fields::Moves;
    use sinabro_common::abi::layout::{OF_KEY, OF_VALUE};

    const KEY: [u8; size_of::<ConnectionKey>()] = [7; _];

    fn map(name: &str) -> Expected {
        let all = shape::expected(&DatapathConfig::default());
        all.into_iter().find(|map| map.shape.name == name).unwrap()
    }

    fn record() -> Vec<u8> {
        (0..CONNECTION_0_1 as u8).collect()
    }

    #[test]
    fn each_begins_at_a_layout_that_there_was() {
        for migration in ALL {
            let earlier = (migration.earlier)(map(migration.map));
            let Shape {
                name, value_size, ..
            } = earlier.shape;
            let line = format!("{name} {} {:016x}", earlier.number, earlier.layout);
            let mut written = include_str!("layouts.txt").lines();
            assert!(written.any(|written| written == line), "{line}");
            let spans = earlier.spans(OF_VALUE);
            assert!(
                spans
                    .iter()
                    .all(|(_, span)| span.offset + span.len <= value_size && span.len > 0)
            );
        }
    }

    #[test]
    fn a_record_goes_up_and_down_whole() {
        let (key, up) = with_windows(&KEY, &record()).unwrap();
        assert_eq!(
            (key.as_slice(), up.len()),
            (&KEY[..], size_of::<Connection>())
        );
        let (same, more) = up.split_at(CONNECTION_0_1 as usize);
        assert_eq!(same, record());
        assert!(more.iter().all(|byte| *byte == 0));
        // As an agent of release 0.1.0 does it.
        let present = map("CONNECTIONS");
        let fields = [OF_KEY, OF_VALUE].map(|part| present.spans(part).into_iter().collect());
        let earlier = (ALL[0].earlier)(present);
        let (_, down) = Moves::new(fields, &earlier)
            .unwrap()
            .entry(&KEY, &up)
            .unwrap();
        assert_eq!(down, record());
    }

    #[test]
    fn what_is_no_record_is_not_taken_for_one() {
        for len in [0, 87, 89, 136] {
            assert_eq!(with_windows(&KEY, &vec![1; len]), None, "{len}");
        }
        assert_eq!(with_windows(&KEY[1..], &record()), None);
    }
}
