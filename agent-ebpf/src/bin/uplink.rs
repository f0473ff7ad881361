//! Both directions of the uplink.
//!
//! - `uplink_out`, egress: sends no tunnel packets but the node's own, masquerades what pods
//!   of this node send out of the cluster, and gives what Services answer their addresses;
//! - `uplink_in`, ingress: checks tunnels, keeps strangers from speaking for pods, gives
//!   replies back, and finds endpoints for clients of Services.
//!
//! Everything else passes untouched: VLANs, other protocols, and what the node itself sends and
//! receives.
//!
//! What they read of a packet is in the scratch, and each stage is a function of its own: the verifier
//! counts the deepest chain of calls against 512 bytes of stack, and walks each function once. Such a function
//! takes and returns what fits a register.
#![no_std]
#![no_main]

use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    macros::{classifier, map},
    programs::TcContext,
};
use aya_log_ebpf::warn;
use sinabro_common::abi::{
    config::FLAG_LAYER3_UPLINKS,
    drop::{DropReason, Hook},
};
use sinabro_ebpf::{
    PASS,
    flow::{self, Flows, Votes},
    forward,
    maps::{CONFIG, UPLINKS},
    nat::{self, DROPPED},
    overlay::{self, arriving::Arriving},
    parse::{
        eth,
        l4::L4,
        skb::{self, Head},
    },
    scratch::{self, Scratch},
    service,
    stage::{Action, report::Peer, tunnel},
};
#[path = "../event.rs"]
mod event;
#[path = "../rare.rs"]
mod rare;

/// What comes from pods of other nodes.
#[map]
static FLOWS: Flows<Arriving> = Flows::with_max_entries(flow::FLOWS, 0);

#[map]
static VOTES: Votes = Votes::with_max_entries(1, 0);

#[classifier]
pub fn uplink_out(ctx: TcContext) -> i32 {
    let skb = ctx.as_ptr().cast();
    if tunnel::is_made_here(skb) {
        return PASS;
    }
    let Some(scratch) = scratch::get() else {
        return PASS;
    };
    if !read(skb, scratch) {
        return PASS;
    }
    let action = match keep_tunnels(skb, scratch) {
        PASS => finish(&ctx, leave(skb, scratch)),
        tunnel::OURS => PASS,
        action => action,
    };
    event::told(skb, Hook::UplinkOut, action)
}

#[classifier]
pub fn uplink_in(ctx: TcContext) -> i32 {
    let skb = ctx.as_ptr().cast();
    let Some(scratch) = scratch::get() else {
        return PASS;
    };
    if !read(skb, scratch) {
        return PASS;
    }
    let action = match again(skb, scratch) {
        PASS => match check_source(skb, scratch) {
            PASS => finish(&ctx, arrive(skb, scratch)),
            tunnel::OURS => unwrap(skb, scratch),
            tunnel::NATIVE => event::of_stage(take(skb, scratch)),
            action => action,
        },
        action => event::of_stage(action),
    };
    event::told(skb, Hook::UplinkIn, action)
}

/// Delivers what goes on a flow from a pod of another node that was judged a moment ago. [`PASS`] if it is to be judged, and what was read
/// of it as it was.
#[inline(never)]
fn again(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    scratch.seen.forget();
    let Some(config) = CONFIG.get(0).filter(|config| overlay::takes(config)) else {
        return PASS;
    };
    let Some(overlay) = tunnel::overlay(config) else {
        return PASS;
    };
    let room = overlay::arrive::look_inside(skb, scratch, overlay);
    if room == 0 && !overlay::native::may_lead() {
        return PASS;
    }
    flow::see(skb, config, scratch, &VOTES);
    let action = match flow::way(&FLOWS, scratch) {
        Some(way) => overlay::arriving::again(skb, scratch, way, room),
        None => PASS,
    };
    if action == PASS && room != 0 {
        read(skb, scratch);
    }
    action
}

/// Has what was just delivered be remembered.
#[inline(never)]
fn keep(scratch: &Scratch) {
    if let Some(flow) = flow::to_remember(&FLOWS, scratch) {
        overlay::arriving::keep(flow, scratch);
    }
}

/// Delivers what is in a tunnel packet that was admitted, or leaves that to the VXLAN device.
#[inline(always)]
fn unwrap(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    // Not read any more of what is inside.
    let udp = scratch.ip.l4;
    scratch.sender = scratch.ip.src;
    match overlay::arrive::arrive(skb, scratch) {
        PASS => {
            Peer::find(&scratch.sender).count(|peer| &mut peer.kernel_rx);
            stamp(skb, udp)
        }
        action => {
            if action < DROPPED {
                Peer::find(&scratch.sender).count(|peer| &mut peer.direct_rx);
                keep(scratch);
            }
            event::of_stage(action)
        }
    }
}

