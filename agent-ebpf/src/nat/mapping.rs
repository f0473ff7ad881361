//! Endpoint-independent mapping of UDP (RFC 4787 §4.1), where the settings want it: a pod's port has one port outside,
//! whatever it sends to.
//!
//! The first connection from a port picks one that is nobody's mapping and not taken towards its own remote end, and
//! writes the mapping, a record of its own. The next ones claim that port towards theirs. Who else has it towards one of
//! them, a socket of the host or a connection from before, keeps it: that one connection gets another port
//! ([`FLAG_APART`]).
//!
//! Only the agent ends a mapping, after the last of its connections; until then nobody else gets its port, and so
//! there is nothing to gain by asking here whether it is over. What comes in is still looked up with its remote end:
//! a mapping lets nobody in.

use super::{
    claim::{self, FOUND, TAKEN},
    drop,
};
use crate::{
    connection::{self, share},
    maps::{ALIASES, CONFIG, CONNECTIONS, EEXIST},
    parse::proto,
    scratch::Scratch,
};
use aya_ebpf::bindings::{__sk_buff, BPF_NOEXIST};
use sinabro_common::{
    abi::{
        Addr,
        config::FLAG_ENDPOINT_INDEPENDENT,
        connection::{
            Connection, ConnectionKey, FLAG_APART, FLAG_EMBRYONIC, FLAG_MAPPED, FLAG_MAPPING,
            FLAG_MASQUERADED, is_of_pod,
        },
        drop::DropReason,
    },
    algo::{ct_state::SEEN, port_pick::ATTEMPTS},
};

/// What a search for a port has to do with mappings: nothing, as the settings are;
const NONE: u32 = 0;
/// it keeps off their ports;
const KEEPS_OFF: u32 = 1;
/// it begins one.
const BEGINS: u32 = 2;

/// The client has no mapping.
const ABSENT: i32 = 3;

/// A question and its answer, from a port of its own each: a mapping for two minutes would cost a resolver four times
/// as many records, and nobody else is spoken to by it (RFC 4787 REQ-5 a).
pub const DNS: [u8; 2] = 53u16.to_be_bytes();

/// Finds the mapping of the packet's client and claims its port towards the remote end: [`FOUND`] if the alias is
/// written, [`TAKEN`] if a port is to be searched for as `scratch.search` says, or a drop.
#[inline(never)]
pub fn look(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    scratch.search = NONE;
    if !is_of_interest(scratch) {
        return TAKEN;
    }
    scratch.search = KEEPS_OFF;
    write_alias(scratch);
    if !has_mappings(scratch.payer) {
        return TAKEN;
    }
    match existing(skb, scratch) {
        ABSENT if scratch.tuple.dst_port == DNS => TAKEN,
        ABSENT => {
            scratch.search = BEGINS;
            TAKEN
        }
        TAKEN => {
            scratch.mapping_flags = FLAG_APART;
            TAKEN
        }
        found => found,
    }
}

/// Whether the packet is of UDP and the settings want mappings.
#[inline(always)]
fn is_of_interest(scratch: &Scratch) -> bool {
    scratch.tuple.proto == proto::UDP
        && CONFIG
            .get(0)
            .is_some_and(|config| config.flags & FLAG_ENDPOINT_INDEPENDENT != 0)
}

/// The host's ports, and those of clients outside, are their own towards each remote end.
#[inline(always)]
fn has_mappings(payer: u32) -> bool {
    is_of_pod(payer)
}

/// Claims the port of the client's mapping, if it has one.
#[inline(never)]
fn existing(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    write_key_of_client(scratch);
    let Some(found) = connection::find(&scratch.other_key) else {
        return ABSENT;
    };
    // SAFETY: a value that the map just gave.
    let port = unsafe { (*found).nat_port };
    claim::own(scratch);
    claim::address_answers(scratch, port);
    if !claim::may_have(scratch.tuple.proto, u16::from_be_bytes(port)) {
        return TAKEN;
    }
    let claimed = claim::claim_alias(skb, scratch);
    if claimed == FOUND {
        scratch.mapping_flags = FLAG_MAPPED;
        // SAFETY: as above.
        unsafe { used(found) };
    }
    claimed
}

/// Whether a connection that is over may begin again by its port, the one in `scratch.connection`, and as what: its
/// flag, or [`REFUSED`]. One from before the settings wanted mappings begins one.
#[inline(never)]
pub fn renews(scratch: &mut Scratch, payer: u32) -> u32 {
    if !has_mappings(payer) || !is_of_interest(scratch) {
        return 0;
    }
    write_key_of_client(scratch);
    match connection::find(&scratch.other_key) {
        // SAFETY: a value that the map just gave.
        Some(found) => unsafe {
            if (*found).nat_port != scratch.connection.nat_port {
                return REFUSED;
            }
            used(found);
            FLAG_MAPPED.into()
        },
        None if scratch.tuple.dst_port == DNS => 0,
        None => {
            scratch.search = BEGINS;
            scratch.alias_key.dst_port = scratch.connection.nat_port;
            write_alias(scratch);
            claim::own(scratch);
            if reserve(scratch) != FOUND {
                return REFUSED;
            }
            match write(scratch, payer) {
                FOUND => FLAG_MAPPED.into(),
                _ => {
                    release(scratch);
                    REFUSED
                }
            }
        }
    }
}

/// The connection has to ask for a port anew.
pub const REFUSED: u32 = u32::MAX;

/// Makes the key of the client's mapping.
#[inline(always)]
fn write_key_of_client(scratch: &mut Scratch) {
    let Scratch {
        other_key,
        tuple,
        nat,
        ..
    } = scratch;
    write_key(other_key, &tuple.src, tuple.src_port, nat);
}

