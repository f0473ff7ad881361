//! A pod's record as the data path wants it.

use super::EndpointRecord;
use crate::{
    acceleration::choice::Policy,
    chain::Chain,
    datapath::{Datapath, DatapathError, PortSet, PortsOf},
};
use sinabro_common::{
    abi::{
        Addr,
        endpoint::{Endpoint, NO_HOST_PORTS, PodLink},
    },
    api::HostPort,
};
use sinabro_netlink::Conn;
use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

/// What an endpoint needs of the data path.
///
/// A trait so that tests can make a step fail and watch the order of steps.
pub trait PodPrograms: Send + Sync {
    /// As [`Datapath::attach_pod`].
    fn attach(&self, record: &EndpointRecord) -> Result<(), DatapathError>;
    /// As [`Datapath::detach_pod`].
    fn detach(&self, record: &EndpointRecord) -> Result<(), DatapathError>;
    /// As [`Datapath::retain_pods`].
    fn retain(&self, live: &HashSet<String>) -> Result<Vec<String>, DatapathError>;
    /// Keeps new masqueraded connections off exactly these ports, beside the node's own.
    fn reserve(&self, ports: &BTreeSet<HostPort>) -> Result<(), DatapathError>;
}

/// The data path of this node, and what it does for every pod.
pub struct Programs {
    pub datapath: Arc<Datapath>,
    pub acceleration: Policy,
}

impl PodPrograms for Programs {
    fn attach(&self, record: &EndpointRecord) -> Result<(), DatapathError> {
        let of_family = |v4| {
            let address = record.addresses.iter().find(|a| a.is_ipv4() == v4);
            address.map_or(Addr::UNSPECIFIED, |a| Addr::from(*a))
        };
        let pod = PodLink {
            v4: of_family(true),
            v6: of_family(false),
            mac: record.mac.0,
            pad: PodLink::pad_of(netns_of(record.ifindex)),
        };
        let flags = match record.has_datagrams_by_host_port() {
            Some(false) => NO_HOST_PORTS,
            _ => 0,
        };
        let endpoint = Endpoint {
            ifindex: record.ifindex,
            flags: Endpoint::flags_of(record.link_mtu(), flags),
            mac: record.mac.0,
            host_mac: record.host_mac.0,
        };
        let endpoints = record.addresses.iter().map(|a| (Addr::from(*a), endpoint));
        let endpoints: Vec<_> = endpoints.collect();
        let acceleration = self.acceleration.of(record);
        self.datapath.attach_pod(
            record.ifindex,
            &record.link,
            &pod,
            &endpoints,
            acceleration,
            record.translated_netns(),
        )
    }

    fn detach(&self, record: &EndpointRecord) -> Result<(), DatapathError> {
        let addresses: Vec<_> = record.addresses.iter().map(|a| Addr::from(*a)).collect();
        self.datapath
            .detach_pod(record.ifindex, &record.link, &addresses)
    }

    fn retain(&self, live: &HashSet<String>) -> Result<Vec<String>, DatapathError> {
        self.datapath.retain_pods(live)
    }

    fn reserve(&self, ports: &BTreeSet<HostPort>) -> Result<(), DatapathError> {
        let mut set = PortSet::default();
        for HostPort { protocol, port } in ports {
            set.add(protocol.number(), *port..=*port);
        }
        self.datapath.set_host_ports(PortsOf::Pods, set)
    }
}

/// The id of the network namespace in which a pod's link has its other end. Without it the pod's sockets are not looked at.
fn netns_of(ifindex: u32) -> Option<u32> {
    let link = Conn::new().and_then(|mut conn| conn.link_by_index(ifindex));
    link.inspect_err(|error| tracing::debug!(ifindex, error = %Chain(error), "no id of a pod's network namespace"))
        .ok()?
        .peer_netns
}
