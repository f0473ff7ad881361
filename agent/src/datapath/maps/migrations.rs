//! How the entries of a map are carried from the layout before to the present one, and back.
//!
//! A migration stays for one release after the layout that it is for; who goes back further begins
//! with an empty map.

use super::shape::Expected;

/// Makes an entry of another; none if it is nothing that a program or an agent has written. What it is
/// given has the lengths of the map's, and nothing else is certain.
pub type Convert = fn(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)>;

pub struct Migration {
    /// Of the present map,
    pub map: &'static str,
    /// the one that it takes the place of: another layout, or another map.
    pub earlier: fn(present: Expected) -> Expected,
    /// From there.
    pub up: Convert,
    /// And back.
    pub down: Convert,
}

/// Several may be for one map, and several from one.
#[cfg(not(feature = "layout-next"))]
pub const ALL: &[Migration] = &[flows::RECORDS, flows::ALIASES, flows::STACK];

/// A version after this one: it knows how this one's are carried.
#[cfg(feature = "layout-next")]
pub const ALL: &[Migration] = &[next::CONNECTIONS];

/// Maps of earlier versions that have no successor of their name: left for one of those by an agent that ended in order,
/// and nobody's once another comes.
pub const RETIRED: [&str; 2] = ["NAT", "STACK_FLOWS"];

/// The same layout, for a map of another size.
pub fn same(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    Some((key.to_vec(), value.to_vec()))
}

#[cfg(any(test, not(feature = "layout-next")))]
mod flows;
#[cfg(any(test, feature = "layout-next"))]
mod next;
