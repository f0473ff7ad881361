//! Both directions of the host-side interface of every pod.
//!
//! - `pod_out`, ingress of the interface: what leaves the pod;
//! - `pod_in`, egress of the interface: what the stack delivers to the pod. Packets redirected
//!   by `pod_out` of the sender do not pass here.
#![no_std]
#![no_main]

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, TC_ACT_REDIRECT},
    macros::{classifier, map},
    programs::TcContext,
};
use core::hint::black_box;
use sinabro_common::abi::{
    config::NodeConfig,
    drop::{DropReason, Hook},
    endpoint::Endpoint,
};
use sinabro_ebpf::{
    PASS,
    flow::{self, Flows, Votes},
    forward,
    maps::{CONFIG, POD_LINKS},
    overlay::{self, leave::Leaving},
    parse::{
        Ip, arp, eth,
        l4::{self, L4},
        skb::{self, Frame as _, Head},
    },
    scratch::{self, Scratch},
    service,
    stage::{Action, deliver, identity, mss, origin, report, track, tunnel},
};
#[path = "../event.rs"]
mod event;

/// What pods send to pods.
#[map]
static FLOWS: Flows<Leaving> = Flows::with_max_entries(flow::FLOWS, 0);

#[map]
static VOTES: Votes = Votes::with_max_entries(1, 0);

/// What `leave` and `arrive` say of a packet that passes and begins a connection; no action of the kernel's.
const BEGINS: i32 = 64;

/// Functions one after the other: each has a stack of its own, and what the second does is
/// verified once.
#[classifier]
pub fn pod_out(ctx: TcContext) -> i32 {
    let skb = ctx.as_ptr().cast();
    let mut action = leave(skb);
    if matches!(action, PASS | BEGINS) && CONFIG.get(0).is_some_and(overlay::is_beside_proxy_alone)
    {
        action = match beside_proxy_global(skb) {
            PASS => action,
            instead => instead,
        };
    }
    let action = match action {
        BEGINS => begin(skb),
        deliver::TELLS => match tell(skb) {
            PASS => tell_elsewhere(skb),
            action => action,
        },
        action => action,
    };
    event::told(skb, Hook::PodOut, action)
}

#[inline(never)]
fn leave(skb: *mut __sk_buff) -> i32 {
    match checked(&TcContext::new(skb)) {
        Ok(action) => event::of_stage(action),
        Err(reason) => event::dropped(reason),
    }
}

/// Few packets come here, so it may read them again.
#[inline(never)]
fn begin(skb: *mut __sk_buff) -> i32 {
    lowered(skb, mss::leaving)
}

#[inline(never)]
fn tell(skb: *mut __sk_buff) -> i32 {
    match scratch::get() {
        Some(scratch) => event::of_stage(deliver::tell(skb, scratch)),
        None => PASS,
    }
}

/// As `tell`, to a pod of another node.
#[inline(never)]
fn tell_elsewhere(skb: *mut __sk_buff) -> i32 {
    match scratch::get() {
        Some(scratch) => event::of_stage(overlay::leave::tell(skb, scratch)),
        None => PASS,
    }
}

/// As `begin`, of what comes from another machine.
#[inline(never)]
fn enter(skb: *mut __sk_buff) -> i32 {
    lowered(skb, |ctx, ip, _| mss::entering(ctx, ip))
}

#[inline(always)]
fn lowered(skb: *mut __sk_buff, lower: impl Fn(&TcContext, &Ip, &L4) -> Action) -> i32 {
    let ctx = TcContext::new(skb);
    let lowered = match Ip::read(&ctx, skb::kind(&ctx)) {
        Some(Some(ip)) => l4::read(&ctx, &ip).map(|l4| lower(&ctx, &ip, &l4)),
        _ => None,
    };
    match lowered {
        Some(Ok(action)) => action,
        Some(Err(reason)) => event::dropped(reason),
        // Of what leaves it was read before; of the rest the pod itself thinks what it likes.
        None => PASS,
    }
}

