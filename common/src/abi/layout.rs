//! Numbers that tell whether two versions of the project mean the same by a map's bytes.
//!
//! The kernel knows sizes only. A field that moved, was renamed, or got another meaning in a type
//! of the same size is found by [`Layout::LAYOUT`], which is made of the type's name, its size, its
//! number (see `map_type`), and name and place of each field.

/// A key or value of a map.
pub trait Layout {
    const LAYOUT: u64;
}

/// Types that mean what they are.
macro_rules! plain {
    ($($type:ident)+) => {
        $(impl Layout for $type {
            const LAYOUT: u64 = start(stringify!($type), size_of::<$type>(), 1);
        })+
    };
}
plain!(u8 u32 u64 i32);

/// One after the other.
impl<A: Layout, B: Layout> Layout for (A, B) {
    const LAYOUT: u64 = both(A::LAYOUT, B::LAYOUT);
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
