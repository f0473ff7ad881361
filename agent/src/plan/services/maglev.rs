//! Maglev's lookup table (Eisenbud et al., NSDI '16, section 3.4): which of a Service's endpoints has which entry.
//!
//! Each endpoint has an order of its own in which it would have the entries, and the endpoints take turns until all
//! are had. So each gets as many as any other, or one more; and where an endpoint comes or goes, few of the others' change
//! hands. The order depends on nothing but the endpoint's address and port and the number of entries, so all nodes
//! make the same table. With a table of at least [`ENTRIES_EACH`] entries for each endpoint shares differ by one in a
//! hundred at most, as the paper has it.

use sinabro_common::{abi::Addr, algo::client_hash};
use std::{collections::BTreeSet, net::SocketAddr};

/// Lengths that tables have: primes, so that any step goes round all entries. Another one is another table altogether,
/// hence only few; the first is for as many endpoints as most Services ever have.
const LENGTHS: [u32; 5] = [16_381, 65_521, 262_139, 1_048_573, 4_194_301];
/// Entries that each endpoint has at least.
pub const ENTRIES_EACH: usize = 100;

/// Seeds of the two hashes. All nodes have to have the same: others make another table.
const OFFSET_SEED: u64 = 0xc2b2_ae3d_27d4_eb4f;
const STEP_SEED: u64 = 0x1656_67b1_9e37_79f9;

/// How many entries a table for so many endpoints has; none if there are too many for any.
pub fn length(endpoints: usize) -> Option<u32> {
    let fits = |length: &u32| *length as usize / ENTRIES_EACH >= endpoints;
    LENGTHS.into_iter().find(fits)
}

/// Of each of `length` entries, a prime, the endpoint that has it: its place in the order of the set, which is never empty.
pub fn table(endpoints: &BTreeSet<SocketAddr>, length: u32) -> Vec<u32> {
    const NOBODY: u32 = u32::MAX;
    let mut turns: Vec<Turn> = endpoints.iter().map(|at| Turn::new(at, length)).collect();
    let mut table = vec![NOBODY; length as usize];
    let mut left = length;
    loop {
        for (who, turn) in (0..).zip(&mut turns) {
            if left == 0 {
                return table;
            }
            // Somewhere on its way round is one that nobody has.
            let mut entry = turn.next(length);
            while table[entry] != NOBODY {
                entry = turn.next(length);
            }
            table[entry] = who;
            left -= 1;
        }
    }
}

/// Where an endpoint is on its way round the entries.
struct Turn {
    next: u32,
    step: u32,
}

impl Turn {
    fn new(at: &SocketAddr, length: u32) -> Self {
        let (addr, port) = (Addr::from(at.ip()), at.port().to_be_bytes());
        let below = |seed, end: u32| (client_hash::of(seed, &addr, port) % u64::from(end)) as u32;
        Self {
            next: below(OFFSET_SEED, length),
            step: 1 + below(STEP_SEED, length - 1),
        }
    }

    fn next(&mut self, length: u32) -> usize {
        let entry = self.next;
        // Neither is more than half of what a u32 holds.
        self.next += self.step;
        if self.next >= length {
            self.next -= length;
        }
        entry as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::btree_set, prelude::*};
    use sinabro_common::algo::hash::{fnv1a, fnv1a_more};
    use std::time::Instant;

    fn endpoints(hosts: impl IntoIterator<Item = u16>) -> BTreeSet<SocketAddr> {
        let at = |host: u16| {
            let [high, low] = host.to_be_bytes();
            SocketAddr::from(([10, 244, high, low], 8080))
        };
        hosts.into_iter().map(at).collect()
    }

    fn owners(endpoints: &BTreeSet<SocketAddr>, length: u32) -> Vec<SocketAddr> {
        let all: Vec<SocketAddr> = endpoints.iter().copied().collect();
        let table = table(endpoints, length).into_iter();
        table.map(|who| all[who as usize]).collect()
    }

