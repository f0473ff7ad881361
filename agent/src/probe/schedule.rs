//! How often peers are asked.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    time::Duration,
};

/// Each peer is asked this often, in a cluster of no more than a hundred nodes.
const ROUND: Duration = Duration::from_secs(10);
/// In larger ones so many peers are asked in a second.
const PEERS_PER_SECOND: u32 = 10;
/// Requests of all kinds are so far apart: what was lost and is asked again, and what fills the
/// MTU, is as much again at most.
pub const APART: Duration = Duration::from_millis(50);

/// How often each of so many peers is asked.
pub fn interval(peers: usize) -> Duration {
    ROUND.max(least(peers))
}

/// The same where pods' packets are lost until it is noticed: in a cluster of no more than twenty nodes every two seconds.
pub fn soon(peers: usize) -> Duration {
    Duration::from_secs(2).max(least(peers))
}

fn least(peers: usize) -> Duration {
    let peers = u32::try_from(peers).unwrap_or(u32::MAX);
    Duration::from_secs(1) * (peers / PEERS_PER_SECOND)
}

/// A time between three quarters and five quarters of it, so that agents which started together
/// do not stay together.
pub fn spread(time: Duration) -> Duration {
    time / 4 * 3 + within(time / 2)
}

/// Some time up to this one.
pub fn within(time: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 1000;
    time / 1000 * random as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_clusters_are_asked_less_often() {
        let seconds = [0, 1, 100, 101, 1000, 5000].map(|n| interval(n).as_secs());
        assert_eq!(seconds, [10, 10, 10, 10, 100, 500]);
        let seconds = [0, 1, 20, 100, 1000, 5000].map(|n| soon(n).as_secs());
        assert_eq!(seconds, [2, 2, 2, 10, 100, 500]);
        for _ in 0..100 {
            let time = spread(ROUND);
            assert!(time >= ROUND / 4 * 3 && time <= ROUND / 4 * 5, "{time:?}");
        }
    }
}
