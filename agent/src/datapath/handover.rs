//! What somebody else translates when this node's Services become ours, and stays theirs.
//!
//! Datagrams of pods, and of clients outside, are left by a record whose server is the frontend itself (`sinabro_common::abi::service`); those of
//! the node's own sockets by a mark beside the socket. TCP needs neither: a segment says whether it begins anything.

use super::{
    Choice, Datapath, DatapathError, Level, Translation, attach::service_sock, maps, monotonic_ns,
};
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Connection, ConnectionKey, FLAG_CLIENT_IS_HIGH, FLAG_SERVICE, Tuple, outside_share,
        },
        service::{
            BACKEND_DRAINING, BACKEND_SERVING, Frontend, FrontendKey, SENT_TO, Set, SocketKey,
        },
    },
    algo::{ct_state::SEEN, lifetime::STREAM_NS},
    names,
};
use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    path::Path,
};

/// A connection that somebody else translates.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Theirs {
    /// IP protocol number.
    pub proto: u8,
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub endpoint: SocketAddr,
}

impl Theirs {
    fn frontend_key(&self) -> FrontendKey {
        FrontendKey {
            addr: self.frontend.ip().into(),
            port: self.frontend.port().to_be_bytes(),
            proto: self.proto,
            pad: 0,
        }
    }

    fn sent(&self) -> Tuple {
        sent(self.proto, self.client, self.frontend)
    }
}

/// What a client sends to an address.
pub(super) fn sent(proto: u8, client: SocketAddr, to: SocketAddr) -> Tuple {
    Tuple {
        src: client.ip().into(),
        dst: to.ip().into(),
        src_port: client.port().to_be_bytes(),
        dst_port: to.port().to_be_bytes(),
        proto,
        pad: [0; 3],
    }
}

/// A datagram socket of the node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OfSocket {
    pub cookie: u64,
    pub frontend: SocketAddr,
}

impl OfSocket {
    fn key(&self) -> SocketKey {
        let port = self.frontend.port().to_be_bytes();
        SocketKey::new(SENT_TO, self.cookie, self.frontend.ip().into(), port)
    }
}

/// An endpoint's address, port and IP protocol.
type End = (Addr, [u8; 2], u8);

/// Ids of endpoints that serve, with their generations.
#[derive(Default)]
struct Backends {
    /// Of those that sets lead to: by [`Frontend::service`].
    of_service: HashMap<(u32, End), (u32, u32)>,
    /// Of those that finish their connections, for whichever Service.
    draining: HashMap<End, (u32, u32)>,
}

impl Backends {
    fn get(&self, service: u32, end: End) -> Option<(u32, u32)> {
        let own = self.of_service.get(&(service, end));
        own.or_else(|| self.draining.get(&end)).copied()
    }
}

impl Datapath {
    /// What an earlier agent told the programs, asked before anything is loaded. Off if there were none, or nobody knows.
    pub fn translated_before(bpf_dir: &Path) -> Translation {
        match maps::config::pinned(bpf_dir) {
            Some(Ok(config)) => Translation::of(&config),
            Some(Err(_)) | None => Translation::Off,
        }
    }

    /// Whether an earlier agent translated at sockets: while these are there, the programs tell under which name they were
    /// connected.
    pub fn has_service_sockets(bpf_dir: &Path) -> bool {
        service_sock::are_pinned(&bpf_dir.join(names::BPF_LINKS_DIR))
    }

