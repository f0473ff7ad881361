//! Frames as the kernel has them.

use super::{Header, Packet, ip6};
use crate::scratch;
use aya_ebpf::{bindings::__sk_buff, helpers::bpf_skb_load_bytes, programs::TcContext};
use core::mem::MaybeUninit;

/// linux/if_packet.h: the frame is to this interface's own MAC address.
pub const PACKET_HOST: u32 = 0;

/// Behind any headers that are read; the verifier wants to know of one.
const MAX_OFFSET: u32 = 255;

/// What [`follow_global`] says of extension headers.
const WELL_FORMED: i32 = 1;

impl Packet for TcContext {
    #[inline(always)]
    fn len(&self) -> u32 {
        self.skb.len()
    }

    #[inline(always)]
    fn load<T: Header>(&self, offset: u32) -> Option<T> {
        self.skb.load(offset as usize).ok()
    }

    #[inline(always)]
    unsafe fn load_into<T: Header>(&self, offset: u32, to: *mut T) -> bool {
        let len = size_of::<T>() as u32;
        // SAFETY: the caller's promise, and the context is valid for as long as the program runs.
        unsafe { bpf_skb_load_bytes(self.skb.skb.cast(), offset, to.cast(), len) == 0 }
    }

    /// Few packets have extension headers, and a loop is walked for each caller else.
    #[inline(always)]
    fn follow(&self, rest: &mut ip6::Rest) -> bool {
        let Some(scratch) = scratch::get() else {
            return false;
        };
        scratch.rest = *rest;
        let is_well_formed = scratch.lend(|| follow_global(self.skb.skb)) == WELL_FORMED;
        *rest = scratch.rest;
        is_well_formed
    }
}

#[inline(never)]
fn follow_global(skb: *mut __sk_buff) -> i32 {
    scratch::borrow(
        |scratch| match ip6::follow(&TcContext::new(skb), &mut scratch.rest) {
            true => WELL_FORMED,
            false => 0,
        },
    )
}

/// How a frame is read.
pub trait Frame: Packet {
    fn new(skb: *mut __sk_buff) -> Self;
}

impl Frame for TcContext {
    #[inline(always)]
    fn new(skb: *mut __sk_buff) -> Self {
        Self::new(skb)
    }
}

impl Frame for Head {
    #[inline(always)]
    fn new(skb: *mut __sk_buff) -> Self {
        Self(TcContext::new(skb))
    }
}

/// A frame whose first bytes are read where they lie, if they lie in one piece: a call of the kernel for each header
/// is a tenth of what a packet costs at a pod's link.
pub struct Head(TcContext);

impl Packet for Head {
    #[inline(always)]
    fn len(&self) -> u32 {
        self.0.len()
    }

    #[inline(always)]
    fn load<T: Header>(&self, offset: u32) -> Option<T> {
        let mut to = MaybeUninit::<T>::uninit();
        // SAFETY: a place of this function's, which is a value once all of it is written.
        unsafe {
            self.load_into(offset, to.as_mut_ptr())
                .then(|| to.assume_init())
        }
    }

    #[inline(always)]
    unsafe fn load_into<T: Header>(&self, offset: u32, to: *mut T) -> bool {
        let (start, len) = (self.0.data() + offset as usize, size_of::<T>());
        if offset <= MAX_OFFSET && len.is_multiple_of(2) && start + len <= self.0.data_end() {
            let (from, to) = (start as *const u8, to.cast::<u8>());
            // SAFETY: the caller's promise; and what is read is in front of the end.
            unsafe {
                let words = copy::<u64>(from, to, 0, len);
                let halves = copy::<u32>(from, to, words, len);
                copy::<u16>(from, to, halves, len);
            }
            return true;
        }
        // SAFETY: the caller's promise.
        unsafe { self.0.load_into(offset, to) }
    }

    #[inline(always)]
    fn follow(&self, rest: &mut ip6::Rest) -> bool {
        self.0.follow(rest)
    }
}

/// Copies whole words of `len` bytes, from an offset on; returns where what is left begins. In words as long as can be: a processor that reads what it has just
/// written waits if that was written in parts.
///
/// # Safety
/// So many bytes may be read and written. They are of any alignment, which the kernel's machines with BPF take, and those that do not refuse the program.
#[inline(always)]
unsafe fn copy<W: Copy>(from: *const u8, to: *mut u8, mut at: usize, len: usize) -> usize {
    while at + size_of::<W>() <= len {
        // SAFETY: the caller's promise.
        unsafe {
            to.add(at)
                .cast::<W>()
                .write(from.add(at).cast::<W>().read())
        };
        at += size_of::<W>();
    }
    at
}

/// EtherType, as it is on the wire, of what the stack sends by an Ethernet interface. Costs nothing,
/// while reading the header is a call; but other interfaces have no header at all, and what a pod
/// sends is what its header says.
#[inline(always)]
pub fn kind(ctx: &TcContext) -> [u8; 2] {
    // SAFETY: the context is valid for as long as the program runs.
    let protocol = unsafe { (*ctx.skb.skb).protocol };
    (protocol as u16).to_ne_bytes()
}

/// Whether a VLAN tag was taken out of the frame: what the header says is then not what the
/// stack will make of it. A tag still inside the frame is an EtherType of its own.
#[inline(always)]
pub fn is_tagged(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { (*ctx.skb.skb).vlan_present != 0 }
}

/// Whether the tag that was taken out names a VLAN. One that has a priority only (VLAN 0, IEEE
/// 802.1Q §6.9) is ignored by the stack, and some switches put it on every frame.
#[inline(always)]
pub fn is_of_vlan(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    is_tagged(ctx) && unsafe { (*ctx.skb.skb).vlan_tci } & 0x0fff != 0
}
