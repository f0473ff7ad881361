//! Frames as the kernel has them.

use super::{Header, Packet};
use aya_ebpf::{helpers::bpf_skb_load_bytes, programs::TcContext};

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
