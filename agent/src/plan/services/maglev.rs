//! Maglev's lookup table (Eisenbud et al., NSDI '16, section 3.4): which of a Service's endpoints has which entry.
//!
//! Each endpoint has an order of its own in which it would have the entries, and the endpoints take turns until all
//! are had. So each gets as many as any other, or one more; and where an endpoint comes or goes, few of the others' change
//! hands. The order depends on nothing but the endpoint's address and port and the number of entries, so all nodes
//! make the same table. With a table of at least [`ENTRIES_EACH`] entries for each endpoint shares differ by one in a
//! hundred at most, as the paper has it.
//!
//! The paper's order is a walk round the table, by a step of each endpoint's own. Of two endpoints whose steps are equal, or
//! opposite, or nearly, one treads in the other's footprints, and when a third one goes much of what they have changes
//! hands: up to three tenths of the table, of one in five hundred Services with four endpoints. So the order is that in which a generator of random
//! numbers comes upon the entries, where no two endpoints have anything in common.

use sinabro_common::{abi::Addr, algo::client_hash};
use std::{collections::BTreeSet, net::SocketAddr};

/// Lengths that tables have. Another one is another table altogether, hence only few; the first is for as many endpoints as
/// most Services ever have.
const LENGTHS: [u32; 5] = [16_381, 65_521, 262_139, 1_048_573, 4_194_301];
/// Entries that each endpoint has at least.
pub const ENTRIES_EACH: usize = 100;

/// What the endpoints' generators begin with. All nodes have to have the same: another one makes another table.
const SEED: u64 = 0xc2b2_ae3d_27d4_eb4f;
/// What a generator goes on by: odd, so that it comes by all numbers of 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// How many entries a table for so many endpoints has; none if there are too many for any.
pub fn length(endpoints: usize) -> Option<u32> {
    let fits = |length: &u32| *length as usize / ENTRIES_EACH >= endpoints;
    LENGTHS.into_iter().find(fits)
}

/// Of each of `length` entries the endpoint that has it: its place in the order of the set, which is never empty.
pub fn table(endpoints: &BTreeSet<SocketAddr>, length: u32) -> Vec<u32> {
    const NOBODY: u32 = u32::MAX;
    let mut turns: Vec<Turn> = endpoints.iter().map(Turn::new).collect();
    let mut table = vec![NOBODY; length as usize];
    let mut left = length;
    loop {
        for (who, turn) in (0..).zip(&mut turns) {
            if left == 0 {
                return table;
            }
            // Sooner or later it comes upon one that nobody has.
            let mut entry = turn.next(length);
            while table[entry] != NOBODY {
                entry = turn.next(length);
            }
            table[entry] = who;
            left -= 1;
        }
    }
}

/// Where an endpoint's generator is (SplitMix64; Steele et al., OOPSLA '14).
struct Turn(u64);

impl Turn {
    fn new(at: &SocketAddr) -> Self {
        let (addr, port) = (Addr::from(at.ip()), at.port().to_be_bytes());
        Self(client_hash::of(SEED, &addr, port))
    }

    fn next(&mut self, length: u32) -> usize {
        self.0 = self.0.wrapping_add(STEP);
        // The upper half, as a part of 2^32.
        let part = client_hash::mixed(self.0) >> 32;
        ((part * u64::from(length)) >> 32) as usize
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
    fn lengths_are_long_enough() {
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
            (endpoints(1..=10), 0x0589_70dd_4aec_6325),
            (v6, 0xdbcb_0d7b_213e_db55),
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

        /// What one that goes had goes to the others, and of theirs hardly anything changes hands, whichever they are: of
        /// 163 endpoints' 1.6 % on average, with a deviation of 0.1.
        #[test]
        fn who_goes_takes_little_along(hosts in btree_set(any::<u16>(), 2..164), which: prop::sample::Index) {
            let before = endpoints(hosts);
            let gone = *which.get(&before.iter().copied().collect::<Vec<_>>());
            let after: BTreeSet<_> = before.iter().copied().filter(|at| *at != gone).collect();
            let (old, new) = (owners(&before, LENGTHS[0]), owners(&after, LENGTHS[0]));
            let moved = old.iter().zip(&new).filter(|(old, new)| **old != gone && old != new).count();
            let share = moved as f64 / f64::from(LENGTHS[0]);
            prop_assert!(share < 0.025, "{} endpoints: {share}", before.len());
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
