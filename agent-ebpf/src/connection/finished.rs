//! Connections that are over and whose room others want.
//!
//! A connection that is closed stays for two minutes, a question by UDP that has its answer for half of one. Those of a pod
//! that has more than half of what it may have, or of anybody once the table is three quarters full, are noted here, and
//! make way before a new one is refused. The agent does the same once a second (`datapath::sweep::scarcity`), for all that
//! is in the table: this is for the time between, and for when it is away.

use super::{ending, find, idle, now, share, stage};
use crate::{
    maps::FINISHED,
    scratch::{self, Scratch},
};
use aya_ebpf::{
    bindings::BPF_EXIST,
    helpers::{bpf_map_peek_elem, bpf_map_pop_elem},
};
use core::{ffi::c_void, hint::black_box};
use sinabro_common::{
    abi::connection::Connection,
    algo::lifetime::{LATE_NS, MAKES_WAY_AFTER_NS, Stage},
};

/// So many make way for a new one, at most: who comes next finds some, too.
const AT_ONCE: u32 = 4;
/// So many are looked at for that: some may have ended otherwise, or begun again.
const LOOKS: u32 = 16;

/// Notes that `scratch.key`'s connection is over, most likely, if room is scarce for it.
#[inline(always)]
pub fn note(scratch: &mut Scratch, stage: Stage, payer: u32) {
    let is_closed = stage.is_closed();
    if is_closed || stage.is_answered() {
        write(scratch, is_closed, payer);
    }
}

/// A function, so that it takes nothing of its caller's stack, which has deeper ones to call.
#[inline(never)]
fn write(scratch: &mut Scratch, is_closed: bool, payer: u32) {
    let pause = match is_closed {
        true => LATE_NS,
        false => MAKES_WAY_AFTER_NS,
    };
    if !share::is_scarce(payer, is_closed) {
        return;
    }
    let now = now();
    let Scratch { key, finished, .. } = scratch;
    finished.key = *key;
    finished.ended_ns = now;
    finished.from_ns = now + pause;
    // In the place of the first, if it is full.
    let _ = FINISHED.push(&*finished, BPF_EXIST.into());
}

/// Ends connections that are over, for one that is refused otherwise: whether there were any.
#[inline(always)]
pub fn make_way(scratch: &mut Scratch, payer: u32) -> bool {
    // In the scratch: the verifier would walk the loop for each number of them.
    scratch.ended = 0;
    let mut looked = 0;
    while looked < LOOKS {
        match scratch.lend(|| first_global(payer)) {
            ENDED => scratch.ended += 1,
            LEFT => {}
            _ => break,
        }
        if scratch.ended >= AT_ONCE {
            break;
        }
        looked += 1;
    }
    scratch.ended != 0
}

/// What became of the first one that is noted: it was ended,
const ENDED: i32 = 0;
/// it is something else by now, or does not make way for this payer,
const LEFT: i32 = 1;
/// or it is not to make way yet, and neither are those behind it.
const NOT_YET: i32 = 2;

/// Takes the first one out and ends it, if it is time.
#[inline(never)]
fn first_global(payer: u32) -> i32 {
    scratch::borrow(|scratch| first(scratch, black_box(payer)))
}

#[inline(always)]
fn first(scratch: &mut Scratch, payer: u32) -> i32 {
    let map: *mut c_void = core::ptr::from_ref(&FINISHED).cast_mut().cast();
    let value: *mut c_void = (&raw mut scratch.finished).cast();
    let now = now();
    // SAFETY: room for a value of the map.
    if unsafe { bpf_map_peek_elem(map, value) } != 0 || scratch.finished.from_ns > now {
        return NOT_YET;
    }
    // SAFETY: as above.
    if unsafe { bpf_map_pop_elem(map, value) } != 0 {
        return NOT_YET;
    }
    // Another processor had that one.
    if scratch.finished.from_ns > now {
        let _ = FINISHED.push(&scratch.finished, BPF_EXIST.into());
        return NOT_YET;
    }
    scratch.ending = scratch.finished.key;
    let Some(found) = find(&scratch.ending) else {
        return LEFT;
    };
    // SAFETY: a value that the map just gave.
    let has_ended = unsafe { may_go(found, scratch, payer) && ending::end(scratch, found) };
    if has_ended { ENDED } else { LEFT }
}

/// Whether it is still the connection that was noted, and over. Of datagrams nobody knows for certain: they make room for none
/// but their own payer's.
///
/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn may_go(connection: *const Connection, scratch: &Scratch, payer: u32) -> bool {
    let proto = scratch.ending.proto;
    // SAFETY: the caller's promise.
    unsafe {
        if (*connection).began_ns > scratch.finished.ended_ns {
            return false;
        }
        let stage = stage(connection, proto);
        if stage.is_closed() {
            return true;
        }
        stage.is_answered()
            && (*connection).payer == payer
            && idle(connection) >= MAKES_WAY_AFTER_NS
    }
}
