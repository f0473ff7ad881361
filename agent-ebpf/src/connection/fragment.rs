//! Fragments: only the first names ports, so it notes for the others what becomes of them.
//!
//! A packet passes several programs under the same addresses, each of which may write another end of it: a note is for
//! one end.
//!
//! Bounded and short-lived: the least recently used are forgotten, and after [`LIFETIME_NS`], or soon after the packet's last
//! part, an id may be that of another packet. A sender of many has none but 65,536 of IPv4, and other pods get some of them.

use super::now;
use crate::{maps::FRAGMENTS, parse::Packet as _, rewrite::End, scratch::Scratch};
use aya_ebpf::programs::TcContext;
use sinabro_common::{abi::Addr, algo::lifetime::LATE_NS};

/// As long as hosts wait for the rest of a packet (net.ipv4.ipfrag_time).
const LIFETIME_NS: u64 = 30_000_000_000;

/// Which packet this is a fragment of, and which end of it is to be written, in `scratch.fragment_key`; false if that
/// cannot be read.
#[inline(always)]
pub fn identify(ctx: &TcContext, scratch: &mut Scratch, end: End) -> bool {
    let Scratch {
        ip,
        fragment_key: key,
        ..
    } = scratch;
    key.src = ip.src;
    key.dst = ip.dst;
    // IPv6's later fragments may name another: of what is divided the first header, not the last.
    key.proto = if ip.v6 { 0 } else { ip.proto };
    key.id = [0; 4];
    key.pad[0] = u8::from(end == End::Source);
    // SAFETY: four bytes, which any bytes may be written to.
    unsafe {
        match ip.v6 {
            false => ctx.load_into(ip.id_at, (&raw mut key.id).cast::<[u8; 2]>()),
            true => ctx.load_into(ip.id_at, &raw mut key.id),
        }
    }
}

/// Notes for the packet's other fragments which address to write at an end; before this one is changed.
#[inline(always)]
pub fn note(ctx: &TcContext, scratch: &mut Scratch, end: End, addr: &Addr) {
    if !identify(ctx, scratch, end) {
        return;
    }
    scratch.fragment.addr = *addr;
    scratch.fragment.seen_ns = now();
    // It cannot be full; a failure costs one packet.
    let _ = FRAGMENTS.insert(&scratch.fragment_key, &scratch.fragment, 0);
}

/// Whether the first of a later fragment was seen; the address to write is in `scratch.fragment` then.
#[inline(always)]
pub fn find(ctx: &TcContext, scratch: &mut Scratch, end: End) -> bool {
    identify(ctx, scratch, end) && find_identified(scratch)
}

/// The same of a fragment that is identified.
#[inline(always)]
pub fn find_identified(scratch: &mut Scratch) -> bool {
    let Some(found) = FRAGMENTS.get_ptr(&scratch.fragment_key) else {
        return false;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        scratch.fragment.addr = Addr::at(&raw const (*found).addr);
        scratch.fragment.seen_ns = (*found).seen_ns;
    }
    is_fresh(scratch.fragment.seen_ns)
}

/// Notes that the last part of a packet that is identified was here: what that overtook has as long as late segments have.
#[inline(always)]
pub fn end(scratch: &mut Scratch) {
    if let Some(found) = FRAGMENTS.get_ptr_mut(&scratch.fragment_key) {
        // SAFETY: a value that the map just gave.
        unsafe { (*found).seen_ns = now().wrapping_sub(LIFETIME_NS - LATE_NS) };
    }
}

/// Whether what was seen then is still of the same packet.
#[inline(always)]
pub fn is_fresh(seen_ns: u64) -> bool {
    now().wrapping_sub(seen_ns) < LIFETIME_NS
}
