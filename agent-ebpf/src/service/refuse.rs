//! Refusals: who sends where nobody can answer is told so, by the Service's address.
//!
//! TCP gets a reset (RFC 9293 §3.10.7.1), all else an ICMP error: port unreachable, which quotes the IP header and
//! eight bytes (RFC 792; RFC 4443 §2.4 wants more, but this is what a sender's stack looks at). The packet becomes its own
//! answer and goes back by the link that it came from: so nobody gets more of them than he asks for.

use crate::{
    nat::DROPPED,
    parse::{
        Fragment, icmp, ip4, ip6,
        l4::{self, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
        proto,
    },
    rewrite::{self, Failed},
    scratch::{self, Scratch, verified_once},
    stage::report,
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_RECOMPUTE_CSUM},
    helpers::{
        bpf_csum_diff, bpf_redirect, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
    },
    programs::TcContext,
};
use sinabro_common::{abi::Addr, algo::checksum};

/// Without options.
const TCP_LEN: u32 = 20;
/// Of the transport header that is quoted.
const QUOTED: u32 = 8;
const V4_LEN: u32 = icmp::MIN_LEN + ip4::HEADER_LEN + QUOTED;
const V6_LEN: u32 = icmp::MIN_LEN + ip6::HEADER_LEN + QUOTED;

/// Of what the node itself sends.
const TTL: u8 = 64;

/// What is behind the IP header of an answer, and what else is in its checksum.
#[repr(C)]
pub struct Answer {
    pseudo: Pseudo,
    bytes: [u8; V6_LEN as usize],
}

/// Of IPv4, too: what a mapped address has beside the address itself adds nothing to a sum.
#[repr(C)]
struct Pseudo {
    src: Addr,
    dst: Addr,
    len: [u8; 4],
    proto: [u8; 4],
}

verified_once! {
    /// Sends the answer for `scratch.reason`, or drops the packet for it.
    pub fn refuse = refuse_global(refused);
}

