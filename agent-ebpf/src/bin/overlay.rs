//! Both directions of the VXLAN device, and what the agent asks the kernel about tunnels.
//!
//! - `overlay_in`, ingress: what comes out of tunnels, each packet once it is unwrapped;
//! - `overlay_out`, egress: what the stack sends into one; clients of Services that came in by an uplink get this node's address,
//!   and so do the node's own sockets that are bound to another one. What needs no tunnel leaves without;
//! - `overlay_wraps`, attached nowhere: the agent runs it, on no packet of anybody's.
#![no_std]
#![no_main]

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, macros::classifier, programs::TcContext};
use core::hint::black_box;
use sinabro_common::abi::{
    config::FLAG_STAMPED,
    drop::{DropReason, Hook},
};
use sinabro_ebpf::{
    PASS,
    maps::CONFIG,
    nat::across,
    overlay::{self, arrive, leave, native},
    parse::{Ip, eth, ip4, skb},
    scratch::{self, Scratch},
    stage::{Action, origin, track, tunnel},
};
#[path = "../event.rs"]
mod event;

#[classifier]
pub fn overlay_in(ctx: TcContext) -> i32 {
    let skb = ctx.as_ptr().cast();
    let action = match check(skb) {
        tunnel::OURS => match read(skb) {
            Some(scratch) => event::of_stage(across::arrive(skb, scratch)),
            None => PASS,
        },
        PASS if CONFIG.get(0).is_some_and(overlay::is_beside_proxy) => match read(skb) {
            Some(scratch) => event::of_stage(arrive::from_device(skb, scratch)),
            None => PASS,
        },
        action => action,
    };
    event::told(skb, Hook::OverlayIn, action)
}

#[classifier]
pub fn overlay_out(ctx: TcContext) -> i32 {
    let skb = ctx.as_ptr().cast();
    let mut action = judge(skb);
    if action == PASS && !tunnel::is_made_here(skb) {
        action = record_global(skb);
    }
    if action == PASS
        && native::may_lead()
        && let Some(scratch) = scratch::get()
    {
        action = native::instead_of_the_device(skb, scratch);
    }
    event::told(skb, Hook::OverlayOut, action)
}

#[inline(always)]
fn judge(skb: *mut __sk_buff) -> i32 {
    let from = origin::comes_from(skb);
    // What a pod sends is neither forged nor masqueraded here.
    if origin::is_a_pods(from) {
        return PASS;
    }
    if !origin::is_checked(from) && is_forged(skb, from) {
        return event::dropped(DropReason::PodSource);
    }
    if across::may_be_masqueraded(from)
        && let Some(scratch) = read(skb)
    {
        return event::of_stage(across::leave(skb, scratch));
    }
    PASS
}

/// Has the answers to what the stack sends, and may have translated, go by the stack, too.
#[inline(never)]
fn record_global(skb: *mut __sk_buff) -> i32 {
    black_box(record(skb))
}

#[inline(always)]
fn record(skb: *mut __sk_buff) -> i32 {
    if !CONFIG.get(0).is_some_and(overlay::records_stack) {
        return PASS;
    }
    let Some(scratch) = read(skb) else {
        return PASS;
    };
    event::of_stage(track::sent(skb, scratch))
}

/// Whether others send it in a pod's name.
#[inline(never)]
fn is_forged(skb: *mut __sk_buff, from: u32) -> bool {
    let (Some(config), Some((src, _))) = (CONFIG.get(0), native::ends(&TcContext::new(skb))) else {
        return false;
    };
    origin::is_forged(from, config, &src)
}

/// Zero if this kernel has packets put into tunnels past the stack.
#[classifier]
pub fn overlay_wraps(ctx: TcContext) -> i32 {
    i32::from(!leave::wrap::<ip4::Header>(ctx.as_ptr().cast()))
}

#[inline(never)]
fn check(skb: *mut __sk_buff) -> i32 {
    match checked(&TcContext::new(skb)) {
        Ok(tunnel::OURS) if !across::has_answers() => PASS,
        Ok(action) => action,
        Err(reason) => event::dropped(reason),
    }
}

#[inline(always)]
fn checked(ctx: &TcContext) -> Action {
    let stamped = CONFIG
        .get(0)
        .filter(|config| config.flags & FLAG_STAMPED != 0);
    let Some(overlay) = stamped.and_then(tunnel::overlay) else {
        return Ok(PASS);
    };
    let eth = eth::read(ctx).ok_or(DropReason::Malformed)?;
    // Neighbours are known and never asked for: whatever is not IP comes from a stranger.
    let ip = Ip::read(ctx, eth.kind).ok_or(DropReason::TunnelUnchecked)?;
    let ip = ip.ok_or(DropReason::Malformed)?;
    tunnel::arrives(overlay, &eth, &ip)
}

/// Reads the headers into the scratch; none if they are none of ours, or malformed.
#[inline(always)]
fn read(skb: *mut __sk_buff) -> Option<&'static mut Scratch> {
    let scratch = scratch::get()?;
    let is_read = match skb::kind(&TcContext::new(skb)) {
        eth::IP4 => scratch::read_ip4::<TcContext>(skb, scratch, eth::LEN),
        eth::IP6 => scratch::read_ip6::<TcContext>(skb, scratch, eth::LEN),
        _ => false,
    };
    if !is_read {
        return None;
    }
    scratch::read_l4::<TcContext>(skb, scratch);
    Some(scratch)
}
