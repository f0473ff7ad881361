//! By which interface a packet came that says it is from a pod.
//!
//! Of what comes by a pod's link, by a tunnel or by an uplink the source was checked there. By any other interface of the
//! node (a second network card, a bridge of containers, a VPN) nobody speaks for a pod, neither to pods nor to other nodes.
//!
//! Nearly all packets come by an interface that one load finds. Only for the others the source is looked up.
//!
//! Limit: what is for the node itself passes no program.

use super::tunnel;
use crate::maps::{CHECKED_LINKS, ENDPOINTS, POD_LINKS, UPLINKS};
use aya_ebpf::bindings::__sk_buff;
use sinabro_common::abi::{
    Addr,
    config::NodeConfig,
    uplink::{NOT_OF_POD, OVERLAY_PLACE, checked_place},
};

/// The interface that a packet came in by; zero if it is of a socket of the node.
#[inline(always)]
pub fn comes_from(skb: *mut __sk_buff) -> u32 {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { (*skb).ingress_ifindex }
}

/// Whether a packet came by a pod's link, so far as that is found at once.
#[inline(always)]
pub fn is_a_pods(from: u32) -> bool {
    from != 0 && CHECKED_LINKS.get(checked_place(from)) == Some(&from)
}

/// Whether it came by an interface whose sources are checked, or is of a socket of the node, so far as that is found at
/// once.
#[inline(always)]
pub fn is_checked(from: u32) -> bool {
    let found = CHECKED_LINKS.get(checked_place(from));
    from == 0 || found.is_some_and(|found| *found & !NOT_OF_POD == from)
}

/// Whether a packet of which [`is_checked`] does not know has a pod's address for its source.
#[inline(never)]
pub fn is_forged(from: u32, config: &NodeConfig, src: &Addr) -> bool {
    // What tunnels end in is not known before the agent says so. Its place among the checked ones may be another link's.
    let overlay_link = CHECKED_LINKS.get(OVERLAY_PLACE).map_or(0, |link| *link);
    if from == overlay_link || UPLINKS.get_ptr(from).is_some() || POD_LINKS.get_ptr(from).is_some()
    {
        return false;
    }
    if ENDPOINTS.get_ptr(src).is_some() {
        return true;
    }
    let Some(overlay) = tunnel::overlay(config).filter(|_| overlay_link != 0) else {
        return false;
    };
    // The stack gives these to what it masquerades on the way to pods.
    let [first, second] = &overlay.gateways;
    let is_nodes = *src == *first || *src == *second;
    !is_nodes && tunnel::pods_of(src).is_some()
}
