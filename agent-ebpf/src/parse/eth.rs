//! Ethernet II (RFC 894).

use super::{Header, Packet};

/// Length of the header, and offset of what follows.
pub const LEN: u32 = 14;
/// Where its EtherType is.
pub const KIND: u32 = 12;

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
