//! ICMP errors. What they quote is a packet as somebody got it, behind our translation or in front of it: it is
//! looked up like a packet, and translated inside and outside, so that path MTU, unreachable and time
//! exceeded reach whom they are for (RFC 5508 §4).

use super::drop;
use crate::{
    PASS, connection,
    maps::{ALIASES, ENDPOINTS},
    nat::keeps_source,
    parse::{icmp, ip4, ip6, l4, proto},
    rewrite::{self, End, Failed},
    scratch::{self, Scratch, verified_once},
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0},
    programs::TcContext,
};
use core::mem::MaybeUninit;
use sinabro_common::abi::{Addr, connection::FLAG_MASQUERADED, drop::DropReason};

verified_once! {
    /// An error about what a pod sent, as it is outside.
    pub fn arrive = arrive_global(arrived);
}

#[inline(always)]
fn arrived(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !read(skb, scratch) || scratch.quoted.src != scratch.ip.dst {
        return PASS;
    }
    scratch.identify_quoted();
    scratch.tuple.write_reversed(&mut scratch.alias_key);
    let Some(alias) = ALIASES.get_ptr(&scratch.alias_key) else {
        return PASS;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        scratch.alias.addr = Addr::at(&raw const (*alias).addr);
        scratch.alias.port = (*alias).port;
    }
    finish(quoted(skb, scratch, End::Source).and_then(|()| outer(skb, scratch, End::Destination)))
}

verified_once! {
    /// An error about what a pod, or the node on its way to a pod, got from outside: outside that packet had
    /// the uplink's address.
    pub fn leave = leave_global(left);
}

#[inline(always)]
fn left(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let of_pod = ENDPOINTS.get_ptr(&scratch.ip.src).is_some();
    let unknown = match of_pod && !keeps_source(scratch.ip.dst) {
        true => drop(DropReason::NatProtocol),
        false => PASS,
    };
    if !read(skb, scratch) {
        return unknown;
    }
    let is_of_sender = scratch.quoted.dst == scratch.ip.src;
    // No pod speaks of what another one got.
    if of_pod && !is_of_sender {
        return unknown;
    }
    scratch.identify_quoted();
    let Some(found) = connection::find(&scratch.key) else {
        return unknown;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        if (*found).flags & FLAG_MASQUERADED == 0 {
            return PASS;
        }
        scratch.alias.addr = Addr::at(&raw const (*found).nat);
        scratch.alias.port = (*found).nat_port;
    }
    let quoted = quoted(skb, scratch, End::Destination);
    finish(match is_of_sender {
        true => quoted.and_then(|()| outer(skb, scratch, End::Source)),
        false => quoted,
    })
}

verified_once! {
    /// An error about what a client of a Service got from a pod of another node, on its way there: that pod got the client's
    /// packets from this node's address, in `scratch.nat`, and nothing else may come to it from here.
    pub fn cross = cross_global(crossed);
}

#[inline(always)]
fn crossed(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !read(skb, scratch) || scratch.quoted.src != scratch.ip.dst {
        return PASS;
    }
    scratch.identify_quoted();
    let Some(found) = connection::find(&scratch.key) else {
        return PASS;
    };
    // SAFETY: a value that the map just gave.
    unsafe {
        if (*found).flags & FLAG_MASQUERADED == 0 {
            return PASS;
        }
        scratch.alias.addr = Addr::at(&raw const (*found).nat);
        scratch.alias.port = (*found).nat_port;
    }
    let quoted = quoted(skb, scratch, End::Destination);
    finish(quoted.and_then(|()| outer(skb, scratch, End::Source)))
}

fn finish(result: Result<(), Failed>) -> i32 {
    match result {
        Ok(()) => PASS,
        Err(Failed) => drop(DropReason::RewriteFailed),
    }
}

