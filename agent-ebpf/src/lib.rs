//! The data path. A packet's way: hook (`bin/`) → [`parse`] → the [`stage`]s in order → action.
//!
//! - `bin/pod.rs`: both directions of every pod's host-side interface;
//! - `bin/uplink.rs`: both directions of the uplink;
//! - `bin/overlay.rs`: what comes out of tunnels, and goes into them;
//! - `bin/sock.rs`: TCP sockets of pods;
//! - `bin/service_sock.rs`: sockets that connect and send to Services.
//!
//! Headers are read with `bpf_skb_load_bytes` and written with `bpf_skb_store_bytes`: both work
//! on packets whose data is not linear, and no pointer into the packet can go stale.
//!
//! Helpers and program features used are those of Linux 5.10.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]
// Maps take keys and values either way; a borrow says that they are used again.
#![allow(clippy::needless_borrows_for_generic_args)]

#[cfg(target_arch = "bpf")]
pub mod atomic;
#[cfg(target_arch = "bpf")]
pub mod connection;
#[cfg(target_arch = "bpf")]
pub mod context;
#[cfg(target_arch = "bpf")]
pub mod family;
#[cfg(target_arch = "bpf")]
pub mod flow;
#[cfg(target_arch = "bpf")]
pub mod forward;
#[cfg(target_arch = "bpf")]
pub mod maps;
#[cfg(target_arch = "bpf")]
pub mod nat;
#[cfg(target_arch = "bpf")]
pub mod overlay;
pub mod parse;
#[cfg(target_arch = "bpf")]
pub mod rewrite;
#[cfg(target_arch = "bpf")]
pub mod scratch;
#[cfg(target_arch = "bpf")]
pub mod service;
#[cfg(target_arch = "bpf")]
pub mod stage;

#[cfg(target_arch = "bpf")]
use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};

/// Lets a packet go on: to programs that others attached after ours, then to the stack.
#[cfg(target_arch = "bpf")]
pub const PASS: i32 = TC_ACT_UNSPEC;
/// Drops a packet.
#[cfg(target_arch = "bpf")]
pub const DROP: i32 = TC_ACT_SHOT;

/// Helpers that the kernel does not tie to a licence still check for one here and there.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// A panic that can be reached is a loop without end, which the verifier refuses to load.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
