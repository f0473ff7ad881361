//! The VXLAN device.
//!
//! - `overlay_in`, ingress: what comes out of tunnels, each packet once it is unwrapped.
#![no_std]
#![no_main]

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, macros::classifier, programs::TcContext};
use sinabro_common::abi::{
    config::FLAG_STAMPED,
    drop::{DropReason, Hook},
};
use sinabro_ebpf::{
    PASS,
    maps::CONFIG,
    parse::{Ip, eth},
    stage::{Action, tunnel},
};
#[path = "../event.rs"]
mod event;

#[classifier]
pub fn overlay_in(ctx: TcContext) -> i32 {
    let skb = ctx.as_ptr().cast();
    event::told(skb, Hook::OverlayIn, arrive(skb))
}

#[inline(never)]
fn arrive(skb: *mut __sk_buff) -> i32 {
    match checked(&TcContext::new(skb)) {
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
