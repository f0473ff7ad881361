//! connect(2), and sendto(2) with MSG_FASTOPEN.

use super::{
    PROCEED, TCP, UDP,
    address::{self, Family},
    bound,
    choose::{self, Endpoint},
    datagram, is_draining, is_on, owner, protocol, refuse, state,
};
use aya_ebpf::programs::SockAddrContext;
use sinabro_common::abi::service::{
    CONNECTED, FrontendKey, NETNS_OF_NODE, ServiceSocket, SocketKey,
};
use sinabro_ebpf::parse::proto;

/// Has the socket connect to an endpoint, if it is about to connect to a frontend.
#[inline(always)]
pub fn connect(ctx: &SockAddrContext, family: Family) -> i32 {
    // What it was connected to before, it is no more. A datagram socket may connect as often as it likes, any other
    // after it was disconnected (AF_UNSPEC).
    state::disconnected(ctx);
    if !is_on() || is_draining() {
        return PROCEED;
    }
    let (proto, is_datagram) = match protocol(ctx) {
        // Also the first subflow of MPTCP, which connects for the whole.
        TCP => (proto::TCP, false),
        UDP => (proto::UDP, true),
        _ => return PROCEED,
    };
    let Some(owner) = owner(ctx) else {
        return PROCEED;
    };
    // A pod's datagram socket would keep to an endpoint that is gone: no packet of it is seen here.
    if is_datagram && owner.flags & NETNS_OF_NODE == 0 {
        return PROCEED;
    }
    let (addr, port) = address::read(ctx, family);
    let key = FrontendKey {
        addr,
        port,
        proto,
        pad: 0,
    };
    let client = match addr.as_v4() {
        Some(_) => owner.v4,
        None => owner.v6,
    };
    let is_node = owner.flags & NETNS_OF_NODE != 0;
    let mut to = Endpoint::NONE;
    match choose::choose(&key, &client, is_node, &mut to) {
        choose::CHOSEN => {}
        choose::REFUSED => return refuse(),
        _ => return PROCEED,
    }
    if bound::is_out_of_reach(ctx, &to.addr) {
        return refuse();
    }
    let state = ServiceSocket {
        frontend: addr,
        endpoint: to.addr,
        frontend_port: port,
        endpoint_port: to.port,
    };
    state::connected(ctx, &state);
    if is_datagram {
        note(state::cookie(ctx), &key, &to);
    }
    address::write(ctx, family, &to.addr, to.port);
    PROCEED
}

/// Says which endpoint a datagram socket is connected to, to the agent. A function, for the room that its keys take.
#[inline(never)]
fn note(cookie: u64, key: &FrontendKey, to: &Endpoint) {
    let connected = SocketKey::new(CONNECTED, cookie, to.addr, to.port);
    datagram::note(&connected, key, to);
}
