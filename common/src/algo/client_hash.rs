//! Where in a Maglev table (NSDI '16, section 3.4) a client's connection has its endpoint.
//!
//! All nodes must say the same of one client, whichever of them its packets reach: after a router has
//! spread its flows anew, or by another node's address. So the destination is no part of it: a node port
//! is at each node's own address, and each port of a Service has a table of its own. What is part of it is
//! read as numbers of one byte order, and nothing of it is random: a client can know its endpoint, and
//! choose it by its port, as with any such table.

use crate::abi::{Addr, connection::halves};

/// The first 64 bits of the golden ratio's fraction: any number would do, as long as it stays.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The part of 2^32 at which an end's connections are, by its address and port (network order; zero: all of
/// its ports).
#[inline(always)]
pub fn place(addr: &Addr, port: [u8; 2]) -> u32 {
    (of(SEED, addr, port) >> 32) as u32
}

/// All 64 bits, from another seed.
#[inline(always)]
pub fn of(seed: u64, addr: &Addr, port: [u8; 2]) -> u64 {
    let (first, second) = halves(addr);
    let hash = mixed(mixed(seed ^ first) ^ second);
    mixed(hash ^ u64::from(u16::from_be_bytes(port)))
}

/// The finalizer of MurmurHash3 (64 bit): each bit of the input changes each of the output with a chance of
/// nearly one half, and no two inputs have one output.
#[inline(always)]
pub const fn mixed(mut hash: u64) -> u64 {
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of two versions must agree, and of two byte orders.
    #[test]
    fn it_is_what_it_was() {
        let v6 = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
        let places = [
            place(&Addr::v4([203, 0, 113, 77]), 40_000u16.to_be_bytes()),
            place(&Addr::v4([203, 0, 113, 77]), [0; 2]),
            place(&Addr::v6(v6), 40_000u16.to_be_bytes()),
        ];
        assert_eq!(places, [2_832_025_718, 671_010_092, 2_563_863_197]);
    }

    /// Clients that count their ports up, and neighbours, are spread like any others.
    #[test]
    fn clients_are_spread_evenly() {
        const SLOTS: usize = 101;
        const EACH: usize = 1000;
        let slot = |addr: &Addr, port: usize| {
            let place = place(addr, (port as u16).to_be_bytes());
            ((u64::from(place) * SLOTS as u64) >> 32) as usize
        };
        let one = Addr::v4([203, 0, 113, 77]);
        let neighbour = |n: usize| Addr::v4([10, 0, (n >> 8) as u8, n as u8]);
        let clients: [&dyn Fn(usize) -> usize; 3] =
            [&|n| slot(&one, n), &|n| slot(&one, n << 1), &|n| {
                slot(&neighbour(n & 0xffff), n >> 16)
            }];
        for (which, client) in clients.iter().enumerate() {
            let total = [SLOTS * EACH, 32_768][usize::from(which == 1)].min(65_536);
            let mut hits = [0u32; SLOTS];
            (0..total).for_each(|n| hits[client(n)] += 1);
            let expected = total as f64 / SLOTS as f64;
            let squares = hits.map(|hits| (f64::from(hits) - expected).powi(2) / expected);
            // Of 100 degrees of freedom: 149.4 is exceeded once in a thousand.
            let chi_square: f64 = squares.iter().sum();
            assert!(chi_square < 149.4, "{which}: {chi_square}");
        }
    }
}
