//! The table of connections (`sinabro_common::abi::connection`).

pub mod ending;
pub mod finished;
pub mod fragment;
pub mod newcomer;
pub mod share;

use crate::{
    PASS, flow,
    maps::{ALIASES, CONNECTIONS, EEXIST, LIMITS},
    nat::mapping,
    parse::{
        l4::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
        proto,
    },
    scratch::{self, Scratch},
};
use aya_ebpf::{
    bindings::BPF_NOEXIST,
    helpers::{bpf_jiffies64, bpf_ktime_get_ns},
};
use core::hint::black_box;
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Connection, ConnectionKey, FLAG_CLIENT_IS_HIGH, FLAG_EMBRYONIC, FLAG_INBOUND,
            FLAG_MAPPED, FLAG_MASQUERADED, FLAG_STACK, is_outside,
        },
    },
    algo::{
        ct_state::{self, ACK, RST},
        lifetime::{self, LATE_NS, MAKES_WAY_AFTER_NS, Stage},
        tcp_window,
    },
};

/// A packet of a busy connection writes its time no more often than this: a second or less, by the kernel's
/// CONFIG_HZ.
const REFRESH_TICKS: u32 = 100;

#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: no arguments.
    unsafe { bpf_ktime_get_ns() }
}

/// The lower half of `jiffies`, which costs a load where the clock costs many.
#[inline(always)]
pub fn ticks() -> u32 {
    // SAFETY: no arguments.
    unsafe { bpf_jiffies64() as u32 }
}

/// Whether a time that was written at these ticks is to be written again.
#[inline(always)]
pub fn is_due(now: u32, written: u32) -> bool {
    now.wrapping_sub(written) >= REFRESH_TICKS
}

/// Ticks of something that the next packet is to write.
#[inline(always)]
pub fn due_now() -> u32 {
    ticks().wrapping_sub(REFRESH_TICKS)
}

/// The record of a connection, over or not.
#[inline(always)]
pub fn find(key: &ConnectionKey) -> Option<*mut Connection> {
    CONNECTIONS.get_ptr_mut(key)
}

/// Removes a record and what it takes of its pod's share.
#[inline(always)]
pub fn remove(key: &ConnectionKey) {
    let Some(found) = find(key) else {
        return;
    };
    // SAFETY: a value that the map just gave.
    let (payer, embryonic) = unsafe { ((*found).payer, (*found).has(FLAG_EMBRYONIC)) };
    if CONNECTIONS.remove(key).is_ok() {
        share::give(payer, embryonic);
    }
}

/// Writes a record of the packet's connection, which is not translated here; false if there is no room for it.
#[inline(always)]
pub fn begin_untranslated(scratch: &mut Scratch, flags: u16, payer: u32) -> bool {
    let embryonic = flags & FLAG_INBOUND == 0;
    let has_room = match embryonic {
        true => share::take(scratch, payer),
        false => share::take_inbound(scratch, payer),
    };
    if !has_room {
        return false;
    }
    scratch.connection.nat = Addr::UNSPECIFIED;
    scratch.connection.nat_port = [0; 2];
    scratch.connection.frontend = Addr::UNSPECIFIED;
    scratch.connection.frontend_port = [0; 2];
    scratch.connection.endpoint = 0;
    scratch.connection.endpoint_generation = 0;
    scratch.begin(flags, payer, now());
    match CONNECTIONS.insert(&scratch.key, &scratch.connection, BPF_NOEXIST.into()) {
        Ok(()) => {
            flow::has_record(&scratch.key);
            true
        }
        Err(error) => {
            share::give(payer, embryonic);
            error == EEXIST
        }
    }
}

/// What a packet changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Noted {
    /// Nothing that anything depends on.
    Same,
    /// How far the connection is, or how long its mapping lives: see [`changed`].
    Changed,
    /// It was over before that packet, which is not noted.
    Over,
}

/// Notes a packet in its connection's record, to which its key and direction lead. Two processors may write at once, each
/// end's bits being a byte of its own: a lost bit is set again by the next packet, and a lost time is less than a second old.
///
/// # Safety
/// `connection` is a value that the map gave in this run of the program.
#[inline(always)]
pub unsafe fn note(connection: *mut Connection, scratch: &Scratch) -> Noted {
    // SAFETY: the caller's promise.
    unsafe { note_from(connection, scratch, true) }
}

