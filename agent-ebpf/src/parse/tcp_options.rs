//! Options of a SYN: the maximum segment size (RFC 9293 §3.7.1) and the window's shift (RFC 7323 §2.2).

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
const WINDOW_SCALE: u8 = 3;
const WINDOW_SCALE_LEN: u8 = 3;
/// Options that are looked at. A SYN has room for forty bytes of them; stacks have the maximum segment size first.
const LOOKED_AT: u32 = 8;

pub struct Mss {
    /// Offset of the value from the start of the TCP header.
    pub offset: u32,
    /// As it is on the wire.
    pub value: [u8; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Lead {
    kind: u8,
    len: u8,
}

// SAFETY: bytes alone.
unsafe impl Header for Lead {}

/// Reads the maximum segment size from the TCP header at an offset, whose length was found right (`l4::read`); `None` if it
/// says none where it is looked for.
#[inline(always)]
pub fn mss(ctx: &impl Packet, tcp: u32) -> Option<Mss> {
    let offset = find(ctx, tcp, MSS, MSS_LEN)?;
    let value = ctx.load(tcp + offset)?;
    Some(Mss { offset, value })
}

/// As [`mss`], the shift of the windows that its sender announces from now on.
#[inline(always)]
pub fn window_shift(ctx: &impl Packet, tcp: u32) -> Option<u8> {
    let offset = find(ctx, tcp, WINDOW_SCALE, WINDOW_SCALE_LEN)?;
    ctx.load(tcp + offset)
}

/// Where the value of an option is, from the start of the TCP header.
#[inline(always)]
fn find(ctx: &impl Packet, tcp: u32, kind: u8, len: u8) -> Option<u32> {
    let offset: u8 = ctx.load(tcp + DATA_OFFSET)?;
    let end = (offset >> 4) as u32 * 4;
    let mut at = TCP_HEADER_LEN;
    for _ in 0..LOOKED_AT {
        if at + len as u32 > end {
            return None;
        }
        let option: Lead = ctx.load(tcp + at)?;
        match option.kind {
            END => return None,
            NOP => at += 1,
            _ if option.kind == kind && option.len == len => return Some(at + 2),
            _ if option.len < 2 => return None,
            _ => at += option.len as u32,
        }
    }
    None
}
