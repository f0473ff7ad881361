//! A translation for a new connection: a port that nobody has towards that remote end.
//!
//! Who has it: another connection, by its alias; a socket of the host, which the kernel is asked for once the
//! alias is claimed. The host's side of that is [`super::host`]: a socket is there before its first packet, which
//! looks for an alias. So of a pod and a host's process that come at the same time at least one sees the
//! other.

use super::{crowd, drop, leave::KNOWN, mapping, socket};
use crate::{
    PASS,
    connection::{self, ending::is_first, share},
    maps::{ALIASES, CONFIG, CONNECTIONS, EEXIST, HOST_PORTS},
    parse::proto,
    scratch::{self, Scratch},
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_ANY, BPF_NOEXIST},
    helpers::bpf_get_prandom_u32,
};
use core::hint::black_box;
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Alias, Connection, FLAG_EMBRYONIC, FLAG_MASQUERADED, HOST_SHARE, KEEPS_SOURCE,
            has_one_id, host_port_word,
        },
        drop::DropReason,
    },
    algo::{
        lifetime::MAKES_WAY_AFTER_NS,
        port_pick::{self, PATIENT_ATTEMPTS},
    },
};

/// A port was found.
pub const FOUND: i32 = 0;

/// Claims a translation of `scratch.tuple` to `scratch.nat` and writes its record: [`KNOWN`], or what becomes
/// of the packet.
#[inline(never)]
pub fn claim(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match claimed(skb, scratch) {
        KNOWN => KNOWN,
        _ if scratch.may_pass => PASS,
        action => action,
    }
}

#[inline(always)]
fn claimed(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let payer = scratch.payer;
    if !scratch.has_record && !share::take(scratch, payer) {
        return drop(DropReason::ConnectionShare);
    }
    scratch.mapping_flags = 0;
    let picked = match has_ports(scratch.tuple.proto) {
        true => port(skb, scratch),
        false => only(scratch),
    };
    if picked != FOUND {
        if !scratch.has_record {
            share::give(payer, true);
        }
        return match picked {
            mapping::LOST => join(scratch),
            dropped => dropped,
        };
    }
    scratch.connection.nat = scratch.alias_key.dst;
    scratch.connection.nat_port = scratch.alias_key.dst_port;
    if scratch.has_record {
        return add(scratch);
    }
    let flags = FLAG_MASQUERADED | scratch.mapping_flags;
    scratch.begin(flags, payer, connection::now());
    match CONNECTIONS.insert(&scratch.key, &scratch.connection, BPF_NOEXIST.into()) {
        Ok(()) => KNOWN,
        Err(error) => {
            // Nobody else touches a claim that no record leads to.
            let _ = ALIASES.remove(&scratch.alias_key);
            share::give(payer, true);
            match error {
                EEXIST => join(scratch),
                _ => drop(DropReason::NatTableFull),
            }
        }
    }
}

/// Writes the translation into the record that the packet's connection has. Of two processors that come to this at the
/// same moment one may leave its claim behind, which leads to no record then.
#[inline(never)]
fn add(scratch: &mut Scratch) -> i32 {
    let Some(found) = connection::find(&scratch.key) else {
        // It was over just now.
        let _ = ALIASES.remove(&scratch.alias_key);
        return drop(DropReason::NatTableFull);
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        if (*found).has(FLAG_MASQUERADED) {
            let _ = ALIASES.remove(&scratch.alias_key);
            return join(scratch);
        }
        (*found).nat = scratch.connection.nat.by_words();
        (*found).nat_port = scratch.connection.nat_port;
        (*found).flags |= FLAG_MASQUERADED | scratch.mapping_flags;
    }
    KNOWN
}

/// Gives the packet the translation that another processor has just claimed for its connection.
#[inline(never)]
fn join(scratch: &mut Scratch) -> i32 {
    if let Some(winner) = connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        unsafe {
            scratch.connection.nat = Addr::at(&raw const (*winner).nat);
            scratch.connection.nat_port = (*winner).nat_port;
        }
        if scratch.connection.nat != Addr::UNSPECIFIED {
            return KNOWN;
        }
    }
    drop(DropReason::NatTableFull)
}

/// A port, the mapping's where there is one.
#[inline(always)]
fn port(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let found = match mapping::look(skb, scratch) {
        TAKEN => pick(skb, scratch),
        found => return found,
    };
    match found == FOUND && mapping::begins(scratch) {
        true => mapping::begin(skb, scratch),
        false => found,
    }
}

/// Whether a protocol's packets say which of several connections between two addresses they are of.
#[inline(always)]
fn has_ports(proto: u8) -> bool {
    matches!(
        proto,
        proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP | proto::ICMP | proto::ICMPV6
    )
}

/// Makes the alias in the scratch the client's own.
#[inline(always)]
pub fn own(scratch: &mut Scratch) {
    scratch.alias.addr = scratch.tuple.src.by_words();
    scratch.alias.port = scratch.tuple.src_port;
    // The record that is there already is a Service's.
    scratch.alias.pad[0] = match scratch.has_record {
        false => KEEPS_SOURCE,
        true => 0,
    };
    scratch.alias.takers = 0;
    // The first answer is always noted.
    scratch.alias.noted_ticks = connection::due_now();
    scratch.alias.reusable_ns = 0;
}