#[inline(always)]
fn refused(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let is_reset = scratch.ip.proto == proto::TCP && scratch.l4.tcp_flags & TCP_RST != 0;
    let is_answered = scratch.ip.fragment == Fragment::No && !scratch.ip.options && !is_reset;
    let made = match scratch.ip.proto {
        _ if !is_answered => Err(Failed),
        proto::TCP => reset(skb, scratch),
        _ => unreachable(skb, scratch),
    };
    match made {
        Ok(()) => {
            report::dropped(scratch.reason as u32);
            // SAFETY: the context is valid for as long as the program runs; no other pointers involved.
            unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
        }
        Err(Failed) => DROPPED + scratch.reason,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Tcp {
    ports: [[u8; 2]; 2],
    sequence: [u8; 4],
    acknowledged: [u8; 4],
    data_offset: u8,
    flags: u8,
}

#[inline(never)]
fn reset(skb: *mut __sk_buff, scratch: &mut Scratch) -> Result<(), Failed> {
    let ctx = TcContext::new(skb);
    let Scratch { ip, answer, .. } = &mut *scratch;
    let tcp: Tcp = ctx.load(ip.l4 as usize)?;
    let bytes = &mut answer.bytes;
    *bytes = [0; V6_LEN as usize];
    bytes[..2].copy_from_slice(&tcp.ports[1]);
    bytes[2..4].copy_from_slice(&tcp.ports[0]);
    if tcp.flags & TCP_ACK != 0 {
        bytes[4..8].copy_from_slice(&tcp.acknowledged);
        bytes[13] = TCP_RST;
    } else {
        let data = ip.l4_len.wrapping_sub(u32::from(tcp.data_offset >> 4) * 4);
        let controls = u32::from(tcp.flags & TCP_SYN != 0) + u32::from(tcp.flags & TCP_FIN != 0);
        let next = u32::from_be_bytes(tcp.sequence)
            .wrapping_add(data)
            .wrapping_add(controls);
        bytes[8..12].copy_from_slice(&next.to_be_bytes());
        bytes[13] = TCP_RST | TCP_ACK;
    }
    bytes[12] = (TCP_LEN as u8 / 4) << 4;
    let sum = sum(scratch, TCP_LEN, proto::TCP)?;
    let checksum = (!sum).to_ne_bytes();
    scratch.answer.bytes[l4::TCP_CHECKSUM as usize] = checksum[0];
    scratch.answer.bytes[l4::TCP_CHECKSUM as usize + 1] = checksum[1];
    send(skb, scratch, TCP_LEN, proto::TCP)?;
    complete(skb, scratch)
}

/// Where a card, or whoever takes its place, is to complete the checksum, the packet has the sum of the pseudo header
/// alone. Whether it is so shows in what the kernel does for a change of what only the whole sum covers.
#[inline(always)]
fn complete(skb: *mut __sk_buff, scratch: &mut Scratch) -> Result<(), Failed> {
    let ctx = TcContext::new(skb);
    let at = (scratch.ip.l4 + l4::TCP_CHECKSUM) as usize;
    let before: [u8; 2] = ctx.load(at)?;
    ctx.l4_csum_replace(at, 0, 1, 2)?;
    let after: [u8; 2] = ctx.load(at)?;
    if after != before {
        return Ok(ctx.l4_csum_replace(at, 1, 0, 2)?);
    }
    let sum = folded(of_pseudo_header(scratch)?);
    Ok(ctx.store(at, &sum.to_ne_bytes(), 0)?)
}

#[inline(never)]
fn unreachable(skb: *mut __sk_buff, scratch: &mut Scratch) -> Result<(), Failed> {
    let v6 = scratch.ip.v6;
    let l3 = scratch.ip.l3;
    let bytes = &mut scratch.answer.bytes;
    *bytes = [0; V6_LEN as usize];
    (bytes[0], bytes[1]) = match v6 {
        false => (icmp::V4_UNREACHABLE, icmp::V4_PORT),
        true => (icmp::V6_UNREACHABLE, icmp::V6_PORT),
    };
    // SAFETY: the context is valid for as long as the program runs, and so many bytes are there to be written to.
    let loaded = unsafe {
        let to = bytes.as_mut_ptr().add(icmp::MIN_LEN as usize).cast();
        match v6 {
            false => bpf_skb_load_bytes(skb.cast(), l3, to, V4_LEN - icmp::MIN_LEN),
            true => bpf_skb_load_bytes(skb.cast(), l3, to, V6_LEN - icmp::MIN_LEN),
        }
    };
    if loaded != 0 {
        return Err(Failed);
    }
    let (len, proto) = match v6 {
        false => (V4_LEN, proto::ICMP),
        true => (V6_LEN, proto::ICMPV6),
    };
    let sum = match v6 {
        // Zeros behind what is sent; no address is in it.
        false => folded(of(&scratch.answer.bytes, V6_LEN, 0)?),
        true => sum(scratch, len, proto)?,
    };
    let checksum = (!sum).to_ne_bytes();
    scratch.answer.bytes[icmp::CHECKSUM as usize] = checksum[0];
    scratch.answer.bytes[icmp::CHECKSUM as usize + 1] = checksum[1];
    send(skb, scratch, len, proto)
}

/// The sum of the answer, behind which there are zeros, and of its pseudo header.
#[inline(always)]
fn sum(scratch: &mut Scratch, len: u32, proto: u8) -> Result<u16, Failed> {
    let Scratch { ip, answer, .. } = &mut *scratch;
    answer.pseudo.src = ip.dst;
    answer.pseudo.dst = ip.src;
    answer.pseudo.len = len.to_be_bytes();
    answer.pseudo.proto = [0, 0, 0, proto];
    let seed = of_pseudo_header(scratch)?;
    Ok(folded(of(&scratch.answer.bytes, V6_LEN, seed)?))
}

#[inline(always)]
fn of_pseudo_header(scratch: &Scratch) -> Result<u32, Failed> {
    of(&scratch.answer.pseudo, size_of::<Pseudo>() as u32, 0)
}

/// The one's complement sum of the first bytes of something, and of `seed`.
#[inline(always)]
fn of<T>(bytes: &T, len: u32, seed: u32) -> Result<u32, Failed> {
    let from = core::ptr::from_ref(bytes).cast_mut().cast();
    // SAFETY: so many bytes, which are read.
    let sum = unsafe { bpf_csum_diff(core::ptr::null_mut(), 0, from, len, seed) };
    u32::try_from(sum).map_err(|_| Failed)
}

#[inline(always)]
fn folded(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// Makes the packet the answer, whose sum the bytes have.
#[inline(always)]
fn send(skb: *mut __sk_buff, scratch: &mut Scratch, len: u32, proto: u8) -> Result<(), Failed> {
    let ctx = TcContext::new(skb);
    let ip = &scratch.ip;
    // SAFETY: the context is valid for as long as the program runs. Also takes away what says how large the
    // segments of the packet were.
    if unsafe { bpf_skb_change_tail(skb, ip.l4 + len, 0) } != 0 {
        return Err(Failed);
    }
    let flags = BPF_F_RECOMPUTE_CSUM.into();
    let from = scratch.answer.bytes.as_ptr().cast_mut().cast();
    // SAFETY: as above, and so many bytes are there to be read.
    let stored = unsafe {
        match len {
            TCP_LEN => bpf_skb_store_bytes(skb.cast(), ip.l4, from, TCP_LEN, flags),
            V4_LEN => bpf_skb_store_bytes(skb.cast(), ip.l4, from, V4_LEN, flags),
            _ => bpf_skb_store_bytes(skb.cast(), ip.l4, from, V6_LEN, flags),
        }
    };
    if stored != 0 {
        return Err(Failed);
    }
    // A layer-3 device's packets begin with their IP header.
    if ip.l3 != 0 {
        let [dst, src]: [[u8; 6]; 2] = ctx.load(0)?;
        rewrite::macs(&ctx, src, dst)?;
    }
    if ip.v6 {
        let [high, low] = (len as u16).to_be_bytes();
        let start = [0x60, 0, 0, 0, high, low, proto, TTL];
        ctx.store(ip.l3 as usize, &start, flags)?;
        ctx.store((ip.l3 + ip6::SRC) as usize, &[ip.dst, ip.src], flags)?;
        return Ok(());
    }
    let [high, low] = ((ip4::HEADER_LEN + len) as u16).to_be_bytes();
    let (src, dst) = (rewrite::word(&ip.dst), rewrite::word(&ip.src));
    // Whole, and not to be cut: it needs no id (RFC 6864 §4).
    let words = [
        u32::from_ne_bytes([0x45, 0, high, low]),
        u32::from_ne_bytes([0, 0, 0x40, 0]),
        u32::from_ne_bytes([TTL, proto, 0, 0]),
        src,
        dst,
    ];
    let mut sum = [0xff; 2];
    for word in words {
        sum = checksum::replaced(sum, 0, word);
    }
    let third = u32::from_ne_bytes([TTL, proto, sum[0], sum[1]]);
    let header = [words[0], words[1], third, src, dst];
    Ok(ctx.store(ip.l3 as usize, &header, flags)?)
}
