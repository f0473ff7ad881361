//! Services: which addresses and ports lead to which endpoints.
//!
//! - map `FRONTENDS`, hash: [`FrontendKey`] → [`Frontend`]: an address and port that clients use. With port and
//!   protocol zero: the address is some active Service's own, so what is for another port of it is refused.
//! - map `SETS`, array: index → [`Set`]: what becomes of a new connection. One eight-byte store changes it.
//! - map `SLOTS`, array: index → [`Slot`]: the endpoints of a set lie side by side from [`Set::base`] on.
//! - map `BACKENDS`, array: id → [`Backend`]: an endpoint.
//! - map `AFFINITY`, LRU hash: [`AffinityKey`] → [`Affinity`]: the endpoint that a client has of a Service with
//!   session affinity.
//! - map `SOURCE_RANGES`, LPM trie: prefix over [`SourceKey`] → u8: who may use a frontend with [`FRONTEND_GUARDED`].
//! - map `SERVICE_RANGES`, LPM trie: prefix over [`Addr`] → [`RangeOf`]: addresses that nothing but Services may have.
//! - map `NETNS`, hash: cookie of a network namespace (u64) → [`NetNs`]: whose sockets are translated. It and the next
//!   three are those of the programs on sockets alone.
//! - map `SERVICE_SOCKETS`, socket storage: [`ServiceSocket`]: what a datagram socket was connected to.
//! - map `STREAM_FRONTENDS`, LRU hash: cookie of a socket (u64) → [`ServiceSocket`]: the same of TCP, for getpeername.
//! - map `SOCKET_FRONTENDS`, LRU hash: [`SocketKey`] → [`SocketFrontend`]: which endpoint a datagram socket has of a
//!   frontend, of which frontend an endpoint's answers are, and for which one the socket was connected.
//!
//! Publishing. Written are endpoints first, then slots that no set uses, then the set, then the frontend that names it;
//! removed in the opposite order. An id is given to another endpoint, or a slot to another set, only once its
//! readers are done and with another generation. So a packet at any moment finds the set of before or
//! that of after, and a connection that remembers an endpoint knows by its generation whether it is still there.
//!
//! Handover. What somebody else translates when this begins stays theirs ([`super::config::FLAG_HANDOVER`]). A pod's
//! datagrams, by a record whose server is the frontend itself: to translate to that changes nothing, and the packet goes
//! on to who has the flow; it ends as any record does, or with its endpoint. A socket's of the node, by [`LEFT`].
//! The agent alone writes `FRONTENDS`, `SETS`, `SLOTS`, `BACKENDS`, `SOURCE_RANGES`, `SERVICE_RANGES` and `NETNS`.

use super::{Addr, map_type};

/// Room, if the settings do not say: for ten thousand Services of both families, which take an entry for each address
/// and one for each of its ports.
pub const MAX_FRONTENDS: u32 = 65_536;
/// As above.
pub const MAX_SETS: u32 = 65_536;
/// As above.
pub const MAX_SLOTS: u32 = 131_072;
/// As above.
pub const MAX_BACKENDS: u32 = 65_536;
/// Ranges of clients.
pub const MAX_SOURCE_RANGES: u32 = 16_384;
/// Ranges of Services' addresses, and addresses in them that are not ours.
pub const MAX_SERVICE_RANGES: u32 = 4096;
/// Clients with an endpoint of their own.
pub const MAX_AFFINITIES: u32 = 16_384;
/// Pairs of datagram sockets and with whom they speak.
pub const MAX_SOCKET_FRONTENDS: u32 = 65_536;
/// Sockets of TCP whose frontend is known.
pub const MAX_STREAM_FRONTENDS: u32 = 65_536;
/// Namespaces of pods, and the node's.
pub const MAX_NETNS: u32 = super::endpoint::MAX_PODS + 1;

/// What a client sends to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendKey {
    pub addr: Addr,
    /// Network order.
    pub port: [u8; 2],
    /// IP protocol number: TCP, UDP or SCTP.
    pub proto: u8,
    /// Zero.
    pub pad: u8,
}
map_type!(FrontendKey, 20, 2, [addr, port, proto, pad]);

