//! IPv6 and its extension headers (RFC 8200).
//!
//! At most [`MAX_EXTENSIONS`] extension headers are followed; behind more, the protocol is that
//! of the next extension header, which has no ports and so goes to the stack.

use super::{Fragment, Ip, Packet, eth, proto};
use sinabro_common::abi::Addr;

/// Offset from the start of the frame.
pub const HOP_LIMIT: u32 = eth::LEN + 7;

const HEADER_LEN: u32 = 40;
const MAX_EXTENSIONS: u32 = 6;

#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    version: [u8; 4],
    payload_len: [u8; 2],
    next: u8,
    hop_limit: u8,
    src: [u8; 16],
    dst: [u8; 16],
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
unsafe impl super::Header for Extension {}

#[inline(always)]
pub fn read(ctx: &impl Packet) -> Option<Ip> {
    let header: Header = ctx.load(eth::LEN)?;
    if header.version[0] >> 4 != 6 {
        return None;
    }
    let (src, dst) = (Addr::v6(header.src), Addr::v6(header.dst));
    if src.as_v4().is_some() || dst.as_v4().is_some() {
        // In every map this is an IPv4 address; on the wire it is none at all
        // (draft-itojun-v6ops-v4mapped-harmful).
        return None;
    }
    let there = ctx.len().wrapping_sub(eth::LEN + HEADER_LEN);
    let mut left = u16::from_be_bytes(header.payload_len) as u32;
    if left == 0 && there > u16::MAX as u32 {
        // A segmentation offload packet too large for the field ("BIG TCP", Linux 5.19).
        left = there;
    }
    if left > there {
        return None;
    }

    let mut next = header.next;
    let mut offset = eth::LEN + HEADER_LEN;
    let mut options = false;
    let mut fragment = Fragment::No;
    let mut followed = 0;
    while followed < MAX_EXTENSIONS && fragment != Fragment::Later {
        if !matches!(
            next,
            proto::HOP_BY_HOP
                | proto::ROUTING
                | proto::FRAGMENT
                | proto::AUTH
                | proto::DEST_OPTIONS
        ) {
            break;
        }
        if left < 8 {
            return None;
        }
        let extension: Extension = ctx.load(offset)?;
        let len = match next {
            proto::FRAGMENT => {
                let field = u16::from_be_bytes(extension.fragment);
                if field & 0xfff8 != 0 {
                    fragment = Fragment::Later;
                } else if field & 1 != 0 {
                    fragment = Fragment::First;
                }
                8
            }
            // The length of an authentication header counts in words (RFC 4302 §2.2).
            proto::AUTH => (extension.len as u32 + 2) * 4,
            _ => (extension.len as u32 + 1) * 8,
        };
        if len > left {
            return None;
        }
        left -= len;
        offset += len;
        options = true;
        next = extension.next;
        followed += 1;
    }
    Some(Ip {
        src,
        dst,
        l4: offset,
        l4_len: left,
        proto: next,
        ttl: header.hop_limit,
        v6: true,
        options,
        fragment,
    })
}
