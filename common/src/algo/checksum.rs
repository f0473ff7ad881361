//! The Internet checksum (RFC 1071).

/// A checksum over data in which `from` became `to`: words, or pairs of bytes, in the order of memory, at an even
/// offset (RFC 1624 §3, equation 3).
#[inline(always)]
pub const fn replaced(checksum: [u8; 2], from: u32, to: u32) -> [u8; 2] {
    let mut sum = !u16::from_ne_bytes(checksum) as u64 + !from as u64 + to as u64;
    // Of three such numbers the first fold leaves 17 bits at most, the second 16.
    sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    (!(sum as u16)).to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// From all of the bytes.
    fn whole(bytes: &[u8]) -> [u8; 2] {
        let mut sum: u64 = bytes
            .chunks(2)
            .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (!(sum as u16)).to_be_bytes()
    }

    proptest! {
        #[test]
        fn is_that_of_the_changed_bytes(
            mut bytes: [u8; 20], at in 0usize..5, to in prop_oneof![Just([0; 4]), Just([0xff; 4]), any::<[u8; 4]>()],
        ) {
            // As in a header, where not all is zero.
            bytes[19] |= 1;
            let before = whole(&bytes);
            let place = &mut bytes[at * 4..at * 4 + 4];
            let from: [u8; 4] = place.try_into().unwrap();
            place.copy_from_slice(&to);
            let is = replaced(before, u32::from_ne_bytes(from), u32::from_ne_bytes(to));
            prop_assume!(bytes != [0; 20]);
            prop_assert_eq!(is, whole(&bytes));
        }

        #[test]
        fn takes_pairs_too(mut bytes: [u8; 4], to: [u8; 2]) {
            bytes[3] |= 1;
            let before = whole(&bytes);
            let from = u16::from_ne_bytes([bytes[0], bytes[1]]);
            bytes[..2].copy_from_slice(&to);
            let is = replaced(before, from.into(), u16::from_ne_bytes(to).into());
            prop_assert_eq!(is, whole(&bytes));
        }
    }
}
