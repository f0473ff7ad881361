//! Transport headers: what tells flows apart.

use super::{Fragment, Header, Ip, Packet, icmp, proto};
use sinabro_common::algo::tcp_window::Numbers;

/// Offsets of checksums from the start of the transport header.
pub const TCP_CHECKSUM: u32 = 16;
pub const UDP_CHECKSUM: u32 = 6;
pub const SCTP_CHECKSUM: u32 = 8;

/// Length of UDP's header.
pub const UDP_LEN: u32 = 8;

/// Flags of a TCP header (RFC 9293 §3.1), as in [`L4::tcp_flags`].
pub const TCP_FIN: u8 = 0x01;
pub const TCP_SYN: u8 = 0x02;
pub const TCP_RST: u8 = 0x04;
pub const TCP_ACK: u8 = 0x10;

#[derive(Clone, Copy, Default)]
pub struct L4 {
    /// Network order; the id of an ICMP echo message; zero where there is none.
    pub src_port: [u8; 2],
    /// As `src_port`; an echo message has its id in both.
    pub dst_port: [u8; 2],
    /// Byte 13 of the TCP header.
    pub tcp_flags: u8,
    /// Type of an ICMP message.
    pub icmp: u8,
    /// Length of a TCP header; zero of others.
    pub len: u8,
}

/// A TCP header up to its window, as it is on the wire.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub struct Tcp {
    src_port: [u8; 2],
    dst_port: [u8; 2],
    sequence: [u8; 4],
    acknowledged: [u8; 4],
    data_offset: u8,
    flags: u8,
    window: [u8; 2],
}

impl Tcp {
    /// `shift`: of a SYN (`tcp_window::announced`), zero of others.
    #[inline(always)]
    pub fn numbers(&self, shift: u8) -> Numbers {
        Numbers {
            sequence: u32::from_be_bytes(self.sequence),
            acknowledged: u32::from_be_bytes(self.acknowledged),
            window: u16::from_be_bytes(self.window),
            shift,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ports {
    src_port: [u8; 2],
    dst_port: [u8; 2],
}

// SAFETY: bytes alone.
unsafe impl Header for Tcp {}

// SAFETY: bytes alone.
unsafe impl Header for Ports {}

/// Reads the transport header of `ip`; everything zero in a later fragment and for protocols
/// that are not known here.
#[inline(always)]
pub fn read(ctx: &impl Packet, ip: &Ip) -> Option<L4> {
    read_with(ctx, ip, &mut Tcp::default())
}

/// As [`read`], with the header of a TCP segment as it is.
#[inline(always)]
pub fn read_with(ctx: &impl Packet, ip: &Ip, tcp: &mut Tcp) -> Option<L4> {
    if ip.fragment == Fragment::Later {
        return Some(L4::default());
    }
    match ip.proto {
        proto::TCP => {
            if ip.l4_len < 20 {
                return None;
            }
            // SAFETY: the place is the caller's, and whatever bytes are in it are a value.
            if !unsafe { ctx.load_into(ip.l4, core::ptr::from_mut(tcp)) } {
                return None;
            }
            let header_len = (tcp.data_offset >> 4) as u32 * 4;
            if header_len < 20 || (header_len > ip.l4_len && ip.fragment == Fragment::No) {
                return None;
            }
            Some(L4 {
                src_port: tcp.src_port,
                dst_port: tcp.dst_port,
                tcp_flags: tcp.flags,
                icmp: 0,
                len: header_len as u8,
            })
        }
        proto::UDP | proto::UDPLITE => ports(ctx, ip, 8),
        proto::SCTP => ports(ctx, ip, 12),
        proto::ICMP if !ip.v6 => echo(ctx, ip),
        proto::ICMPV6 if ip.v6 => echo(ctx, ip),
        _ => Some(L4::default()),
    }
}

#[inline(always)]
fn ports(ctx: &impl Packet, ip: &Ip, header_len: u32) -> Option<L4> {
    if ip.l4_len < header_len {
        return None;
    }
    let ports: Ports = ctx.load(ip.l4)?;
    Some(L4 {
        src_port: ports.src_port,
        dst_port: ports.dst_port,
        ..L4::default()
    })
}

#[inline(always)]
fn echo(ctx: &impl Packet, ip: &Ip) -> Option<L4> {
    if ip.l4_len < icmp::MIN_LEN {
        return None;
    }
    let header: icmp::Header = ctx.load(ip.l4)?;
    let id = if icmp::is_echo(ip.v6, header.kind) {
        header.id
    } else {
        [0; 2]
    };
    Some(L4 {
        src_port: id,
        dst_port: id,
        icmp: header.kind,
        ..L4::default()
    })
}

/// The ports (or echo id) of a packet that an ICMP error quotes, of which no more than the first eight bytes behind its
/// IP header need be there (RFC 792).
#[inline(always)]
pub fn read_quoted(ctx: &impl Packet, ip: &Ip) -> Option<L4> {
    if ip.fragment == Fragment::Later {
        return None;
    }
    match ip.proto {
        proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP => ports(ctx, ip, 8),
        proto::ICMP if !ip.v6 => echo(ctx, ip),
        proto::ICMPV6 if ip.v6 => echo(ctx, ip),
        _ => Some(L4::default()),
    }
}