impl FrontendKey {
    /// Of the address by itself.
    pub const fn address(addr: Addr) -> Self {
        Self {
            addr,
            port: [0; 2],
            proto: 0,
            pad: 0,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// Index in `SETS` for pods and the node itself.
    pub inside: u32,
    /// The same for clients outside.
    pub outside: u32,
    /// Number of the Service's port, for affinity: one for all of its addresses.
    pub service: u32,
    /// Seconds that a client keeps its endpoint after its last new connection; zero: not at all.
    pub affinity_seconds: u32,
    /// `FRONTEND_*`.
    pub flags: u32,
}
map_type!(
    Frontend,
    20,
    2,
    [inside, outside, service, affinity_seconds, flags]
);

/// For the node's own sockets alone: a node port at a loopback address, which each pod has one of, too.
pub const FRONTEND_OF_NODE: u32 = 1 << 0;
/// For clients in `SOURCE_RANGES` alone, pods and nodes not excepted; others are dropped.
pub const FRONTEND_GUARDED: u32 = 1 << 1;
/// One of the node's own addresses: what is for another port of it is the node's.
pub const FRONTEND_NODE_PORT: u32 = 1 << 2;
/// A client outside gets the slot that [`crate::algo::client_hash`] says, not one by chance. Its set is [`Kind::Balance`] like
/// any other, with a Maglev table for slots: programs that do not know the flag choose from it by chance.
pub const FRONTEND_CONSISTENT: u32 = 1 << 3;
/// Whoever writes a Service says that it has this address: none of a pod's.
pub const FRONTEND_EXTERNAL: u32 = 1 << 4;

/// Who may use a Service's port; a prefix has [`Self::bits_of`] bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceKey {
    /// [`Frontend::service`], compared as bytes.
    pub service: u32,
    pub client: Addr,
}
map_type!(SourceKey, 20, 2, [service, client]);

impl SourceKey {
    /// How much of the key is compared, of that many bits of an [`Addr`]; an IPv4 prefix of length n has 96 + n.
    pub const fn bits_of(prefix: u32) -> u32 {
        u32::BITS + prefix
    }
}

/// Whose addresses of a range are.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeOf(pub u8);
map_type!(RangeOf, 1, 2, [0]);

impl RangeOf {
    /// Somebody else translates them, although they are in a range of Services.
    pub const OTHERS: Self = Self(0);
    /// Services'. What is for one that no Service has is for nobody.
    pub const SERVICES: Self = Self(1);
}

/// What becomes of a new connection; [`Set::new`] has the parts.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set(pub u64);
map_type!(Set, 8, 2, [0]);

/// What a [`Set`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of the endpoints, by chance.
    Balance = 0,
    /// There is no endpoint anywhere: the client is told so.
    Refuse = 1,
    /// There are endpoints, but none that this client may have.
    Drop = 2,
}

impl Set {
    /// Host order: the first slot's index in the lower half, 24 bits of how many, 8 bits of [`Kind`].
    pub const fn new(kind: Kind, base: u32, count: u32) -> Self {
        Self(base as u64 | (count as u64 & 0xff_ffff) << 32 | (kind as u64) << 56)
    }

    #[inline(always)]
    pub const fn base(self) -> u32 {
        self.0 as u32
    }

    #[inline(always)]
    pub const fn count(self) -> u32 {
        (self.0 >> 32) as u32 & 0xff_ffff
    }

    /// An unknown one, as zero endpoints, refuses.
    #[inline(always)]
    pub const fn kind(self) -> Kind {
        match self.0 >> 56 {
            0 if self.count() > 0 => Kind::Balance,
            2 => Kind::Drop,
            _ => Kind::Refuse,
        }
    }
}

/// One of a set's endpoints.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index in `BACKENDS`,
    pub backend: u32,
    /// and which of those that had the number.
    pub generation: u32,
}
map_type!(Slot, 8, 2, [backend, generation]);

/// An endpoint that takes new connections is in a set; one that finishes those it has is not, but serves.
pub const BACKEND_SERVING: u16 = 1 << 0;
/// It is in no set: a client with affinity gets another one for its next connection.
pub const BACKEND_DRAINING: u16 = 1 << 1;
/// The highest byte of the flags: the IP protocol. Two endpoints that differ in nothing else have two ids.
const BACKEND_PROTO_SHIFT: u16 = 8;

/// An endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    pub addr: Addr,
    /// Network order.
    pub port: [u8; 2],
    /// `BACKEND_*`.
    pub flags: u16,
    pub generation: u32,
}
map_type!(Backend, 24, 2, [addr, port, flags, generation]);

