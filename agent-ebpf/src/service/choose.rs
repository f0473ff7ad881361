//! An endpoint for a new connection.
//!
//! Its alias is claimed before its record is written, as with masquerade. Where the endpoint already has a connection
//! from the client's port (directly, or by another frontend), its answers could not be told from this one's: another
//! endpoint is tried.

use super::{
    NONE, hairpin, is_draining, is_handover,
    leave::{KNOWN, forget, make_way},
    refuse::refuse,
    unallocated,
};
use crate::{
    connection::{self, newcomer, share},
    flow,
    maps::{
        AFFINITY, ALIASES, BACKENDS, CONFIG, CONNECTIONS, EEXIST, FRONTENDS, SETS, SLOTS,
        SOURCE_RANGES,
    },
    nat::{DROPPED, drop, is_carried, socket},
    parse::proto,
    scratch::{self, Scratch},
    stage::tunnel,
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_NOEXIST},
    helpers::bpf_get_prandom_u32,
    maps::lpm_trie::Key,
};
use core::hint::black_box;
use sinabro_common::{
    abi::{
        Addr,
        connection::{FLAG_MASQUERADED, FLAG_SERVICE, KEEPS_SOURCE, outside_share},
        drop::DropReason,
        service::{
            BACKEND_DRAINING, BACKEND_SERVING, FRONTEND_CONSISTENT, FRONTEND_EXTERNAL,
            FRONTEND_GUARDED, FRONTEND_NODE_PORT, FRONTEND_OF_NODE, Kind, SourceKey,
        },
    },
    algo::{client_hash, ct_state},
};

/// The frontend's set is in the scratch, and has endpoints.
const BALANCE: i32 = 68;
/// Another endpoint may do.
const NEXT: i32 = 69;

/// The client is to hear that nobody is there, for `scratch.reason`.
const REFUSE: i32 = 71;

/// Endpoints that are tried.
const ATTEMPTS: u32 = 8;

const SECOND_NS: u64 = 1_000_000_000;

/// Looks up what the packet's destination is for a client inside of the cluster, or outside as the scratch says:
/// [`BALANCE`], what becomes of the packet, or no Service's. `has_one`: it has an endpoint that does not serve any more,
/// which it keeps if it does not begin anything.
#[inline(never)]
fn frontend(skb: *mut __sk_buff, scratch: &mut Scratch, has_one: bool) -> i32 {
    if is_draining() {
        return NONE;
    }
    let flags = scratch.l4.tcp_flags;
    let is_outside = scratch.is_outside;
    let Scratch {
        tuple,
        frontend_key: key,
        ..
    } = scratch;
    key.addr = tuple.dst;
    key.port = tuple.dst_port;
    key.proto = tuple.proto;
    let begins = ct_state::begins(tuple.proto, flags);
    if begins && let Some(frontend) = FRONTENDS.get_ptr(&scratch.frontend_key) {
        // SAFETY: a value that the map just gave.
        let (index, flags) = unsafe {
            scratch.service = (*frontend).service;
            scratch.affinity_seconds = (*frontend).affinity_seconds;
            let index = match is_outside {
                false => (*frontend).inside,
                true => (*frontend).outside,
            };
            (index, (*frontend).flags)
        };
        if flags & FRONTEND_OF_NODE != 0
            || flags & FRONTEND_EXTERNAL != 0 && tunnel::is_a_pods(&scratch.tuple.dst)
        {
            return NONE;
        }
        // What a socket of the node has asked for by a port that is a Service's, too, is the socket's.
        if flags & (FRONTEND_NODE_PORT | FRONTEND_EXTERNAL) != 0
            && scratch.tuple.proto == proto::UDP
            && socket::is_asked(skb, scratch) != 0
        {
            return NONE;
        }
        if flags & FRONTEND_GUARDED != 0 && !may_use(scratch) {
            return drop(DropReason::ServiceSourceRange);
        }
        scratch.is_consistent = is_outside && flags & FRONTEND_CONSISTENT != 0;
        let Some(set) = SETS.get_ptr(index) else {
            return drop(DropReason::ServiceNoEndpoint);
        };
        // SAFETY: as above; one load of eight bytes, which the agent stores at once.
        scratch.set = unsafe { set.read_volatile() };
        return match scratch.set.kind() {
            Kind::Balance => BALANCE,
            Kind::Refuse => refused(scratch, DropReason::ServiceNoEndpoint),
            Kind::Drop => drop(DropReason::ServiceNotHere),
        };
    }
    if has_one && !begins {
        return KNOWN;
    }
    // The rest of a connection that the stack has from before, or a proxy beside: from outside there may be many.
    if is_outside && !begins {
        return NONE;
    }
    let key = &mut scratch.frontend_key;
    key.port = [0; 2];
    key.proto = 0;
    match FRONTENDS.get_ptr(&scratch.frontend_key) {
        None if begins => unallocated::check(&scratch.tuple.dst),
        None => NONE,
        Some(_)
            if CONFIG
                .get(0)
                .is_some_and(|config| is_carried(config, scratch)) =>
        {
            drop(DropReason::NatCarried)
        }
        Some(_) if is_handover() && !begins => NONE,
        Some(_) => refused(scratch, DropReason::ServiceNoPort),
    }
}

