//! Services, translated where sockets connect and send: the packets never have a Service's address.
//!
//! All are on a cgroup; `4` and `6` are the family of the address that the system call has.
//!
//! - `connect4`, `connect6`: TCP of pods and of the node, UDP of the node;
//! - `sendmsg4`, `sendmsg6`, `recvmsg4`, `recvmsg6`: datagrams of the node that go out by address;
//! - `getpeername4`, `getpeername6`: what the socket thinks it is connected to;
//! - `sock_release`: a socket goes, and what is known of it;
//! - `tell_netns`: for the agent alone, and only where the kernel does not tell it.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr},
    programs::{SockAddrContext, SockContext},
};
// The panic handler and the licence.
use sinabro_ebpf as _;

#[path = "../service_sock/mod.rs"]
mod service_sock;

use service_sock::{address::Family, connect, datagram, peer, state, tell};

#[cgroup_sock_addr(connect4)]
pub fn connect4(ctx: SockAddrContext) -> i32 {
    connect::connect(&ctx, Family::V4)
}

/// Attached for a moment.
#[cgroup_sock_addr(connect4)]
pub fn tell_netns(ctx: SockAddrContext) -> i32 {
    tell::tell(&ctx);
    1
}

#[cgroup_sock_addr(connect6)]
pub fn connect6(ctx: SockAddrContext) -> i32 {
    connect::connect(&ctx, Family::V6)
}

#[cgroup_sock_addr(sendmsg4)]
pub fn sendmsg4(ctx: SockAddrContext) -> i32 {
    datagram::send(&ctx, Family::V4)
}

#[cgroup_sock_addr(sendmsg6)]
pub fn sendmsg6(ctx: SockAddrContext) -> i32 {
    datagram::send(&ctx, Family::V6)
}

// Of the rest the kernel takes one answer.

#[cgroup_sock_addr(recvmsg4)]
pub fn recvmsg4(ctx: SockAddrContext) -> i32 {
    datagram::receive(&ctx, Family::V4);
    1
}

#[cgroup_sock_addr(recvmsg6)]
pub fn recvmsg6(ctx: SockAddrContext) -> i32 {
    datagram::receive(&ctx, Family::V6);
    1
}

#[cgroup_sock(sock_release)]
pub fn sock_release(ctx: SockContext) -> i32 {
    state::closed(&ctx);
    1
}

#[cgroup_sock_addr(getpeername4)]
pub fn getpeername4(ctx: SockAddrContext) -> i32 {
    peer::name(&ctx, Family::V4);
    1
}

#[cgroup_sock_addr(getpeername6)]
pub fn getpeername6(ctx: SockAddrContext) -> i32 {
    peer::name(&ctx, Family::V6);
    1
}
