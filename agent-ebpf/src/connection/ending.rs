//! Ends a connection whose room another one gets: its record goes, and the aliases that lead to it.

use super::remove;
use crate::{atomic::add_u32, maps::ALIASES, scratch::Scratch};
use sinabro_common::abi::{
    Addr,
    connection::{Alias, Connection, FLAG_MASQUERADED, FLAG_SERVICE, has_one_id},
};

/// Removes `scratch.ending`'s connection; false if another one is just taking its port, which removes it, too.
///
/// # Safety
/// `found` is the value that the map gave for that key in this run of the program.
#[inline(always)]
pub unsafe fn end(scratch: &mut Scratch, found: *const Connection) -> bool {
    let Scratch {
        ending,
        ending_sends,
        ending_gets,
        ..
    } = &mut *scratch;
    // SAFETY: the caller's promise. Read before it goes: its memory may be another one's right after.
    let flags = unsafe {
        let (low, high) = (
            (&ending.low, ending.low_port),
            (&ending.high, ending.high_port),
        );
        let (client, server) = match (*found).client_is_high() {
            true => (high, low),
            false => (low, high),
        };
        ending_sends.src = *client.0;
        ending_sends.src_port = client.1;
        ending_sends.dst = Addr::at(&raw const (*found).frontend);
        ending_sends.dst_port = (*found).frontend_port;
        ending_sends.proto = ending.proto;
        ending_gets.src = *server.0;
        ending_gets.src_port = match has_one_id(ending.proto) {
            true => (*found).nat_port,
            false => server.1,
        };
        ending_gets.dst = Addr::at(&raw const (*found).nat);
        ending_gets.dst_port = (*found).nat_port;
        ending_gets.proto = ending.proto;
        (*found).flags
    };
    if flags & FLAG_MASQUERADED != 0
        && let Some(alias) = ALIASES.get_ptr_mut(&*ending_gets)
    {
        // SAFETY: a value that the map just gave.
        unsafe {
            let is_own =
                (*alias).addr == ending_sends.src && (*alias).port == ending_sends.src_port;
            if !is_own || !is_first(alias) {
                return false;
            }
        }
    }
    remove(ending);
    if flags & FLAG_MASQUERADED != 0 {
        let _ = ALIASES.remove(&*ending_gets);
    }
    if flags & FLAG_SERVICE != 0 {
        let _ = ALIASES.remove(&*ending_sends);
    }
    true
}

/// Whether nobody else takes the alias: all add one to its number, and who finds another one beside its own takes that back.
/// Two that find each other leave the alias to whoever comes next, which may be one of them.
///
/// # Safety
/// `alias` is a value that the map gave in this run of the program.
#[inline(always)]
pub unsafe fn is_first(alias: *mut Alias) -> bool {
    // SAFETY: the caller's promise; aligned to four bytes, and changed by such additions only.
    unsafe {
        let takers = &raw mut (*alias).takers;
        add_u32(takers, 1);
        let is_alone = takers.read_volatile() == 1;
        if !is_alone {
            add_u32(takers, ONE_LESS);
        }
        is_alone
    }
}

/// One less, modulo 2^32.
const ONE_LESS: u32 = u32::MAX;
