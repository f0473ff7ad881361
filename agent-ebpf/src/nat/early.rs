//! Fragments that come in before the first of their packet, which alone says whose it is. They are kept, and come in
//! once more when their turn is.
//!
//! One after the other, without a loop: a fragment that was given to its pod looks whether the next one is there
//! already ([`follow`]). If so both come in again by the same link: the one as it is for its pod now, which nobody
//! changes any more, and the other, which finds the first's note and looks for the next in turn. Offsets only
//! grow, and an entry is removed by whoever sends it, so that each passes once.
//!
//! Of a fragment and its first on two processors one sees the other: each writes before it looks, with a lock of the map's
//! in between ([`fence`]). From then on a note is there, and what comes is not kept.
//!
//! A fragment that is kept goes on to the stack, too: it may be the node's own. What is certainly its own is known by a
//! mark at offset zero ([`stays`]), so that the node's traffic does not drive out what waits.

use super::{drop, find_source, leave::KNOWN};
use crate::{
    DROP, PASS,
    connection::{fragment, now},
    maps::{EARLY_FRAGMENTS, FRAGMENTS},
    parse::Fragment,
    rewrite::End,
    scratch::Scratch,
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_INGRESS, BPF_F_RECOMPUTE_CSUM},
    helpers::{bpf_redirect, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes},
    macros::map,
    maps::PerCpuArray,
    programs::TcContext,
};
use core::arch::asm;
use sinabro_common::abi::{
    drop::DropReason,
    fragment::{EARLY_BYTES, EarlyFragment},
};

/// What is about to be kept: more than a stack has room for. Not pinned.
#[map]
static EARLY: PerCpuArray<EarlyFragment> = PerCpuArray::with_max_entries(1, 0);

/// More fragments are behind this one: a bit of the field that [`name`] gives.
const MORE: u32 = 1 << 16;
/// It could not be read.
const UNREADABLE: u32 = 1 << 17;

/// Makes `scratch.early_key` that of a fragment that is identified; gives its offset, and [`MORE`].
#[inline(always)]
fn name(skb: *mut __sk_buff, scratch: &mut Scratch) -> u32 {
    let Scratch {
        ip,
        fragment_key,
        early_key: key,
        ..
    } = scratch;
    let at = match ip.v6 {
        false => ip.id_at + 2,
        true => ip.id_at - 2,
    };
    let Ok(field) = TcContext::new(skb).load::<[u8; 2]>(at as usize) else {
        return UNREADABLE;
    };
    let field = u32::from(u16::from_be_bytes(field));
    let (offset, more) = match ip.v6 {
        false => (field & 0x1fff, field & 0x2000),
        true => (field >> 3, field & 1),
    };
    key.packet = *fragment_key;
    key.offset = offset;
    match more {
        0 => offset,
        _ => offset | MORE,
    }
}

/// Has what was written before be seen by all before anything is read: a removal takes a lock. What it removes is the mark that
/// the packet is no pod's, which a pod's first makes void, and which nobody found who keeps a fragment.
#[inline(always)]
fn fence(scratch: &mut Scratch) {
    scratch.early_key.offset = 0;
    let _ = EARLY_FRAGMENTS.remove(&scratch.early_key);
}

/// Whether the packet is for the address that pods share.
#[inline(always)]
fn may_be_masqueraded(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    find_source(skb, scratch) && scratch.ip.dst == scratch.nat
}

/// Notes that a packet whose first fragment was not translated is the node's own.
#[inline(never)]
pub fn stays(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !may_be_masqueraded(skb, scratch)
        || !fragment::identify(&TcContext::new(skb), scratch, End::Destination)
    {
        return PASS;
    }
    // Of a pod's packet that had its id before.
    let _ = FRAGMENTS.remove(&scratch.fragment_key);
    scratch.early_key.packet = scratch.fragment_key;
    scratch.early_key.offset = 0;
    if let Some(mark) = EARLY.get_ptr_mut(0) {
        // SAFETY: this processor's own; the bytes are of nobody's any more.
        unsafe {
            (*mark).seen_ns = now();
            (*mark).len = 0;
            let _ = EARLY_FRAGMENTS.insert(&scratch.early_key, &*mark, 0);
        }
    }
    PASS
}

