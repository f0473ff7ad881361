//! How often a file is put back that somebody else takes away.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// So many times within [`WITHIN`], and no more for [`REST`].
pub const TIMES: usize = 5;
const WITHIN: Duration = Duration::from_secs(60);
pub const REST: Duration = Duration::from_secs(600);

/// Two that each put back their own would do so for ever; this one gives in.
#[derive(Debug, Default)]
pub struct Patience {
    put_back: VecDeque<Instant>,
    resting_until: Option<Instant>,
}

impl Patience {
    /// Whether to put the file back that is found taken away now.
    pub fn puts_back(&mut self, now: Instant) -> bool {
        match self.resting_until {
            Some(until) if now < until => return false,
            _ => self.resting_until = None,
        }
        self.put_back
            .retain(|at| now.saturating_duration_since(*at) < WITHIN);
        if self.put_back.len() < TIMES {
            self.put_back.push_back(now);
            return true;
        }
        self.put_back.clear();
        self.resting_until = Some(now + REST);
        false
    }

    /// The file is as it should be without us: the quarrel is over.
    pub fn in_place(&mut self) {
        self.resting_until = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_always_taken_away_is_left_alone_for_long() {
        let mut patience = Patience::default();
        let start = Instant::now();
        let second = |n| start + Duration::from_secs(n);
        for n in 0..TIMES as u64 {
            assert!(patience.puts_back(second(n)), "{n}");
        }
        assert!(!patience.puts_back(second(10)));
        assert!(!patience.puts_back(second(10 + REST.as_secs() - 1)));
        for n in 0..TIMES as u64 {
            assert!(patience.puts_back(second(10 + REST.as_secs() + n)));
        }
        assert!(!patience.puts_back(second(20 + REST.as_secs())));
        patience.in_place();
        assert!(patience.puts_back(second(21 + REST.as_secs())));
    }

    #[test]
    fn now_and_then_is_no_quarrel() {
        let mut patience = Patience::default();
        let start = Instant::now();
        assert!((0..50).all(|n| patience.puts_back(start + WITHIN / 4 * n)));
    }
}
