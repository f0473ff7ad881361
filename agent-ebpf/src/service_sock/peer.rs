//! getpeername(2).

use super::{
    address::{self, Family},
    state,
};
use aya_ebpf::programs::SockAddrContext;
use sinabro_common::abi::{Addr, service::ServiceSocket};

/// Whether that is the endpoint that a socket was connected to for a frontend: the kernel may have failed to connect it,
/// or have disconnected it since.
#[inline(always)]
pub fn is_endpoint(state: &ServiceSocket, addr: &Addr, port: [u8; 2]) -> bool {
    state.endpoint_port == port && state.endpoint_port != [0; 2] && state.endpoint == *addr
}

/// Tells the frontend in the place of its endpoint. Also while Services are not translated any more: what the socket was
/// connected to does not change by that.
#[inline(always)]
pub fn name(ctx: &SockAddrContext, family: Family) {
    let Some(state) = state::of_stream(ctx).or_else(|| state::of(ctx).map(|state| &*state)) else {
        return;
    };
    let (addr, port) = address::read(ctx, family);
    if is_endpoint(state, &addr, port) {
        address::write(ctx, family, &state.frontend, state.frontend_port);
    }
}
