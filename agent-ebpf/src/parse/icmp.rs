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

/// Errors: what they quote follows the first eight bytes. A redirect quotes a packet, too, but is for the
/// router that reads it.
pub const V4_UNREACHABLE: u8 = 3;
/// Code: nobody is at the port.
pub const V4_PORT: u8 = 3;
const V4_SOURCE_QUENCH: u8 = 4;
const V4_TIME_EXCEEDED: u8 = 11;
const V4_PARAMETER_PROBLEM: u8 = 12;
pub const V6_UNREACHABLE: u8 = 1;
/// As `V4_PORT`.
pub const V6_PORT: u8 = 4;
const V6_PARAMETER_PROBLEM: u8 = 4;

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

/// Whether a message is an error, which quotes the packet that it is about (RFC 792, RFC 4443 §2.1).
#[inline(always)]
pub fn is_error(v6: bool, kind: u8) -> bool {
    match v6 {
        true => (V6_UNREACHABLE..=V6_PARAMETER_PROBLEM).contains(&kind),
        false => matches!(
            kind,
            V4_UNREACHABLE | V4_SOURCE_QUENCH | V4_TIME_EXCEEDED | V4_PARAMETER_PROBLEM
        ),
    }
}

#[inline(always)]
pub fn is_echo_request(v6: bool, kind: u8) -> bool {
    kind == if v6 { V6_ECHO_REQUEST } else { V4_ECHO_REQUEST }
}

#[inline(always)]
pub fn is_echo_reply(v6: bool, kind: u8) -> bool {
    kind == if v6 { V6_ECHO_REPLY } else { V4_ECHO_REPLY }
}
