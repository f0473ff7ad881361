//! TCP sockets on the same-node fast path.
//!
//! Map `SOCKETS`, sock hash: [`SocketKey`] → socket. Only connections whose two addresses are
//! both in `ENDPOINTS` are enrolled: pod addresses are unique on a node, loopback and node
//! addresses never match, so two pods' flows cannot meet in one key.

use super::{Addr, map_type};

pub const MAX_SOCKETS: u32 = 65_536;

/// One end of a connection as that end sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketKey {
    pub local: Addr,
    pub remote: Addr,
    /// Host order.
    pub local_port: u16,
    /// Host order.
    pub remote_port: u16,
}
map_type!(SocketKey, 36);

impl SocketKey {
    /// The other end's key.
    #[inline(always)]
    pub const fn peer(&self) -> Self {
        Self {
            local: self.remote,
            remote: self.local,
            local_port: self.remote_port,
            remote_port: self.local_port,
        }
    }
}
