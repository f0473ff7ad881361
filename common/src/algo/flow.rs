//! Where flows are remembered, and which of those that have one place.

use crate::abi::Addr;

/// Places at most, a power of two.
pub const PLACES: u32 = 1 << BITS;
const BITS: u32 = 12;

/// How many flows all processors of a node remember together, if there are not very many of them: about 8 MB.
const ROOM: u32 = 32_768;
/// How many each remembers at least.
const LEAST: u32 = 64;

/// How many places each processor of a node has, by how many of them there may be: a power of two.
#[must_use]
pub const fn places(processors: u32) -> u32 {
    let each = match processors {
        0 => PLACES,
        _ => ROOM / processors,
    };
    match each {
        ..LEAST => LEAST,
        PLACES.. => PLACES,
        _ => 1 << each.ilog2(),
    }
}

/// How many packets a flow has before it is remembered: more than a connection has of one request, which would be over before that pays.
pub const ENOUGH: u16 = 8;

/// A number by the address and the port (in network order) of either end, the same for both directions.
#[inline(always)]
#[must_use]
pub const fn of_ends(one: (&Addr, [u8; 2]), other: (&Addr, [u8; 2])) -> u64 {
    // 2^64 by the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    // Pods' addresses differ in their last bits.
    let addresses = last_word(one.0) ^ last_word(other.0);
    let ports = u16::from_ne_bytes(one.1) ^ u16::from_ne_bytes(other.1);
    ((ports as u64) << 32 | addresses as u64).wrapping_mul(SPREAD)
}

/// The place of both directions, less than [`PLACES`].
#[inline(always)]
#[must_use]
pub const fn place(of_ends: u64) -> u32 {
    (of_ends >> (u64::BITS - BITS)) as u32
}

/// The place of one direction, less than [`PLACES`]: the other one has another.
#[inline(always)]
#[must_use]
pub const fn place_of_direction(of_ends: u64, src: (&Addr, [u8; 2]), dst: (&Addr, [u8; 2])) -> u32 {
    place(of_ends) ^ (end(src) > end(dst)) as u32
}

#[inline(always)]
const fn end((address, port): (&Addr, [u8; 2])) -> u64 {
    (last_word(address) as u64) << 16 | u16::from_ne_bytes(port) as u64
}

#[inline(always)]
const fn last_word(address: &Addr) -> u32 {
    let [.., a, b, c, d] = address.0;
    u32::from_ne_bytes([a, b, c, d])
}

/// Which flow has most of a place's packets: twelve bits of its number, and four that count (a majority vote: Boyer and Moore, 1981).
pub type Vote = u16;

const COUNT: u16 = 15;

/// The vote with one more packet, by the number of its ends; and whether that is of the flow that the place is for, which had [`ENOUGH`]. So
/// neither many brief flows nor one more busy one have a place change hands with each packet.
#[inline(always)]
#[must_use]
pub const fn vote(before: Vote, of_ends: u64) -> (Vote, bool) {
    let flow = (of_ends >> (u64::BITS - BITS - Vote::BITS)) as u16 & !COUNT;
    let count = before & COUNT;
    if before & !COUNT == flow {
        let more = if count < COUNT { before + 1 } else { before };
        return (more, count >= ENOUGH);
    }
    match count {
        0 => (flow | 1, false),
        _ => (before - 1, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn both_directions_have_one_place_and_each_another_of_its_own(
            src: [u8; 16], dst: [u8; 16], src_port: [u8; 2], dst_port: [u8; 2],
        ) {
            let (src, dst) = (Addr(src), Addr(dst));
            let (src, dst) = ((&src, src_port), (&dst, dst_port));
            let there = of_ends(src, dst);
            prop_assert_eq!(there, of_ends(dst, src));
            prop_assert!(place(there) < PLACES);
            let directions = [(src, dst), (dst, src)]
                .map(|(src, dst)| place_of_direction(there, src, dst));
            prop_assert!(directions[0] < PLACES);
            if end(src) != end(dst) {
                prop_assert_ne!(directions[0], directions[1]);
            }
        }

        /// Whoever has more than half of a place's packets gets it, in whatever order they come, and nobody else does before it
        /// had as many packets as are enough.
        #[test]
        fn the_busiest_flow_gets_its_place(others in 0..20_usize, seed: u64) {
            let (busy, brief) = (7 << 40, 9 << 40);
            let mut packets = vec![busy; 64];
            packets.extend(std::iter::repeat_n(brief, others));
            let mut random = seed | 1;
            for at in (1..packets.len()).rev() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                packets.swap(at, (random >> 33) as usize % (at + 1));
            }
            let (mut now, mut seen) = (0, 0);
            for packet in packets {
                let (then, is_enough) = vote(now, packet);
                prop_assert!(!is_enough || packet == busy || others > usize::from(ENOUGH));
                prop_assert!(!is_enough || seen >= ENOUGH);
                (now, seen) = (then, seen + 1);
            }
            let (_, is_known) = (0..=ENOUGH).fold((now, false), |(now, _), _| vote(now, busy));
            prop_assert!(is_known);
        }
    }

    #[test]
    fn many_processors_have_no_more_places_than_few() {
        for (processors, each) in [
            (0, 4096),
            (1, 4096),
            (8, 4096),
            (9, 2048),
            (16, 2048),
            (100, 256),
            (512, 64),
            (u32::MAX, 64),
        ] {
            assert_eq!(places(processors), each, "{processors}");
        }
    }

    #[test]
    fn a_flow_is_worth_remembering_once_it_had_enough_packets() {
        let mut now = 0;
        let mut at = 0;
        loop {
            let (then, is_enough) = vote(now, 5 << 40);
            if is_enough {
                break;
            }
            (now, at) = (then, at + 1);
        }
        assert_eq!(at, ENOUGH);
        for _ in 0..COUNT {
            (now, _) = vote(now, 5 << 40);
        }
        // A busy one is not driven out by single packets of others.
        for other in 0..100_u64 {
            let (then, _) = vote(now, (100 + other) << 40);
            let (then, is_enough) = vote(then, 5 << 40);
            assert!(is_enough);
            now = then;
        }
    }

    #[test]
    fn flows_of_one_pod_and_flows_of_many_are_spread() {
        let of = |src: u8, dst: u8, port: u16| {
            let address = |node, pod| Addr::v4([10, 1, node, pod]);
            let from = (&address(1, src), port.to_be_bytes());
            place(of_ends(from, (&address(2, dst), 80_u16.to_be_bytes())))
        };
        // As many as places: by chance they would have 0.63 of them.
        let ports: HashSet<u32> = (0..4096).map(|port| of(7, 9, 32_768 + port)).collect();
        assert!(ports.len() > 2_300, "{}", ports.len());
        let pods = (0..64).flat_map(|src| (0..64).map(move |dst| (src, dst)));
        // The difference of two addresses is all that counts of them, so that ports have to differ.
        let pods: HashSet<u32> = pods
            .map(|(src, dst)| of(src, dst, 32_768 + u16::from(src) * 251 + u16::from(dst) * 7))
            .collect();
        assert!(pods.len() > 2_000, "{}", pods.len());
    }
}
