//! By which interface a packet came that says it is from a pod.
//!
//! Of what comes by a pod's link, by a tunnel or by an uplink the source was checked there. By any other interface of the node, a
//! second network card, a bridge of containers, a VPN, nobody speaks for a pod: neither to pods nor to other nodes.
//!
//! Limit: what is for the node itself passes no program.

use super::tunnel;
use crate::maps::{ENDPOINTS, OVERLAY_LINK, UPLINKS};
use aya_ebpf::bindings::__sk_buff;
use sinabro_common::abi::{Addr, config::NodeConfig};

/// Index of the interface that a packet came in by; zero if it is of a socket of the node.
#[inline(always)]
pub fn came_by(skb: *mut __sk_buff) -> u32 {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { (*skb).ingress_ifindex }
}

/// Whether a packet that the stack sends on has a pod's address as its source and did not come from there.
#[inline(always)]
pub fn is_forged(skb: *mut __sk_buff, config: &NodeConfig, src: &Addr) -> bool {
    let from = came_by(skb);
    let link = OVERLAY_LINK.get(0).copied().unwrap_or(0);
    if from == 0 || from == link {
        return false;
    }
    if let Some(endpoint) = ENDPOINTS.get_ptr(src) {
        // SAFETY: a value that the map just gave.
        return unsafe { (*endpoint).ifindex } != from && UPLINKS.get_ptr(from).is_none();
    }
    // By what tunnels end in is not known before the agent says so.
    let Some(overlay) = tunnel::overlay(config).filter(|_| link != 0) else {
        return false;
    };
    // The stack gives these to what it masquerades on the way to pods.
    let [first, second] = &overlay.gateways;
    let is_nodes = *src == *first || *src == *second;
    !is_nodes && tunnel::pods_of(src).is_some() && UPLINKS.get_ptr(from).is_none()
}
