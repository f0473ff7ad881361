//! IPv4 (RFC 791).

use super::{Fragment, Ip, Packet};
use sinabro_common::abi::Addr;

/// Offsets from the start of the header.
pub const ID: u32 = 4;
pub const TTL: u32 = 8;
pub const CHECKSUM: u32 = 10;
/// Without options.
pub const HEADER_LEN: u32 = 20;

/// As it is on the wire, without options.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Header {
    pub version_length: u8,
    pub service: u8,
    pub total_len: [u8; 2],
    pub id: [u8; 2],
    pub fragment: [u8; 2],
    pub ttl: u8,
    pub proto: u8,
    pub checksum: [u8; 2],
    pub src: [u8; 4],
    pub dst: [u8; 4],
}

// SAFETY: bytes alone.
unsafe impl super::Header for Header {}

/// Reads the header at an offset; `whole`: the rest of the packet must be there, too, as it is not in what an ICMP
/// error quotes.
#[inline(always)]
pub fn read(ctx: &impl Packet, at: u32, whole: bool) -> Option<Ip> {
    let header: Header = ctx.load(at)?;
    let header_len = (header.version_length & 0x0f) as u32 * 4;
    if header.version_length >> 4 != 4 || header_len < HEADER_LEN {
        return None;
    }
    let there = ctx.len().wrapping_sub(at);
    let mut total_len = u16::from_be_bytes(header.total_len) as u32;
    if total_len == 0 && there > u16::MAX as u32 {
        // A segmentation offload packet too large for the field ("BIG TCP", Linux 6.3).
        total_len = there;
    }
    if total_len > there && !whole {
        total_len = there;
    }
    if total_len < header_len || total_len > there {
        return None;
    }
    let fragment = u16::from_be_bytes(header.fragment);
    Some(Ip {
        src: Addr::v4(header.src),
        dst: Addr::v4(header.dst),
        l3: at,
        id_at: at + ID,
        l4: at + header_len,
        l4_len: total_len - header_len,
        checksum: header.checksum,
        proto: header.proto,
        ttl: header.ttl,
        v6: false,
        options: header_len > HEADER_LEN,
        fragment: if fragment & 0x1fff != 0 {
            Fragment::Later
        } else if fragment & 0x2000 != 0 {
            Fragment::First
        } else {
            Fragment::No
        },
    })
}
