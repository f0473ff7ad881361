//! Connections of clients outside that nobody has answered yet.
//!
//! Whoever begins connections from addresses that are not his needs no answers, and can begin as many as he likes. A pod
//! that does so is refused, which harms nobody else; to refuse new clients outside would do what a flood is meant
//! to. So each new connection takes a place, drawn by chance, and what had it goes, if it is still unanswered: of an honest
//! client that takes a moment, and a flood drives out itself.

use super::{ending, find, stage};
use crate::{maps::LIMITS, scratch::Scratch};
use aya_ebpf::{helpers::bpf_get_prandom_u32, macros::map, maps::Array};
use sinabro_common::{
    abi::{
        Addr,
        connection::{Connection, ConnectionKey, FLAG_EMBRYONIC, FLAG_INBOUND, OUTSIDE_SHARE},
    },
    algo::lifetime::Stage,
};

/// Places, at most.
const MAX_PLACES: u32 = 16_384;
/// One of so many records that there is room for may be a newcomer's.
const PART: u32 = 8;

/// Not pinned: a newcomer whose place is forgotten has the time that any unanswered connection has.
#[map]
static NEWCOMERS: Array<ConnectionKey> = Array::with_max_entries(MAX_PLACES, 0);

/// Gives `scratch.key`'s connection a place, from which another one may have to go.
#[inline(never)]
pub fn settle(scratch: &mut Scratch) -> u32 {
    let Some(limits) = LIMITS.get_ptr(0) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    let places = unsafe { (*limits).capacity / PART }.clamp(1, MAX_PLACES);
    // SAFETY: no arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    let Some(place) = NEWCOMERS.get_ptr_mut((random * u64::from(places) >> 32) as u32) else {
        return 0;
    };
    let Scratch { key, ending, .. } = &mut *scratch;
    // SAFETY: a value that the map just gave. Of two processors that write to it at once both may leave a part: such a
    // key leads to no connection, and the agent ends those that lost their place.
    unsafe {
        ending.low = Addr::at(&raw const (*place).low);
        ending.high = Addr::at(&raw const (*place).high);
        ending.low_port = (*place).low_port;
        ending.high_port = (*place).high_port;
        ending.proto = (*place).proto;
        (*place).low = key.low;
        (*place).high = key.high;
        (*place).low_port = key.low_port;
        (*place).high_port = key.high_port;
        (*place).proto = key.proto;
    }
    // Nobody has had the place, or the same ends have it again.
    if scratch.ending.proto == 0 || scratch.ending == scratch.key {
        return 0;
    }
    drive_out(scratch)
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
            return (*connection).payer == OUTSIDE_SHARE && (*connection).has(FLAG_EMBRYONIC);
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
