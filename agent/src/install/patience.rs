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
    pub fn allows(&mut self, now: Instant) -> bool {
        match self.resting_until {
            Some(until) if now < until => return false,
            _ => self.resting_until = None,
        }
        self.put_back
            .retain(|at| now.saturating_duration_since(*at) < WITHIN);
        if self.put_back.len() < TIMES {
            return true;
        }
        self.put_back.clear();
        self.resting_until = Some(now + REST);
        false
    }

    /// It was put back.
    pub fn put_back(&mut self, now: Instant) {
        self.put_back.push_back(now);
    }

    /// The file is as it should be without us: nobody contests it any more.
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
        let puts_back = |patience: &mut Patience, now| {
            let allowed = patience.allows(now);
            if allowed {
                patience.put_back(now);
            }
            allowed
        };
        let start = Instant::now();
        let second = |n| start + Duration::from_secs(n);
        for n in 0..TIMES as u64 {
            assert!(puts_back(&mut patience, second(n)), "{n}");
        }
        assert!(!puts_back(&mut patience, second(10)));
        assert!(!puts_back(&mut patience, second(10 + REST.as_secs() - 1)));
        for n in 0..TIMES as u64 {
            assert!(puts_back(&mut patience, second(10 + REST.as_secs() + n)));
        }
        assert!(!puts_back(&mut patience, second(20 + REST.as_secs())));
        patience.in_place();
        assert!(puts_back(&mut patience, second(21 + REST.as_secs())));
    }

    #[test]
    fn now_and_then_is_nothing() {
        let mut patience = Patience::default();
        let start = Instant::now();
        for n in 0..50 {
            let now = start + WITHIN / 4 * n;
            assert!(patience.allows(now));
            patience.put_back(now);
        }
    }

    #[test]
    fn what_could_not_be_put_back_does_not_count() {
        let mut patience = Patience::default();
        let now = Instant::now();
        assert!((0..50).all(|_| patience.allows(now)));
    }
}
