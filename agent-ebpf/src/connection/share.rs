//! What each pod's connections take, so that one pod's leave room for the others'.
//!
//! A pod may have as many connections as there is room left for, and an eighth of that of those that nobody
//! answered: so the greediest is refused first, the table is never full, and no connection that both ends
//! want makes way for a new one. (Choudhury and Hahne: Dynamic queue length thresholds for shared-memory
//! packet switches, 1998.)
//!
//! Counts are changed by atomic additions and may drift, for a record may be removed by two at once; the agent
//! sets them right at each of its sweeps.

use super::{finished, newcomer};
use crate::{
    atomic::add_u64,
    maps::{LIMITS, SHARES},
    scratch::Scratch,
};
use sinabro_common::{
    abi::connection::{ALL_SHARES, OUTSIDE_DATAGRAMS, OUTSIDE_SHARE, Share, is_outside},
    algo::room::Room,
};

/// One of so many that there is room for.
const EMBRYONIC_PART: u64 = 8;

/// Counts one more connection of the pod, which nobody has answered yet, or refuses it.
#[inline(always)]
pub fn take(scratch: &mut Scratch, payer: u32) -> bool {
    // Clients outside have places instead (`newcomer`).
    take_or_make_way(scratch, payer, !is_outside(payer), 1)
}

/// Counts one more connection that somebody outside began with the pod, or refuses it. It has a place (`newcomer`), and is none
/// of those that nobody has answered: a flood from outside would keep the pod from beginning any of its own.
#[inline(always)]
pub fn take_inbound(scratch: &mut Scratch, payer: u32) -> bool {
    take_or_make_way(scratch, payer, false, 0)
}

/// A function, so that it takes nothing of its callers' stack, which have deeper ones to call.
#[inline(never)]
fn take_or_make_way(scratch: &mut Scratch, payer: u32, may_be_crowded: bool, one: u64) -> bool {
    scratch.place = 0;
    let found = taken(payer, may_be_crowded, one);
    match found {
        NO_ROOM if finished::make_way(scratch, payer) => {}
        NO_ROOM | CROWDED if newcomer::make_way(scratch, payer, found == CROWDED) => {
            // In the place of another one: no more than before, however little room others have left.
            change(payer, 1, one);
            return noted(scratch, found == CROWDED);
        }
        TAKEN | TAKEN_OF_MANY => return noted(scratch, found == TAKEN_OF_MANY),
        _ => return refuse(payer),
    }
    match taken(payer, may_be_crowded, one) {
        TAKEN => true,
        TAKEN_OF_MANY => noted(scratch, true),
        _ => refuse(payer),
    }
}

/// Has a connection of a pod with many unanswered ones be found once it is over.
#[inline(always)]
fn noted(scratch: &mut Scratch, are_many: bool) -> bool {
    if are_many {
        newcomer::note(scratch);
    }
    true
}

const TAKEN: u32 = 0;
/// It has more than half of the unanswered ones that it may have.
const TAKEN_OF_MANY: u32 = 3;
/// It has as many as it may have,
const NO_ROOM: u32 = 1;
/// or as many of those that nobody has answered.
const CROWDED: u32 = 2;

#[inline(never)]
fn taken(payer: u32, may_be_crowded: bool, unanswered: u64) -> u32 {
    let (Some(limits), Some(all)) = (LIMITS.get(0), SHARES.get_ptr_mut(ALL_SHARES)) else {
        return CROWDED;
    };
    let Some(share) = SHARES.get_ptr_mut(payer) else {
        return CROWDED;
    };
    // SAFETY: values that the map gave.
    let (taken, connections, embryonic) = unsafe {
        (
            Share::counted((*all).connections),
            Share::counted((*share).connections),
            Share::counted((*share).embryonic),
        )
    };
    let room = u64::from(limits.capacity).saturating_sub(taken);
    let is_crowded = may_be_crowded
        && (embryonic * EMBRYONIC_PART >= room || embryonic >= u64::from(limits.embryonic_per_pod));
    if is_crowded {
        return CROWDED;
    }
    // What anybody can have by datagrams in others' names leaves room for TCP, which nobody can.
    let counts = match payer {
        OUTSIDE_DATAGRAMS => connections * 2,
        _ => connections,
    };
    if counts >= room || connections >= u64::from(limits.per_pod) {
        return NO_ROOM;
    }
    for share in [share, all] {
        add(share, 1, unanswered);
    }
    let are_many = may_be_crowded
        && (embryonic * 2 * EMBRYONIC_PART >= room
            || embryonic * 2 >= u64::from(limits.embryonic_per_pod));
    match are_many {
        true => TAKEN_OF_MANY,
        false => TAKEN,
    }
}

#[inline(never)]
fn refuse(payer: u32) -> bool {
    if let Some(share) = SHARES.get_ptr_mut(payer) {
        // SAFETY: as in `add`.
        unsafe { add_u64(&raw mut (*share).refused, 1) };
    }
    false
}

/// Whether room is scarce for a pod, or, if that counts, for everybody.
#[inline(always)]
pub fn is_scarce(payer: u32, of_all: bool) -> bool {
    let (Some(limits), Some(all), Some(share)) = (
        LIMITS.get(0),
        SHARES.get_ptr(ALL_SHARES),
        SHARES.get_ptr(payer),
    ) else {
        return false;
    };
    // SAFETY: values that the map gave.
    let (taken, connections) = unsafe {
        (
            Share::counted((*all).connections),
            Share::counted((*share).connections),
        )
    };
    let room = Room::of(taken, limits.capacity, limits.per_pod);
    room.is_scarce_for(connections) || of_all && room.is_scarce_for_all()
}

/// Whether clients outside have any connections.
#[inline(always)]
pub fn has_outside() -> bool {
    is_used(OUTSIDE_SHARE) || is_used(OUTSIDE_DATAGRAMS)
}

/// Whether a share has any connections.
#[inline(always)]
pub fn is_used(payer: u32) -> bool {
    SHARES
        .get_ptr(payer)
        // SAFETY: a value that the map just gave.
        .is_some_and(|share| Share::counted(unsafe { (*share).connections }) != 0)
}

/// One of the pod's connections is over.
#[inline(always)]
pub fn give(payer: u32, embryonic: bool) {
    change(payer, ONE_LESS, if embryonic { ONE_LESS } else { 0 });
}

/// One of the pod's connections was answered.
#[inline(always)]
pub fn answered(payer: u32) {
    change(payer, 0, ONE_LESS);
}

/// One of the pod's connections begins again.
#[inline(always)]
pub fn unanswered(payer: u32) {
    change(payer, 0, 1);
}

/// One less, modulo 2^64.
const ONE_LESS: u64 = u64::MAX;

#[inline(always)]
fn change(payer: u32, connections: u64, embryonic: u64) {
    for key in [payer, ALL_SHARES] {
        // A pod that is gone has no share any more.
        if let Some(share) = SHARES.get_ptr_mut(key) {
            add(share, connections, embryonic);
        }
    }
}

/// Adds what is not zero.
#[inline(always)]
fn add(share: *mut Share, connections: u64, embryonic: u64) {
    // SAFETY: fields of a value that the map gave, aligned to eight bytes, and changed by such additions only.
    unsafe {
        if connections != 0 {
            add_u64(&raw mut (*share).connections, connections);
        }
        if embryonic != 0 {
            add_u64(&raw mut (*share).embryonic, embryonic);
        }
    }
}