/// The key of [`sinabro_common::abi::connection::Tuple::mapping`], whose client is the lower end.
#[inline(always)]
fn write_key(key: &mut ConnectionKey, client: &Addr, port: [u8; 2], nat: &Addr) {
    key.low = *client;
    key.low_port = port;
    key.high = nat.any_remote();
    key.high_port = [0; 2];
    key.proto = proto::UDP;
}

/// Makes the key of a mapping's alias, but for its port.
#[inline(always)]
fn write_alias(scratch: &mut Scratch) {
    let Scratch {
        mapping_alias, nat, ..
    } = scratch;
    mapping_alias.src = nat.any_remote();
    mapping_alias.src_port = [0; 2];
    mapping_alias.dst = *nat;
    mapping_alias.proto = proto::UDP;
}

/// Whether the search that is going on is for a port that becomes a mapping's.
#[inline(always)]
pub fn begins(scratch: &Scratch) -> bool {
    scratch.search == BEGINS
}

/// From this attempt on no port is left for a mapping: one that is free towards the remote end will do, whosever mapping's
/// it is. So whoever has all ports takes others' mappings, and not their way out.
pub const GIVES_UP: u32 = ATTEMPTS / 3 * 2;

#[inline(always)]
pub fn give_up(scratch: &mut Scratch) {
    if begins(scratch) {
        scratch.mapping_flags = FLAG_APART;
    }
    scratch.search = NONE;
}

/// Reserves the port in the alias's key, or finds that it is a mapping's.
#[inline(never)]
pub fn reserve(scratch: &mut Scratch) -> i32 {
    if scratch.search == NONE {
        return FOUND;
    }
    scratch.mapping_alias.dst_port = scratch.alias_key.dst_port;
    if scratch.search == KEEPS_OFF {
        return match ALIASES.get_ptr(&scratch.mapping_alias) {
            Some(_) => TAKEN,
            None => FOUND,
        };
    }
    match ALIASES.insert(&scratch.mapping_alias, &scratch.alias, BPF_NOEXIST.into()) {
        Ok(()) => FOUND,
        Err(EEXIST) => TAKEN,
        Err(_) => drop(DropReason::NatTableFull),
    }
}

/// Gives back what was reserved.
#[inline(never)]
pub fn release(scratch: &mut Scratch) -> u32 {
    if begins(scratch) {
        let _ = ALIASES.remove(&scratch.mapping_alias);
    }
    0
}

/// Writes the mapping of a port that was found and reserved. A mapping that another processor wrote meanwhile counts
/// instead.
#[inline(never)]
pub fn begin(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    scratch.connection.nat_port = scratch.alias_key.dst_port;
    let written = write(scratch, scratch.payer);
    if written == FOUND {
        scratch.mapping_flags = FLAG_MAPPED;
        return FOUND;
    }
    // Nobody else touches claims that no record leads to.
    let _ = ALIASES.remove(&scratch.alias_key);
    release(scratch);
    match written {
        TAKEN => match existing(skb, scratch) {
            TAKEN | ABSENT => LOST,
            found => found,
        },
        dropped => dropped,
    }
}

/// Another processor was first, and it may have been with this very connection.
pub const LOST: i32 = 4;

/// Writes the record of the client's mapping to `scratch.nat` and the port in `scratch.connection`: [`FOUND`],
/// [`TAKEN`] if it has one by now, or a drop.
#[inline(never)]
fn write(scratch: &mut Scratch, payer: u32) -> i32 {
    if !share::take(scratch, payer) {
        return drop(DropReason::ConnectionShare);
    }
    write_key_of_client(scratch);
    let now = connection::now();
    let connection = &mut scratch.connection;
    connection.nat = scratch.nat;
    connection.last_seen_ns = now;
    connection.began_ns = now;
    connection.seen_ticks = connection::ticks();
    connection.payer = payer;
    connection.states = [SEEN, 0];
    connection.flags = FLAG_MASQUERADED | FLAG_MAPPING | FLAG_EMBRYONIC;
    match CONNECTIONS.insert(&scratch.other_key, &scratch.connection, BPF_NOEXIST.into()) {
        Ok(()) => FOUND,
        Err(error) => {
            share::give(payer, true);
            match error {
                EEXIST => TAKEN,
                _ => drop(DropReason::NatTableFull),
            }
        }
    }
}

/// Notes that a mapping is in use.
///
/// # Safety
/// `mapping` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn used(mapping: *mut Connection) {
    // SAFETY: the caller's promise.
    unsafe {
        (*mapping).last_seen_ns = connection::now();
        (*mapping).seen_ticks = connection::ticks();
    }
}

/// Notes the packet's connection in its mapping, if it has one.
#[inline(never)]
pub fn note(scratch: &mut Scratch) -> u32 {
    let Some(record) = connection::find(&scratch.key) else {
        return 0;
    };
    // SAFETY: a value that the map just gave; other programs may write to it, whose every value is one.
    let record = unsafe { &*record };
    if !record.has(FLAG_MAPPED) {
        return 0;
    }
    let Scratch { key, other_key, .. } = &mut *scratch;
    write_key(other_key, &key.low, key.low_port, &record.nat);
    if record.client_is_high() {
        other_key.low = key.high;
        other_key.low_port = key.high_port;
    }
    let answered = record.states[0] & record.states[1] & SEEN;
    let Some(found) = connection::find(&scratch.other_key) else {
        return 0;
    };
    // SAFETY: a value that the map just gave. Of two processors that find it unanswered both may count; the agent
    // sets it right.
    unsafe {
        used(found);
        if answered != 0 && (*found).has(FLAG_EMBRYONIC) {
            (*found).flags &= !FLAG_EMBRYONIC;
            (*found).states = [SEEN; 2];
            share::answered((*found).payer);
        }
    }
    0
}
