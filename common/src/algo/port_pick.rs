//! Which translated ports to try for a new flow, in which order.

/// Attempts before a flow is refused. With half of the range taken the chance that all fail is
/// 2⁻³², with 90 % taken 3 %.
pub const ATTEMPTS: u32 = 32;

/// The port to try at `attempt` (from 0), within `min..=max`, host order.
///
/// The pod's own port comes first where it lies in the range, so that a quiet node keeps ports
/// as they are; then one place after another that has nothing to do with the one before. (A walk
/// with a fixed stride comes back early where stride and size share a factor.)
#[inline(always)]
pub const fn candidate(flow_hash: u64, own_port: u16, attempt: u32, min: u16, max: u16) -> u16 {
    let (min, max) = if min <= max { (min, max) } else { (max, min) };
    if attempt == 0 && own_port >= min && own_port <= max {
        return own_port;
    }
    let size = (max - min) as u64 + 1;
    let place = mix(flow_hash.wrapping_add((attempt as u64).wrapping_mul(GAMMA))) % size;
    min + place as u16
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): its
/// increment, and its mixing of a counter into a number that looks random.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline(always)]
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stays_in_range(hash: u64, own: u16, attempt in 0..ATTEMPTS, a: u16, b: u16) {
            let (min, max) = (a.min(b), a.max(b));
            let port = candidate(hash, own, attempt, a, b);
            prop_assert!((min..=max).contains(&port));
        }

        #[test]
        fn keeps_the_own_port_when_it_may(hash: u64, own in 61000u16..) {
            prop_assert_eq!(candidate(hash, own, 0, 61000, 65535), own);
        }

        #[test]
        fn tries_different_ports(hash: u64, max in 61999u16..) {
            let tried: std::collections::HashSet<u16> =
                (0..ATTEMPTS).map(|n| candidate(hash, 0, n, 61000, max)).collect();
            prop_assert!(tried.len() >= 28, "{} ports", tried.len());
        }
    }

    #[test]
    fn finds_a_place_while_there_are_some() {
        // Of the default range's size, which has many factors.
        let (min, max) = (61000, 65535);
        let mut taken = std::collections::HashSet::new();
        let mut refused = 0;
        for flow in 0u64..3400 {
            let hash = super::super::hash::fnv1a(&flow.to_ne_bytes());
            if !(0..ATTEMPTS).any(|n| taken.insert(candidate(hash, 0, n, min, max))) {
                refused += 1;
            }
        }
        assert_eq!(refused, 0, "three quarters taken");
    }
}
