//! Ethernet II (RFC 894).

use super::{Header, Packet};
use aya_ebpf::programs::TcContext;

/// Length of the header, and offset of what follows.
pub const LEN: u32 = 14;

pub const IP4: [u8; 2] = [0x08, 0x00];
pub const ARP: [u8; 2] = [0x08, 0x06];
pub const IP6: [u8; 2] = [0x86, 0xdd];

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Eth {
    pub dst: [u8; 6],
    pub src: [u8; 6],
    /// EtherType as it is on the wire.
    pub kind: [u8; 2],
}

// SAFETY: bytes alone.
unsafe impl Header for Eth {}

#[inline(always)]
pub fn read(ctx: &impl Packet) -> Option<Eth> {
    ctx.load(0)
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
