//! Counters of pods, and what the connections to a server are like.
//!
//! Messages are counted with their socket and carried over now and then: what many sockets share
//! is too dear to touch for each message.

use super::{ACCELERATION_COUNTERS, SERVER_TRAFFIC};
use aya_ebpf::helpers::bpf_ktime_get_ns;
use sinabro_common::{
    abi::acceleration::{AccelerationCounters, Path, ServerKey, Skip, SocketState, Traffic},
    algo::acceleration::{self, LASTING_EXCHANGES},
};

/// Messages and bytes after which they are carried over.
const CARRY_MESSAGES: u32 = 32;
const CARRY_BYTES: u64 = 1 << 18;

#[inline(always)]
fn now() -> u64 {
    // SAFETY: no arguments.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
fn counters(ifindex: u32) -> Option<&'static mut AccelerationCounters> {
    let counters = ACCELERATION_COUNTERS.get_ptr_mut(ifindex)?;
    // SAFETY: this CPU's own value, valid until the program ends.
    unsafe { counters.as_mut() }
}

/// Counts a message that a socket sends the way it does now.
#[inline(always)]
pub fn sent(state: &mut SocketState, size: u32) {
    // The very first is seen at once.
    let first = state.messages == 0 && state.bytes == 0;
    state.messages += 1;
    state.all_messages = state.all_messages.saturating_add(1);
    state.bytes += u64::from(size);
    if first || state.messages >= CARRY_MESSAGES || state.bytes >= CARRY_BYTES {
        carry(state);
    }
}

/// Carries over what a socket has counted; its path must still be the one it counted for.
#[inline(always)]
pub fn carry(state: &mut SocketState) {
    let (messages, bytes) = (u64::from(state.messages), state.bytes);
    if messages == 0 {
        return;
    }
    if let Some(counters) = counters(state.ifindex) {
        if state.path == Path::Stack as u8 {
            let reason = usize::from(state.reason);
            if let (Some(of_messages), Some(of_bytes)) = (
                counters.passed_messages.get_mut(reason),
                counters.passed_bytes.get_mut(reason),
            ) {
                *of_messages += messages;
                *of_bytes += bytes;
            }
        } else {
            counters.redirected_messages += messages;
            counters.redirected_bytes += bytes;
        }
    }
    let passive = state.passive != 0;
    let lasts = passive && state.counted == 0 && state.all_messages >= LASTING_EXCHANGES;
    let exchanges = state.all_messages;
    learn(&state.key.server(passive), |traffic| {
        acceleration::learn(traffic, !passive, messages, bytes, now());
        if lasts {
            acceleration::count(traffic, exchanges);
        }
    });
    if lasts {
        state.counted = 1;
    }
    state.messages = 0;
    state.bytes = 0;
}

/// Counts a socket enrolled.
#[inline(always)]
pub fn enrolled(ifindex: u32) {
    if let Some(counters) = counters(ifindex) {
        counters.enrolled += 1;
    }
}

/// Counts a socket not enrolled.
#[inline(always)]
pub fn skipped(ifindex: u32, why: Skip) {
    if let Some(counters) = counters(ifindex) {
        counters.skipped[why as usize] += 1;
    }
}

/// Why a new connection to a server should rather not be enrolled.
#[inline(always)]
pub fn judge(server: &ServerKey) -> Option<Skip> {
    let traffic = SERVER_TRAFFIC.get_ptr(server)?;
    // SAFETY: as in [`learn`].
    acceleration::judge(unsafe { &*traffic }, now())
}

/// An enrolled socket closes: a connection to a server ended.
#[inline(always)]
pub fn ended(state: &mut SocketState) {
    carry(state);
    if state.passive != 0 {
        count(state, state.all_messages);
    }
}

/// An enrolled connection gains nothing: what it costs is counted as that of a short one.
#[inline(always)]
pub fn unpaired(state: &mut SocketState) {
    count(state, 0);
}

/// Counts a connection, once.
#[inline(always)]
fn count(state: &mut SocketState, exchanges: u32) {
    if state.counted == 0 {
        state.counted = 1;
        let server = state.key.server(state.passive != 0);
        learn(&server, |traffic| acceleration::count(traffic, exchanges));
    }
}

/// A connection to a server ended that went through TCP.
#[inline(always)]
pub fn ended_plain(server: &ServerKey, segments: [u32; 2], bytes: [u64; 2]) {
    let now = now();
    let [received, sent] = acceleration::messages_of(segments.map(u64::from), bytes);
    learn(server, |traffic| {
        acceleration::learn(traffic, true, received, bytes[0], now);
        acceleration::learn(traffic, false, sent, bytes[1], now);
        acceleration::count(traffic, segments[0].min(segments[1]));
    });
}

#[inline(always)]
fn learn(server: &ServerKey, update: impl Fn(&mut Traffic)) {
    if let Some(traffic) = SERVER_TRAFFIC.get_ptr_mut(server) {
        // SAFETY: a value that the map gave, valid until the program ends. Others may write it at
        // the same time; what gets lost changes no verdict.
        unsafe { update(&mut *traffic) };
        return;
    }
    let mut traffic = Traffic {
        connections: 0,
        exchanges: 0,
        messages: [0; 2],
        bytes: [0; 2],
        updated_ns: now(),
    };
    update(&mut traffic);
    // Without room nothing is remembered.
    let _ = SERVER_TRAFFIC.insert(server, traffic, 0);
}
