//! Same-node traffic goes straight into the receiving pod.
//!
//! Left to the stack, whose routes deliver it too: fragments, because only their first part
//! names the flow; ICMP other than echo, because it speaks of a flow that the stack may have
//! translated; options and extension headers, because a router must act on them; a TTL that
//! ends here, and what is too large for the receiver, because someone must say so.

use super::{Action, report, track};
use crate::{
    PASS,
    maps::ENDPOINTS,
    parse::{Fragment, Ip, eth, icmp, proto, skb::PACKET_HOST},
    rewrite::{self, End},
    scratch::Scratch,
    service,
};
use aya_ebpf::{helpers::bpf_redirect_peer, programs::TcContext};
use sinabro_common::abi::{
    config::{FLAG_REDIRECT_PEER, NodeConfig},
    drop::DropReason,
    endpoint::Endpoint,
};

/// Set by the agent before it loads the programs, so that the verifier leaves out what it rules out:
/// for kernels that refuse the programs with it.
#[unsafe(no_mangle)]
static WITHOUT_REDIRECT: u8 = 0;

/// Whether packets between pods of this node go past the stack.
#[inline(always)]
pub fn redirects(config: &NodeConfig) -> bool {
    // SAFETY: a variable of this program; volatile, for its value here is not the one at run time.
    let without = unsafe { core::ptr::read_volatile(&raw const WITHOUT_REDIRECT) } != 0;
    !without && config.flags & FLAG_REDIRECT_PEER != 0
}

/// Whether a packet that nobody will cut does not fit into the receiver's link. `bpf_redirect_peer` would
/// deliver it all the same, and what is behind a link that is kept small, such as a virtual machine's,
/// lose it without a word, while the stack tells the sender.
/// `outside` is what it will be shorter by.
#[inline(always)]
pub fn is_too_large(ctx: &TcContext, outside: u32, receiver: &Endpoint) -> bool {
    let mtu = receiver.mtu();
    // SAFETY: the context is valid for as long as the program runs.
    let (len, segments) = unsafe { ((*ctx.skb.skb).len, (*ctx.skb.skb).gso_size) };
    mtu != 0 && len > mtu + outside + eth::LEN && segments == 0
}

/// The pod of this node that a packet is for, where anything depends on that.
#[inline(always)]
pub fn receiver(config: &NodeConfig, ip: &Ip) -> Option<&'static Endpoint> {
    if !redirects(config) && !service::are_ours(config) {
        return None;
    }
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    unsafe { ENDPOINTS.get(ip.dst) }
}

/// Delivers a packet to `receiver`, if it may go past the stack.
#[inline(always)]
pub fn local(
    ctx: &TcContext,
    config: &NodeConfig,
    ifindex: u32,
    scratch: &mut Scratch,
    receiver: Option<&Endpoint>,
    was_translated: bool,
) -> Action {
    if !redirects(config) {
        return Ok(PASS);
    }
    let Some(receiver) = receiver else {
        return Ok(PASS);
    };
    let (ip, l4) = (&scratch.ip, &scratch.l4);
    // The packet type is kept on the way into the pod, so it must be right: not a frame to some
    // other MAC address or to all.
    // SAFETY: the context is valid for as long as the program runs.
    let to_gateway = unsafe { (*ctx.skb.skb).pkt_type } == PACKET_HOST;
    if !to_gateway
        || receiver.ifindex == ifindex
        || ip.ttl <= 1
        || ip.options
        || ip.fragment != Fragment::No
        || (matches!(ip.proto, proto::ICMP | proto::ICMPV6) && !icmp::is_echo(ip.v6, l4.icmp))
        || is_too_large(ctx, 0, receiver)
    {
        return Ok(PASS);
    }
    // What has just been looked up is not asked for again.
    if !was_translated {
        match track::known(scratch) {
            track::STACK => return Ok(PASS),
            track::ANSWER => match service::translate(ctx.skb.skb, scratch, End::Source) {
                service::TRANSLATED => {}
                dropped => return Ok(dropped),
            },
            track::CLASH => return Err(DropReason::ServiceClash),
            _ => {}
        }
    }
    let ip = &scratch.ip;
    if rewrite::decrement_ttl(ctx, ip).is_err()
        || rewrite::macs(ctx, receiver.mac, receiver.host_mac).is_err()
    {
        return Err(DropReason::RewriteFailed);
    }
    report::received(ctx, receiver.ifindex);
    // SAFETY: no pointers involved; an interface that is gone makes the kernel drop the packet.
    Ok(unsafe { bpf_redirect_peer(receiver.ifindex, 0) } as i32)
}
