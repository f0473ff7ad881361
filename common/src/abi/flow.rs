//! What has the programs judge a flow anew that they have judged before: how that went they remember for a while.
//!
//! Map `FLOW_EPOCHS`, array of [`FLOW_EPOCHS`]: u32, numbers that are raised and mean nothing by themselves. The first is the agent's:
//! raised after it has changed anything that says where packets between pods of two nodes go, or who may send them. Each other
//! one is raised once a connection has a record whose ends have that [`place`].

use super::Addr;

/// Flows that each processor remembers: the last one of each place.
pub const MAX_FLOWS: u32 = 1 << BITS;
const BITS: u32 = 12;

/// The agent's number, and one for each place.
pub const FLOW_EPOCHS: u32 = MAX_FLOWS + 1;
/// Where the agent's is.
pub const OF_AGENT: u32 = 0;

/// The place of a flow, less than [`MAX_FLOWS`], by the address and the port (in network order) of either end: the same for both directions.
#[inline(always)]
#[must_use]
pub const fn place(one: (&Addr, [u8; 2]), other: (&Addr, [u8; 2])) -> u32 {
    // 2^64 by the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    // Pods' addresses differ in their last bits.
    let addresses = last_word(one.0) ^ last_word(other.0);
    let ports = u16::from_ne_bytes(one.1) ^ u16::from_ne_bytes(other.1);
    let both = (ports as u64) << 32 | addresses as u64;
    (both.wrapping_mul(SPREAD) >> (u64::BITS - BITS)) as u32
}

/// Where the number of a place is.
#[inline(always)]
#[must_use]
pub const fn epoch_of(place: u32) -> u32 {
    1 + place
}

#[inline(always)]
const fn last_word(address: &Addr) -> u32 {
    let [.., a, b, c, d] = address.0;
    u32::from_ne_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn both_directions_have_one_place(
            src: [u8; 16], dst: [u8; 16], src_port: [u8; 2], dst_port: [u8; 2],
        ) {
            let (src, dst) = (Addr(src), Addr(dst));
            let there = place((&src, src_port), (&dst, dst_port));
            prop_assert!(there < MAX_FLOWS);
            prop_assert_eq!(there, place((&dst, dst_port), (&src, src_port)));
        }
    }

    #[test]
    fn flows_of_one_pod_and_flows_of_many_are_spread() {
        let of = |src: u8, dst: u8, port: u16| {
            let address = |node, pod| Addr::v4([10, 1, node, pod]);
            let from = (&address(1, src), port.to_be_bytes());
            place(from, (&address(2, dst), 80_u16.to_be_bytes()))
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
