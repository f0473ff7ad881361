//! Same-node TCP acceleration.
//!
//! - `sock_ops`, on a cgroup: enrols connections between pods of this node;
//! - `sk_msg`, on the map `SOCKETS`: sends what enrolled sockets write.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

use aya_ebpf::{
    macros::{sk_msg, sock_ops},
    programs::{SkMsgContext, SockOpsContext},
};
// The panic handler and the licence.
use sinabro_ebpf as _;

#[path = "../acceleration/mod.rs"]
mod acceleration;
#[path = "../rare.rs"]
mod rare;

#[sock_ops]
pub fn pod_sockets(ctx: SockOpsContext) -> u32 {
    acceleration::enrol::follow(&ctx);
    // Go on; the reply stays zero, which changes nothing where the kernel asks for one.
    1
}

#[sk_msg]
pub fn pod_messages(ctx: SkMsgContext) -> u32 {
    acceleration::send::send(&ctx)
}