/// Makes the key of the alias that is for answers to a port of the address that the packet is to have.
#[inline(always)]
pub fn address_answers(scratch: &mut Scratch, port: [u8; 2]) {
    let Scratch {
        tuple,
        nat,
        alias_key,
        ..
    } = scratch;
    tuple.write_reply_to(nat, port, alias_key);
}

/// A connection of two addresses: there is no port to choose.
#[inline(never)]
fn only(scratch: &mut Scratch) -> i32 {
    address_answers(scratch, scratch.tuple.src_port);
    own(scratch);
    match ALIASES.insert(&scratch.alias_key, &scratch.alias, BPF_NOEXIST.into()) {
        Ok(()) => FOUND,
        Err(EEXIST) if take_over(scratch) => FOUND,
        Err(EEXIST) => drop(DropReason::NatPortsExhausted),
        Err(_) => drop(DropReason::NatTableFull),
    }
}

/// Finds a port and claims it: the alias is written.
#[inline(never)]
fn pick(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    // The host keeps its ports, whatever ports pods may have. At another address than the packet's they may be another
    // socket's.
    let is_at_home = scratch.payer == HOST_SHARE && scratch.nat == scratch.tuple.src;
    if is_at_home && only(scratch) == FOUND {
        return FOUND;
    }
    own(scratch);
    address_answers(scratch, [0; 2]);
    let proto = scratch.tuple.proto;
    // In the scratch, not compared in the loop: the verifier would walk it for each protocol.
    scratch.host_ports = host_port_word(proto, 0).map_or(u32::MAX / 2, |(word, _)| word);
    scratch.id_mask = if has_one_id(proto) { u16::MAX } else { 0 };
    crowd::name(scratch);
    // A port that nobody outside can foresee (RFC 6056 §3).
    // SAFETY: no arguments.
    scratch.random =
        unsafe { u64::from(bpf_get_prandom_u32()) << 32 | u64::from(bpf_get_prandom_u32()) };
    let mut attempt = 0;
    while attempt < port_pick::ATTEMPTS {
        match try_port(skb, scratch, attempt) {
            TAKEN => attempt += 1,
            found => return found,
        }
    }
    drop(DropReason::NatPortsExhausted)
}

/// Somebody has the port.
pub const TAKEN: i32 = 2;

/// One attempt. The client's own port comes first.
#[inline(always)]
fn try_port(skb: *mut __sk_buff, scratch: &mut Scratch, attempt: u32) -> i32 {
    scratch.lend(|| try_port_global(skb, attempt))
}

#[inline(never)]
fn try_port_global(skb: *mut __sk_buff, attempt: u32) -> i32 {
    scratch::borrow(|scratch| tried(skb, scratch, black_box(attempt)))
}

#[inline(always)]
fn tried(skb: *mut __sk_buff, scratch: &mut Scratch, attempt: u32) -> i32 {
    let Some(config) = CONFIG.get(0) else {
        return TAKEN;
    };
    let own = u16::from_be_bytes(scratch.tuple.src_port);
    if attempt == mapping::GIVES_UP {
        mapping::give_up(scratch);
    }
    let (min, max) = (config.nat_port_min, config.nat_port_max);
    let random = port_pick::candidate(scratch.random, own, attempt, min, max);
    let port = match attempt {
        0 => random,
        _ => crowd::choose(scratch, random, attempt),
    };
    scratch.alias_key.dst_port = port.to_be_bytes();
    scratch.may_take_over = attempt >= PATIENT_ATTEMPTS;
    let remote = u16::from_be_bytes(scratch.tuple.dst_port);
    let both = port & scratch.id_mask | remote & !scratch.id_mask;
    scratch.alias_key.src_port = both.to_be_bytes();
    let result = match port < min || port > max || is_of_host(scratch.host_ports, port) {
        true => TAKEN,
        false => claim_port(skb, scratch),
    };
    if attempt != 0 {
        crowd::note(scratch);
    }
    result
}

/// Claims the port that is in the alias's key, and what a mapping needs of it.
#[inline(never)]
fn claim_port(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let reserved = mapping::reserve(scratch);
    if reserved != FOUND {
        return reserved;
    }
    let claimed = claim_alias(skb, scratch);
    if claimed != FOUND {
        mapping::release(scratch);
    }
    claimed
}

/// Claims the port that is in the alias's key towards the remote end in it.
#[inline(never)]
pub fn claim_alias(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match ALIASES.insert(&scratch.alias_key, &scratch.alias, BPF_NOEXIST.into()) {
        Ok(()) => {}
        Err(EEXIST) if scratch.may_take_over && take_over(scratch) => {}
        Err(EEXIST) => return TAKEN,
        Err(_) => return drop(DropReason::NatTableFull),
    }
    if socket::takes_answers(skb, scratch) == 0 {
        return FOUND;
    }
    let _ = ALIASES.remove(&scratch.alias_key);
    TAKEN
}