    /// What the programs were told.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn translation(&self) -> Result<Translation, DatapathError> {
        match self.choice {
            Choice {
                level: Level::None,
                ran: false,
                ..
            } => Ok(Translation::Off),
            _ => self
                .maps
                .config
                .get()
                .map(|config| Translation::of(&config)),
        }
    }

    /// Addresses and ports that are published, each with its protocol.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn frontends(&self) -> Result<HashSet<(SocketAddr, u8)>, DatapathError> {
        let all = self.maps.services.frontends()?;
        let ports = all.into_iter().filter(|(key, _)| key.proto != 0);
        Ok(ports
            .map(
                |(
                    FrontendKey {
                        addr, port, proto, ..
                    },
                    _,
                )| {
                    let at = SocketAddr::new(addr.into(), u16::from_be_bytes(port));
                    (at, proto)
                },
            )
            .collect())
    }

    /// Addresses of this node's pods.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn pods(&self) -> Result<HashSet<IpAddr>, DatapathError> {
        let all = self.maps.endpoints.list()?;
        Ok(all.into_iter().map(|(addr, _)| addr.into()).collect())
    }

    /// Leaves to others what pods of this node, and clients outside by its uplinks, send by these connections, while their
    /// endpoints serve. Those that we have already are passed over.
    ///
    /// # Errors
    /// If the maps cannot be read or written.
    pub fn leave_connections<'a>(
        &self,
        theirs: impl Iterator<Item = &'a Theirs>,
    ) -> Result<(), DatapathError> {
        let mut theirs = theirs.peekable();
        if theirs.peek().is_none() {
            return Ok(());
        }
        let pods: HashMap<Addr, u32> = self.maps.endpoints.list()?.into_iter().collect();
        let frontends: HashMap<_, _> = self.maps.services.frontends()?.into_iter().collect();
        let backends = self.backends(frontends.values());
        for theirs in theirs {
            let (server, port) = (theirs.endpoint.ip().into(), theirs.endpoint.port());
            let serving = (server, port.to_be_bytes(), theirs.proto);
            let payer = pods.get(&Addr::from(theirs.client.ip()));
            let frontend = frontends.get(&theirs.frontend_key());
            let endpoint = frontend.and_then(|of| backends.get(of.service, serving));
            let Some(endpoint) = endpoint else {
                continue;
            };
            let payer = payer.copied().unwrap_or(outside_share(theirs.proto));
            let (key, connection) = record(&theirs.sent(), payer, endpoint, monotonic_ns());
            self.maps.connections.add_of_service(&key, &connection)?;
        }
        self.maps.flows.raise()
    }

    /// Leaves to others what these sockets send.
    ///
    /// # Errors
    /// If the map cannot be written.
    pub fn leave_sockets(&self, sockets: &HashSet<OfSocket>) -> Result<(), DatapathError> {
        let Some(frontends) = self.service_sockets.frontends() else {
            return Ok(());
        };
        let mut sockets = sockets.iter();
        sockets.try_for_each(|socket| frontends.leave(&socket.key()))
    }

    /// Takes back what was left to others, and is not among these. What is sent next gets an endpoint by us.
    ///
    /// # Errors
    /// If the maps cannot be read or written.
    pub fn take_back(
        &self,
        theirs: &HashSet<Theirs>,
        sockets: &HashSet<OfSocket>,
    ) -> Result<(), DatapathError> {
        let kept: HashSet<ConnectionKey> = theirs.iter().map(|one| one.sent().key().0).collect();
        let mut over = Vec::new();
        self.maps.connections.for_each(|key, connection| {
            if is_left(&key, &connection) && !kept.contains(&key) {
                over.push((key, connection));
            }
        })?;
        for (key, connection) in over {
            self.maps.connections.remove(&key, &connection)?;
        }
        let Some(frontends) = self.service_sockets.frontends() else {
            return Ok(());
        };
        let kept: HashSet<SocketKey> = sockets.iter().map(OfSocket::key).collect();
        let left = frontends.left()?;
        let mut over = left.iter().filter(|key| !kept.contains(key));
        over.try_for_each(|key| frontends.remove(key))
    }

    /// Connections of pods and clients outside that are translated here, without those that are left to others.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub fn translated(&self) -> Result<u64, DatapathError> {
        let mut count = 0;
        self.maps.connections.for_each(|key, connection| {
            count += u64::from(connection.has(FLAG_SERVICE) && !is_left(&key, &connection));
        })?;
        Ok(count)
    }

    /// Endpoints of these frontends that serve, and those that finish their connections.
    fn backends<'f>(&self, frontends: impl Iterator<Item = &'f Frontend>) -> Backends {
        let services = &self.maps.services;
        let mut backends = Backends::default();
        let serving = |id, flags| {
            let backend = services.backend(id).ok()?;
            let end = (backend.addr, backend.port, backend.proto());
            (backend.flags & flags != 0).then_some((end, (id, backend.generation)))
        };
        let sets: HashSet<(u32, u32)> = frontends
            .flat_map(|of| [of.inside, of.outside].map(|set| (of.service, set)))
            .collect();
        for (service, set) in sets {
            let set = services.set(set).unwrap_or(Set(0));
            let slots = set.base()..set.base().saturating_add(set.count());
            let ids = slots.filter_map(|slot| Some(services.slot(slot).ok()?.backend));
            let ends = ids.filter_map(|id| serving(id, BACKEND_SERVING));
            let of_service = ends.map(|(end, id)| ((service, end), id));
            backends.of_service.extend(of_service);
        }
        let draining = (0..services.room().backends).filter_map(|id| serving(id, BACKEND_DRAINING));
        backends.draining.extend(draining);
        backends
    }
}

/// Whether a record only says that a connection is somebody else's.
fn is_left(key: &ConnectionKey, connection: &Connection) -> bool {
    let sent = connection.from_client(key);
    connection.has(FLAG_SERVICE)
        && (sent.dst, sent.dst_port) == (connection.frontend, connection.frontend_port)
}

/// Of what a client sends. It is one that both ends have sent for, so that it lives as long as netfilter's.
fn record(sent: &Tuple, payer: u32, endpoint: (u32, u32), now: u64) -> (ConnectionKey, Connection) {
    let (key, from_high) = sent.key();
    let connection = Connection {
        last_seen_ns: now,
        began_ns: now.saturating_sub(2 * STREAM_NS),
        frontend: sent.dst,
        frontend_port: sent.dst_port,
        states: [SEEN; 2],
        flags: FLAG_SERVICE
            | match from_high {
                true => FLAG_CLIENT_IS_HIGH,
                false => 0,
            },
        payer,
        endpoint: endpoint.0,
        endpoint_generation: endpoint.1,
        ..Connection::NONE
    };
    (key, connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_leads_to_its_frontend_is_somebody_elses() {
        for (client, frontend) in [
            ("10.0.0.1:9", "10.96.0.1:53"),
            ("10.0.0.1:9", "10.0.0.0:53"),
        ] {
            let theirs = Theirs {
                proto: 17,
                client: client.parse().unwrap(),
                frontend: frontend.parse().unwrap(),
                endpoint: "10.0.0.2:53".parse().unwrap(),
            };
            let sent = theirs.sent();
            let (key, connection) = record(&sent, 7, (3, 1), 1 << 40);
            assert_eq!(connection.from_client(&key), sent);
            assert_eq!(connection.service_alias(&key), Some(sent));
            assert!(is_left(&key, &connection));
            let ours = Connection {
                frontend: Addr::v4([10, 96, 0, 2]),
                ..connection
            };
            assert!(!is_left(&key, &ours));
        }
    }
}
