//! The fast path between nodes while netfilter translates Services, or has rules that are to be met (`FLAG_BESIDE_PROXY`).

use super::{Datapath, DatapathError, handover::sent, maps::BesideProxy, monotonic_ns};
use ipnet::IpNet;
use sinabro_common::{
    abi::{
        Addr,
        connection::{
            Connection, ConnectionKey, FLAG_CLIENT_IS_HIGH, FLAG_STACK, FLAG_TRACKED, outside_share,
        },
    },
    algo::{
        ct_state::{ACK, SEEN},
        lifetime::{STREAM_NS, Stage},
    },
};
use sinabro_netlink::sysctl;
use std::{collections::HashMap, net::SocketAddr};

/// A connection that netfilter translates, by the ends that its server sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfStack {
    /// IP protocol number.
    pub proto: u8,
    pub client: SocketAddr,
    pub server: SocketAddr,
}

impl OfStack {
    /// The record of an established connection, so that it lives as long as netfilter's.
    fn record(&self, payer: u32, now: u64) -> (ConnectionKey, Connection) {
        let (key, from_high) = sent(self.proto, self.client, self.server).key();
        let client_is_high = if from_high { FLAG_CLIENT_IS_HIGH } else { 0 };
        let connection = Connection {
            last_seen_ns: now,
            began_ns: now.saturating_sub(2 * STREAM_NS),
            states: [SEEN | ACK; 2],
            flags: FLAG_STACK | client_is_high,
            payer,
            ..Connection::NONE
        };
        (key, connection)
    }
}

/// For how many seconds netfilter keeps idle connections: a record with `FLAG_STACK` lives no shorter, or answers would go past the
/// translation that they need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    tcp_established: u32,
    udp_stream: u32,
    sctp_established: u32,
}

impl Timeouts {
    /// As the node's settings are; zeros without connection tracking.
    pub fn read() -> Self {
        let seconds = |name: &str| {
            let name = format!("nf_conntrack_{name}");
            let value = sysctl::read(&["net", "netfilter", &name]);
            value.ok().and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        Self {
            tcp_established: seconds("tcp_timeout_established"),
            udp_stream: seconds("udp_timeout_stream"),
            sctp_established: seconds("sctp_timeout_established"),
        }
    }

    /// Of a connection at a stage; of closed ones ours are as long.
    pub fn of(&self, stage: Stage) -> u32 {
        match stage {
            Stage::Established => self.tcp_established,
            Stage::Replied | Stage::Stream => self.udp_stream,
            Stage::Other => self.sctp_established,
            _ => 0,
        }
    }
}

impl Datapath {
    /// The pod ranges of all nodes.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub fn pod_ranges(&self) -> Result<Vec<IpNet>, DatapathError> {
        self.maps.nodes.pod_ranges()
    }

    /// Begins, once each connection that netfilter translates has a record: `translated` lists them. Idempotent; while it drains, it just
    /// goes on.
    ///
    /// # Errors
    /// If the maps cannot be read or written. The fast path has not begun then.
    pub fn begin_beside_proxy<E: From<DatapathError>>(
        &self,
        translated: impl FnOnce() -> Result<Vec<OfStack>, E>,
    ) -> Result<(), E> {
        self.ensure_beside_proxy(translated)?;
        // The programs record what begins while it drains: nothing is missing.
        Ok(self.end_draining()?)
    }

    /// The same, but what drains goes on to drain.
    ///
    /// # Errors
    /// As [`Self::begin_beside_proxy`].
    pub fn ensure_beside_proxy<E: From<DatapathError>>(
        &self,
        translated: impl FnOnce() -> Result<Vec<OfStack>, E>,
    ) -> Result<(), E> {
        if !self.is_set_up() {
            return Ok(());
        }
        match self.maps.config.beside_proxy()? {
            BesideProxy::On | BesideProxy::Drains => return Ok(()),
            BesideProxy::Off | BesideProxy::Records => {}
        }
        self.maps.config.set_beside_proxy(BesideProxy::Records)?;
        self.record_of_stack(&translated()?)?;
        Ok(self.maps.config.set_beside_proxy(BesideProxy::On)?)
    }

