//! CRC32c, the checksum of SCTP (RFC 9260 §6.8, appendix A), of a packet of which two bytes change.
//!
//! A CRC is linear: that of the changed packet differs from that of the packet by what the change alone leaves in a
//! register of zeros, whatever the other bytes are. So the packet is not read.
//!
//! Bits are reflected, as in the register: the highest bit is the coefficient of x⁰.

/// The generator without its highest coefficient, x³².
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// Hexadecimal digits of the length of a packet.
const DIGITS: usize = 5;

/// x to the power of 8 · 16ⁱ · d, at 16 · i + d: what a digit d at place i of a number of bytes multiplies a register by.
/// More than there are digits, so that a mask makes an index of any number.
const POWERS: [u32; 128] = {
    let mut powers = [0x8000_0000; 128];
    // Of one byte at this place.
    let mut factor = 0x0080_0000;
    let mut place = 0;
    while place < DIGITS {
        let mut digit = 1;
        while digit < 16 {
            powers[16 * place + digit] = product(powers[16 * place + digit - 1], factor);
            digit += 1;
        }
        factor = product(powers[16 * place + 15], factor);
        place += 1;
    }
    powers
};

/// Modulo the generator. Without a branch: the verifier walks each of them.
#[inline(always)]
const fn product(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        product ^= b & 0u32.wrapping_sub(a >> bit & 1);
        b = b >> 1 ^ POLYNOMIAL & 0u32.wrapping_sub(b & 1);
    }
    product
}

/// A register that is multiplied by the power of x at a place in the table of powers, which has sixteen of each hexadecimal
/// digit of a number of bytes.
#[inline(always)]
pub fn times(register: u32, power: u32) -> u32 {
    product(register, POWERS[power as usize % POWERS.len()])
}

/// The checksum of a packet in which two bytes, `behind` bytes in front of its end, became others by `change`, the
/// exclusive or of both. Checksum and change are as they lie in memory on the wire; the checksum's own bytes count
/// as zeros. `times` is [`times`], or a function that does the same.
#[inline(always)]
pub fn replaced(
    checksum: [u8; 4],
    change: [u8; 2],
    behind: u32,
    times: impl Fn(u32, u32) -> u32,
) -> [u8; 4] {
    // Two bytes that are still to be worked in are a register of which as many bytes have been.
    let mut register = u16::from_le_bytes(change) as u32;
    let bytes = behind + 2;
    let mut place = 0;
    while place < DIGITS as u32 {
        let digit = bytes >> (4 * place) & 15;
        register = times(register, 16 * place + digit);
        place += 1;
    }
    (u32::from_le_bytes(checksum) ^ register).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OTHERS: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);

    proptest! {
        #[test]
        fn is_that_of_the_changed_bytes(
            mut bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 2..100),
                prop::collection::vec(any::<u8>(), 65_000..65_536),
            ],
            at: prop::sample::Index,
            to: [u8; 2],
        ) {
            let before = OTHERS.checksum(&bytes).to_le_bytes();
            let at = at.index(bytes.len() - 1);
            let change = [bytes[at] ^ to[0], bytes[at + 1] ^ to[1]];
            bytes[at..at + 2].copy_from_slice(&to);
            let is = replaced(before, change, (bytes.len() - at - 2) as u32, times);
            prop_assert_eq!(is, OTHERS.checksum(&bytes).to_le_bytes());
        }
    }
}