/// As [`note`], of an end that has an alias, by which most of its packets go past the record: what it acknowledges is not
/// noted. That would be out of date when the other end resets the connection.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
pub unsafe fn note_by_alias(connection: *mut Connection, scratch: &Scratch) -> Noted {
    // SAFETY: the caller's promise.
    unsafe { note_from(connection, scratch, false) }
}

/// `hears`: each packet of this end is noted.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
unsafe fn note_from(connection: *mut Connection, scratch: &Scratch, hears: bool) -> Noted {
    let proto = scratch.key.proto;
    let mut tcp_flags = scratch.l4.tcp_flags;
    // SAFETY: the caller's promise. The kernel keeps the memory until the program ends; it may come to hold
    // another connection if this one ends at this very moment, idle for its whole life.
    unsafe {
        let states = (&raw mut (*connection).states).cast::<u8>();
        let windows = (&raw mut (*connection).receive_windows).cast::<u64>();
        let (own, other, own_window, other_window) = match scratch.from_high {
            false => (states, states.add(1), windows, windows.add(1)),
            true => (states.add(1), states, windows.add(1), windows),
        };
        let was = *own;
        let before = *own_window;
        let mut after = before;
        // Of other protocols than TCP there are no flags.
        if tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST) != 0 {
            let of = u32::from_ne_bytes([tcp_flags, was, *other, 0]);
            let (whose, payer) = ((*connection).flags, (*connection).payer);
            let both = black_box(edge_global(before, *other_window, of, whose, payer));
            (after, tcp_flags) = tcp_window::split(both, tcp_flags);
        } else if tcp_flags & TCP_ACK != 0 {
            after = tcp_window::heard(before, &scratch.tcp.numbers(0));
        }
        if hears && after != before {
            *own_window = after;
        }
        let ticks = ticks();
        // Not compared here: the verifier would walk the rest once more.
        let mut mapped = 0;
        // A reset is noted when it comes: a moment later a SYN may take the connection's place.
        let at_once = u32::from(tcp_flags & TCP_RST) * REFRESH_TICKS;
        if is_due(ticks, (*connection).seen_ticks.wrapping_sub(at_once)) {
            let now = now();
            let idle = now.wrapping_sub((*connection).last_seen_ns);
            // Another processor's clock may be ahead of ours.
            if idle < 1 << 63 {
                // Netfilter may know a connection for longer (`FLAG_STACK`): the agent ends its record.
                if (*connection).flags & FLAG_STACK == 0 && is_over(connection, proto, idle) {
                    return Noted::Over;
                }
                (*connection).last_seen_ns = now;
            }
            (*connection).seen_ticks = ticks;
            mapped = (*connection).flags & FLAG_MAPPED;
        }
        let state = ct_state::next(was, proto, tcp_flags);
        if state != was {
            *own = state;
        }
        // Who goes on sending has not taken the other end's reset, which anybody may have forged. An end that did
        // reset answers with another.
        let reset = *other & RST & !(scratch.l4.tcp_flags << 1);
        if reset != 0 {
            *other &= !RST;
        }
        // Its mapping is to live as long. All in one number: the verifier walks what follows once for each condition.
        match u16::from((state ^ was) | reset) | mapped {
            0 => Noted::Same,
            _ => Noted::Changed,
        }
    }
}

/// As [`note`], but a connection is over, too, if the packet [begins another](begins_again) by its ports.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
pub unsafe fn note_or_begin_again(connection: *mut Connection, scratch: &Scratch) -> Noted {
    // SAFETY: the caller's promise.
    unsafe {
        match begins_again(connection, scratch.key.proto, scratch.l4.tcp_flags) {
            true => Noted::Over,
            false => note(connection, scratch),
        }
    }
}

