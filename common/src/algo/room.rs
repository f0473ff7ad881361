//! For whom room in the table of connections is scarce: from then on what is over makes way, in the programs and by the agent.

/// How much of it there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    capacity: u64,
    /// By all.
    pub taken: u64,
    /// What any pod may have.
    pub each: u64,
}

impl Room {
    /// `per_pod`: what a pod may have, however much there is.
    #[inline(always)]
    pub fn of(taken: u64, capacity: u32, per_pod: u32) -> Self {
        let capacity = u64::from(capacity);
        Self {
            capacity,
            taken,
            each: capacity.saturating_sub(taken).min(u64::from(per_pod)),
        }
    }

    /// For a pod with so many connections: more than half of what it may have. One alone may have half of the table
    /// (`connection::share` in the programs), and has half of what is left to it at a third.
    #[inline(always)]
    pub const fn is_scarce_for(&self, connections: u64) -> bool {
        connections > self.each / 2
    }

    /// For everybody: once three quarters are taken.
    #[inline(always)]
    pub const fn is_scarce_for_all(&self) -> bool {
        self.taken > self.capacity / 4 * 3
    }
}
