//! The maximum segment size that the sender of a SYN announces (RFC 9293 §3.7.1).

use super::{Header, Packet};

/// Length of a TCP header without options.
pub const TCP_HEADER_LEN: u32 = 20;
/// Where a TCP header says its length: in the upper four bits, in words.
const DATA_OFFSET: u32 = 12;

/// Kinds of options (RFC 9293 §3.1).
const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const MSS_LEN: u8 = 4;
/// Options that are looked at. A SYN has room for forty bytes of them; stacks have this one first.
const LOOKED_AT: u32 = 8;

pub struct Mss {
    /// Offset of the value from the start of the TCP header.
    pub offset: u32,
    /// As it is on the wire.
    pub value: [u8; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Option4 {
    kind: u8,
    len: u8,
    value: [u8; 2],
}

// SAFETY: bytes alone.
unsafe impl Header for Option4 {}

/// Reads it from the TCP header at an offset, whose length was found right (`l4::read`); `None` if it says none where
/// it is looked for.
#[inline(always)]
pub fn read(ctx: &impl Packet, tcp: u32) -> Option<Mss> {
    let offset: u8 = ctx.load(tcp + DATA_OFFSET)?;
    let end = (offset >> 4) as u32 * 4;
    let mut at = TCP_HEADER_LEN;
    for _ in 0..LOOKED_AT {
        if at + MSS_LEN as u32 > end {
            return None;
        }
        let option: Option4 = ctx.load(tcp + at)?;
        match option.kind {
            END => return None,
            NOP => at += 1,
            MSS if option.len == MSS_LEN => {
                return Some(Mss {
                    offset: at + 2,
                    value: option.value,
                });
            }
            _ if option.len < 2 => return None,
            _ => at += option.len as u32,
        }
    }
    None
}
