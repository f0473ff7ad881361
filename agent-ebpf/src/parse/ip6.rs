//! IPv6 and its extension headers (RFC 8200).
//!
//! At most [`MAX_EXTENSIONS`] extension headers are followed; behind more, the protocol is that
//! of the next extension header, which has no ports and so goes to the stack. So it is with an authentication
//! header, as in IPv4: it covers both addresses (RFC 4302 §3.3.3.1.2), and what is behind it arrives only if nobody translates it.

use super::{Fragment, Ip, Packet, proto};
use core::mem::MaybeUninit;
use sinabro_common::abi::Addr;

/// Offsets from the start of the header.
pub const HOP_LIMIT: u32 = 7;
pub const SRC: u32 = 8;
pub const DST: u32 = 24;

/// First byte of an address that nobody sends from (RFC 4291 §2.7): the kernel drops such packets, and in the maps such an
/// address stands for others ([`Addr::any_remote`]).
const MULTICAST: u8 = 0xff;

/// Without extension headers.
pub const HEADER_LEN: u32 = 40;
const MAX_EXTENSIONS: u32 = 6;
/// Offset in a fragment header.
const FRAGMENT_ID: u32 = 4;

/// What stands before the addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Start {
    /// Version, traffic class, flow label.
    pub version: [u8; 4],
    pub payload_len: [u8; 2],
    pub next: u8,
    pub hop_limit: u8,
}

/// As it is on the wire, without extension headers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Header {
    pub start: Start,
    pub src: [u8; 16],
    pub dst: [u8; 16],
}

/// Every extension header but the fragment header begins so.
#[repr(C)]
#[derive(Clone, Copy)]
struct Extension {
    next: u8,
    len: u8,
    /// Of a fragment header: offset in units of eight bytes, two reserved bits, more-fragments.
    fragment: [u8; 2],
}

// SAFETY: bytes alone.
unsafe impl super::Header for Header {}

// SAFETY: bytes alone.
unsafe impl super::Header for Start {}

// SAFETY: bytes alone.
unsafe impl super::Header for Extension {}

/// Reads the header at an offset; `whole` as in [`super::ip4::read`].
#[inline(always)]
pub fn read(ctx: &impl Packet, at: u32, whole: bool) -> Option<Ip> {
    let header: Header = ctx.load(at)?;
    let fixed = header.start.fixed(ctx, at, whole)?;
    let (src, dst) = (Addr::v6(header.src), Addr::v6(header.dst));
    if src.as_v4().is_some() || dst.as_v4().is_some() {
        // In every map this is an IPv4 address; on the wire it is none at all
        // (draft-itojun-v6ops-v4mapped-harmful).
        return None;
    }
    if src.0[0] == MULTICAST {
        return None;
    }
    let rest = rest(ctx, at, fixed)?;
    Some(Ip {
        src,
        dst,
        l3: at,
        id_at: rest.id_at,
        checksum: [0; 2],
        l4: rest.offset,
        l4_len: rest.left,
        proto: rest.next,
        ttl: fixed.hop_limit,
        v6: true,
        options: rest.options,
        fragment: rest.fragment,
    })
}

