//! Headers, read into values. A reader returns `None` for what is truncated or contradicts
//! itself, and never looks beyond the length that the header before it gave.
//!
//! Readers take any [`Packet`], so that they also run on the host: there they are fuzzed, and the agent
//! shows what was dropped.

pub mod arp;
#[cfg(not(target_arch = "bpf"))]
pub mod bytes;
pub mod eth;
pub mod icmp;
pub mod ip4;
pub mod ip6;
pub mod l4;
#[cfg(target_arch = "bpf")]
pub mod skb;
pub mod tcp_options;

use sinabro_common::abi::Addr;

/// Where headers are read from.
#[allow(clippy::len_without_is_empty)] // nobody asks
pub trait Packet {
    /// Length of the whole frame.
    fn len(&self) -> u32;

    /// The header at an offset; `None` if not all of it is there.
    fn load<T: Header>(&self, offset: u32) -> Option<T>;

    /// The same into a place of the caller's; false if not all of it is there.
    ///
    /// # Safety
    /// `to` may be written to. Only if this returns true is there a value.
    unsafe fn load_into<T: Header>(&self, offset: u32, to: *mut T) -> bool;

    /// [`ip6::follow`], or what does the same.
    fn follow(&self, rest: &mut ip6::Rest) -> bool
    where
        Self: Sized,
    {
        ip6::follow(self, rest)
    }
}

/// A header as it is on the wire.
///
/// # Safety
/// Whatever its bytes are, they are a value of the type: it consists of bytes alone.
pub unsafe trait Header: Copy {}

// SAFETY: bytes alone.
unsafe impl Header for Addr {}

// SAFETY: a byte.
unsafe impl Header for u8 {}

// SAFETY: bytes alone.
unsafe impl<const N: usize> Header for [u8; N] {}

/// IP protocol numbers.
pub mod proto {
    pub const HOP_BY_HOP: u8 = 0;
    pub const ICMP: u8 = 1;
    pub const IPIP: u8 = 4;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    pub const IP6: u8 = 41;
    pub const ROUTING: u8 = 43;
    pub const FRAGMENT: u8 = 44;
    pub const GRE: u8 = 47;
    pub const ESP: u8 = 50;
    pub const ICMPV6: u8 = 58;
    pub const DEST_OPTIONS: u8 = 60;
    pub const SCTP: u8 = 132;
    pub const UDPLITE: u8 = 136;
}

/// What the stages need of an IP header of either family.
#[derive(Clone, Copy)]
pub struct Ip {
    pub src: Addr,
    pub dst: Addr,
    /// Offset of the header from the start of the frame.
    pub l3: u32,
    /// Offset of the transport header, likewise.
    pub l4: u32,
    /// Offset of what all fragments of a packet have in common, likewise: two bytes of IPv4, four of IPv6, where it
    /// is zero if there is no fragment header.
    pub id_at: u32,
    /// Length of the transport header and everything behind it.
    pub l4_len: u32,
    /// Of the IPv4 header, as it is on the wire; zero of IPv6.
    pub checksum: [u8; 2],
    /// Transport protocol, behind any IPv6 extension headers.
    pub proto: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    pub v6: bool,
    /// IPv4 options or IPv6 extension headers are there.
    pub options: bool,
    pub fragment: Fragment,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// A whole packet.
    No,
    /// Has the transport header.
    First,
    /// Does not.
    Later,
}

impl Ip {
    /// Reads the header that `kind`, an EtherType, announces; `None` if it is not IP.
    #[inline(always)]
    pub fn read(ctx: &impl Packet, kind: [u8; 2]) -> Option<Option<Self>> {
        match kind {
            eth::IP4 => Some(ip4::read(ctx, eth::LEN, true)),
            eth::IP6 => Some(ip6::read(ctx, eth::LEN, true)),
            _ => None,
        }
    }
}
