//! Echo requests and their answers (RFC 792, RFC 4443 section 4) as a ping socket has them: from
//! the ICMP header on. The kernel writes checksum and identifier, and gives the socket only
//! answers with that identifier.
//!
//! ```text
//!  0        1        2                 4                 6
//!  type     code     checksum          identifier        sequence
//!  8 nonce, random, the same for as long as the agent runs
//! 16 number of the request, in network order
//! 24 zeros, up to the length
//! ```

use socket2::SockFilter;
use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::IpAddr,
    ops::Range,
};

/// ICMP header, nonce and number.
pub const LEAST: usize = 24;
/// Written by the kernel, as is the identifier after the next two bytes, where a ping socket sends.
pub const CHECKSUM: Range<usize> = 2..4;
const IDENTIFIER: Range<usize> = 4..6;
const NONCE: Range<usize> = 8..16;
const NUMBER: Range<usize> = 16..24;

/// What tells this agent's requests from everything else, and is not to be guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonce(pub [u8; 8]);

impl Nonce {
    /// From the standard library's hash keys, which are the kernel's random bytes.
    pub fn random() -> Self {
        Self(RandomState::new().build_hasher().finish().to_be_bytes())
    }
}

/// Types of request and answer.
fn types(ip: IpAddr) -> (u8, u8) {
    match ip {
        IpAddr::V4(_) => (8, 0),
        IpAddr::V6(_) => (128, 129),
    }
}

/// A request to `to` of this length, header included, or [`LEAST`].
pub fn request(to: IpAddr, nonce: Nonce, number: u64, length: usize) -> Vec<u8> {
    let mut packet = vec![0; length.max(LEAST)];
    packet[0] = types(to).0;
    // For people with tcpdump.
    packet[6..8].copy_from_slice(&(number as u16).to_be_bytes());
    packet[NONCE].copy_from_slice(&nonce.0);
    packet[NUMBER].copy_from_slice(&number.to_be_bytes());
    packet
}

/// The shortest request, with a ping socket's identifier, for who writes it without that socket; its checksum is zero yet.
pub fn request_of(to: IpAddr, nonce: Nonce, number: u64, identifier: u16) -> Vec<u8> {
    let mut packet = request(to, nonce, number, LEAST);
    packet[IDENTIFIER].copy_from_slice(&identifier.to_be_bytes());
    packet
}

/// The number of the request that `packet` from `from` answers; none if it answers none of ours.
pub fn answered(from: IpAddr, nonce: Nonce, packet: &[u8]) -> Option<u64> {
    let of_answer = [types(from).1, 0];
    if packet.get(..2)? != of_answer || packet.get(NONCE)? != nonce.0 {
        return None;
    }
    let number = packet.get(NUMBER)?.try_into().ok()?;
    Some(u64::from_be_bytes(number))
}

/// Classic BPF that lets a socket have only packets with the nonce (Documentation/networking/
/// filter.rst; a ping socket's packets begin with the ICMP header). A pod that floods its node
/// with answers to nothing so wakes nobody.
pub fn filter(nonce: Nonce) -> [SockFilter; 6] {
    let load_word = |at: usize| SockFilter::new(0x20, 0, 0, at as u32);
    let unless_equal_skip = |word: &[u8], skip| {
        let word = word
            .iter()
            .fold(0, |word, byte| word << 8 | u32::from(*byte));
        SockFilter::new(0x15, 0, skip, word)
    };
    let take = |bytes| SockFilter::new(0x06, 0, 0, bytes);
    let (high, low) = nonce.0.split_at(4);
    [
        load_word(NONCE.start),
        unless_equal_skip(high, 3),
        load_word(NONCE.start + 4),
        unless_equal_skip(low, 1),
        take(u32::MAX),
        take(0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 244, 2, 1));
    const V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));

    /// As the other end answers: the same with another type.
    fn answer(to: IpAddr, nonce: Nonce, number: u64, length: usize) -> Vec<u8> {
        let mut packet = request(to, nonce, number, length);
        packet[0] = types(to).1;
        packet
    }

    #[test]
    fn an_answer_has_the_number_of_its_request() {
        let nonce = Nonce::random();
        for ip in [V4, V6] {
            for (number, length) in [(0, 0), (1, LEAST), (u64::MAX, 1430)] {
                let packet = answer(ip, nonce, number, length);
                assert_eq!(packet.len(), length.max(LEAST));
                assert_eq!(answered(ip, nonce, &packet), Some(number));
                // The request itself is none, nor an answer of the other family.
                assert_eq!(
                    answered(ip, nonce, &request(ip, nonce, number, length)),
                    None
                );
                let other = if ip == V4 { V6 } else { V4 };
                assert_eq!(answered(other, nonce, &packet), None);
            }
        }
    }

    #[test]
    fn agents_have_nonces_of_their_own() {
        assert_ne!(Nonce::random(), Nonce::random());
        let (ours, others) = (Nonce([1; 8]), Nonce([2; 8]));
        assert_eq!(answered(V4, ours, &answer(V4, others, 7, 0)), None);
    }

    proptest! {
        #[test]
        fn bytes_of_anybody_are_no_answer(
            nonce: [u8; 8],
            packet in proptest::collection::vec(any::<u8>(), 0..64),
            v4: bool,
        ) {
            let ip = if v4 { V4 } else { V6 };
            let ours = packet.len() >= LEAST && packet[NONCE] == nonce;
            prop_assert!(ours || answered(ip, Nonce(nonce), &packet).is_none());
        }

        #[test]
        fn what_is_cut_short_is_no_answer(number: u64, length in 0..LEAST) {
            let nonce = Nonce([9; 8]);
            let packet = answer(V6, nonce, number, 100);
            prop_assert_eq!(answered(V6, nonce, &packet[..length]), None);
        }
    }
}