/// As [`read`], into a place of the caller's and with as little stack as can be: no header but the
/// first eight bytes is ever on it. Nothing can be said of the place if it returns false.
#[inline(always)]
pub fn read_into(ctx: &impl Packet, at: u32, whole: bool, to: &mut MaybeUninit<Ip>) -> bool {
    let to = to.as_mut_ptr();
    let Some(start) = ctx.load::<Start>(at) else {
        return false;
    };
    let Some(fixed) = start.fixed(ctx, at, whole) else {
        return false;
    };
    // SAFETY: fields of the caller's place. Each is written before it is read, and all are before
    // the place counts as an Ip.
    unsafe {
        let (src, dst) = (&raw mut (*to).src, &raw mut (*to).dst);
        if !ctx.load_into(at + SRC, src) || !ctx.load_into(at + DST, dst) {
            return false;
        }
        if (*src).as_v4().is_some() || (*dst).as_v4().is_some() || (*src).0[0] == MULTICAST {
            return false;
        }
        let Some(rest) = rest(ctx, at, fixed) else {
            return false;
        };
        (&raw mut (*to).l3).write(at);
        (&raw mut (*to).id_at).write(rest.id_at);
        (&raw mut (*to).checksum).write([0; 2]);
        (&raw mut (*to).ttl).write(fixed.hop_limit);
        (&raw mut (*to).v6).write(true);
        (&raw mut (*to).l4).write(rest.offset);
        (&raw mut (*to).l4_len).write(rest.left);
        (&raw mut (*to).proto).write(rest.next);
        (&raw mut (*to).options).write(rest.options);
        (&raw mut (*to).fragment).write(rest.fragment);
    }
    true
}

/// What is needed of the fixed header beside the addresses.
#[derive(Clone, Copy)]
struct Fixed {
    /// Length of all behind it.
    left: u32,
    next: u8,
    hop_limit: u8,
}

/// How far the extension headers were followed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Rest {
    /// Of what is behind them from the start of the frame,
    offset: u32,
    /// and its length.
    left: u32,
    /// As in [`Ip`].
    id_at: u32,
    fragment: Fragment,
    options: bool,
    next: u8,
}

impl Start {
    #[inline(always)]
    fn fixed(&self, ctx: &impl Packet, at: u32, whole: bool) -> Option<Fixed> {
        if self.version[0] >> 4 != 6 {
            return None;
        }
        let there = ctx.len().wrapping_sub(at + HEADER_LEN);
        let mut left = u16::from_be_bytes(self.payload_len) as u32;
        if left == 0 && there > u16::MAX as u32 {
            // A segmentation offload packet too large for the field ("BIG TCP", Linux 5.19).
            left = there;
        }
        if left > there && !whole {
            left = there;
        }
        (left <= there).then_some(Fixed {
            left,
            next: self.next,
            hop_limit: self.hop_limit,
        })
    }
}

/// Follows the extension headers, if there are any.
#[inline(always)]
fn rest(ctx: &impl Packet, at: u32, fixed: Fixed) -> Option<Rest> {
    let mut rest = Rest {
        offset: at + HEADER_LEN,
        left: fixed.left,
        id_at: 0,
        fragment: Fragment::No,
        options: false,
        next: fixed.next,
    };
    (!is_extension(rest.next) || ctx.follow(&mut rest)).then_some(rest)
}

#[inline(always)]
fn is_extension(next: u8) -> bool {
    matches!(
        next,
        proto::HOP_BY_HOP | proto::ROUTING | proto::FRAGMENT | proto::DEST_OPTIONS
    )
}

/// Follows the extension headers from where `rest` is, which is behind them then; false if they are malformed.
#[inline(always)]
pub fn follow(ctx: &impl Packet, rest: &mut Rest) -> bool {
    let mut followed = 0;
    while followed < MAX_EXTENSIONS && rest.fragment != Fragment::Later && is_extension(rest.next) {
        if rest.left < 8 {
            return false;
        }
        let Some(extension) = ctx.load::<Extension>(rest.offset) else {
            return false;
        };
        let len = match rest.next {
            proto::FRAGMENT => {
                let field = u16::from_be_bytes(extension.fragment);
                rest.id_at = rest.offset + FRAGMENT_ID;
                if field & 0xfff8 != 0 {
                    rest.fragment = Fragment::Later;
                } else if field & 1 != 0 {
                    rest.fragment = Fragment::First;
                }
                8
            }
            _ => (extension.len as u32 + 1) * 8,
        };
        if len > rest.left {
            return false;
        }
        rest.left -= len;
        rest.offset += len;
        rest.options = true;
        rest.next = extension.next;
        followed += 1;
    }
    true
}
