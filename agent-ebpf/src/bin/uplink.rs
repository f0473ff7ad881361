//! Both directions of the uplink.
//!
//! - `uplink_out`, egress: sends no tunnel packets but the node's own, and masquerades what pods
//!   of this node send out of the cluster;
//! - `uplink_in`, ingress: checks tunnels, keeps strangers from speaking for pods, and gives
//!   replies back.
//!
//! Everything else passes untouched: VLANs, other protocols, and what the node itself sends and
//! receives.
//!
//! A program has 512 bytes of stack. The parts are functions of their own, one after another, so
//! that each has what the others left: the verifier counts the deepest chain of calls. Such a
//! function takes and returns what fits a register. Masquerading, with its loop over ports, is part
//! of the program itself: through a call the verifier before Linux 6.4 cannot follow which values
//! matter (kernel commit fde2a3882bd0), takes all of them to, and walks the loop's states without
//! end.
#![no_std]
#![no_main]

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, macros::classifier, programs::TcContext};
use aya_log_ebpf::warn;
use core::mem::MaybeUninit;
use sinabro_common::abi::{
    Addr,
    config::{FLAG_MASQUERADE, NodeConfig},
    drop::{DropReason, Hook},
};
use sinabro_ebpf::{
    PASS,
    maps::{CONFIG, ENDPOINTS},
    parse::{Ip, eth, ip4, ip6, l4, l4::L4, skb},
    stage::{Action, nat, tunnel},
};
#[path = "../event.rs"]
mod event;
#[path = "../rare.rs"]
mod rare;

/// The headers of a packet.
struct Packet {
    ip: Ip,
    /// All zeros if it is malformed. Not an Option: what is no value in one is no bytes either,
    /// and the verifier lets nobody copy those.
    l4: L4,
    well_formed: bool,
}

impl Packet {
    #[inline(always)]
    fn l4(&self) -> Option<L4> {
        self.well_formed.then_some(self.l4)
    }
}

#[classifier]
pub fn uplink_out(ctx: TcContext) -> i32 {
    let mut packet = MaybeUninit::uninit();
    let skb = ctx.as_ptr().cast();
    if !read(skb, &mut packet) {
        return PASS;
    }
    // SAFETY: `read` wrote it.
    let packet = unsafe { packet.assume_init_ref() };
    let action = match keep_tunnels(skb, packet) {
        PASS => masquerade(skb, packet),
        action => action,
    };
    event::told(skb, Hook::UplinkOut, action)
}

#[classifier]
pub fn uplink_in(ctx: TcContext) -> i32 {
    let mut packet = MaybeUninit::uninit();
    let skb = ctx.as_ptr().cast();
    if !read(skb, &mut packet) {
        return PASS;
    }
    // SAFETY: `read` wrote it.
    let packet = unsafe { packet.assume_init_ref() };
    let action = match check_source(skb, packet) {
        PASS => reverse(skb, packet),
        action => action,
    };
    event::told(skb, Hook::UplinkIn, action)
}

/// Reads the headers; false if they are none of ours, or malformed: that is the stack's to judge.
#[inline(always)]
fn read(skb: *mut __sk_buff, packet: &mut MaybeUninit<Packet>) -> bool {
    let to = packet.as_mut_ptr();
    // SAFETY: each part is written before it is read, and nothing else refers to it.
    unsafe {
        let ip = &raw mut (*to).ip;
        let is_read = match family(skb) {
            4 => read_ip4(skb, ip),
            6 => read_ip6(skb, ip),
            _ => false,
        };
        if !is_read {
            return false;
        }
        (&raw mut (*to).well_formed).write(read_l4(skb, ip, &raw mut (*to).l4));
    }
    true
}

/// IP version of the packet, zero if it is none or of a VLAN.
#[inline(never)]
fn family(skb: *mut __sk_buff) -> u32 {
    let ctx = TcContext::new(skb);
    match eth::read(&ctx) {
        Some(_) if skb::is_of_vlan(&ctx) => 0,
        Some(eth) if eth.kind == eth::IP4 => 4,
        Some(eth) if eth.kind == eth::IP6 => 6,
        _ => 0,
    }
}

