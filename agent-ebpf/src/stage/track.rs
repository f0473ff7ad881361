//! Same-node flows that must keep to the stack (`sinabro_common::abi::flow`).

use crate::{
    maps::{ENDPOINTS, STACK_FLOWS},
    parse::{Fragment, Ip, l4::L4, proto},
};
use sinabro_common::abi::flow::FlowKey;

/// Whether a packet that the stack delivers to a pod is of a flow to [`note`]: from another pod of
/// this node, and of a protocol with ports; only those are ever translated there. Of a packet in parts,
/// the first names the flow.
#[inline(always)]
pub fn is_of_pods(ip: &Ip) -> bool {
    ip.fragment != Fragment::Later
        && matches!(ip.proto, proto::TCP | proto::UDP | proto::SCTP)
        && ENDPOINTS.get_ptr(ip.src).is_some()
}

/// Notes that replies to a packet which the stack delivers between two pods of this node must
/// go back through it.
#[inline(always)]
pub fn note(ip: &Ip, l4: &L4) {
    let reply = FlowKey {
        src: ip.dst,
        dst: ip.src,
        src_port: l4.dst_port,
        dst_port: l4.src_port,
        proto: ip.proto,
        pad: [0; 3],
    };
    // An insertion takes a lock, a lookup does not.
    if STACK_FLOWS.get_ptr(&reply).is_none() {
        // Cannot be full, it forgets the least recently used; a failure costs one flow its
        // translation until its next packet.
        let _ = STACK_FLOWS.insert(&reply, 1, 0);
    }
}

/// Whether a packet belongs to a flow that keeps to the stack.
#[inline(always)]
pub fn keeps_to_stack(ip: &Ip, l4: &L4) -> bool {
    let key = FlowKey {
        src: ip.src,
        dst: ip.dst,
        src_port: l4.src_port,
        dst_port: l4.dst_port,
        proto: ip.proto,
        pad: [0; 3],
    };
    STACK_FLOWS.get_ptr(&key).is_some()
}
