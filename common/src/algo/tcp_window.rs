//! Which FIN or RST of one end the other end can have taken (RFC 5961 §3, RFC 9293 §3.10.7.4): one whose sequence number is
//! in the window that the other end announced last. Whoever cannot see a connection's packets has to guess that number.
//!
//! A window is a number, zero of an end that nothing is known of: bits 0 to 31 have the sequence number that it
//! expects next, bits 32 to 47 the window as it is on the wire, bits 48 to 55 the shift (RFC 7323 §2.2) plus one, or zero if
//! its SYN was not seen, bit 56 whether it has acknowledged anything.

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
const SYN_ACK: u8 = SYN | ACK;

const SHIFT_AT: u32 = 48;
const SHIFT: u64 = 0xff << SHIFT_AT;
const HEARD: u64 = 1 << 56;
/// Where flags are above a window, all of whose bits are below.
const FLAGS_AT: u32 = 57;
const WINDOW: u64 = (1 << FLAGS_AT) - 1;
/// The largest shift (RFC 7323 §2.3): of an end whose SYN was not seen.
const MOST: u64 = 14;

/// The fields of a segment, host order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    pub sequence: u32,
    pub acknowledged: u32,
    /// As it is on the wire: without the shift.
    pub window: u16,
    /// Of a SYN: [`announced`]; zero of others.
    pub shift: u8,
}

/// The shift of a SYN plus one; `shift` is none if the option is not there. A larger one than there may be is the largest one.
#[inline(always)]
pub const fn announced(shift: Option<u8>) -> u8 {
    match shift {
        None => 1,
        Some(shift) if shift as u64 > MOST => MOST as u8 + 1,
        Some(shift) => shift + 1,
    }
}

/// The window of an end of which nothing was known, and which sends a segment with this [`Numbers::shift`].
#[inline(always)]
pub const fn opened(shift: u8) -> u64 {
    (shift as u64) << SHIFT_AT
}

/// The window of an end after one more segment of it, which is neither a SYN nor a RST: all others acknowledge.
#[inline(always)]
pub const fn heard(window: u64, numbers: &Numbers) -> u64 {
    window & SHIFT | HEARD | (numbers.window as u64) << 32 | numbers.acknowledged as u64
}

/// The same after any segment. `is_open`: its SYN was seen and acknowledged, and no reset.
///
/// A SYN within an open connection says nothing (RFC 5961 §4): anybody may have sent it. Nor does a reset: its
/// window is zero, and it is the sender's last word.
#[inline(always)]
pub const fn after(window: u64, tcp_flags: u8, numbers: &Numbers, is_open: bool) -> u64 {
    match tcp_flags & (SYN | RST | ACK) {
        ACK => heard(window, numbers),
        SYN if !is_open => opened(numbers.shift),
        SYN_ACK if !is_open => heard(opened(numbers.shift), numbers),
        _ => window,
    }
}

/// The flags of a segment that count: its FIN or RST does not if it is outside the receiver's window.
///
/// `payload`: length in bytes. A FIN comes behind it; a RST is judged by where the segment begins.
#[inline(always)]
pub const fn that_count(receiver: u64, tcp_flags: u8, sequence: u32, payload: u32) -> u8 {
    let at = match tcp_flags & RST {
        0 => sequence.wrapping_add(payload),
        _ => sequence,
    };
    let distance = at.wrapping_sub(receiver as u32);
    let shift = match (receiver & SHIFT) >> SHIFT_AT {
        0 => MOST,
        // No more than the verifier and Rust let a number be shifted by.
        known => (known - 1) & 15,
    };
    let size = (receiver >> 32 & 0xffff) << shift;
    match receiver & HEARD != 0 && distance as u64 > size {
        true => tcp_flags & !(FIN | RST),
        false => tcp_flags,
    }
}

/// A window and, above it, the flags of a segment that count, which programs give each other as one number.
#[inline(always)]
pub const fn with_flags(window: u64, tcp_flags: u8) -> u64 {
    window | ((tcp_flags & (FIN | RST)) as u64) << FLAGS_AT
}