#[inline(always)]
fn checked(ctx: &TcContext) -> Action {
    let ifindex = ifindex(ctx);
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let link = unsafe { POD_LINKS.get(ifindex) }.ok_or(DropReason::UnknownLink)?;
    let eth = eth::read(&Head::new(ctx.skb.skb)).ok_or(DropReason::Malformed)?;
    identity::frame(ctx, &eth, link)?;
    match eth.kind {
        eth::IP4 | eth::IP6 => {
            let scratch = scratch::get().ok_or(DropReason::UnknownLink)?;
            read(ctx, eth.kind, scratch)?;
            identity::ip(&scratch.ip, link)?;
            if !scratch::read_l4::<Head>(ctx.skb.skb, scratch) {
                return Err(DropReason::Malformed);
            }
            identity::icmp(&scratch.ip, &scratch.l4)?;
            // An array has all its entries.
            let config = CONFIG.get(0).ok_or(DropReason::UnknownLink)?;
            report::sent(ctx, ifindex);
            flow::see(ctx.skb.skb, config, scratch, &VOTES);
            if scratch.seen.is_remembered() {
                match again(ctx.skb.skb, scratch) {
                    PASS => {}
                    action => return Ok(action),
                }
            }
            scratch.whose = forward::leave::UNKNOWN;
            let are_ours = service::are_ours(config);
            let goes_on = are_ours && forward::leave::goes_on(scratch);
            let mut receiver = None;
            let mut node = None;
            let mut was_translated = false;
            if !goes_on {
                receiver = deliver::receiver(config, &scratch.ip);
            }
            if are_ours && !goes_on && receiver.is_none() {
                node = tunnel::pods_elsewhere(config, &scratch.ip.dst);
                // What is to a pod of another node is to no Service.
                if node.is_none() {
                    match service::leave::leave(ctx.skb.skb, scratch) {
                        PASS => {}
                        service::TRANSLATED => {
                            was_translated = true;
                            scratch.seen.forget();
                            receiver = deliver::receiver(config, &scratch.ip);
                            node = tunnel::pods_elsewhere(config, &scratch.ip.dst);
                        }
                        action => return Ok(action),
                    }
                }
            }
            tunnel::from_pod(config, &scratch.ip, &scratch.l4)?;
            // Not both pointers in one condition: the compiler would make a number of them, which verifiers refuse.
            let is_to_a_pod = black_box(receiver.is_some()) || node.is_some();
            // What has just been looked up is not asked for again.
            let belongs = match is_to_a_pod && !was_translated {
                true if scratch.whose == forward::leave::NONE => track::without_record(),
                true => track::known(scratch),
                false => track::DIRECT,
            };
            if belongs == track::CLASH {
                return Err(DropReason::ServiceClash);
            }
            if receiver.is_none() && belongs != track::STACK && overlay::takes(config) {
                if let Some(node) = node {
                    let is_of_service = was_translated || belongs == track::ANSWER;
                    if !overlay::is_beside_proxy(config)
                        || overlay::drains(scratch, is_of_service.into()) == 0
                    {
                        // An array has all its entries.
                        let flow =
                            flow::place_of(&FLOWS, scratch).ok_or(DropReason::UnknownLink)?;
                        match overlay::leave::leave(ctx.skb.skb, scratch, node, flow) {
                            PASS => {}
                            action => return Ok(action),
                        }
                    }
                } else if forward::takes(config) {
                    match forward::leave::leave(ctx.skb.skb, scratch, was_translated) {
                        PASS => {}
                        action => return Ok(action),
                    }
                }
            }
            match deliver::local(ctx, config, ifindex, scratch, receiver, belongs)? {
                PASS if mss::begins(&scratch.ip, &scratch.l4) => Ok(BEGINS),
                action => {
                    if action == TC_ACT_REDIRECT
                        && let Some(receiver) = receiver
                    {
                        keep(scratch, receiver);
                    }
                    Ok(action)
                }
            }
        }
        eth::ARP => {
            let arp = arp::read(ctx).ok_or(DropReason::Malformed)?;
            identity::arp(&arp, link)?;
            report::sent(ctx, ifindex);
            Ok(PASS)
        }
        // No address in it is the pod's.
        _ => Err(DropReason::SourceAddr),
    }
}

/// Sends what is for another node's pod and is read, unless netfilter translates its connection. [`PASS`] if that is left to the stack.
#[inline(never)]
fn beside_proxy_global(skb: *mut __sk_buff) -> i32 {
    scratch::borrow(|scratch| beside_proxy(skb, scratch))
}

