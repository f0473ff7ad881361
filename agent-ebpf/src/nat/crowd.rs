//! Remote ends towards which few ports are left: which ones are taken is noted, so that a free one is found without
//! luck (`PORT_BITMAPS`).
//!
//! All of it is a hint. A bit that is lost, as two processors write to one word, costs a try; a bit that stays although its
//! port is free again costs that port until the agent's next sweep.

use super::mapping;
use crate::{
    maps::{ALIASES, PORT_BITMAPS, RESERVED_PORTS},
    scratch::Scratch,
};
use aya_ebpf::bindings::BPF_NOEXIST;
use core::hint::black_box;
use sinabro_common::{
    abi::connection::{TakenPorts, port_table},
    algo::port_pick::{self, RANDOM_ATTEMPTS},
};

/// Makes the key by which the remote end is noted, of the alias's, which has no port yet. Of a port that becomes a
/// mapping's it is the end that stands for all.
#[inline(always)]
pub fn name(scratch: &mut Scratch) {
    let begins = mapping::begins(scratch);
    let Scratch {
        crowd_key,
        alias_key,
        mapping_alias,
        id_mask,
        ..
    } = scratch;
    let of = if begins { mapping_alias } else { alias_key };
    crowd_key.src = of.src.by_words();
    crowd_key.dst = of.dst.by_words();
    let remote = u16::from_be_bytes(of.src_port) & !*id_mask;
    crowd_key.src_port = remote.to_be_bytes();
    crowd_key.proto = of.proto;
}

/// The port to try: the random one until the remote end is crowded.
#[inline(never)]
pub fn choose(scratch: &mut Scratch, random: u16, attempt: u32) -> u16 {
    if attempt == RANDOM_ATTEMPTS {
        begin(scratch);
    }
    let Some(ports) = PORT_BITMAPS.get_ptr(&scratch.crowd_key) else {
        return random;
    };
    let place = free(ports, port_pick::place(random));
    // Some may have become free since it was noted.
    if place < port_pick::NONE {
        port_pick::port_at(place as u16)
    } else {
        random
    }
}

/// Notes from now on which ports are taken.
#[inline(always)]
fn begin(scratch: &Scratch) {
    if let Some(reserved) = RESERVED_PORTS.get(port_table(scratch.crowd_key.proto)) {
        let _ = PORT_BITMAPS.insert(&scratch.crowd_key, reserved, BPF_NOEXIST.into());
    }
}

/// The compiler sees that indexes are within their arrays, and leaves out what shows it; Linux 5.10 does not see it
/// by itself.
#[inline(never)]
fn free(ports: *const TakenPorts, from: u16) -> u32 {
    // SAFETY: a value that the map just gave; within its arrays.
    unsafe {
        let full = (&raw const (*ports).full).cast::<u64>();
        let taken = (&raw const (*ports).taken).cast::<u64>();
        port_pick::next_free(
            from,
            |group| full.add((black_box(group) & 15) as usize).read_volatile(),
            |word| taken.add((black_box(word) & 1023) as usize).read_volatile(),
        )
    }
}

/// Notes that the port in the alias's key is taken now, by whomever, if the remote end is crowded. One that is
/// soon free is not noted.
#[inline(never)]
pub fn note(scratch: &mut Scratch) -> u32 {
    let Some(ports) = PORT_BITMAPS.get_ptr_mut(&scratch.crowd_key) else {
        return 0;
    };
    let begins = mapping::begins(scratch);
    let key = match begins {
        true => &scratch.mapping_alias,
        false => &scratch.alias_key,
    };
    match ALIASES.get_ptr(key) {
        // SAFETY: a value that the map just gave.
        Some(alias) if unsafe { (*alias).reusable_ns } != 0 => return 0,
        // Taken towards the packet's remote end alone.
        None if begins => return 0,
        _ => {}
    }
    let place = port_pick::place(u16::from_be_bytes(scratch.alias_key.dst_port));
    let word = u32::from(place) / 64;
    // SAFETY: a value that the map just gave; within its arrays. No other value of a bit is a wrong one.
    unsafe {
        let taken = (&raw mut (*ports).taken)
            .cast::<u64>()
            .add((word & 1023) as usize);
        let of_word = taken.read_volatile() | 1 << (place % 64);
        taken.write_volatile(of_word);
        if of_word == u64::MAX {
            let full = (&raw mut (*ports).full)
                .cast::<u64>()
                .add((word / 64 & 15) as usize);
            full.write_volatile(full.read_volatile() | 1 << (word % 64));
        }
    }
    1
}
