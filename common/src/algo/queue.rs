//! What may wait in an enrolled socket's queue, and what that costs the kernel.
//!
//! For each message that goes from socket to socket the kernel allocates a `struct sk_msg`, which
//! no cgroup is charged for. So each queue has a level: it may hold [`allowed`] messages, and what
//! they cost is charged beforehand. A connection of questions and answers never leaves level 0.
//! A sender raises the level of the other end's queue when more wait there, as far as the budgets
//! allow, and takes it back when it finds the queue empty.

use crate::abi::acceleration::{Account, Budget};

pub const LEVELS: u32 = 4;

/// `struct sk_psock`, the entries of maps and what is kept with the socket. Measured: 1.5 KB.
const SOCKET_BYTES: u32 = 2048;
/// `struct sk_msg` has some 700 bytes and is allocated from `kmalloc-1k`.
pub const MESSAGE_BYTES: u32 = 1024;

/// How many messages a queue of this level may hold: 8, 64, 512, 4096.
#[inline(always)]
pub const fn allowed(level: u32) -> u32 {
    8 << (3 * (level & 3))
}

/// What reaching a level costs beside the levels before it.
#[inline(always)]
pub const fn cost(level: u32) -> u32 {
    match level {
        0 => SOCKET_BYTES + allowed(0) * MESSAGE_BYTES,
        level => (allowed(level) - allowed(level - 1)) * MESSAGE_BYTES,
    }
}

/// Whether an account, with all that is being charged to it, is within its budget.
#[inline(always)]
pub fn fits(account: &Account, budget: &Budget) -> bool {
    used(account, budget) <= budget.limit
}

/// What is charged now. An account may be read before what was given back of it.
#[inline(always)]
pub fn used(account: &Account, budget: &Budget) -> u64 {
    account.charged.saturating_sub(budget.returned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_levels_together_cost_what_all_their_messages_do() {
        let all: u32 = (0..LEVELS).map(cost).sum();
        assert_eq!(all, SOCKET_BYTES + 4096 * MESSAGE_BYTES);
        assert_eq!([0, 1, 2, 3].map(allowed), [8, 64, 512, 4096]);
        // A level out of range is one in range.
        assert_eq!(allowed(u32::MAX), 4096);
    }

    #[test]
    fn a_budget_counts_what_was_given_back() {
        let budget = Budget {
            limit: 100,
            returned: 50,
        };
        let fits = |charged| fits(&Account { charged }, &budget);
        assert!(fits(150) && !fits(151) && fits(0));
    }
}
