//! What comes in from outside of the cluster for a pod.

use super::takes;
use crate::{
    PASS,
    maps::{CONFIG, ENDPOINTS},
    parse::{eth, skb::PACKET_HOST},
    rewrite,
    scratch::Scratch,
    stage::{deliver, mtu},
};
use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use sinabro_common::{abi::connection::KEEPS_SOURCE, algo::checksum};

/// Puts a packet whose destination was just translated into its pod, if that is of this node; [`PASS`] if it is left to others.
#[inline(never)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    if !may_go_on(skb, scratch) {
        return PASS;
    }
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    match unsafe { ENDPOINTS.get(scratch.ip.dst) } {
        Some(receiver) if !deliver::is_too_large(&TcContext::new(skb), scratch, 0, receiver) => {
            let may_answer = scratch.alias.pad[0] != KEEPS_SOURCE;
            deliver::from_outside(skb, scratch, receiver, mtu::of_uplinks(), may_answer)
        }
        _ => PASS,
    }
}

/// Whether what came by an uplink may go past the stack, wherever it goes.
#[inline(always)]
pub fn may_go_on(skb: *mut __sk_buff, scratch: &Scratch) -> bool {
    // SAFETY: the context is valid for as long as the program runs.
    let to_host = unsafe { (*skb).pkt_type } == PACKET_HOST;
    to_host
        && scratch.ip.l3 == eth::LEN
        && CONFIG.get(0).is_some_and(takes)
        && deliver::is_plain(&scratch.ip, &scratch.l4)
}

/// Has the scratch say that the packet's destination is the one in `scratch.alias` by now.
#[inline(always)]
pub fn has_destination(scratch: &mut Scratch) {
    let Scratch { ip, l4, alias, .. } = scratch;
    if !ip.v6 {
        let (from, to) = (rewrite::word(&ip.dst), rewrite::word(&alias.addr));
        ip.checksum = checksum::replaced(ip.checksum, from, to);
    }
    ip.dst = alias.addr;
    l4.dst_port = alias.port;
}
