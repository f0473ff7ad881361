//! Same-node flows that must keep to the kernel's stack.
//!
//! Map `STACK_FLOWS`, LRU hash: [`FlowKey`] as the *replying* pod sends it → u8.
//!
//! A packet between two pods of this node that reaches the receiver through the stack, not by
//! redirection, was translated there (kube-proxy turned a Service address into the pod's). Its
//! replies must pass the same translation backwards, so they must not be redirected either.

use super::{Addr, map_type};

pub const MAX_STACK_FLOWS: u32 = 65_536;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    pub src: Addr,
    pub dst: Addr,
    /// Network order; zero for protocols without ports.
    pub src_port: [u8; 2],
    /// Network order; zero for protocols without ports.
    pub dst_port: [u8; 2],
    /// IP protocol number.
    pub proto: u8,
    /// Zero.
    pub pad: [u8; 3],
}
map_type!(FlowKey, 40, 1, [src, dst, src_port, dst_port, proto, pad]);
