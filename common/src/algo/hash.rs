//! FNV-1a, 64 bit (<http://www.isthe.com/chongo/tech/comp/fnv/>): short, `const`, the same on
//! every machine. For names and for spreading ports, not against an adversary.

const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// Hashes `bytes`.
#[inline(always)]
pub const fn fnv1a(bytes: &[u8]) -> u64 {
    fnv1a_more(OFFSET, bytes)
}

/// Goes on from an earlier hash.
#[inline(always)]
pub const fn fnv1a_more(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(PRIME);
        i += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    #[test]
    fn matches_the_published_vectors() {
        assert_eq!(super::fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(super::fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(super::fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