/// What a SYN, FIN or RST does: the window of its sender after it, with those of its flags that count. Given are both
/// ends' windows before it, its flags with the bits of its sender and of the other end, and the record's flags and payer.
#[inline(never)]
fn edge_global(own: u64, other: u64, of: u32, whose: u16, payer: u32) -> u64 {
    let [tcp_flags, was, others, _] = black_box(of).to_ne_bytes();
    let (own, other) = (black_box(own), black_box(other));
    let Some(scratch) = scratch::get() else {
        return black_box(own);
    };
    // A SYN of a client that cannot be another's begins again, whatever was.
    let (whose, payer) = (black_box(whose), black_box(payer));
    let is_client = (whose & FLAG_CLIENT_IS_HIGH != 0) == scratch.from_high;
    let is_checked = is_client && !is_begun_outside(whose, payer);
    let is_open = !is_checked && was & ACK != 0 && (was | others) & RST == 0;
    let payload = scratch.ip.l4_len.saturating_sub(u32::from(scratch.l4.len));
    let numbers = scratch.tcp.numbers(scratch.announced());
    let count = tcp_window::that_count(other, tcp_flags, numbers.sequence, payload);
    let after = tcp_window::after(own, tcp_flags, &numbers, is_open);
    black_box(tcp_window::with_flags(after, count))
}

/// # Safety
/// As in [`note`].
#[inline(always)]
pub unsafe fn stage(connection: *const Connection, proto: u8) -> Stage {
    // SAFETY: the caller's promise.
    let (client, server, lived) = unsafe { ends(connection) };
    lifetime::stage(proto, client, server, lived)
}

/// Whether a packet asks for a connection by the ports of one that is closed: of that nothing is left to know. If the client is
/// outside, not at once after a reset: one that was forged the other end answers (RFC 5961 §3.2), and the connection goes on.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
pub unsafe fn begins_again(connection: *const Connection, proto: u8, tcp_flags: u8) -> bool {
    proto == proto::TCP
        && ct_state::begins(proto::TCP, tcp_flags)
        // SAFETY: the caller's promise.
        && unsafe {
            let stage = stage(connection, proto::TCP);
            let waits = stage as u8 == Stage::Reset as u8 && has_client_outside(connection);
            stage.is_closed() && !(waits && idle(connection) < LATE_NS)
        }
}

/// Whether the client of a record with these flags and this payer is neither a pod of this node nor the node: anybody may have
/// sent what seems to come from it.
#[inline(always)]
const fn is_begun_outside(flags: u16, payer: u32) -> bool {
    flags & FLAG_INBOUND != 0 || is_outside(payer)
}

/// [`is_begun_outside`] of a record.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
unsafe fn has_client_outside(connection: *const Connection) -> bool {
    // SAFETY: the caller's promise.
    unsafe { is_begun_outside((*connection).flags, (*connection).payer) }
}

/// What client and server have sent, and nanoseconds from the first to the last packet.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
unsafe fn ends(connection: *const Connection) -> (u8, u8, u64) {
    // SAFETY: the caller's promise.
    unsafe {
        let (client, server) = (*connection).client_and_server();
        let lived = (*connection)
            .last_seen_ns
            .wrapping_sub((*connection).began_ns);
        (client, server, lived)
    }
}

/// # Safety
/// As in [`note`].
#[inline(always)]
pub unsafe fn is_over(connection: *const Connection, proto: u8, idle_ns: u64) -> bool {
    // SAFETY: the caller's promise.
    let (client, server, lived) = unsafe { ends(connection) };
    let ends = u32::from_ne_bytes([proto, client, server, 0]);
    black_box(is_over_global(ends, lived, idle_ns)) != 0
}

/// Of a connection once a second: its ends are the protocol's number and what client and server have sent.
#[inline(never)]
fn is_over_global(ends: u32, lived_ns: u64, idle_ns: u64) -> u32 {
    let [proto, client, server, _] = black_box(ends).to_ne_bytes();
    let stage = lifetime::stage(proto, client, server, black_box(lived_ns));
    black_box(outlives(stage, black_box(idle_ns)).into())
}

/// Whether a connection at a stage has been idle for longer than it may be.
#[inline(always)]
pub fn outlives(stage: Stage, idle_ns: u64) -> bool {
    let stage = stage as u32 & 15;
    let Some(limits) = LIMITS.get_ptr(0) else {
        return false;
    };
    // SAFETY: an array of sixteen in a value that the map gave.
    let seconds = unsafe {
        (&raw const (*limits).lifetimes)
            .cast::<u32>()
            .add(stage as usize)
            .read()
    };
    idle_ns > u64::from(seconds) * 1_000_000_000
}