/// Whether no connection gets this port: a NodePort, a hostPort, what the host reserves. `first`: where its
/// protocol's ports begin in `HOST_PORTS`.
#[inline(always)]
fn is_of_host(first: u32, port: u16) -> bool {
    let word = HOST_PORTS.get(first + u32::from(port / 64));
    word.is_some_and(|word| word >> (port % 64) & 1 != 0)
}

/// Whether connections of a protocol may have this port, as the settings and the host's ports are.
#[inline(always)]
pub fn may_have(proto: u8, port: u16) -> bool {
    let Some(config) = CONFIG.get(0) else {
        return false;
    };
    let first = host_port_word(proto, 0).map_or(u32::MAX / 2, |(word, _)| word);
    port >= config.nat_port_min && port <= config.nat_port_max && !is_of_host(first, port)
}

/// Takes the alias of a connection that is over, or of a question that has its answer. Of several that try at the same time
/// [at most one](is_first) may; whoever comes later finds another alias.
#[inline(never)]
fn take_over(scratch: &mut Scratch) -> bool {
    let Some(alias) = ALIASES.get_ptr_mut(&scratch.alias_key) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        let reusable = (*alias).reusable_ns;
        if reusable == 0 || connection::now() < reusable {
            return false;
        }
        // What the remote end sends to its owner.
        let Scratch {
            real,
            alias_key,
            other_key,
            ..
        } = &mut *scratch;
        real.src = alias_key.src;
        real.src_port = alias_key.src_port;
        real.dst = Addr::at(&raw const (*alias).addr);
        real.proto = alias_key.proto;
        real.set_dst_port((*alias).port);
        real.write_key(other_key);
    }
    // Unless that has another alias by now.
    let owner = connection::find(&scratch.other_key).filter(|found| {
        // SAFETY: a value that the map just gave.
        let (nat, port) = unsafe { ((**found).nat, (**found).nat_port) };
        nat == scratch.alias_key.dst && port == scratch.alias_key.dst_port
    });
    // SAFETY: values that the maps just gave; the alias's number is changed by such additions only.
    unsafe {
        if let Some(owner) = owner
            && !has_ended(owner, alias, scratch.alias_key.proto)
        {
            return false;
        }
        if !is_first(alias) {
            return false;
        }
    }
    if owner.is_some() {
        connection::remove(&scratch.other_key);
    }
    ALIASES
        .insert(&scratch.alias_key, &scratch.alias, BPF_ANY.into())
        .is_ok()
}

/// Whether a connection that let others have its port is still what it was then. One that is closed says so itself when it is not
/// any more. Nobody does for a question that was followed by others.
///
/// # Safety
/// Both are values that maps gave in this run of the program.
#[inline(always)]
unsafe fn has_ended(connection: *const Connection, alias: *mut Alias, proto: u8) -> bool {
    if proto != proto::UDP {
        return true;
    }
    // SAFETY: the caller's promise.
    unsafe {
        if !connection::stage(connection, proto).is_answered() {
            (*alias).reusable_ns = 0;
            return false;
        }
        connection::idle(connection) >= MAKES_WAY_AFTER_NS
    }
}

/// Removes the packet's record. Its alias, if there is one, goes once it is another's or swept.
#[inline(never)]
pub fn forget(scratch: &mut Scratch) -> u32 {
    connection::remove(&scratch.key);
    0
}

/// Begins the packet's connection again with the translation that it had, if nobody else has it by now; which
/// that is, is in the scratch then.
#[inline(never)]
pub fn renew(scratch: &mut Scratch) -> bool {
    let Some(found) = connection::find(&scratch.key) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    let (payer, embryonic) = unsafe {
        if (*found).nat != scratch.nat {
            return false;
        }
        scratch.connection.nat_port = (*found).nat_port;
        ((*found).payer, (*found).has(FLAG_EMBRYONIC))
    };
    let mapping_flags = mapping::renews(scratch, payer);
    if mapping_flags == mapping::REFUSED {
        return false;
    }
    scratch.connection.nat = scratch.nat;
    address_answers(scratch, scratch.connection.nat_port);
    own(scratch);
    let Some(alias) = ALIASES.get_ptr_mut(&scratch.alias_key) else {
        return false;
    };
    // SAFETY: as above.
    unsafe {
        let is_mine = (*alias).addr == scratch.tuple.src && (*alias).port == scratch.tuple.src_port;
        if !is_mine || !is_first(alias) {
            return false;
        }
    }
    // Another one, with which those who look at the one before cannot do anything.
    if ALIASES
        .insert(&scratch.alias_key, &scratch.alias, BPF_ANY.into())
        .is_err()
    {
        return false;
    }
    let flags = FLAG_MASQUERADED | mapping_flags as u16;
    scratch.begin(flags, payer, connection::now());
    if !embryonic {
        share::unanswered(payer);
    }
    CONNECTIONS
        .insert(&scratch.key, &scratch.connection, BPF_ANY.into())
        .is_ok()
}
