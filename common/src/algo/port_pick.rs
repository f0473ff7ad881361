//! Which translated ports to try for a new connection, in which order.

/// Attempts for one packet before its connection is refused. The verifier
/// walks each.
pub const ATTEMPTS: u32 = 84;

/// So many of them at random; if all are taken, it is noted from then on which ports are.
pub const RANDOM_ATTEMPTS: u32 = 8;

/// So many leave alone the ports of connections that are over, whose remote ends may have them in TIME_WAIT: the first segment
/// of another client's is an old one to them as often as not (RFC 9293 §3.6.1, RFC 6191), and comes again a second later.
pub const PATIENT_ATTEMPTS: u32 = 4;

/// No place.
pub const NONE: u32 = 1 << 16;

/// Where a port's bit is among those that say which are taken (`sinabro_common::abi::connection::TakenPorts`).
///
/// Ports that follow one another are taken by one client, or free, more often than not, and would be found in that order: those
/// behind a long stretch of known ones by nearly every search, the first ones behind what others have by hardly any. So
/// they are far apart, by the golden ratio (Knuth, The Art of Computer Programming, vol. 3, §6.4).
#[inline(always)]
pub const fn place(port: u16) -> u16 {
    port.wrapping_mul(SPREAD)
}

/// The port whose place this is.
#[inline(always)]
pub const fn port_at(place: u16) -> u16 {
    place.wrapping_mul(GATHER)
}

/// 65,536 by the golden ratio, odd.
const SPREAD: u16 = 40_503;
/// `SPREAD * GATHER` is one more than a multiple of 65,536.
const GATHER: u16 = 30_599;

/// The first [`place`] at or behind `from`, in a circle, whose bit is not set in `taken`; [`NONE`] if all are.
/// `full` has a bit for each word of it that is all ones.
///
/// Where `full` is behind, the place may be a taken one of such a word: the claim fails, and mends it.
#[inline(always)]
pub fn next_free(from: u16, full: impl Fn(u32) -> u64, taken: impl Fn(u32) -> u64) -> u32 {
    let first = u32::from(from) / 64;
    let mut word = first;
    let mut free = !taken(first) & (u64::MAX << (from % 64));
    if free == 0 {
        // By groups of 64 words, from those behind the first one until those up to it.
        let behind = (u64::MAX << 1) << (first % 64);
        let (mut group, mut open) = (first / 64, !full(first / 64) & behind);
        let mut step = 0;
        while step < 15 && open == 0 {
            group = (group + 1) % 16;
            open = !full(group);
            step += 1;
        }
        if open == 0 {
            group = first / 64;
            open = !full(group) & !behind;
        }
        if open == 0 {
            return NONE;
        }
        word = group * 64 + open.trailing_zeros();
        free = !taken(word);
    }
    word * 64 + (free.trailing_zeros() & 63)
}

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
    use crate::abi::connection::TakenPorts;
    use proptest::prelude::*;

    fn next(from: u16, ports: &TakenPorts) -> Option<u16> {
        let place = next_free(
            place(from),
            |group| ports.full[group as usize],
            |word| ports.taken[word as usize],
        );
        u16::try_from(place).ok().map(port_at)
    }

    /// All but these.
    fn all_but(free: &[u16]) -> TakenPorts {
        let mut ports = TakenPorts::NONE;
        (0..=u16::MAX)
            .filter(|port| !free.contains(port))
            .for_each(|port| ports.take(port));
        ports
    }

    proptest! {
        #[test]
        fn finds_the_next_free_one_from_anywhere(
            from: u16, free in prop::collection::vec(any::<u16>(), 0..40),
        ) {
            let behind = |port: &u16| place(*port).wrapping_sub(place(from));
            let wanted = free.iter().copied().min_by_key(behind);
            prop_assert_eq!(next(from, &all_but(&free)), wanted);
        }

        #[test]
        fn a_summary_that_is_behind_costs_a_try(
            from: u16, free: u16, behind in prop::collection::vec(0usize..1024, 0..20),
        ) {
            let mut ports = all_but(&[free]);
            for word in &behind {
                ports.full[word / 64] &= !(1 << (word % 64));
            }
            for _ in 0..=behind.len() {
                let port = next(from, &ports).unwrap();
                if port == free {
                    return Ok(());
                }
                // What the claim does that fails.
                ports.take(port);
            }
            prop_assert!(false, "the free one was not found");
        }

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
            prop_assert!(tried.len() as u32 >= ATTEMPTS * 9 / 10, "{} ports", tried.len());
        }
    }

    #[test]
    fn each_of_a_few_is_found_by_a_random_start() {
        let free = [7u16, 1024, 30_000, 30_001, 50_000, 65_535];
        let ports = all_but(&free);
        let from = |n: u64| super::super::hash::fnv1a(&n.to_ne_bytes()) as u16;
        let found: std::collections::HashSet<_> =
            (0..1_000_000).map(|n| next(from(n), &ports)).collect();
        assert_eq!(found.len(), free.len());
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

    #[test]
    fn each_port_has_a_place_of_its_own() {
        assert!((0..=u16::MAX).all(|port| port_at(place(port)) == port));
    }

    /// One client has half of the ports, all of them in a row, which a search knows nothing of: it needs no more attempts for
    /// the last ones of the other half than for others.
    #[test]
    fn what_others_have_in_a_row_does_not_hide_a_free_one() {
        for seed in 0..200u64 {
            let mut noted = TakenPorts::NONE;
            for connection in 0..1u64 << 15 {
                let random = super::super::hash::fnv1a(&(seed << 32 | connection).to_ne_bytes());
                let free = (0..ATTEMPTS / 2).any(|attempt| {
                    let port = next(candidate(random, 0, attempt, 1, u16::MAX), &noted).unwrap();
                    noted.take(port);
                    port >= 1 << 15
                });
                assert!(free, "seed {seed}: {connection} were found");
            }
        }
    }
}
