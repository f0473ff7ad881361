//! Both directions of the uplink.
//!
//! - `uplink_out`, egress: masquerades what pods of this node send out of the cluster;
//! - `uplink_in`, ingress: gives replies back.
//!
//! Everything that is not a pod's passes untouched: IPv6, VLAN tags, other protocols, and what
//! the node itself sends and receives.
#![no_std]
#![no_main]

use aya_ebpf::{macros::classifier, programs::TcContext};
use aya_log_ebpf::warn;
use sinabro_common::abi::{
    Addr,
    config::{FLAG_MASQUERADE, NodeConfig},
    drop::DropReason,
};
use sinabro_ebpf::{
    PASS,
    maps::{CONFIG, ENDPOINTS},
    parse::{Ip, eth, ip4, l4},
    stage::{nat, report},
};
#[path = "../rare.rs"]
mod rare;

#[classifier]
pub fn uplink_out(ctx: TcContext) -> i32 {
    let Some((config, ip)) = read(&ctx) else {
        return PASS;
    };
    if ENDPOINTS.get_ptr(ip.src).is_none() {
        return PASS;
    }
    match nat::masquerade(&ctx, config, &ip, l4::read(&ctx, &ip)) {
        Ok(action) => action,
        Err(reason) => dropped(&ctx, reason),
    }
}

#[classifier]
pub fn uplink_in(ctx: TcContext) -> i32 {
    let Some((config, ip)) = read(&ctx) else {
        return PASS;
    };
    // What is malformed is the stack's to judge: nothing here looks at it.
    let Some(l4) = l4::read(&ctx, &ip) else {
        return PASS;
    };
    match nat::reverse(&ctx, config, &ip, &l4) {
        Ok(action) => action,
        Err(reason) => dropped(&ctx, reason),
    }
}

#[inline(always)]
fn dropped(ctx: &TcContext, reason: DropReason) -> i32 {
    // The one reason that is the node's trouble and no packet's.
    if reason == DropReason::NatTableFull && rare::due() {
        warn!(
            ctx,
            target: "uplink",
            "masquerade table is full, new flows are dropped until others end"
        );
    }
    report::dropped(reason)
}

/// The IPv4 header, if masquerade is on and this is an IPv4 packet.
#[inline(always)]
fn read(ctx: &TcContext) -> Option<(&'static NodeConfig, Ip)> {
    let config = CONFIG.get(0)?;
    if config.flags & FLAG_MASQUERADE == 0 || config.masquerade_v4 == Addr::UNSPECIFIED {
        return None;
    }
    let eth = eth::read(ctx)?;
    if eth.kind != eth::IP4 || eth::is_tagged(ctx) {
        return None;
    }
    Some((config, ip4::read(ctx)?))
}