    /// Whether conntrack picks up no TCP connection in the middle (`nf_conntrack_tcp_loose`): one that it has not seen begin does not drain then.
    ///
    /// # Errors
    /// If the programs' settings cannot be written.
    pub fn set_conntrack_strict(&self, is: bool) -> Result<(), DatapathError> {
        match self.is_set_up() {
            true => self.maps.config.set_conntrack_strict(is),
            false => Ok(()),
        }
    }

    fn end_draining(&self) -> Result<(), DatapathError> {
        match self.is_set_up() && self.maps.config.beside_proxy()? == BesideProxy::Drains {
            true => self.maps.config.set_beside_proxy(BesideProxy::On),
            false => Ok(()),
        }
    }

    /// Begins to end it: what netfilter picks up goes by the stack, and the rest of connections that it has not seen does not. Idempotent.
    ///
    /// # Errors
    /// If the programs' settings cannot be read or written.
    pub fn drain_beside_proxy(&self) -> Result<(), DatapathError> {
        if !self.is_set_up() {
            return Ok(());
        }
        match self.maps.config.beside_proxy()? {
            BesideProxy::On => {
                self.maps.config.set_beside_proxy(BesideProxy::Drains)?;
                self.maps.flows.raise()
            }
            BesideProxy::Drains | BesideProxy::Off => Ok(()),
            BesideProxy::Records => self.maps.config.set_beside_proxy(BesideProxy::Off),
        }
    }

    /// While Services are translated here alone: nothing drains any more. Ends it once no connection with a pod of another node needs the
    /// stack.
    ///
    /// # Errors
    /// If the maps cannot be read or written.
    pub fn settle_beside_proxy(&self) -> Result<(), DatapathError> {
        self.end_draining()?;
        if !self.is_set_up() || self.maps.config.beside_proxy()? == BesideProxy::Off {
            return Ok(());
        }
        let pods = self.pods()?;
        let mut is_needed = false;
        self.maps.connections.for_each(|key, connection| {
            let is_on_this_node = pods.contains(&key.low.into()) && pods.contains(&key.high.into());
            let needs_stack = connection.flags & (FLAG_STACK | FLAG_TRACKED) != 0;
            is_needed |= needs_stack && !is_on_this_node;
        })?;
        match is_needed {
            true => Ok(()),
            false => self.end_beside_proxy(),
        }
    }

    /// Ends it: packets between nodes go by the stack. Idempotent.
    ///
    /// # Errors
    /// If the programs' settings cannot be written.
    pub fn end_beside_proxy(&self) -> Result<(), DatapathError> {
        if !self.is_set_up() {
            return Ok(());
        }
        self.maps.config.set_beside_proxy(BesideProxy::Off)
    }

    fn record_of_stack(&self, translated: &[OfStack]) -> Result<(), DatapathError> {
        let pods: HashMap<Addr, u32> = self.maps.endpoints.list()?.into_iter().collect();
        let now = monotonic_ns();
        for one in translated {
            let is_served = pods.contains_key(&one.server.ip().into());
            let payer = match pods.get(&one.client.ip().into()) {
                Some(payer) => *payer,
                None if is_served => outside_share(one.proto),
                None => continue,
            };
            let (key, connection) = one.record(payer, now);
            self.maps.connections.add_untranslated(&key, &connection)?;
        }
        self.maps.flows.raise()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_the_ends_that_the_server_sees() {
        for (client, server) in [("10.0.0.1:9", "10.1.0.1:53"), ("10.1.0.1:9", "10.0.0.1:53")] {
            let one = OfStack {
                proto: 6,
                client: client.parse().unwrap(),
                server: server.parse().unwrap(),
            };
            let (key, connection) = one.record(7, 1 << 40);
            let sent = connection.from_client(&key);
            assert_eq!(sent.src, one.client.ip().into());
            assert_eq!(sent.dst_port, one.server.port().to_be_bytes());
            assert_eq!(
                (connection.payer, connection.flags & FLAG_STACK),
                (7, FLAG_STACK)
            );
            assert_eq!(
                (connection.alias(&key), connection.service_alias(&key)),
                (None, None)
            );
        }
    }
}
