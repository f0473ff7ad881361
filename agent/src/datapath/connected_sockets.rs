//! Datagram sockets of the node that were connected to an endpoint for a Service's address.
//!
//! The programs see connect(2) of such a socket, and nothing of what it sends afterwards. So it would keep an endpoint
//! that has left its Service, or feed whoever has the address next. It is disconnected instead: the process that has it
//! hears ECONNABORTED or EDESTADDRREQ, and connects again. Sockets that are not connected move with their next datagram.

use super::{Datapath, DatapathError};
use sinabro_common::abi::{Addr, service::BACKEND_SERVING};
use sinabro_netlink::{Family, sock_diag::SockDiag};

/// Why a socket keeps an endpoint that is gone.
#[derive(Debug, thiserror::Error)]
pub enum ConnectedError {
    #[error("the node's connected UDP sockets cannot be told from others")]
    Maps(#[from] DatapathError),

    #[error("the node's connected UDP sockets cannot be listed")]
    List(#[source] sinabro_netlink::Error),

    /// Such as a kernel without CONFIG_INET_DIAG_DESTROY.
    #[error("{count} UDP sockets of the node stay connected to endpoints that are gone")]
    Kept {
        count: usize,
        #[source]
        source: sinabro_netlink::Error,
    },
}

impl Datapath {
    /// Disconnects those whose endpoints do not serve any more, in the calling thread's network namespace; says how many.
    ///
    /// # Errors
    /// If some are left.
    pub fn disconnect_stale_sockets(&self) -> Result<usize, ConnectedError> {
        let Some(frontends) = self.service_sockets.frontends() else {
            return Ok(0);
        };
        let mut diag = SockDiag::new().map_err(ConnectedError::List)?;
        let (mut count, mut refused) = (0, Vec::new());
        for family in [Family::V4, Family::V6] {
            for socket in diag.connected(family).map_err(ConnectedError::List)? {
                let addr = Addr::from(socket.remote.ip());
                let port = socket.remote.port().to_be_bytes();
                let Some((id, generation)) = frontends.connected(socket.cookie, addr, port)? else {
                    continue;
                };
                let backend = self.maps.services.backend(id)?;
                if backend.generation == generation && backend.flags & BACKEND_SERVING != 0 {
                    continue;
                }
                match diag.disconnect(&socket) {
                    Ok(was_there) => count += usize::from(was_there),
                    Err(error) => refused.push(error),
                }
            }
        }
        let kept = refused.len();
        match refused.pop() {
            Some(source) => Err(ConnectedError::Kept {
                count: kept,
                source,
            }),
            None => Ok(count),
        }
    }
}
