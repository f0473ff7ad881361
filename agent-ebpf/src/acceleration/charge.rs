//! What enrolled sockets may cost the kernel: charged before it is spent, given back once.
//!
//! An account holds what is charged, and every change of it is an atomic addition. A charge is
//! added first and looked at then: of several that come at the same time the last one sees all of
//! them, so together they never exceed the budget. What was charged is an entry of its own, never
//! changed, and giving it back belongs to whoever removes the entry: this program or the agent.
//!
//! The memory is a queue's, so the charge lasts as long as the queue, whatever becomes of the
//! connection: a sender that closes, a reset, an end that nobody accepted leave it where it is.

use super::{QUEUE_ACCOUNTS, QUEUE_BUDGETS, QUEUE_CHARGES, find};
use aya_ebpf::bindings::BPF_NOEXIST;
use sinabro_common::{
    abi::acceleration::{Account, Charge, ChargeKey, NODE_ACCOUNT, Reason, Skip, SocketState},
    algo::queue,
};
use sinabro_ebpf::{atomic::add_u64, maps::EEXIST};

/// Whose budget has no room.
pub enum Over {
    Pod,
    Node,
}

impl From<Over> for Skip {
    #[inline(always)]
    fn from(over: Over) -> Self {
        match over {
            Over::Pod => Self::PodLimit,
            Over::Node => Self::NodeLimit,
        }
    }
}

/// Adds to an account, modulo 2^64, and returns what is in it then: at least this, and what others
/// added before.
#[inline(always)]
fn add(account: u32, bytes: u64) -> Option<Account> {
    let account = QUEUE_ACCOUNTS.get_ptr_mut(account)?;
    // SAFETY: a value that the map gave, valid until the program ends, aligned to eight bytes,
    // and changed by such additions only.
    unsafe {
        add_u64(&raw mut (*account).charged, bytes);
        Some(Account {
            charged: (&raw const (*account).charged).read_volatile(),
        })
    }
}

#[inline(always)]
fn take(account: u32, bytes: u64) -> bool {
    let Some(budget) = find(&QUEUE_BUDGETS, account) else {
        return false;
    };
    let Some(now) = add(account, bytes) else {
        return false;
    };
    let fits = queue::fits(&now, budget);
    if !fits {
        give(account, bytes);
    }
    fits
}

#[inline(always)]
fn give(account: u32, bytes: u64) {
    // A pod that is gone has no account any more, the node has.
    let _ = add(account, bytes.wrapping_neg());
}

/// Charges a socket's queue with a level.
#[inline(always)]
pub fn charge(cookie: u64, level: u32, payer: u32) -> Result<(), Over> {
    let bytes = queue::cost(level);
    if !take(payer, bytes.into()) {
        return Err(Over::Pod);
    }
    if !take(NODE_ACCOUNT, bytes.into()) {
        give(payer, bytes.into());
        return Err(Over::Node);
    }
    let key = key(cookie, level);
    match QUEUE_CHARGES.insert(&key, Charge { payer, bytes }, BPF_NOEXIST.into()) {
        Ok(()) => Ok(()),
        Err(error) => {
            give(payer, bytes.into());
            give(NODE_ACCOUNT, bytes.into());
            match error {
                // It is charged already.
                EEXIST => Ok(()),
                _ => Err(Over::Node),
            }
        }
    }
}

#[inline(always)]
fn key(cookie: u64, level: u32) -> ChargeKey {
    ChargeKey {
        cookie,
        level,
        pad: 0,
    }
}

/// Gives a level back; false if it was not charged.
#[inline(always)]
fn release_level(cookie: u64, level: u32) -> bool {
    let key = key(cookie, level);
    let Some(&Charge { payer, bytes }) = find(&QUEUE_CHARGES, &key) else {
        return false;
    };
    if QUEUE_CHARGES.remove(&key).is_ok() {
        give(payer, bytes.into());
        give(NODE_ACCOUNT, bytes.into());
    }
    true
}

/// Gives back all that a socket's queue is charged with.
#[inline(always)]
pub fn release(cookie: u64) {
    for level in 0..queue::LEVELS {
        if !release_level(cookie, level) {
            break;
        }
    }
}

/// Whether the other end's queue may hold so many messages, of which the last is this one.
///
/// A connection of questions and answers leaves here at once; the rest is a function of its own, so
/// that its registers cost such a connection nothing.
#[inline(always)]
pub fn admit(state: &mut SocketState, waiting: u32) -> Result<(), Reason> {
    let level = u32::from(state.level);
    if waiting <= queue::allowed(level) && (waiting != 1 || level == 0) {
        return Ok(());
    }
    match change_level(state, waiting) {
        ADMITTED => Ok(()),
        POD_LIMIT => Err(Reason::PodLimit),
        NODE_LIMIT => Err(Reason::NodeLimit),
        _ => Err(Reason::QueueFull),
    }
}

/// What [`change_level`] says: it returns what fits a register.
const ADMITTED: u32 = 0;
const POD_LIMIT: u32 = 1;
const NODE_LIMIT: u32 = 2;
const QUEUE_FULL: u32 = 3;

#[inline(never)]
fn change_level(state: &mut SocketState, waiting: u32) -> u32 {
    let level = u32::from(state.level);
    if waiting <= queue::allowed(level) {
        // It was empty: a level that is still needed will be taken again, at one call for many
        // messages.
        release_level(state.peer.cookie, level);
        state.level -= 1;
        return ADMITTED;
    }
    let next = level + 1;
    if next >= queue::LEVELS || waiting > queue::allowed(next) {
        return QUEUE_FULL;
    }
    // None: it ended, or was enrolled by programs that did not charge.
    let Some(base) = find(&QUEUE_CHARGES, &key(state.peer.cookie, 0)) else {
        return QUEUE_FULL;
    };
    match charge(state.peer.cookie, next, base.payer) {
        Ok(()) => {
            state.level += 1;
            ADMITTED
        }
        Err(Over::Pod) => POD_LIMIT,
        Err(Over::Node) => NODE_LIMIT,
    }
}
