//! The VXLAN device.
//!
//! - `overlay_in`, ingress: what comes out of tunnels, each packet once it is unwrapped.
#![no_std]
#![no_main]

use aya_ebpf::{macros::classifier, programs::TcContext};
use sinabro_common::abi::{config::FLAG_STAMPED, drop::DropReason};
use sinabro_ebpf::{
    PASS,
    maps::CONFIG,
    parse::{Ip, eth},
    stage::{Action, report, tunnel},
};

#[classifier]
pub fn overlay_in(ctx: TcContext) -> i32 {
    match arrive(&ctx) {
        Ok(action) => action,
        Err(reason) => report::dropped(reason),
    }
}

#[inline(always)]
fn arrive(ctx: &TcContext) -> Action {
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
