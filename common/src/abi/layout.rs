//! Numbers that tell whether two versions of the project mean the same by a map's bytes.
//!
//! The kernel knows sizes only. A field that moved, was renamed, or got another meaning in a type
//! of the same size is found by [`Layout::LAYOUT`], which is made of the type's name, its size, its
//! number (see `map_type`), and name and place of each field.
//!
//! - map `LAYOUTS`, hash: [`key`] of a map's [`Place`] (u64) → [`MapRecord`], written by agents for each
//!   other; no program reads it.
//! - map `LAYOUT_FIELDS`, hash: [`FieldKey`] → [`FieldSpan`]: where the fields are, for an agent of a version
//!   before, which knows some of them by name but not this layout. A field that means something else
//!   has another name.
//!
//! The number says where a map is pinned, too ([`Place`]): two layouts of one map are there beside each
//! other while one version gives way to another.

use super::map_type;
use crate::algo::hash::{fnv1a, fnv1a_more};

/// A key or value of a map.
pub trait Layout {
    const LAYOUT: u64;
    /// The layout generation that gave it this layout; 1 at first. See [`Place`].
    const NUMBER: u32;
    /// All of its bytes, if they have names.
    const FIELDS: &'static [Field];
}

/// The key of what has none, such as a queue.
impl Layout for () {
    const LAYOUT: u64 = 0;
    const NUMBER: u32 = 1;
    const FIELDS: &'static [Field] = &[];
}

/// Where a field begins; it ends where the next one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// A hash of it.
    pub name: u64,
    pub offset: u32,
}

impl Field {
    pub const fn new(name: &str, offset: usize) -> Self {
        Self {
            name: fnv1a(name.as_bytes()),
            offset: offset as u32,
        }
    }
}

/// Room in `LAYOUTS`.
pub const MAX_MAPS: u32 = 64;
/// Room in `LAYOUT_FIELDS`.
pub const MAX_FIELDS: u32 = 2048;

/// A field of a map's key or value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FieldKey {
    /// [`key`] of its place.
    pub map: u64,
    /// [`Field::name`].
    pub name: u64,
    /// [`OF_KEY`] or [`OF_VALUE`].
    pub part: u32,
    /// Zero.
    pub pad: u32,
}
map_type!(FieldKey, 24, 1, [map, name, part, pad]);

pub const OF_KEY: u32 = 0;
pub const OF_VALUE: u32 = 1;

/// Where it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldSpan {
    pub offset: u32,
    pub len: u32,
}
map_type!(FieldSpan, 8, 1, [offset, len]);

/// Which map it was that an agent used, and what it meant by its bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRecord {
    /// Of key and value.
    pub layout: u64,
    /// The kernel's number of the map: an agent that keeps no records puts another in its place.
    pub id: u32,
    /// Zero.
    pub pad: u32,
}
map_type!(MapRecord, 16, 1, [layout, id, pad]);

/// Where a map is pinned: by its name if it is of the first generation, else in a
/// directory of the generation that changed it, `v<N>/`. A version that changes layouts is a
/// generation, one more than the last; what it does not change stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    pub name: &'a str,
    /// Of key and value, the higher one.
    pub number: u32,
}

/// A map's name in `LAYOUTS`.
pub const fn key(place: Place<'_>) -> u64 {
    let hash = fnv1a(place.name.as_bytes());
    match place.number {
        0 | 1 => hash,
        number => fnv1a_more(hash, &number.to_le_bytes()),
    }
}

/// Types that mean what they are.
macro_rules! plain {
    ($($type:ident)+) => {
        $(impl Layout for $type {
            const LAYOUT: u64 = start(stringify!($type), size_of::<$type>(), Self::NUMBER);
            const NUMBER: u32 = 1;
            const FIELDS: &'static [Field] = &[Field::new("", 0)];
        })+
    };
}
plain!(u8 u32 u64 i32);

/// One after the other.
impl<A: Layout, B: Layout> Layout for (A, B) {
    const LAYOUT: u64 = both(A::LAYOUT, B::LAYOUT);
    const NUMBER: u32 = match A::NUMBER > B::NUMBER {
        true => A::NUMBER,
        false => B::NUMBER,
    };
    const FIELDS: &'static [Field] = &[];
}

/// The layout of a type without its fields.
pub const fn start(name: &str, size: usize, number: u32) -> u64 {
    let hash = fnv1a(name.as_bytes());
    let hash = fnv1a_more(hash, &(size as u64).to_le_bytes());
    fnv1a_more(hash, &number.to_le_bytes())
}

/// Adds a field.
pub const fn field(hash: u64, name: &str, offset: usize) -> u64 {
    // The zero keeps the names of two fields apart.
    let hash = fnv1a_more(fnv1a_more(hash, name.as_bytes()), &[0]);
    fnv1a_more(hash, &(offset as u64).to_le_bytes())
}

/// Of two layouts, one after the other.
pub const fn both(first: u64, second: u64) -> u64 {
    fnv1a_more(first, &second.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_the_same_size_is_another_layout() {
        let before = field(field(start("Entry", 8, 1), "port", 0), "id", 4);
        let changes = [
            // Swapped, renamed, moved, another meaning, another name, another size, less.
            field(field(start("Entry", 8, 1), "id", 0), "port", 4),
            field(field(start("Entry", 8, 1), "port", 0), "cookie", 4),
            field(field(start("Entry", 8, 1), "port", 0), "id", 2),
            field(field(start("Entry", 8, 2), "port", 0), "id", 4),
            field(field(start("Entries", 8, 1), "port", 0), "id", 4),
            field(field(start("Entry", 12, 1), "port", 0), "id", 4),
            field(start("Entry", 8, 1), "port", 0),
        ];
        assert!(changes.iter().all(|change| *change != before));
        assert_ne!(<(u32, u64)>::LAYOUT, <(u64, u32)>::LAYOUT);
    }
}
