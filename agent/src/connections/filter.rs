//! Which connections.

use super::{ConnectionsError, row::Row};
use crate::endpoint::PodNames;
use ipnet::IpNet;
use sinabro_common::{
    abi::Addr,
    api::{ConnectionFilter, StateClass},
};
use std::net::IpAddr;

/// A filter whose pod is there.
pub struct Filter<'a> {
    pod: Option<&'a str>,
    remote: Option<IpNet>,
    protocol: Option<u8>,
    port: Option<u16>,
    state: Option<StateClass>,
    masqueraded: bool,
}

impl<'a> Filter<'a> {
    pub fn new(filter: &'a ConnectionFilter, pods: &PodNames) -> Result<Self, ConnectionsError> {
        let pod = filter.pod.as_deref();
        if let Some(pod) = pod
            && !pods.has(pod)
        {
            return Err(ConnectionsError::NoPod(pod.to_owned()));
        }
        Ok(Self {
            pod,
            remote: filter.remote,
            protocol: filter.protocol,
            port: filter.port,
            state: filter.state,
            masqueraded: filter.masqueraded,
        })
    }

    pub fn wants(&self, row: &Row, pods: &PodNames) -> bool {
        self.protocol.is_none_or(|proto| proto == row.sent.proto)
            && self
                .port
                .is_none_or(|port| row.ports().contains(&Some(port)))
            && self.state.is_none_or(|state| state == row.class())
            && (!self.masqueraded || row.masqueraded_as().is_some())
            && self.wants_ends(row, pods)
    }

    /// One end is the pod's and the other where it should be. Without a pod any of this node's; and where
    /// neither end is, as of one that has just gone, both are remote.
    fn wants_ends(&self, row: &Row, pods: &PodNames) -> bool {
        // A mapping has no other end that could be somewhere.
        if row.is_mapping() && self.remote.is_some() {
            return false;
        }
        let (client, server) = (row.sent.src, row.sent.dst);
        let is_local = |addr| match (self.pod, pods.at(addr)) {
            (Some(pod), name) => name == Some(pod),
            (None, name) => name.is_some(),
        };
        let is_remote = |addr: Addr| {
            self.remote
                .is_none_or(|net| net.contains(&IpAddr::from(addr)))
        };
        let neither = self.pod.is_none() && !is_local(client) && !is_local(server);
        neither && (is_remote(client) || is_remote(server))
            || is_local(client) && is_remote(server)
            || is_local(server) && is_remote(client)
    }
}
