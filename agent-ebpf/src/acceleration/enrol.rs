//! Which connections, from establishment to close.

use super::{
    ENROLLED, LOOPBACK_PODS, SOCKETS, account, charge,
    context::{self, field, long_field},
    epoch, find,
    kernel::{self, Own},
    pods,
};
use crate::rare;
use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_ANY, BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB,
        BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_TCP_CLOSE, bpf_sock_ops,
    },
    helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_map_delete_elem},
    programs::SockOpsContext,
};
use aya_log_ebpf::warn;
use core::{ffi::c_void, ptr::NonNull};
use sinabro_common::abi::acceleration::{ConnectionKey, Enrolled, Skip, SocketState};

/// What a table without room answers.
const E2BIG: i32 = -7;
/// What the kernel answers for MPTCP's sockets.
const EOPNOTSUPP: i32 = -95;

/// Follows a socket's life.
#[inline(always)]
pub fn follow(ctx: &SockOpsContext) {
    match ctx.op() {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => established(ctx, false),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => established(ctx, true),
        // args[1] is the new state.
        BPF_SOCK_OPS_STATE_CB if ctx.arg(1) == BPF_TCP_CLOSE => closed(ctx),
        _ => {}
    }
}

#[inline(always)]
fn netns(ctx: &SockOpsContext) -> u64 {
    // SAFETY: the context is valid for as long as the program runs.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// On what ground a connection is enrolled.
struct May {
    epoch: u32,
    generations: [u32; 2],
    /// Interface of the pod that pays.
    payer: u32,
}

/// A socket may disconnect and connect again (connect(2) with AF_UNSPEC). The kernel leaves it in
/// the map of sockets, with what it has not read: that is of another connection.
#[inline(always)]
fn begin_anew(ctx: &SockOpsContext) {
    let Some(socket) = context::socket(ctx) else {
        return;
    };
    if context::state(socket).is_some() {
        // SAFETY: the context is valid for as long as the program runs.
        let mut cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
        let sockets = core::ptr::from_ref(&SOCKETS).cast_mut().cast();
        // SAFETY: a map, and a key of its size.
        unsafe { bpf_map_delete_elem(sockets, (&raw mut cookie).cast()) };
        charge::release(cookie);
        context::drop_state(socket);
    }
}

#[inline(always)]
fn established(ctx: &SockOpsContext, passive: bool) {
    if !passive {
        begin_anew(ctx);
    }
    let Some(mut key) = context::key(ctx) else {
        return;
    };
    if key.local.is_loopback() && key.remote.is_loopback() {
        let netns = netns(ctx);
        if LOOPBACK_PODS.get_ptr(netns).is_none() {
            return;
        }
        key.netns = netns;
    }
    // Before the pods: who is evicted from here on has another epoch, and asks again.
    let epoch = epoch();
    let Some((pod, peer)) = pods(&key) else {
        return;
    };
    // A pod may configure its own network: an address counts only where it belongs.
    if key.netns == 0 && pod.netns != netns(ctx) {
        return;
    }
    let ifindex = pod.ifindex;
    let may = May {
        epoch,
        generations: [pod.generation, peer.generation],
        payer: if passive { peer.ifindex } else { ifindex },
    };
    let outcome = match account::judge(&key.server(passive)) {
        Some(skip) => Err(skip),
        None => enrol(ctx, &key, ifindex, may, passive),
    };
    match outcome {
        Ok(()) => account::enrolled(ifindex),
        Err(skip) => {
            account::skipped(ifindex, skip);
            // What it turns out to be is learnt at its end, from the server's side.
            if passive {
                let _ = watch(ctx);
            }
        }
    }
}

/// Asks for word of the socket's end.
#[inline(always)]
fn watch(ctx: &SockOpsContext) -> Result<(), i32> {
    ctx.set_cb_flags((ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG) as i32)
        .map_err(|error| error as i32)
}

/// Asks for no more word of it.
#[inline(always)]
fn leave(ctx: &SockOpsContext) {
    let _ = ctx.set_cb_flags((ctx.cb_flags() & !BPF_SOCK_OPS_STATE_CB_FLAG) as i32);
}

#[inline(always)]
fn enrol(
    ctx: &SockOpsContext,
    key: &ConnectionKey,
    ifindex: u32,
    may: May,
    passive: bool,
) -> Result<(), Skip> {
    let socket = context::socket(ctx).ok_or(Skip::Refused)?;
    let unfit = Own::new(socket).is_none_or(Own::is_unfit);
    if unfit || field!(ctx.ops, bpf_sock_ops, data_segs_out) != 0 {
        return Err(Skip::Unfit);
    }
    // SAFETY: the context is valid for as long as the program runs.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    // Written in place: the stack has no room for it.
    let state = context::keep(socket).ok_or(Skip::Refused)?;
    state.key = *key;
    state.sk = socket.as_ptr() as u64;
    state.passive = passive.into();
    state.ifindex = ifindex;
    state.epoch = may.epoch;
    state.generations = may.generations;
    // Read back, the address is a number, and not a socket with which nothing may be computed.
    // SAFETY: a reference.
    let sk = unsafe { core::ptr::read_volatile(&raw const state.sk) };
    if !passive && kernel::has_early_reader(sk) != Some(false) {
        context::drop_state(socket);
        return Err(Skip::Unfit);
    }
    if let Err(over) = charge::charge(cookie, 0, may.payer) {
        context::drop_state(socket);
        return Err(over.into());
    }
    if passive && is_alone(key, sk) {
        charge::release(cookie);
        context::drop_state(socket);
        return Err(Skip::Unfit);
    }
    // The sock hash last: once the socket is in it, it sends through our program.
    let enrolled = ENROLLED
        .insert(key, Enrolled { cookie, sk }, BPF_ANY.into())
        .and_then(|()| watch(ctx))
        // SAFETY: the context is valid for as long as the program runs.
        .and_then(|()| SOCKETS.update(cookie, unsafe { &mut *ctx.ops }, BPF_ANY.into()));
    enrolled.map_err(|error| {
        forget(key, cookie);
        charge::release(cookie);
        context::drop_state(socket);
        leave(ctx);
        refused(ctx, error);
        Skip::Refused
    })
}

/// Whether an accepted connection's client is not enrolled, as one that sends to a Service's address: it is there before the
/// end of the handshake. Of two ends that connect to each other at the same time (RFC 9293 §3.5) one is not.
#[inline(always)]
fn is_alone(key: &ConnectionKey, sk: u64) -> bool {
    find(&ENROLLED, key.peer()).is_none() && kernel::is_of_nobody(sk) != Some(false)
}

#[inline(always)]
fn closed(ctx: &SockOpsContext) {
    let Some(socket) = context::socket(ctx) else {
        return;
    };
    match context::state(socket) {
        Some(state) => ended(ctx, socket, state),
        // Only accepted sockets are watched without being enrolled.
        None => {
            if let Some(key) = context::key(ctx) {
                plain_ended(ctx, key);
            }
        }
    }
    leave(ctx);
}

#[inline(always)]
fn ended(ctx: &SockOpsContext, socket: NonNull<c_void>, state: &mut SocketState) {
    account::ended(state);
    // SAFETY: the context is valid for as long as the program runs.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    forget(&state.key, cookie);
    // An application that has not closed it yet may still read what waits there. Then the agent
    // gives back what it cost, once it is gone.
    if Own::new(socket).is_some_and(|own| !own.has_queue()) {
        charge::release(cookie);
    }
}

#[inline(always)]
fn plain_ended(ctx: &SockOpsContext, mut key: ConnectionKey) {
    if key.local.is_loopback() {
        key.netns = netns(ctx);
    }
    let segments = [
        field!(ctx.ops, bpf_sock_ops, data_segs_in),
        field!(ctx.ops, bpf_sock_ops, data_segs_out),
    ];
    let bytes = [
        long_field!(ctx.ops, bpf_sock_ops, bytes_received),
        long_field!(ctx.ops, bpf_sock_ops, bytes_acked),
    ];
    account::ended_plain(&key.server(true), segments, bytes);
}

/// Takes an entry back, unless it is another socket's by now.
#[inline(always)]
fn forget(key: &ConnectionKey, cookie: u64) {
    if find(&ENROLLED, key).is_some_and(|entry| entry.cookie == cookie) {
        let _ = ENROLLED.remove(key);
    }
}

/// Says why a connection between pods was not enrolled.
#[inline(always)]
fn refused(ctx: &SockOpsContext, error: i32) {
    if error == EOPNOTSUPP || !rare::due() {
        return;
    }
    match error {
        E2BIG => warn!(
            ctx,
            target: "sock",
            "tcp acceleration: table of sockets is full, connections between pods go through tcp"
        ),
        _ => warn!(
            ctx,
            target: "sock",
            "tcp acceleration: connection between pods not enrolled, it goes through tcp: errno {}",
            -error
        ),
    }
}
