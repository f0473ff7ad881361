//! ARP for IPv4 over Ethernet (RFC 826).

use super::{Header, Packet, eth};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Arp {
    hardware: [u8; 2],
    protocol: [u8; 2],
    lengths: [u8; 2],
    operation: [u8; 2],
    pub sender_mac: [u8; 6],
    pub sender: [u8; 4],
    pub target_mac: [u8; 6],
    pub target: [u8; 4],
}

// SAFETY: bytes alone.
unsafe impl Header for Arp {}

#[inline(always)]
pub fn read(ctx: &impl Packet) -> Option<Arp> {
    let arp: Arp = ctx.load(eth::LEN)?;
    (arp.hardware == [0, 1] && arp.protocol == eth::IP4 && arp.lengths == [6, 4]).then_some(arp)
}
