//! Connections to Services that netfilter translates.

use crate::datapath::{
    Datapath,
    handover::{OfSocket, Theirs},
};
use anyhow::Context as _;
use sinabro_netlink::{
    Family,
    conntrack::{Conntrack, Translated},
    sock_diag::{Bound, SockDiag},
};
use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// What is kube-proxy's, of what is sent to Services that we publish.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Flows {
    /// Those of protocols that do not say what begins a connection.
    pub connections: HashSet<Theirs>,
    /// The node's own sockets among their clients.
    pub sockets: HashSet<OfSocket>,
    /// How many there are, of every protocol.
    pub remaining: usize,
}

impl Flows {
    /// Asks the kernel.
    ///
    /// # Errors
    /// If it does not tell.
    pub fn look(datapath: &Datapath) -> anyhow::Result<Self> {
        let frontends = datapath.frontends().context("cannot read the frontends")?;
        let pods = datapath.pods().context("cannot read pods' addresses")?;
        let translated = Conntrack::new()?.translated()?;
        let mut bound = Vec::new();
        for family in Family::BOTH {
            bound.extend(SockDiag::new()?.datagrams(family)?);
        }
        Ok(Self::of(translated, &frontends, &pods, &bound))
    }

    fn of(
        translated: Vec<Translated>,
        frontends: &HashSet<(SocketAddr, u8)>,
        pods: &HashSet<IpAddr>,
        bound: &[Bound],
    ) -> Self {
        let mut flows = Self::default();
        let under_way = translated.into_iter().filter(|flow| !flow.is_over);
        for flow in under_way.filter(|flow| frontends.contains(&(flow.to, flow.proto))) {
            flows.remaining += 1;
            if flow.proto == TCP {
                continue;
            }
            if flow.proto == UDP && !pods.contains(&flow.client.ip()) {
                let own = bound.iter().filter(|bound| is_at(bound, flow.client));
                flows.sockets.extend(own.map(|bound| OfSocket {
                    cookie: bound.cookie,
                    frontend: flow.to,
                }));
            }
            flows.connections.insert(Theirs {
                proto: flow.proto,
                client: flow.client,
                frontend: flow.to,
                endpoint: flow.server,
            });
        }
        flows
    }
}

/// Whether what comes from there may be the socket's.
fn is_at(bound: &Bound, client: SocketAddr) -> bool {
    let ip = bound.at.ip().to_canonical();
    bound.at.port() == client.port()
        && (ip == client.ip() || (ip.is_unspecified() && (ip.is_ipv6() || client.is_ipv4())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn datagrams_to_frontends_are_told_with_their_sockets() {
        let flow = |proto, client, to| Translated {
            proto,
            client: at(client),
            to: at(to),
            server: at("10.0.0.2:8080"),
            seen_as: at(client),
            is_over: false,
        };
        let to_vip = |proto, client| flow(proto, client, "10.96.0.10:53");
        let over = Translated {
            is_over: true,
            ..to_vip(TCP, "10.0.0.1:9")
        };
        let translated = vec![
            to_vip(UDP, "10.0.0.1:7"),
            to_vip(UDP, "192.0.2.1:8"),
            to_vip(TCP, "10.0.0.1:7"),
            over,
            // A port that somebody else publishes.
            flow(UDP, "10.0.0.1:7", "192.0.2.1:53"),
        ];
        let frontends = [UDP, TCP].map(|proto| (at("10.96.0.10:53"), proto));
        let bound = [
            (1, "[::]:8"),
            (2, "192.0.2.1:8"),
            (3, "127.0.0.1:8"),
            (4, "0.0.0.0:7"),
        ];
        let bound = bound.map(|(cookie, place)| Bound {
            cookie,
            at: at(place),
        });
        let pods = HashSet::from(["10.0.0.1".parse().unwrap()]);
        let flows = Flows::of(translated, &frontends.into(), &pods, &bound);
        assert_eq!(flows.remaining, 3);
        let clients: HashSet<_> = flows.connections.iter().map(|flow| flow.client).collect();
        assert_eq!(clients, [at("10.0.0.1:7"), at("192.0.2.1:8")].into());
        let cookies: HashSet<_> = flows.sockets.iter().map(|socket| socket.cookie).collect();
        assert_eq!(cookies, [1, 2].into());
    }
}