/// Keeps a fragment that is identified, and whose first was not seen; [`KNOWN`] if that has come meanwhile.
#[inline(never)]
pub fn keep(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !may_be_masqueraded(skb, scratch) {
        return PASS;
    }
    let field = name(skb, scratch);
    if field == UNREADABLE {
        return PASS;
    }
    let offset = field & !MORE;
    scratch.early_key.offset = 0;
    if let Some(mark) = EARLY_FRAGMENTS.get_ptr(&scratch.early_key)
        // SAFETY: a value that the map just gave.
        && fragment::is_fresh(unsafe { (*mark).seen_ns })
    {
        return PASS;
    }
    scratch.early_key.offset = offset;
    let ip = &scratch.ip;
    let (at, len) = (ip.l3, (ip.l4 - ip.l3).wrapping_add(ip.l4_len));
    let Some(early) = EARLY.get_ptr_mut(0) else {
        return PASS;
    };
    let Some(len) = bounded(len) else {
        return PASS;
    };
    // SAFETY: this processor's own, with room for so many bytes.
    unsafe {
        (*early).seen_ns = now();
        (*early).len = len;
        let bytes = (&raw mut (*early).bytes).cast();
        if bpf_skb_load_bytes(skb.cast(), at, bytes, len) != 0
            || EARLY_FRAGMENTS
                .insert(&scratch.early_key, &*early, 0)
                .is_err()
        {
            return PASS;
        }
    }
    fence(scratch);
    if !fragment::find_identified(scratch) {
        return PASS;
    }
    scratch.early_key.offset = offset;
    match EARLY_FRAGMENTS.remove(&scratch.early_key) {
        Ok(()) => KNOWN,
        // Another processor sends it.
        Err(_) => DROP,
    }
}

/// Behind a fragment that was given to its pod: sends the next one if that waits, and this one before it.
#[inline(never)]
pub fn follow(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let field = name(skb, scratch);
    if field == UNREADABLE {
        return PASS;
    }
    if scratch.ip.fragment == Fragment::First {
        fence(scratch);
    }
    let ip = &scratch.ip;
    let behind = ip.l4.wrapping_add(ip.l4_len);
    let len = match ip.v6 {
        false => ip.l4_len,
        // All behind the fragment header.
        true => behind.wrapping_sub(ip.id_at + 4),
    };
    if field & MORE == 0 {
        fragment::end(scratch);
        return PASS;
    }
    // What contradicts itself is followed by nothing.
    if len == 0 || !len.is_multiple_of(8) {
        return PASS;
    }
    scratch.early_key.offset = (field & !MORE) + len / 8;
    let Some(waits) = EARLY_FRAGMENTS.get_ptr(&scratch.early_key) else {
        return PASS;
    };
    // SAFETY: a value that the map just gave; the context is valid for as long as the program runs.
    let (seen_ns, len, ifindex) = unsafe { ((*waits).seen_ns, (*waits).len, (*skb).ifindex) };
    let Some(len) = bounded(len).filter(|_| fragment::is_fresh(seen_ns)) else {
        return PASS;
    };
    if TcContext::new(skb)
        .clone_redirect(ifindex, BPF_F_INGRESS.into())
        .is_err()
    {
        // It goes on itself.
        return PASS;
    }
    // What is left is a copy, which becomes the other; the link's header is the same.
    let at = scratch.ip.l3;
    // SAFETY: the context as above; so many bytes are there, whosever they are by now.
    let is_made = unsafe {
        let bytes = (&raw const (*waits).bytes).cast_mut().cast();
        bpf_skb_change_tail(skb, at.wrapping_add(len), 0) == 0
            && bpf_skb_store_bytes(skb.cast(), at, bytes, len, BPF_F_RECOMPUTE_CSUM.into()) == 0
    };
    if !is_made {
        return drop(DropReason::NatFragment);
    }
    // An entry that was forgotten meanwhile may have been another's while it was read. One that was written again has
    // another time. (To compare the pointers, too, would make Linux 5.10 forget that none is null.)
    let Some(still) = EARLY_FRAGMENTS.get_ptr(&scratch.early_key) else {
        return DROP;
    };
    // SAFETY: a value that the map just gave.
    let is_same = unsafe { (*still).seen_ns } == seen_ns;
    if !is_same || EARLY_FRAGMENTS.remove(&scratch.early_key).is_err() {
        return DROP;
    }
    // SAFETY: no pointers involved.
    unsafe { bpf_redirect(ifindex, BPF_F_INGRESS.into()) as i32 }
}

/// A number of bytes that an entry can have, as one more than a number of which the verifier sees an upper bound: Linux 5.10
/// learns nothing from a comparison with zero. The compiler would undo the detour, so it is not to know of it.
#[inline(always)]
fn bounded(len: u32) -> Option<u32> {
    let mut less = u64::from(len.wrapping_sub(1));
    // SAFETY: a register is copied to itself.
    unsafe { asm!("{0} = {0}", inout(reg) less, options(nomem, nostack)) };
    if less >= EARLY_BYTES as u64 {
        return None;
    }
    Some(less as u32 + 1)
}
