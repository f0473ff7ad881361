//! What is reported about the TCP acceleration.

use super::{Owner, PodRef};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::IpAddr};

/// `sinabroctl acceleration`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AccelerationReport {
    pub pods: Vec<AcceleratedPodReport>,
    /// What is known of servers that pods of this node connect to on this node.
    pub servers: Vec<ServerReport>,
    /// What the accelerated connections of all pods cost the kernel; none if there are none.
    #[serde(default)]
    pub memory: Option<MemoryReport>,
}

/// Bytes of kernel memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    pub used: u64,
    pub limit: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AcceleratedPodReport {
    pub owner: Owner,
    pub pod: PodRef,
    #[serde(flatten)]
    pub counters: AccelerationCount,
}

/// What a pod's accelerated sockets did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AccelerationCount {
    /// Sockets that were enrolled: one for each end of a connection.
    pub enrolled: u64,
    /// Went from socket to socket.
    pub redirected: MessageCount,
    /// Went through TCP although the socket was enrolled, by reason.
    pub passed: BTreeMap<String, MessageCount>,
    /// Sockets that were not enrolled, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// What the connections that this pod made cost the kernel, and may.
    #[serde(default)]
    pub memory: MemoryReport,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageCount {
    pub messages: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerReport {
    pub address: IpAddr,
    pub port: u16,
    /// Cookie of the network namespace, where the address is of loopback.
    pub netns: Option<u64>,
    /// `enrolled`, or why new connections to it are not.
    pub verdict: String,
    pub connections: u64,
    /// Received and sent by the server: messages of accelerated connections, segments of others.
    pub messages: [u64; 2],
    pub bytes: [u64; 2],
}