impl Backend {
    /// IP protocol number, as [`Self::with_proto`] put it in.
    #[inline(always)]
    pub const fn proto(&self) -> u8 {
        (self.flags >> BACKEND_PROTO_SHIFT) as u8
    }

    /// The same of that protocol.
    pub const fn with_proto(mut self, proto: u8) -> Self {
        self.flags =
            self.flags & ((1 << BACKEND_PROTO_SHIFT) - 1) | (proto as u16) << BACKEND_PROTO_SHIFT;
        self
    }
}

/// A client of a Service with affinity.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffinityKey {
    pub client: Addr,
    /// [`Frontend::service`].
    pub service: u32,
}
map_type!(AffinityKey, 20, 2, [client, service]);

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affinity {
    /// `bpf_ktime_get_ns` of the client's last new connection.
    pub last_ns: u64,
    /// As in [`Slot`].
    pub backend: u32,
    pub generation: u32,
}
map_type!(Affinity, 16, 2, [last_ns, backend, generation]);

/// The node's own namespace.
pub const NETNS_OF_NODE: u32 = 1 << 0;

/// A network namespace whose sockets are translated when they connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetNs {
    /// Its addresses, as affinity and packets know the client; unspecified where there is none.
    pub v4: Addr,
    pub v6: Addr,
    /// `NETNS_*`.
    pub flags: u32,
}
map_type!(NetNs, 36, 2, [v4, v6, flags]);

/// What a socket was connected to. All zero with one that has sent to frontends, and was connected to none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceSocket {
    /// What it thinks it is connected to.
    pub frontend: Addr,
    /// What it is connected to, if the kernel did as the program said.
    pub endpoint: Addr,
    /// Both in network order.
    pub frontend_port: [u8; 2],
    pub endpoint_port: [u8; 2],
}
map_type!(
    ServiceSocket,
    36,
    2,
    [frontend, endpoint, frontend_port, endpoint_port]
);

/// A datagram socket of the node's, and one with whom it speaks.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketKey {
    /// `bpf_get_socket_cookie`.
    pub cookie: u64,
    /// The frontend that it sends to, or the endpoint that it hears.
    pub addr: Addr,
    /// Network order.
    pub port: [u8; 2],
    /// `HEARD`, `SENT_TO` or `CONNECTED`: an address may be one Service's frontend and another's endpoint.
    pub way: u16,
    /// Zero.
    pub pad: [u8; 4],
}
map_type!(SocketKey, 32, 2, [cookie, addr, port, way, pad]);

impl SocketKey {
    #[inline(always)]
    pub const fn new(way: u16, cookie: u64, addr: Addr, port: [u8; 2]) -> Self {
        Self {
            cookie,
            addr,
            port,
            way,
            pad: [0; 4],
        }
    }
}

/// [`SocketKey::way`]: the address is an endpoint's.
pub const HEARD: u16 = 0;
/// [`SocketKey::way`]: the address is a frontend's.
pub const SENT_TO: u16 = 1;
/// [`SocketKey::way`]: the address is that of the endpoint that the socket was connected to for a frontend. Nothing
/// moves such a socket, for no program sees what it sends: the agent, which alone reads this, ends it once its endpoint
/// does not serve.
pub const CONNECTED: u16 = 2;

/// Of such a pair: the frontend and the endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketFrontend {
    /// The frontend's.
    pub addr: Addr,
    /// Network order.
    pub port: [u8; 2],
    /// Zero.
    pub pad: [u8; 2],
    /// As in [`Slot`]; or [`LEFT`].
    pub backend: u32,
    pub generation: u32,
}
/// [`SocketFrontend::backend`]: what the socket sends to the frontend is left to whoever else translates, during
/// a handover.
pub const LEFT: u32 = u32::MAX;
map_type!(
    SocketFrontend,
    28,
    2,
    [addr, port, pad, backend, generation]
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_says_what_was_put_in() {
        let set = Set::new(Kind::Balance, u32::MAX, 0xff_ffff);
        assert_eq!(
            (set.base(), set.count(), set.kind()),
            (u32::MAX, 0xff_ffff, Kind::Balance)
        );
        assert_eq!(Set::new(Kind::Drop, 0, 0).kind(), Kind::Drop);
        // Nothing written yet, nobody to choose from, a kind of a later version.
        for set in [
            Set(0),
            Set::new(Kind::Balance, 7, 0),
            Set(9 << 56 | 1 << 32),
        ] {
            assert_eq!(set.kind(), Kind::Refuse);
        }
    }
}
