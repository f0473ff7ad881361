//! How the entries of a map are carried from an earlier layout to the present one.
//!
//! The oldest layouts that an agent knows are those of release 0.1.0. A migration stays for as long as an
//! upgrade from its layout is possible; from an older one a map begins empty.

use super::shape::{self, Expected};
use crate::datapath::DatapathConfig;

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

/// Several may be for one map, and several from one. None yet: the layouts of release 0.1.0 are the present ones.
pub const ALL: &[Migration] = &[];

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
