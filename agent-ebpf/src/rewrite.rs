//! Edits that keep every checksum right, also where the network card is to complete it
//! (CHECKSUM_PARTIAL) and in segmentation offload packets: the kernel's own helpers do the sums.
//!
//! An edit that fails half-way leaves a damaged packet: callers drop it.

use crate::parse::{Fragment, Ip, icmp, ip4, ip6, l4, proto};
use aya_ebpf::{
    bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::{bpf_csum_diff, bpf_csum_update},
    programs::TcContext,
};
use core::hint::black_box;
use sinabro_common::{
    abi::Addr,
    algo::{checksum, crc32c},
};

/// The kernel refused an edit.
pub struct Failed;

impl<T> From<T> for Failed
where
    T: Into<i64>,
{
    #[inline(always)]
    fn from(_errno: T) -> Self {
        Self
    }
}

/// Which end of a packet to edit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

/// Destination and source MAC address.
#[inline(always)]
pub fn macs(ctx: &TcContext, dst: [u8; 6], src: [u8; 6]) -> Result<(), Failed> {
    Ok(ctx.store(0, &[dst, src], 0)?)
}

/// One hop less. The caller has seen that more than one is left.
#[inline(always)]
pub fn decrement_ttl(ctx: &TcContext, ip: &Ip) -> Result<(), Failed> {
    let ttl = ip.ttl - 1;
    if ip.v6 {
        // No header checksum, but the sum of the whole packet that a card may have left.
        ctx.store(
            (ip.l3 + ip6::HOP_LIMIT) as usize,
            &ttl,
            BPF_F_RECOMPUTE_CSUM.into(),
        )?;
    } else {
        // The checksum, which is over pairs of bytes, is right behind the pair of TTL and protocol.
        let from = u16::from_ne_bytes([ip.ttl, ip.proto]);
        let to = u16::from_ne_bytes([ttl, ip.proto]);
        let checksum = checksum::replaced(ip.checksum, from.into(), to.into());
        let [high, low] = checksum;
        ctx.store((ip.l3 + ip4::TTL) as usize, &[ttl, ip.proto, high, low], 0)?;
    }
    Ok(())
}

/// Sets these bits of ECN (RFC 3168 §5).
#[inline(always)]
pub fn congestion(ctx: &TcContext, ip: &mut Ip, bits: u8) -> Result<(), Failed> {
    let at = ip.l3 as usize;
    let was: [u8; 2] = ctx.load(at)?;
    if ip.v6 {
        // Bits 10 and 11 of the header (RFC 8200 §3); as for the hop limit.
        let is = [was[0], was[1] | bits << 4];
        return Ok(ctx.store(at, &is, BPF_F_RECOMPUTE_CSUM.into())?);
    }
    let is = [was[0], was[1] | bits];
    let (from, to) = (u16::from_ne_bytes(was), u16::from_ne_bytes(is));
    ip.checksum = checksum::replaced(ip.checksum, from.into(), to.into());
    ctx.store(at, &is, 0)?;
    Ok(ctx.store(at + ip4::CHECKSUM as usize, &ip.checksum, 0)?)
}

/// Address and port (or echo id) of one end of a packet: in its headers and in every checksum that covers
/// them. Of a later fragment, and of a protocol that has no ports here, the address alone.
#[inline(always)]
pub fn endpoint(
    ctx: &TcContext,
    ip: &Ip,
    end: End,
    from: (&Addr, [u8; 2]),
    to: (&Addr, [u8; 2]),
) -> Result<(), Failed> {
    if ip.fragment != Fragment::Later {
        transport(ctx, ip, end, from, to)?;
    }
    address(ctx, ip, end, from.0, to.0)
}

#[inline(always)]
fn transport(
    ctx: &TcContext,
    ip: &Ip,
    end: End,
    from: (&Addr, [u8; 2]),
    to: (&Addr, [u8; 2]),
) -> Result<(), Failed> {
    // A UDP checksum of zero means none in IPv4, and a sum that becomes zero is sent as all ones (RFC 768);
    // MARK_MANGLED_0 is both rules. UDP-Lite has the second one: its checksum is never none (RFC 3828 §3.1).
    let (checksum, mark, has_pseudo_header) = match ip.proto {
        proto::TCP => (l4::TCP_CHECKSUM, 0, true),
        proto::UDP | proto::UDPLITE => (l4::UDP_CHECKSUM, BPF_F_MARK_MANGLED_0, true),
        proto::ICMP => (icmp::CHECKSUM, 0, false),
        proto::ICMPV6 => (icmp::CHECKSUM, 0, true),
        // No address is in its sum.
        proto::SCTP if from.1 != to.1 => return sctp_port(ctx, ip, end, from.1, to.1),
        _ => return Ok(()),
    };
    let at = (ip.l4 + checksum) as usize;
    let (from_port, to_port) = (u16::from_ne_bytes(from.1), u16::from_ne_bytes(to.1));
    let flags = BPF_F_PSEUDO_HDR | mark;
    if has_pseudo_header && ip.v6 {
        let diff = difference(from.0, to.0)?;
        ctx.l4_csum_replace(at, 0, diff.into(), flags.into())?;
        // What was taken out of the sum that a card left of the whole packet is made up for by the address:
        // no header checksum does that in IPv6, as the helper supposes.
        // SAFETY: the context is valid for as long as the program runs. Fails where there is no such sum.
        unsafe { bpf_csum_update(ctx.skb.skb, diff) };
    } else if has_pseudo_header {
        let (from, to) = (word(from.0).into(), word(to.0).into());
        ctx.l4_csum_replace(at, from, to, (flags | 4).into())?;
    }
    if from_port != to_port {
        let flags = mark | 2;
        ctx.l4_csum_replace(at, from_port.into(), to_port.into(), flags.into())?;
        let offset = match (ip.proto, end) {
            (proto::ICMP | proto::ICMPV6, _) => icmp::ECHO_ID,
            (_, End::Source) => 0,
            (_, End::Destination) => 2,
        };
        ctx.store((ip.l4 + offset) as usize, &to.1, 0)?;
    }
    Ok(())
}

