//! Numbers that tell whether two versions of the project mean the same by a map's bytes.
//!
//! The kernel knows sizes only. A field that moved, was renamed, or got another meaning in a type
//! of the same size is found by [`Layout::LAYOUT`], which is made of the type's name, its size, its
//! number (see `map_type`), and name and place of each field.
//!
//! - map `LAYOUTS`, hash: [`key`] of a map's name (u64) → [`MapRecord`], written by agents for each other;
//!   no program reads it.

use super::map_type;

/// A key or value of a map.
pub trait Layout {
    const LAYOUT: u64;
    /// Raised where its bytes got another meaning; 1 at first.
    const NUMBER: u32;
}

/// Room in `LAYOUTS`.
pub const MAX_MAPS: u32 = 64;

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

/// A map's name in `LAYOUTS`.
pub const fn key(name: &str) -> u64 {
    bytes_of(name.as_bytes())
}

/// Types that mean what they are.
macro_rules! plain {
    ($($type:ident)+) => {
        $(impl Layout for $type {
            const LAYOUT: u64 = start(stringify!($type), size_of::<$type>(), Self::NUMBER);
            const NUMBER: u32 = 1;
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
}

/// The layout of a type without its fields.
pub const fn start(name: &str, size: usize, number: u32) -> u64 {
    let hash = bytes(OFFSET_BASIS, name.as_bytes());
    let hash = bytes(hash, &(size as u64).to_le_bytes());
    bytes(hash, &number.to_le_bytes())
}

/// Adds a field.
pub const fn field(hash: u64, name: &str, offset: usize) -> u64 {
    // The zero keeps the names of two fields apart.
    let hash = bytes(bytes(hash, name.as_bytes()), &[0]);
    bytes(hash, &(offset as u64).to_le_bytes())
}

/// Of two layouts, one after the other.
pub const fn both(first: u64, second: u64) -> u64 {
    bytes(first, &second.to_le_bytes())
}

/// A number for a file's bytes, against damage.
pub const fn bytes_of(content: &[u8]) -> u64 {
    bytes(OFFSET_BASIS, content)
}

/// FNV-1a, whose offset basis and prime are in RFC 9923: small enough to run while compiling, and
/// the same with every compiler.
const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

const fn bytes(hash: u64, bytes: &[u8]) -> u64 {
    let mut hash = hash;
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(PRIME);
        at += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts_as_fnv_1a_has_it() {
        // From the test vectors of the algorithm's authors.
        assert_eq!(bytes(OFFSET_BASIS, b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(bytes(OFFSET_BASIS, b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(bytes(OFFSET_BASIS, b"foobar"), 0x8594_4171_f739_67e8);
    }

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