/// Delivers what came without a tunnel and was admitted, or hands it on to a client outside, or leaves that to the VXLAN device.
#[inline(always)]
fn take(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let mut action = overlay::native::arrive(skb, scratch);
    if action == PASS {
        action = forward::across::answer(skb, scratch);
    } else if action < DROPPED {
        keep(scratch);
    }
    if action == PASS {
        return overlay::native::into_device(skb, scratch);
    }
    overlay::native::count(&scratch.sender, action);
    action
}

#[inline(never)]
fn stamp(skb: *mut __sk_buff, udp: u32) -> i32 {
    let ctx = TcContext::new(skb);
    match CONFIG.get(0).and_then(tunnel::overlay) {
        Some(overlay) => match counted(tunnel::stamp(&ctx, overlay, udp)) {
            tunnel::OURS => PASS,
            dropped => dropped,
        },
        None => PASS,
    }
}

/// What is for a pod goes into it, or to its node, past the stack, if it may.
#[inline(always)]
fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match nat::arrive::arrive(skb, scratch) {
        nat::arrive::TRANSLATED => forward::arrive::has_destination(scratch),
        action => return action,
    }
    match forward::arrive::arrive(skb, scratch) {
        PASS => forward::across::enter(skb, scratch),
        action => action,
    }
}

/// What answers a client outside has its address from the Service; all else is masqueraded if it is to be.
#[inline(always)]
fn leave(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    match service::outside::exit(skb, scratch) {
        PASS => nat::leave::leave(skb, scratch),
        service::TRANSLATED => PASS,
        action => action,
    }
}

/// Reads the headers; false if they are none of ours, or malformed: that is the stack's to judge.
#[inline(always)]
fn read(skb: *mut __sk_buff, scratch: &mut Scratch) -> bool {
    let ctx = TcContext::new(skb);
    let is_read = match skb::kind(&ctx) {
        _ if skb::is_of_vlan(&ctx) => false,
        eth::IP4 => scratch::read_ip4::<Head>(skb, scratch, header_len(skb)),
        eth::IP6 => scratch::read_ip6::<Head>(skb, scratch, header_len(skb)),
        _ => false,
    };
    if is_read {
        scratch::read_l4::<Head>(skb, scratch);
    }
    is_read
}

/// Where the IP header is, as a number that the verifier knows to be one of two.
#[inline(always)]
fn header_len(skb: *mut __sk_buff) -> u32 {
    match CONFIG.get(0) {
        Some(config) if config.flags & FLAG_LAYER3_UPLINKS != 0 && is_layer3(skb) => 0,
        _ => eth::LEN,
    }
}

/// Whether packets on the uplink begin with their IP header. One that the agent does not know any more has a
/// header as most have.
#[inline(always)]
fn is_layer3(skb: *mut __sk_buff) -> bool {
    // SAFETY: the context is valid for as long as the program runs, the value one that the map just gave.
    unsafe {
        UPLINKS
            .get_ptr((*skb).ifindex)
            .is_some_and(|uplink| (*uplink).header_len == 0)
    }
}

/// The transport header, if it is not malformed.
#[inline(always)]
fn transport(scratch: &Scratch) -> Option<L4> {
    scratch.well_formed.then_some(scratch.l4)
}

#[inline(never)]
fn keep_tunnels(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(overlay) = CONFIG.get(0).and_then(tunnel::overlay) else {
        return PASS;
    };
    match &transport(scratch) {
        Some(l4) if tunnel::is_tunnel(overlay, &scratch.ip, l4) => {
            counted(tunnel::leaves(&ctx, &scratch.ip))
        }
        _ => PASS,
    }
}

#[inline(never)]
fn check_source(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(config) = CONFIG.get(0) else {
        return PASS;
    };
    let Some(overlay) = tunnel::overlay(config) else {
        return PASS;
    };
    match &transport(scratch) {
        Some(l4) if tunnel::is_tunnel(overlay, &scratch.ip, l4) => {
            counted(tunnel::admit(&ctx, config, overlay, &scratch.ip))
        }
        _ => counted(tunnel::outside(skb, config, overlay, scratch)),
    }
}

#[inline(always)]
fn counted(action: Action) -> i32 {
    match action {
        Ok(action) => action,
        Err(reason) => event::dropped(reason),
    }
}

/// Makes an action of what a stage of [`nat`] returned.
#[inline(always)]
fn finish(ctx: &TcContext, action: i32) -> i32 {
    if action < DROPPED {
        return action;
    }
    let reason = (action - DROPPED) as u32;
    // The one reason that is the node's trouble and no packet's.
    if reason == DropReason::NatTableFull as u32 && rare::due() {
        warn!(
            ctx,
            target: "uplink",
            "the table of connections is full, new ones are dropped until others end"
        );
    }
    event::dropped_for(reason)
}