/// What becomes of a packet without an endpoint, or with one that does not serve any more (`has_one`): [`KNOWN`] once it
/// has one.
#[inline(always)]
pub fn led(skb: *mut __sk_buff, scratch: &mut Scratch, has_one: bool) -> i32 {
    let action = frontend(skb, scratch, has_one);
    if has_one && action != KNOWN {
        forget(scratch);
    }
    match action {
        BALANCE => begin(skb, scratch),
        REFUSE => refuse(skb, scratch),
        action => action,
    }
}

/// Whether the client is in a range of the Service in the scratch.
#[inline(always)]
fn may_use(scratch: &Scratch) -> bool {
    let source = SourceKey {
        service: scratch.service,
        client: scratch.tuple.src,
    };
    let bits = SourceKey::bits_of(8 * size_of::<Addr>() as u32);
    SOURCE_RANGES.get(Key::new(bits, source)).is_some()
}

#[inline(always)]
fn refused(scratch: &mut Scratch, reason: DropReason) -> i32 {
    scratch.reason = reason as i32;
    REFUSE
}

/// Chooses an endpoint of `scratch.set`: [`KNOWN`], or what becomes of the packet.
#[inline(never)]
fn begin(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    scratch.payer = match scratch.is_outside {
        true => outside_share(scratch.tuple.proto),
        // SAFETY: the context is valid for as long as the program runs.
        false => unsafe { (*skb).ifindex },
    };
    if !share::take(scratch, scratch.payer) {
        return drop(DropReason::ConnectionShare);
    }
    if !scratch.is_outside && scratch.tuple.proto == proto::TCP {
        forget_direct(scratch);
    }
    scratch.random = where_from(scratch).into();
    // Unless one is found.
    scratch.reason = DropReason::ServiceNoEndpoint as i32;
    let mut attempt = 0;
    while attempt < ATTEMPTS {
        match try_one(scratch, attempt) {
            NEXT => attempt += 1,
            KNOWN => return KNOWN,
            other => {
                share::give(scratch.payer, true);
                return match other {
                    JOIN => join(scratch),
                    dropped => dropped,
                };
            }
        }
    }
    share::give(scratch.payer, true);
    DROPPED + scratch.reason
}

/// Removes the record of a masqueraded connection by the same ports, from before the destination was a frontend: what is sent goes on
/// that ([`crate::forward::leave::goes_on`]).
#[inline(never)]
fn forget_direct(scratch: &mut Scratch) -> u32 {
    let Scratch {
        tuple, other_key, ..
    } = &mut *scratch;
    tuple.write_key(other_key);
    let Some(found) = connection::find(&scratch.other_key) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    if unsafe { (*found).flags } & (FLAG_MASQUERADED | FLAG_SERVICE) == FLAG_MASQUERADED {
        connection::remove(&scratch.other_key);
    }
    0
}

/// Where in its set the search for an endpoint begins, as a part of 2^32.
#[inline(never)]
fn where_from(scratch: &mut Scratch) -> u32 {
    if !scratch.is_consistent {
        // SAFETY: no arguments.
        return unsafe { bpf_get_prandom_u32() };
    }
    // With affinity all of a client's connections have one endpoint, by whichever node they come.
    let port = match scratch.affinity_seconds {
        0 => scratch.tuple.src_port,
        _ => [0; 2],
    };
    client_hash::place(&scratch.tuple.src, port)
}

/// Another processor has claimed the packet's alias.
const JOIN: i32 = 70;

/// Takes the endpoint that another processor has just chosen for this connection.
#[inline(never)]
fn join(scratch: &mut Scratch) -> i32 {
    let Some(alias) = ALIASES.get_ptr(&scratch.tuple) else {
        return drop(DropReason::ServiceClash);
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        scratch.alias.addr = Addr::at(&raw const (*alias).addr);
        scratch.alias.port = (*alias).port;
    }
    KNOWN
}

/// One attempt.
#[inline(always)]
fn try_one(scratch: &mut Scratch, attempt: u32) -> i32 {
    scratch.lend(|| try_one_global(attempt))
}

#[inline(never)]
fn try_one_global(attempt: u32) -> i32 {
    scratch::borrow(|scratch| tried(scratch, black_box(attempt)))
}