#[inline(never)]
fn read_ip4(skb: *mut __sk_buff, to: *mut Ip) -> bool {
    let Some(ip) = ip4::read(&TcContext::new(skb)) else {
        return false;
    };
    // SAFETY: `read` gives the place of an Ip.
    unsafe { to.write(ip) };
    true
}

#[inline(never)]
fn read_ip6(skb: *mut __sk_buff, to: *mut Ip) -> bool {
    // SAFETY: as in `read_ip4`; it need not be one yet.
    let to = unsafe { &mut *to.cast::<MaybeUninit<Ip>>() };
    ip6::read_into(&TcContext::new(skb), to)
}

#[inline(never)]
fn read_l4(skb: *mut __sk_buff, ip: *const Ip, to: *mut L4) -> bool {
    // SAFETY: `read` gives the place of an Ip that was read.
    let l4 = l4::read(&TcContext::new(skb), unsafe { &*ip });
    // SAFETY: `read` gives the place of an L4.
    unsafe { to.write(l4.unwrap_or_default()) };
    l4.is_some()
}

#[inline(never)]
fn keep_tunnels(skb: *mut __sk_buff, packet: &Packet) -> i32 {
    let ctx = TcContext::new(skb);
    let leave = |config| -> Action {
        match (tunnel::overlay(config), &packet.l4()) {
            (Some(overlay), Some(l4)) if tunnel::is_tunnel(overlay, &packet.ip, l4) => {
                tunnel::leaves(&ctx, &packet.ip)
            }
            _ => Ok(PASS),
        }
    };
    finish(&ctx, CONFIG.get(0).map_or(Ok(PASS), leave))
}

#[inline(always)]
fn masquerade(skb: *mut __sk_buff, packet: &Packet) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(config) = masquerading(&packet.ip) else {
        return PASS;
    };
    if ENDPOINTS.get_ptr(packet.ip.src).is_none() {
        return PASS;
    }
    finish(&ctx, nat::masquerade(&ctx, config, &packet.ip, packet.l4()))
}

#[inline(never)]
fn check_source(skb: *mut __sk_buff, packet: &Packet) -> i32 {
    let ctx = TcContext::new(skb);
    let arrive = |config| -> Action {
        let Some(overlay) = tunnel::overlay(config) else {
            return Ok(PASS);
        };
        match &packet.l4() {
            Some(l4) if tunnel::is_tunnel(overlay, &packet.ip, l4) => {
                tunnel::admit(&ctx, config, overlay, &packet.ip)
            }
            _ => tunnel::outside(config, &packet.ip),
        }
    };
    finish(&ctx, CONFIG.get(0).map_or(Ok(PASS), arrive))
}

#[inline(never)]
fn reverse(skb: *mut __sk_buff, packet: &Packet) -> i32 {
    let ctx = TcContext::new(skb);
    let (Some(config), Some(l4)) = (masquerading(&packet.ip), &packet.l4()) else {
        return PASS;
    };
    finish(&ctx, nat::reverse(&ctx, config, &packet.ip, l4))
}

#[inline(always)]
fn finish(ctx: &TcContext, action: Action) -> i32 {
    let reason = match action {
        Ok(action) => return action,
        Err(reason) => reason,
    };
    // The one reason that is the node's trouble and no packet's.
    if reason == DropReason::NatTableFull && rare::due() {
        warn!(
            ctx,
            target: "uplink",
            "masquerade table is full, new flows are dropped until others end"
        );
    }
    event::dropped(reason)
}

/// The node's settings, if packets of this family get the node's address.
#[inline(always)]
fn masquerading(ip: &Ip) -> Option<&'static NodeConfig> {
    CONFIG.get(0).filter(|config| {
        !ip.v6 && config.flags & FLAG_MASQUERADE != 0 && config.masquerade_v4 != Addr::UNSPECIFIED
    })
}