/// A port of SCTP, whose sum is over the whole packet (RFC 9260 §6.8).
#[inline(never)]
fn sctp_port(ctx: &TcContext, ip: &Ip, end: End, from: [u8; 2], to: [u8; 2]) -> Result<(), Failed> {
    // How long the packet is, only its last fragment says.
    if ip.fragment != Fragment::No {
        return Err(Failed);
    }
    let offset = match end {
        End::Source => 0,
        End::Destination => 2,
    };
    let at = (ip.l4 + l4::SCTP_CHECKSUM) as usize;
    let checksum: [u8; 4] = ctx.load(at)?;
    ctx.store((ip.l4 + offset) as usize, &to, BPF_F_RECOMPUTE_CSUM.into())?;
    // Zeros: it has none yet, the card or the stack makes it, or none at all (RFC 9653).
    if checksum == [0; 4] {
        return Ok(());
    }
    let change = [from[0] ^ to[0], from[1] ^ to[1]];
    let checksum = crc32c::replaced(checksum, change, ip.l4_len - offset - 2, times_global);
    Ok(ctx.store(at, &checksum, BPF_F_RECOMPUTE_CSUM.into())?)
}

/// [`crc32c::times`], whose loop the verifier walks for each caller else.
#[inline(never)]
fn times_global(register: u32, power: u32) -> u32 {
    black_box(crc32c::times(black_box(register), black_box(power)))
}

/// The address of one end in the IP header.
#[inline(always)]
pub fn address(ctx: &TcContext, ip: &Ip, end: End, from: &Addr, to: &Addr) -> Result<(), Failed> {
    if ip.v6 {
        let offset = match end {
            End::Source => ip6::SRC,
            End::Destination => ip6::DST,
        };
        return Ok(ctx.store((ip.l3 + offset) as usize, to, 0)?);
    }
    let (src, dst) = match end {
        End::Source => (to, &ip.dst),
        End::Destination => (&ip.src, to),
    };
    // One call of the kernel, each of which makes sure first that the packet may be written to.
    let ends = Ends {
        checksum: checksum::replaced(ip.checksum, word(from), word(to)),
        src: word(src).to_ne_bytes(),
        dst: word(dst).to_ne_bytes(),
    };
    Ok(ctx.store((ip.l3 + ip4::CHECKSUM) as usize, &ends, 0)?)
}

/// The end of an IPv4 header without options, as it lies in the packet.
#[repr(C)]
struct Ends {
    checksum: [u8; 2],
    src: [u8; 4],
    dst: [u8; 4],
}

/// What the one's complement sum of an address becomes more by, if another takes its place. A mapped IPv4 address has
/// the same difference as the address itself.
#[inline(always)]
pub fn difference(from: &Addr, to: &Addr) -> Result<u32, Failed> {
    const LEN: u32 = size_of::<Addr>() as u32;
    let (from, to) = (core::ptr::from_ref(from), core::ptr::from_ref(to));
    // SAFETY: sixteen bytes each, which are read.
    let diff = unsafe { bpf_csum_diff(from.cast_mut().cast(), LEN, to.cast_mut().cast(), LEN, 0) };
    u32::try_from(diff).map_err(|_| Failed)
}

/// Two bytes of the TCP header at `tcp`, at an offset in it.
#[inline(always)]
pub fn in_tcp_header(
    ctx: &TcContext,
    tcp: u32,
    offset: u32,
    from: [u8; 2],
    to: [u8; 2],
) -> Result<(), Failed> {
    // The sum is one of pairs of bytes; these may be of two.
    let word = |bytes: [u8; 2]| match offset % 2 {
        0 => u16::from_ne_bytes(bytes),
        _ => u16::from_ne_bytes(bytes).swap_bytes(),
    };
    let checksum = (tcp + l4::TCP_CHECKSUM) as usize;
    ctx.l4_csum_replace(checksum, word(from).into(), word(to).into(), 2)?;
    Ok(ctx.store((tcp + offset) as usize, &to, 0)?)
}

/// Six bytes behind the UDP header at `udp`, at an even offset in it.
#[inline(always)]
pub fn udp_payload(
    ctx: &TcContext,
    udp: u32,
    offset: u32,
    from: [u8; 6],
    to: [u8; 6],
) -> Result<(), Failed> {
    let checksum = udp + l4::UDP_CHECKSUM;
    let sum: [u8; 2] = ctx.load(checksum as usize)?;
    if sum == [0; 2] {
        // None to repair, but the sum of the whole packet that a card may have left.
        ctx.store(offset as usize, &to, BPF_F_RECOMPUTE_CSUM.into())?;
        return Ok(());
    }
    // Two edits that undo each other in that sum.
    ctx.store(offset as usize, &to, 0)?;
    let mut at = 0;
    while at < 6 {
        let was = u16::from_ne_bytes([from[at], from[at + 1]]);
        let is = u16::from_ne_bytes([to[at], to[at + 1]]);
        let flags = BPF_F_MARK_MANGLED_0 | 2;
        ctx.l4_csum_replace(checksum as usize, was.into(), is.into(), flags.into())?;
        at += 2;
    }
    Ok(())
}

/// The IPv4 address inside a mapped one, as it lies in memory on the wire.
#[inline(always)]
pub fn word(addr: &Addr) -> u32 {
    u32::from_ne_bytes([addr.0[12], addr.0[13], addr.0[14], addr.0[15]])
}
