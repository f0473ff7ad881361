//! What comes in from outside of the cluster for a pod of this node.

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
use sinabro_common::algo::checksum;

/// Puts a packet that was just given the destination in `scratch.alias` into its pod; [`PASS`] if that is left to the stack.
#[inline(never)]
pub fn arrive(skb: *mut __sk_buff, scratch: &mut Scratch) -> i32 {
    let ctx = TcContext::new(skb);
    if !CONFIG.get(0).is_some_and(takes) {
        return PASS;
    }
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let Some(receiver) = (unsafe { ENDPOINTS.get(scratch.alias.addr) }) else {
        return PASS;
    };
    // SAFETY: the context is valid for as long as the program runs.
    let to_host = unsafe { (*skb).pkt_type } == PACKET_HOST;
    if !to_host
        || scratch.ip.l3 != eth::LEN
        || !deliver::is_plain(&scratch.ip, &scratch.l4)
        || deliver::is_too_large(&ctx, 0, receiver)
    {
        return PASS;
    }
    let Scratch { ip, l4, alias, .. } = scratch;
    if !ip.v6 {
        let (from, to) = (rewrite::word(&ip.dst), rewrite::word(&alias.addr));
        ip.checksum = checksum::replaced(ip.checksum, from, to);
    }
    ip.dst = alias.addr;
    l4.dst_port = alias.port;
    deliver::from_outside(skb, scratch, receiver, mtu::of_uplinks())
}
