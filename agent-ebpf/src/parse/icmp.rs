//! ICMP and ICMPv6 (RFC 792, RFC 4443).

/// Shortest message of either: type, code, checksum and four bytes whose meaning the type gives.
pub const MIN_LEN: u32 = 8;

pub const V4_ECHO_REPLY: u8 = 0;
pub const V4_REDIRECT: u8 = 5;
pub const V4_ECHO_REQUEST: u8 = 8;
pub const V6_ECHO_REQUEST: u8 = 128;
pub const V6_ECHO_REPLY: u8 = 129;
/// Neighbour discovery (RFC 4861 §4.2, §4.5).
pub const V6_ROUTER_ADVERTISEMENT: u8 = 134;
pub const V6_REDIRECT: u8 = 137;

/// Offsets from the start of the message.
pub const CHECKSUM: u32 = 2;
pub const ECHO_ID: u32 = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Header {
    pub kind: u8,
    code: u8,
    checksum: [u8; 2],
    /// Of an echo message.
    pub id: [u8; 2],
}

// SAFETY: bytes alone.
unsafe impl super::Header for Header {}

/// Whether a message is an echo request or reply: every other one speaks of some other packet
/// or of the link.
#[inline(always)]
pub fn is_echo(v6: bool, kind: u8) -> bool {
    if v6 {
        matches!(kind, V6_ECHO_REQUEST | V6_ECHO_REPLY)
    } else {
        matches!(kind, V4_ECHO_REQUEST | V4_ECHO_REPLY)
    }
}