/// Reads what is quoted, as far as it is there.
#[inline(never)]
pub fn read(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    let ctx = TcContext::new(skb);
    let at = scratch.ip.l4 + icmp::MIN_LEN;
    if scratch.ip.v6 {
        // SAFETY: an Ip may be written over.
        let to = unsafe { &mut *(&raw mut scratch.quoted).cast::<MaybeUninit<_>>() };
        if !ip6::read_into(&ctx, at, false, to) {
            return false;
        }
    } else {
        let Some(ip) = ip4::read(&ctx, at, false) else {
            return false;
        };
        scratch.quoted = ip;
    }
    match l4::read_quoted(&ctx, &scratch.quoted) {
        Some(l4) => {
            scratch.quoted_l4 = l4;
            true
        }
        None => false,
    }
}

/// The address of one end of the error itself, which has no ports.
#[inline(never)]
pub fn outer(skb: *mut __sk_buff, scratch: &mut Scratch, end: End) -> Result<(), Failed> {
    let from = match end {
        End::Source => &scratch.ip.src,
        End::Destination => &scratch.ip.dst,
    };
    let none = [0; 2];
    let to = &scratch.alias.addr;
    rewrite::endpoint(
        &TcContext::new(skb),
        &scratch.ip,
        end,
        (from, none),
        (to, none),
    )
}

/// One end of the quoted packet becomes `scratch.alias`, and the error's checksum is set right.
#[inline(never)]
pub fn quoted(skb: *mut __sk_buff, scratch: &mut Scratch, end: End) -> Result<(), Failed> {
    let ctx = TcContext::new(skb);
    let ip = &scratch.quoted;
    let (from, port, offset) = match end {
        End::Source => (&ip.src, scratch.quoted_l4.src_port, 0),
        End::Destination => (&ip.dst, scratch.quoted_l4.dst_port, 2),
    };
    let (to, to_port) = (&scratch.alias.addr, scratch.alias.port);
    rewrite::address(&ctx, ip, end, from, to)?;
    let of_addresses = rewrite::difference(from, to)?;
    let (checksum, mark, covers_addresses, offset) = match ip.proto {
        proto::TCP => (l4::TCP_CHECKSUM, 0, true, offset),
        proto::UDP | proto::UDPLITE => (l4::UDP_CHECKSUM, BPF_F_MARK_MANGLED_0, true, offset),
        proto::ICMP => (icmp::CHECKSUM, 0, false, icmp::ECHO_ID),
        proto::ICMPV6 => (icmp::CHECKSUM, 0, true, icmp::ECHO_ID),
        // Behind any packet: whoever gets an error cannot check the sum over a packet that is cut off.
        proto::SCTP => (u32::MAX - 2, 0, false, offset),
        _ => {
            // The address alone; IPv4's header makes up for it itself.
            return match ip.v6 {
                true => in_error(&ctx, scratch, of_addresses),
                false => Ok(()),
            };
        }
    };
    // What becomes more in the sum of all that is quoted.
    let mut more = if ip.v6 { of_addresses } else { 0 };
    let mut of_transport = if covers_addresses { of_addresses } else { 0 };
    if port != to_port {
        let of_port = add(
            u32::from(!u16::from_ne_bytes(port)),
            u32::from(u16::from_ne_bytes(to_port)),
        );
        ctx.store((ip.l4 + offset) as usize, &to_port, 0)?;
        more = add(more, of_port);
        of_transport = add(of_transport, of_port);
    }
    // Often it is cut off in front of the checksum.
    if ip.l4_len >= checksum + 2 {
        let at = (ip.l4 + checksum) as usize;
        let before: [u8; 2] = ctx.load(at)?;
        if mark == 0 || before != [0; 2] {
            ctx.l4_csum_replace(at, 0, of_transport.into(), mark.into())?;
            more = add(more, !of_transport);
        }
    }
    in_error(&ctx, scratch, more)
}

/// Sets the error's own checksum right, where what it covers has become more by that much.
#[inline(always)]
fn in_error(ctx: &TcContext, scratch: &Scratch, more: u32) -> Result<(), Failed> {
    let at = (scratch.ip.l4 + icmp::CHECKSUM) as usize;
    Ok(ctx.l4_csum_replace(at, 0, more.into(), 0)?)
}

/// One's complement addition.
#[inline(always)]
fn add(a: u32, b: u32) -> u32 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u32::from(carry)
}
