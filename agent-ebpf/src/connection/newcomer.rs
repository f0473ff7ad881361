//! Connections that have places, by which one is found that makes way for another: of clients outside, and of pods that have many
//! unanswered ones.
//!
//! Whoever begins connections from addresses that are not his needs no answers, and can begin as many as he likes. A pod
//! that does so is refused, which harms nobody else; to refuse new clients outside would do what a flood is meant
//! to. So each new connection takes a place, drawn by chance, and what had it goes, if it is still unanswered: of an honest
//! client that takes a moment, and a flood drives out itself.
//!
//! Datagrams in others' names make connections that look answered, where a backend answers whatever comes. So of protocols other than
//! TCP an answered connection goes, too, once these have their part of the table. The next datagram of a client that lost its
//! connection so begins it again, with the endpoint that every node chooses for that client (ADR 24).
//!
//! The agent removes what is over. While it is away a pod that asked silent hosts would keep its share of unanswered connections for
//! ever: a new one takes the place of one that is over.

use super::{ending, find, idle, outlives, stage};
use crate::{
    maps::LIMITS,
    parse::proto,
    scratch::{self, Scratch},
};
use aya_ebpf::{helpers::bpf_get_prandom_u32, macros::map, maps::Array};
use core::hint::black_box;
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Connection, ConnectionKey, FLAG_EMBRYONIC, FLAG_INBOUND, OUTSIDE_DATAGRAMS, is_outside,
        },
    },
    algo::lifetime::Stage,
};

/// Places, at most, of each kind.
const MAX_PLACES: u32 = 16_384;
/// TCP's of clients outside; who floods with datagrams drives out no handshake, nor the other way round.
const STREAMS: u32 = 0;
/// All others of clients outside.
const DATAGRAMS: u32 = 1;
/// Pods' that nobody has answered, of those that have many.
const UNANSWERED: u32 = 2;
/// One of so many records that there is room for may be a newcomer's.
const PART: u32 = 8;

/// Not pinned: a newcomer whose place is forgotten has the time that any unanswered connection has.
#[map]
static NEWCOMERS: Array<ConnectionKey> = Array::with_max_entries(3 * MAX_PLACES, 0);

/// Gives `scratch.key`'s connection a place, from which another one may have to go.
#[inline(never)]
pub fn settle(scratch: &mut Scratch) -> u32 {
    let kind = match scratch.key.proto {
        proto::TCP => STREAMS,
        _ => DATAGRAMS,
    };
    // Nobody has had the place, or the same ends have it again.
    if !put(scratch, kind) || scratch.ending.proto == 0 || scratch.ending == scratch.key {
        return 0;
    }
    drive_out(scratch)
}

/// Gives `scratch.key`'s connection a place, by which it is found once it is over.
#[inline(never)]
pub fn note(scratch: &mut Scratch) -> u32 {
    put(scratch, UNANSWERED).into()
}

/// Writes `scratch.key` into a place of that kind; who had it is in `scratch.ending` then.
#[inline(always)]
fn put(scratch: &mut Scratch, kind: u32) -> bool {
    // Of one that went for this one there is a place. In another the key of one that goes on would be lost, and in the end none be
    // found that could go.
    let index = match core::mem::take(&mut scratch.place) {
        0 => draw(kind),
        left => left - 1,
    };
    let Some(place) = NEWCOMERS.get_ptr_mut(index) else {
        return false;
    };
    let Scratch { key, ending, .. } = &mut *scratch;
    // SAFETY: a value that the map just gave. Of two processors that write to it at once both may leave a part: such a
    // key leads to no connection, and the agent ends those that lost their place.
    unsafe {
        read(place, ending);
        (*place).low = key.low;
        (*place).high = key.high;
        (*place).low_port = key.low_port;
        (*place).high_port = key.high_port;
        (*place).proto = key.proto;
    }
    true
}

/// A place of a kind by chance.
#[inline(always)]
fn draw(kind: u32) -> u32 {
    let Some(limits) = LIMITS.get_ptr(0) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    let places = unsafe { (*limits).capacity / PART }.clamp(1, MAX_PLACES);
    // SAFETY: no arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    kind * MAX_PLACES + (random * u64::from(places) >> 32) as u32
}

/// # Safety
/// `place` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn read(place: *const ConnectionKey, into: &mut ConnectionKey) {
    // SAFETY: the caller's promise.
    unsafe {
        into.low = Addr::at(&raw const (*place).low);
        into.high = Addr::at(&raw const (*place).high);
        into.low_port = (*place).low_port;
        into.high_port = (*place).high_port;
        into.proto = (*place).proto;
    }
}

/// So many places are looked at for a connection that has to go. Some have none any more: with four looks one in a hundred
/// thousand newcomers found nobody.
const LOOKS: u32 = 8;

/// Ends a connection for another one that its payer is refused otherwise: one by datagrams that somebody outside began, answered or
/// not; with `unanswered` one that nobody has answered in time. Whether there was any.
#[inline(always)]
pub fn make_way(scratch: &mut Scratch, payer: u32, unanswered: bool) -> bool {
    let kind = if unanswered { UNANSWERED } else { DATAGRAMS };
    let mut looked = 0;
    while looked < LOOKS {
        if scratch.lend(|| one_global(payer, kind)) != 0 {
            return true;
        }
        looked += 1;
    }
    false
}

#[inline(never)]
fn one_global(payer: u32, kind: u32) -> i32 {
    scratch::borrow(|scratch| black_box(one(scratch, black_box(payer), black_box(kind))))
}

#[inline(always)]
fn one(scratch: &mut Scratch, payer: u32, kind: u32) -> i32 {
    let index = draw(kind);
    let Some(place) = NEWCOMERS.get_ptr_mut(index) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    unsafe { read(place, &mut scratch.ending) };
    let Some(found) = find(&scratch.ending) else {
        return 0;
    };
    // SAFETY: as above.
    let has_ended = unsafe {
        let is_payers = (*found).payer == payer;
        let may_go = match kind {
            // Not by `is_over`, a function that is one call too deep here.
            UNANSWERED => {
                (*found).has(FLAG_EMBRYONIC)
                    && outlives(stage(found, scratch.ending.proto), idle(found))
            }
            _ => payer == OUTSIDE_DATAGRAMS || (*found).has(FLAG_INBOUND),
        };
        is_payers && may_go && ending::end(scratch, found)
    };
    if has_ended {
        scratch.place = index + 1;
    }
    has_ended.into()
}

/// Whether a connection may make way for a newcomer: nobody answered it, or it is a pod's that ended by a reset, of which nothing is
/// to come.
///
/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn may_go(connection: *const Connection, proto: u8) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        if (*connection).flags & FLAG_INBOUND == 0 {
            return is_outside((*connection).payer) && (*connection).has(FLAG_EMBRYONIC);
        }
        let stage = stage(connection, proto);
        stage.is_embryonic() || stage as u32 == Stage::Reset as u32
    }
}

/// Ends `scratch.ending`'s connection, if it may go.
#[inline(never)]
fn drive_out(scratch: &mut Scratch) -> u32 {
    let Some(found) = find(&scratch.ending) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    unsafe { may_go(found, scratch.ending.proto) && ending::end(scratch, found) }.into()
}
