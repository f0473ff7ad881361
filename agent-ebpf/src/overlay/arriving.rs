//! What comes on a flow from a pod of another node, in a tunnel or without one, as one of its packets was judged a moment ago
//! ([`crate::flow`]).

use super::{arrive, native, way};
use crate::{
    PASS, flow::Flow, maps::ENDPOINTS, parse::skb::PACKET_HOST, scratch::Scratch, stage::tunnel,
};
use aya_ebpf::bindings::__sk_buff;
use sinabro_common::abi::{Addr, endpoint::Endpoint};

/// How the flow comes in.
#[repr(C)]
pub struct Arriving {
    /// The tunnel address of the node that it is from,
    pub(super) sender: Addr,
    /// and whom it is for.
    pub(super) receiver: Endpoint,
    /// MAC address of this node's VXLAN device, which is inside of a tunnel's headers.
    pub(super) own_mac: [u8; 6],
    pad: [u8; 2],
}

/// Delivers a packet, which is read, as one before it of the same flow; [`PASS`] if it is not for that, and the packet as it was. `room`: as
/// [`arrive::look_inside`] says.
#[inline(never)]
pub fn again(skb: *mut __sk_buff, scratch: &mut Scratch, way: &Arriving, room: u32) -> i32 {
    // SAFETY: the context is valid for as long as the program runs.
    let to_host = unsafe { (*skb).pkt_type } == PACKET_HOST;
    match room {
        _ if !to_host => PASS,
        0 => native::again(skb, scratch, way),
        _ => arrive::again(skb, scratch, way, room),
    }
}

/// Remembers that a packet, which was [seen](crate::flow::see), was delivered, from the node whose tunnel address is in `scratch.sender`.
#[inline(always)]
pub fn keep(flow: &mut Flow<Arriving>, scratch: &Scratch) {
    // SAFETY: records are inserted whole and replaced whole, and live until the program ends.
    let receiver = unsafe { ENDPOINTS.get(scratch.ip.dst) };
    let (Some(receiver), Some(sender)) = (receiver, way(&scratch.sender)) else {
        return;
    };
    // From others a tunnel's packets come as long as settings say so that have no number.
    if tunnel::pods_of(&scratch.ip.src).is_none() {
        return;
    }
    let way = flow.renew();
    way.sender = scratch.sender.by_words();
    way.receiver = *receiver;
    way.own_mac = sender.own_mac;
    flow.keep(scratch);
}