/// The window of [`with_flags`], and the segment's flags without those that do not count.
#[inline(always)]
pub const fn split(both: u64, tcp_flags: u8) -> (u64, u8) {
    let count = (both >> FLAGS_AT) as u8;
    (both & WINDOW, tcp_flags & (count | !(FIN | RST)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ack(acknowledged: u32, window: u16) -> Numbers {
        Numbers {
            acknowledged,
            window,
            ..Numbers::default()
        }
    }

    /// An end with a window that begins at `next`.
    fn receiver(next: u32, window: u16, shift: u8) -> u64 {
        heard(opened(announced(Some(shift))), &ack(next, window))
    }

    proptest! {
        #[test]
        fn what_is_in_the_window_counts_and_nothing_else(
            next: u32, window: u16, shift in 0_u8..=14, distance: u32, flag in prop_oneof![Just(FIN), Just(RST)],
        ) {
            let counts = that_count(receiver(next, window, shift), ACK | flag, next.wrapping_add(distance), 0);
            let is_inside = u64::from(distance) <= u64::from(window) << shift;
            prop_assert_eq!(counts, if is_inside { ACK | flag } else { ACK });
        }

        #[test]
        fn a_fin_is_behind_its_payload(next: u32, payload in 1_u32..65_536) {
            let receiver = receiver(next, u16::MAX, 0);
            let first = next.wrapping_sub(payload);
            // All of it sent again, of which nothing but the FIN is new.
            prop_assert_eq!(that_count(receiver, ACK | FIN, first, payload), ACK | FIN);
            prop_assert_eq!(that_count(receiver, ACK | FIN, first.wrapping_sub(1), payload), ACK);
            prop_assert_eq!(that_count(receiver, ACK | RST, first, payload), ACK);
        }

        #[test]
        fn any_number_is_a_window(window: u64, flags: u8, sequence: u32, payload: u32, acknowledged: u32) {
            let numbers = Numbers { sequence, acknowledged, window: 1, shift: 255 };
            for is_open in [false, true] {
                let _ = after(window, flags, &numbers, is_open);
            }
            for count in [0, FIN, RST, FIN | RST] {
                let window = window & WINDOW;
                let others = flags & !(FIN | RST);
                prop_assert_eq!(split(with_flags(window, count | ACK), others | FIN | RST), (window, others | count));
            }
            prop_assert_eq!(that_count(window, flags, sequence, payload) | FIN | RST, flags | FIN | RST);
        }
    }

    #[test]
    fn what_nothing_is_known_of_takes_everything() {
        for flag in [FIN, RST] {
            assert_eq!(that_count(0, flag, 0x8000_0000, 0), flag);
            assert_eq!(
                that_count(opened(announced(Some(7))), flag, 0x8000_0000, 0),
                flag
            );
        }
    }

    #[test]
    fn without_its_syn_a_window_is_the_largest_it_can_be() {
        let unknown = heard(0, &ack(1000, 10));
        assert_eq!(that_count(unknown, RST, 1000 + (10 << 14), 0), RST);
        assert_eq!(that_count(unknown, RST, 1001 + (10 << 14), 0), 0);
    }

    #[test]
    fn a_handshake_says_what_comes_next() {
        // Of the server: the client has not said yet from where its window is.
        let accepted = after(0, SYN_ACK, &ack(501, 100), false);
        assert_eq!(that_count(accepted, RST, 501, 0), RST);
        assert_eq!(that_count(accepted, RST, 500, 0), 0);
        assert_eq!(after(0, SYN, &ack(77, 100), false), 0);
        assert_eq!(
            after(0, ACK | FIN, &ack(77, 100), false),
            heard(0, &ack(77, 100))
        );
    }

    #[test]
    fn neither_a_syn_nor_a_reset_moves_an_open_window() {
        let open = receiver(1000, 10, 3);
        for flags in [SYN, SYN | ACK, RST, RST | ACK, SYN | RST, FIN] {
            assert_eq!(after(open, flags, &ack(9, 9), true), open, "{flags:#x}");
        }
        // One that was reset begins again.
        let again = Numbers {
            shift: announced(None),
            ..ack(9, 9)
        };
        assert_eq!(after(open, SYN, &again, false), opened(1));
    }

    #[test]
    fn a_shift_is_no_larger_than_it_may_be() {
        assert_eq!(
            [0, 14, 15, 255].map(|shift| announced(Some(shift))),
            [1, 15, 15, 15]
        );
        assert_eq!(announced(None), 1);
    }
}
