//! sendto(2) and recvfrom(2) of the node's UDP sockets.
//!
//! All that a socket sends to a frontend goes to one endpoint while that is there and serves, so that what belongs
//! together arrives together, and answers are told from each other by where they come from.

use super::{
    PROCEED, SOCKET_FRONTENDS, UDP,
    address::{self, Family},
    bound,
    choose::{self, Endpoint},
    is_draining, is_handover, is_on, owner, peer, protocol, refuse, state,
};
use aya_ebpf::programs::SockAddrContext;
use sinabro_common::abi::{
    Addr,
    service::{
        BACKEND_SERVING, FrontendKey, HEARD, LEFT, NETNS_OF_NODE, SENT_TO, SocketFrontend,
        SocketKey,
    },
};
use sinabro_ebpf::{maps::FRONTENDS, parse::proto};

/// Sends a datagram to an endpoint, if it is for a frontend.
#[inline(always)]
pub fn send(ctx: &SockAddrContext, family: Family) -> i32 {
    if !is_on() || protocol(ctx) != UDP {
        return PROCEED;
    }
    let Some(owner) = owner(ctx) else {
        return PROCEED;
    };
    if owner.flags & NETNS_OF_NODE == 0 {
        return PROCEED;
    }
    let (addr, port) = address::read(ctx, family);
    let key = FrontendKey {
        addr,
        port,
        proto: proto::UDP,
        pad: 0,
    };
    let client = match addr.as_v4() {
        Some(_) => owner.v4,
        None => owner.v6,
    };
    let mut to = Endpoint::NONE;
    match endpoint(&key, &client, state::cookie(ctx), &mut to) {
        choose::CHOSEN => {}
        choose::REFUSED => return refuse(),
        _ => {
            answers_for_itself(ctx, &addr, port);
            return PROCEED;
        }
    }
    if bound::is_out_of_reach(ctx, &to.addr) {
        return refuse();
    }
    // Says that there may be answers to look for.
    let _ = state::keep(ctx);
    address::write(ctx, family, &to.addr, to.port);
    PROCEED
}

/// The endpoint that a socket has of a frontend, or another.
#[inline(never)]
fn endpoint(key: &FrontendKey, client: &Addr, cookie: u64, to: &mut Endpoint) -> i32 {
    let sent = SocketKey::new(SENT_TO, cookie, key.addr, key.port);
    let is_known = FRONTENDS.get_ptr(key).is_some();
    if is_handover() && is_left(&sent) {
        return choose::NOT_OURS;
    }
    if !(is_known && has(&sent, to)) {
        if is_draining() {
            return choose::NOT_OURS;
        }
        let chosen = choose::choose(key, client, true, to);
        if chosen != choose::CHOSEN {
            return chosen;
        }
        note(&sent, key, to);
    }
    let heard = SocketKey::new(HEARD, cookie, to.addr, to.port);
    // Written again only for another frontend with this endpoint: their answers are told from each other by time alone.
    let is_noted = match SOCKET_FRONTENDS.get_ptr(heard) {
        // SAFETY: a value that the map gave.
        Some(of) => unsafe { (*of).addr == key.addr && (*of).port == key.port },
        None => false,
    };
    if !is_noted {
        note(&heard, key, to);
    }
    choose::CHOSEN
}

/// What answers from now on is no frontend's: the socket has sent straight there.
#[inline(never)]
fn answers_for_itself(ctx: &SockAddrContext, addr: &Addr, port: [u8; 2]) {
    // Of sockets that never sent to a frontend, that is all.
    if state::of(ctx).is_none() {
        return;
    }
    let _ = SOCKET_FRONTENDS.remove(SocketKey::new(HEARD, state::cookie(ctx), *addr, port));
}

/// Whether somebody else has what a socket sends to a frontend.
#[inline(always)]
fn is_left(sent: &SocketKey) -> bool {
    match SOCKET_FRONTENDS.get_ptr(sent) {
        // SAFETY: a value that the map gave.
        Some(pair) => unsafe { (*pair).backend == LEFT },
        None => false,
    }
}

/// Fills in the endpoint that a socket has of a frontend, if it serves.
#[inline(always)]
fn has(sent: &SocketKey, to: &mut Endpoint) -> bool {
    match SOCKET_FRONTENDS.get_ptr(sent) {
        // SAFETY: a value that the map gave.
        Some(pair) => unsafe {
            choose::endpoint(
                (*pair).backend,
                (*pair).generation,
                BACKEND_SERVING,
                BACKEND_SERVING,
                to,
            )
        },
        None => false,
    }
}

#[inline(always)]
pub fn note(at: &SocketKey, key: &FrontendKey, to: &Endpoint) {
    let pair = SocketFrontend {
        addr: key.addr,
        port: key.port,
        pad: [0; 2],
        backend: to.backend,
        generation: to.generation,
    };
    // The kernel forgets another socket's if it has to.
    let _ = SOCKET_FRONTENDS.insert(at, pair, 0);
}

/// Tells the frontend in the place of the endpoint that a datagram is from.
#[inline(always)]
pub fn receive(ctx: &SockAddrContext, family: Family) {
    // Of sockets that never sent to a frontend, that is all.
    let Some(state) = state::of(ctx) else {
        return;
    };
    let (addr, port) = address::read(ctx, family);
    if peer::is_endpoint(state, &addr, port) {
        address::write(ctx, family, &state.frontend, state.frontend_port);
        return;
    }
    let heard = SocketKey::new(HEARD, state::cookie(ctx), addr, port);
    if let Some(of) = SOCKET_FRONTENDS.get_ptr(heard) {
        // SAFETY: a value that the map gave.
        let (addr, port) = unsafe { (Addr::at(&raw const (*of).addr), (*of).port) };
        address::write(ctx, family, &addr, port);
    }
}
