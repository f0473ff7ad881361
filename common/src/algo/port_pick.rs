//! Which translated ports to try for a new connection, in which order.

/// Attempts for one packet before its connection is refused. With 97 % of the range taken the chance that all
/// fail is one in fifty; the next packet tries others.
pub const ATTEMPTS: u32 = 128;

/// The port to try at `attempt` (from 0), within `min..=max`, host order.
///
/// The client's own port comes first where it lies in the range, so that ports stay as they are while they can:
/// a connection outlives its record then. After it one place after another that has nothing to do with the
/// one before. (A walk with a fixed stride comes back early where stride and size share a factor.)
#[inline(always)]
pub const fn candidate(random: u64, own_port: u16, attempt: u32, min: u16, max: u16) -> u16 {
    let (min, max) = if min <= max { (min, max) } else { (max, min) };
    if attempt == 0 && own_port >= min && own_port <= max {
        return own_port;
    }
    let size = (max - min) as u64 + 1;
    let place = mix(random.wrapping_add((attempt as u64).wrapping_mul(GAMMA))) % size;
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
        fn stays_in_range(random: u64, own: u16, attempt in 0..ATTEMPTS, a: u16, b: u16) {
            let (min, max) = (a.min(b), a.max(b));
            let port = candidate(random, own, attempt, a, b);
            prop_assert!((min..=max).contains(&port));
        }

        #[test]
        fn keeps_the_own_port_when_it_may(random: u64, own in 1024u16..) {
            prop_assert_eq!(candidate(random, own, 0, 1024, 65535), own);
        }

        #[test]
        fn tries_different_ports(random: u64, max in 11999u16..) {
            let tried: std::collections::HashSet<u16> =
                (0..ATTEMPTS).map(|n| candidate(random, 0, n, 1024, max)).collect();
            prop_assert!(tried.len() >= 115, "{} ports", tried.len());
        }
    }

    #[test]
    fn finds_a_place_while_a_few_are_left() {
        let (min, max) = (1024, 65535);
        let mut taken = std::collections::HashSet::new();
        let mut refused = 0;
        for flow in 0u64..58_000 {
            let random = super::super::hash::fnv1a(&flow.to_ne_bytes());
            if !(0..ATTEMPTS).any(|n| taken.insert(candidate(random, 0, n, min, max))) {
                refused += 1;
            }
        }
        assert_eq!(refused, 0, "nine of ten taken");
    }
}