/// For how many nanoseconds nothing has come.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
pub unsafe fn idle(connection: *const Connection) -> u64 {
    // Another processor may have noted a packet since.
    // SAFETY: the caller's promise.
    now().saturating_sub(unsafe { (*connection).last_seen_ns })
}

/// Whether the ports of datagrams may be another's: of a question that has its answer, or of what has been idle for a while.
/// Sockets draw their ports by chance, and who draws the same one again is the same client, or comes after it. Not before
/// they have been idle for `pause_ns`.
///
/// # Safety
/// As in [`note`].
#[inline(always)]
pub unsafe fn makes_way(connection: *const Connection, proto: u8, pause_ns: u64) -> bool {
    if proto != proto::UDP {
        return false;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let idle = idle(connection);
        idle >= pause_ns
            && (idle > MAKES_WAY_AFTER_NS
                || stage(connection, proto) as u32 == Stage::Replied as u32)
    }
}

/// What follows from another stage of `scratch.key`'s connection: it is no longer among those that nobody
/// answered, its port may be another's soon, or not after all. Its mapping is noted with it.
#[inline(always)]
pub fn changed(scratch: &mut Scratch) {
    scratch.lend(changed_global);
}

#[inline(never)]
fn changed_global() -> i32 {
    scratch::borrow(|scratch| {
        follow(scratch);
        PASS
    })
}

#[inline(always)]
fn follow(scratch: &mut Scratch) {
    let Some(connection) = find(&scratch.key) else {
        return;
    };
    // SAFETY: a value that the map just gave.
    if unsafe { (*connection).has(FLAG_MAPPED) } {
        mapping::note(scratch);
    }
    let proto = scratch.key.proto;
    // SAFETY: a value that the map just gave.
    let (stage, record) = unsafe { (stage(connection, proto), &*connection) };
    // By a byte in memory, of which the verifier knows nothing: it does not walk the rest for each stage.
    let stage = black_box(stage);
    if record.has(FLAG_EMBRYONIC) && !stage.is_embryonic() {
        // SAFETY: as above. Of two processors that do this at once both may count; the agent sets it right.
        unsafe { (*connection).flags &= !FLAG_EMBRYONIC };
        share::answered(record.payer);
    }
    finished::note(scratch, stage, record.payer);
    // A mapping keeps its port.
    if record.flags & (FLAG_MASQUERADED | FLAG_MAPPED) != FLAG_MASQUERADED {
        return;
    }
    let Scratch { key, alias_key, .. } = scratch;
    if record.client_is_high() {
        alias_key.src = key.low;
        alias_key.src_port = key.low_port;
    } else {
        alias_key.src = key.high;
        alias_key.src_port = key.high_port;
    }
    // SAFETY: as above.
    alias_key.dst = unsafe { Addr::at(&raw const record.nat) };
    alias_key.proto = key.proto;
    alias_key.set_dst_port(record.nat_port);
    let (proto, [high, low]) = (alias_key.proto, alias_key.src_port);
    let pause = pause_global(u32::from_ne_bytes([stage as u8, proto, high, low]));
    let Some(alias) = ALIASES.get_ptr_mut(&scratch.alias_key) else {
        return;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        let reusable = (*alias).reusable_ns;
        if pause == 0 {
            if reusable != 0 {
                (*alias).reusable_ns = 0;
            }
        } else if reusable == 0 {
            (*alias).reusable_ns = now() + pause;
        }
    }
}

/// For how many nanoseconds a connection's port is not to be another's yet; zero: it keeps it. Of the numbers of its stage and protocol, and its
/// remote port, network order. A function that is verified once: the rest is not walked for each stage.
#[inline(never)]
fn pause_global(of: u32) -> u64 {
    let [stage, proto, high, low] = black_box(of).to_ne_bytes();
    let is_question = proto == proto::UDP && [high, low] == mapping::DNS;
    black_box(if Stage::is_closed_by_number(stage) {
        LATE_NS
    } else if stage == Stage::Replied as u8 && is_question {
        MAKES_WAY_AFTER_NS
    } else {
        0
    })
}
