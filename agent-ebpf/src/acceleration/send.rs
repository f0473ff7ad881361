//! Each message that an enrolled socket sends.
//!
//! The kernel runs this with the sender's socket locked, so no byte enters TCP meanwhile; it
//! unlocks before it queues a redirected message. Threads that send on one socket at the same
//! time may therefore change places, as they may in TCP.

use super::{
    ENROLLED, SOCKETS, account, charge,
    context::{self, field},
    epoch, find,
    kernel::{Connection, Own, Peer},
    pods,
};
use aya_ebpf::{
    bindings::{BPF_F_INGRESS, sk_action::SK_PASS, sk_msg_md},
    programs::SkMsgContext,
};
use core::{ffi::c_void, ptr::NonNull};
use sinabro_common::{
    abi::acceleration::{Path, Reason, SocketState},
    algo::acceleration::gate,
};

/// Hands a message to the other end's socket, or lets TCP have it.
#[inline(always)]
pub fn send(ctx: &SkMsgContext) -> u32 {
    let Some(socket) = context::sender(ctx) else {
        return SK_PASS;
    };
    let Some(state) = context::state(socket) else {
        return SK_PASS;
    };
    let size = field!(ctx.msg, sk_msg_md, size);
    if state.path != Path::Stack as u8 {
        match direct(ctx, socket, state, size) {
            Ok(()) => state.path = Path::Direct as u8,
            Err(reason) => {
                // What was counted until now went the other way.
                account::carry(state);
                state.path = Path::Stack as u8;
                state.reason = reason as u8;
                // Its address is translated on the way: so will be the next one's.
                if matches!(reason, Reason::NotPaired) {
                    account::unpaired(state);
                }
            }
        }
    }
    account::sent(state, size);
    SK_PASS
}

#[inline(always)]
fn direct(
    ctx: &SkMsgContext,
    socket: NonNull<c_void>,
    state: &mut SocketState,
    size: u32,
) -> Result<(), Reason> {
    let epoch = epoch();
    if state.epoch != epoch {
        let (pod, peer) = pods(&state.key).ok_or(Reason::Evicted)?;
        if state.generations != [pod.generation, peer.generation] {
            return Err(Reason::Evicted);
        }
        state.epoch = epoch;
    }
    if state.path == Path::New as u8 {
        state.peer = *find(&ENROLLED, state.key.peer()).ok_or(Reason::NotPaired)?;
    }
    let own = Own::new(socket).ok_or(Reason::Unfit)?;
    let ends = Connection {
        own,
        peer: Peer(state.peer.sk),
    };
    let waiting = gate(&ends, &mut state.backlog, size)?;
    charge::admit(state, waiting)?;
    let verdict = SOCKETS.redirect_msg(ctx, state.peer.cookie, BPF_F_INGRESS.into());
    if verdict != SK_PASS.into() {
        // Where the other end closed in the middle, TCP tells the sender so.
        return Err(Reason::Closing);
    }
    state.backlog.add(size);
    Ok(())
}