    #[test]
    fn lengths_are_prime_and_long_enough() {
        for length in LENGTHS {
            assert!(
                (2..)
                    .take_while(|n| n * n <= length)
                    .all(|n| length % n != 0)
            );
        }
        for (endpoints, length) in [(1, LENGTHS[0]), (163, LENGTHS[0]), (164, LENGTHS[1])] {
            assert_eq!(super::length(endpoints), Some(length));
        }
        assert_eq!(super::length(41_943), Some(LENGTHS[4]));
        assert_eq!(super::length(41_944), None);
    }

    /// Nodes of two versions must agree.
    #[test]
    fn a_table_is_what_it_was() {
        let v6 = ["[fd00::1]:80", "[fd00::2]:80", "[fd00::2]:81"];
        let v6 = v6.map(|at| at.parse().unwrap()).into_iter().collect();
        for (endpoints, digest) in [
            (endpoints(1..=10), 0x4fcf_0dbf_c347_8bb5),
            (v6, 0x8241_7d7f_0697_7465),
        ] {
            let table = table(&endpoints, LENGTHS[0]).into_iter();
            let is = table.fold(fnv1a(b""), |hash, who| fnv1a_more(hash, &who.to_be_bytes()));
            assert_eq!(is, digest);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        #[test]
        fn every_endpoint_has_as_much_as_any_other(hosts in btree_set(any::<u16>(), 1..164)) {
            let endpoints = endpoints(hosts);
            let mut shares = vec![0u32; endpoints.len()];
            for who in table(&endpoints, LENGTHS[0]) {
                shares[who as usize] += 1;
            }
            let even = LENGTHS[0] / endpoints.len() as u32;
            prop_assert!(shares.iter().all(|share| (even..=even + 1).contains(share)));
            // Within 2 % of even, said as it is promised.
            let exact = f64::from(LENGTHS[0]) / endpoints.len() as f64;
            prop_assert!(shares.iter().all(|share| (f64::from(*share) / exact - 1.0).abs() < 0.02));
        }

        /// What one that goes had goes to the others, and of theirs hardly anything changes hands.
        #[test]
        fn who_goes_takes_little_along(hosts in btree_set(any::<u16>(), 2..164), which: prop::sample::Index) {
            let before = endpoints(hosts);
            let gone = *which.get(&before.iter().copied().collect::<Vec<_>>());
            let after: BTreeSet<_> = before.iter().copied().filter(|at| *at != gone).collect();
            let (old, new) = (owners(&before, LENGTHS[0]), owners(&after, LENGTHS[0]));
            let moved = old.iter().zip(&new).filter(|(old, new)| **old != gone && old != new).count();
            let share = moved as f64 / f64::from(LENGTHS[0]);
            prop_assert!(share < 0.02, "{} endpoints: {share}", before.len());
        }
    }

    #[test]
    #[ignore = "figures, by hand"]
    fn how_much_changes_hands_and_how_long_it_takes() {
        for count in [2, 3, 5, 10, 20, 50, 100, 163, 164, 655, 1000, 2000] {
            let length = length(count.into()).unwrap();
            let before = endpoints(0..count);
            let old = owners(&before, length);
            let mut shares = Vec::new();
            let step = usize::from(count).div_ceil(20);
            for gone in before.iter().step_by(step) {
                let mut after = before.clone();
                after.remove(gone);
                let new = owners(&after, length);
                let moved = old
                    .iter()
                    .zip(&new)
                    .filter(|(old, new)| *old != gone && old != new);
                shares.push(100.0 * moved.count() as f64 / f64::from(length));
            }
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            let most = shares.iter().copied().fold(0.0, f64::max);
            let mut times: Vec<_> = (0..15)
                .map(|_| {
                    let began = Instant::now();
                    std::hint::black_box(table(&before, length));
                    began.elapsed()
                })
                .collect();
            times.sort();
            println!(
                "{count} endpoints, {length} entries: one that goes had {:.2} %, of the others' {mean:.2} % (at most {most:.2} %) move; {:?}",
                100.0 / f64::from(count),
                times[7],
            );
        }
    }
}
