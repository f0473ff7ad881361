//! Connections as netfilter tracks them (ctnetlink), read only: those with ports whose destination somebody has changed.
//!
//! Whether somebody has is told by the two tuples, not by the status: IPVS changes destinations, too, and sets no bit.
//!
//! Numbers are those of linux/netfilter/nfnetlink_conntrack.h. Reading needs CAP_NET_ADMIN.

use crate::{
    Conn, Result,
    wire::{self, Attr, Garbage, Message, Raw},
};
use std::net::{IpAddr, SocketAddr};

const SUBSYSTEM: u16 = 1;
/// IPCTNL_MSG_CT_NEW, with which a dump answers.
const NEW: u16 = SUBSYSTEM << 8;
/// IPCTNL_MSG_CT_GET.
const GET: u16 = SUBSYSTEM << 8 | 1;
/// struct nfgenmsg: family, version, resource.
const HEADER: usize = 4;
/// TCP_CONNTRACK_TIME_WAIT; those behind it are over, too.
const TIME_WAIT: u8 = 7;

/// A connection to an address that is not the one which answers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Translated {
    /// IP protocol number.
    pub proto: u8,
    pub client: SocketAddr,
    /// Where the client sends to,
    pub to: SocketAddr,
    /// and where that goes.
    pub server: SocketAddr,
    /// Who sends, as the server sees it.
    pub seen_as: SocketAddr,
    /// Both ends have closed it, or one has reset it: what is left is netfilter's patience with late packets.
    pub is_over: bool,
}

/// A socket for netfilter's connections in the calling thread's network namespace.
#[derive(Debug)]
pub struct Conntrack(Conn);

impl Conntrack {
    /// # Errors
    /// If there can be none.
    pub fn new() -> Result<Self> {
        Conn::netfilter().map(Self)
    }

    /// All connections whose destination was changed. The kernel goes through its whole table: some ten million a second.
    ///
    /// # Errors
    /// If the kernel does not tell of connections, or the process may not read them.
    pub fn translated(&mut self) -> Result<Vec<Translated>> {
        let parse = |message: &Message<'_>| match message.kind {
            NEW => Translated::parse(message.body),
            _ => Ok(None),
        };
        let what = "list connections of netfilter";
        self.0.dump(what, GET, &Raw(&[0; HEADER]), parse)
    }
}

type Parsed<T> = std::result::Result<T, Garbage>;

impl Translated {
    /// None if nobody changed its destination, or it has no ports.
    fn parse(body: &[u8]) -> Parsed<Option<Self>> {
        let (mut original, mut reply, mut is_over) = (Tuple::default(), Tuple::default(), false);
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                1 => original = Tuple::parse(&attr)?,
                2 => reply = Tuple::parse(&attr)?,
                4 => is_over = state_of_tcp(&attr)?.is_some_and(|state| state >= TIME_WAIT),
                _ => {}
            }
        }
        let (Some((proto, client, to)), Some((_, server, seen_as))) =
            (original.ends(), reply.ends())
        else {
            return Ok(None);
        };
        Ok((to != server).then_some(Self {
            proto,
            client,
            to,
            server,
            seen_as,
            is_over,
        }))
    }
}

#[derive(Default)]
struct Tuple {
    addresses: [Option<IpAddr>; 2],
    proto: Option<u8>,
    ports: [Option<u16>; 2],
}

impl Tuple {
    fn parse(attr: &Attr<'_>) -> Parsed<Self> {
        let mut tuple = Self::default();
        for part in wire::attrs(attr.value) {
            let part = part?;
            for attr in wire::attrs(part.value) {
                let attr = attr?;
                match (part.kind, attr.kind) {
                    // Of IPv4, and of IPv6.
                    (1, 1 | 3) => tuple.addresses[0] = Some(attr.ip()?),
                    (1, 2 | 4) => tuple.addresses[1] = Some(attr.ip()?),
                    (2, 1) => tuple.proto = Some(attr.u8()?),
                    (2, 2) => tuple.ports[0] = Some(attr.array().map(u16::from_be_bytes)?),
                    (2, 3) => tuple.ports[1] = Some(attr.array().map(u16::from_be_bytes)?),
                    _ => {}
                }
            }
        }
        Ok(tuple)
    }

    /// Protocol, source and destination.
    fn ends(&self) -> Option<(u8, SocketAddr, SocketAddr)> {
        let end = |at: usize| Some(SocketAddr::new(self.addresses[at]?, self.ports[at]?));
        Some((self.proto?, end(0)?, end(1)?))
    }
}

fn state_of_tcp(attr: &Attr<'_>) -> Parsed<Option<u8>> {
    for attr in wire::attrs(attr.value) {
        let attr = attr?;
        // CTA_PROTOINFO_TCP, and in it CTA_PROTOINFO_TCP_STATE.
        if attr.kind == 1 {
            for attr in wire::attrs(attr.value) {
                let attr = attr?;
                if attr.kind == 1 {
                    return attr.u8().map(Some);
                }
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn garbage_never_panics(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Translated::parse(&body);
        }
    }
}