#[inline(always)]
fn tried(scratch: &mut Scratch, attempt: u32) -> i32 {
    let is_kept = by_affinity(scratch, attempt);
    if !is_kept && !by_slot(scratch, attempt) {
        return NEXT;
    }
    scratch.reason = DropReason::ServiceClash as i32;
    // Its own end: which is the client's nobody could tell.
    if scratch.alias.addr == scratch.tuple.src && scratch.alias.port == scratch.tuple.src_port {
        return NEXT;
    }
    scratch.resolve();
    // It is the client's.
    scratch.alias.pad[0] = KEEPS_SOURCE;
    scratch.alias.takers = 0;
    scratch.alias.reusable_ns = 0;
    // The next packet is always noted.
    scratch.alias.noted_ticks = connection::due_now();
    match ALIASES.insert(&scratch.tuple, &scratch.alias, BPF_NOEXIST.into()) {
        Ok(()) => {}
        Err(EEXIST) => return JOIN,
        Err(_) => return drop(DropReason::NatTableFull),
    }
    // Those that nobody has come first.
    let takes = attempt >= scratch.set.count() || attempt == ATTEMPTS - 1;
    let written = write(scratch, takes);
    if written != KNOWN {
        // Nobody else touches a claim that no record leads to.
        let _ = ALIASES.remove(&scratch.tuple);
        if is_kept {
            // The client's other connections may have it.
            scratch.affinity_seconds = 0;
        }
    }
    written
}

/// Writes the record: [`KNOWN`], [`NEXT`] if the endpoint has one of these ends, or a drop. `takes`: in the place of one
/// that makes way.
#[inline(never)]
fn write(scratch: &mut Scratch, takes: bool) -> i32 {
    let flags = hairpin::claim(scratch);
    let Scratch {
        connection, tuple, ..
    } = &mut *scratch;
    connection.frontend = tuple.dst;
    connection.frontend_port = tuple.dst_port;
    let now = connection::now();
    scratch.begin(flags, scratch.payer, now);
    let mut again = true;
    loop {
        match CONNECTIONS.insert(&scratch.key, &scratch.connection, BPF_NOEXIST.into()) {
            Ok(()) => break,
            Err(EEXIST) if again && is_done(scratch, now, takes) => again = false,
            Err(EEXIST) => return NEXT,
            Err(_) => return drop(DropReason::NatTableFull),
        }
    }
    flow::has_record(&scratch.key);
    if scratch.is_outside {
        newcomer::settle(scratch);
    }
    if scratch.affinity_seconds != 0 {
        let Scratch {
            affinity,
            connection,
            ..
        } = &mut *scratch;
        affinity.last_ns = now;
        affinity.backend = connection.endpoint;
        affinity.generation = connection.endpoint_generation;
        // The least recently used make way.
        let _ = AFFINITY.insert(&scratch.affinity_key, &scratch.affinity, 0);
    }
    KNOWN
}

/// Whether the connection between the same ends is over, or done with and this one begins anew: its record is gone then.
/// What leads to that is found to lead nowhere.
#[inline(never)]
fn is_done(scratch: &mut Scratch, now: u64, takes: bool) -> bool {
    let Some(found) = connection::find(&scratch.key) else {
        return true;
    };
    let proto = scratch.key.proto;
    // SAFETY: a value that the map just gave.
    let is_done = unsafe {
        let idle = now.wrapping_sub((*found).last_seen_ns);
        (idle < 1 << 63 && connection::is_over(found, proto, idle))
            || connection::stage(found, proto).is_closed()
    };
    if is_done {
        connection::remove(&scratch.key);
    }
    is_done || (takes && make_way(scratch))
}

/// The endpoint that the client has had lately, if it is still chosen from: in `scratch.alias`, and in what is to be
/// written.
#[inline(never)]
fn by_affinity(scratch: &mut Scratch, attempt: u32) -> bool {
    if attempt != 0 || scratch.affinity_seconds == 0 {
        return false;
    }
    let Scratch {
        affinity_key: key,
        tuple,
        service,
        ..
    } = &mut *scratch;
    key.client = tuple.src;
    key.service = *service;
    let Some(found) = AFFINITY.get_ptr(&scratch.affinity_key) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    let (last_ns, backend, generation) =
        unsafe { ((*found).last_ns, (*found).backend, (*found).generation) };
    let kept_ns = u64::from(scratch.affinity_seconds) * SECOND_NS;
    connection::now().saturating_sub(last_ns) < kept_ns
        && read(scratch, backend, generation, BACKEND_DRAINING)
}

/// One of the set's, beginning anywhere.
#[inline(never)]
fn by_slot(scratch: &mut Scratch, attempt: u32) -> bool {
    let count = scratch.set.count();
    // Twice all of them: see `try_one`.
    if count == 0 || attempt > 2 * count {
        return false;
    }
    let first = ((scratch.random * u64::from(count)) >> 32) as u32;
    let index = scratch.set.base().wrapping_add((first + attempt) % count);
    let Some(slot) = SLOTS.get_ptr(index) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    let (backend, generation) = unsafe { ((*slot).backend, (*slot).generation) };
    read(scratch, backend, generation, 0)
}

/// Reads an endpoint, if it is still that of its generation, serves and has none of these flags.
#[inline(always)]
fn read(scratch: &mut Scratch, backend: u32, generation: u32, flags: u16) -> bool {
    let Some(found) = BACKENDS.get_ptr(backend) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        if (*found).generation != generation
            || (*found).flags & (BACKEND_SERVING | flags) != BACKEND_SERVING
        {
            return false;
        }
        scratch.alias.addr = Addr::at(&raw const (*found).addr);
        scratch.alias.port = (*found).port;
    }
    scratch.connection.endpoint = backend;
    scratch.connection.endpoint_generation = generation;
    true
}