#[inline(always)]
fn beside_proxy(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(config) = CONFIG.get(0) else {
        return PASS;
    };
    if !matches!(skb::kind(&TcContext::new(skb)), eth::IP4 | eth::IP6) {
        return PASS;
    }
    let Some(node) = tunnel::pods_elsewhere(config, &scratch.ip.dst) else {
        return PASS;
    };
    if overlay::goes_by_stack(config, scratch) {
        return PASS;
    }
    match flow::place_of(&FLOWS, scratch) {
        Some(flow) => event::of_stage(overlay::leave::leave(skb, scratch, node, flow)),
        None => PASS,
    }
}

/// Sends what goes on a flow that was judged a moment ago. [`PASS`] if it is to be judged.
#[inline(never)]
fn again(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let Some(config) = CONFIG.get(0) else {
        return PASS;
    };
    let Some(way) = flow::way(&FLOWS, scratch) else {
        return PASS;
    };
    if way.receiver.ifindex == 0 {
        return match overlay::takes(config) {
            true => overlay::leave::again(skb, scratch, way),
            false => PASS,
        };
    }
    let ctx = TcContext::new(skb);
    match deliver::redirects(config) && deliver::may_enter(&ctx, scratch, &way.receiver) {
        true => deliver::into(&ctx, scratch, &way.receiver),
        false => PASS,
    }
}

/// Remembers that a packet was delivered to a pod of this node.
#[inline(never)]
fn keep(scratch: &Scratch, receiver: &Endpoint) {
    if let Some(flow) = flow::to_remember(&FLOWS, scratch) {
        flow.renew().receiver = *receiver;
        flow.keep(scratch);
    }
}

/// Reads the IP header that the EtherType announces.
#[inline(always)]
fn read(ctx: &TcContext, kind: [u8; 2], scratch: &mut Scratch) -> Result<(), DropReason> {
    let is_read = match kind {
        eth::IP4 => scratch::read_ip4::<Head>(ctx.skb.skb, scratch, eth::LEN),
        eth::IP6 => scratch::read_ip6::<Head>(ctx.skb.skb, scratch, eth::LEN),
        _ => false,
    };
    match is_read {
        true => Ok(()),
        false => Err(DropReason::Malformed),
    }
}

/// Functions as in `pod_out`.
#[classifier]
pub fn pod_in(ctx: TcContext) -> i32 {
    report::received(&ctx, ifindex(&ctx));
    let skb = ctx.as_ptr().cast();
    let action = match arrive(skb) {
        BEGINS => enter(skb),
        action => action,
    };
    event::told(skb, Hook::PodIn, action)
}

#[inline(never)]
fn arrive(skb: *mut __sk_buff) -> i32 {
    let ctx = TcContext::new(skb);
    let Some(scratch) = scratch::get() else {
        return PASS;
    };
    if read(&ctx, skb::kind(&ctx), scratch).is_err() {
        return PASS;
    }
    let Some(config) = CONFIG.get(0) else {
        return PASS;
    };
    if is_forged(skb, config, scratch) {
        return event::dropped(DropReason::PodSource);
    }
    if service::are_ours(config) {
        match service::arrive::arrive(skb, scratch) {
            PASS => {}
            service::TRANSLATED => return passed(&ctx, scratch),
            action => return event::of_stage(action),
        }
    }
    if deliver::redirects(config)
        && let Some(sender) = track::sender(&ctx, config, &scratch.ip)
        && scratch::read_l4::<Head>(skb, scratch)
    {
        match track::delivered(skb, scratch, sender) {
            PASS => {}
            dropped => return event::of_stage(dropped),
        }
    }
    passed(&ctx, scratch)
}

/// A function, so that verifiers walk through what follows once.
#[inline(never)]
fn is_forged(skb: *mut __sk_buff, config: &NodeConfig, scratch: &Scratch) -> bool {
    let from = origin::comes_from(skb);
    !origin::is_checked(from) && origin::is_forged(from, config, &scratch.ip.src)
}

#[inline(always)]
fn passed(ctx: &TcContext, scratch: &Scratch) -> i32 {
    match mss::begins_elsewhere(ctx, &scratch.ip) {
        true => BEGINS,
        false => PASS,
    }
}

#[inline(always)]
fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { (*ctx.skb.skb).ifindex }
}
