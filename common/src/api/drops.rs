//! Packets that were dropped, one by one.

use super::Mac;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Dropped packets in one reply: thirteen hundred bytes each, with the longest names, fit into a frame.
pub const DROPS_OF_A_PAGE: usize = 500;
/// How long the agent waits at most for a packet that it has not shown yet.
pub const MAX_DROP_WAIT_MS: u64 = 10_000;

/// What was dropped since the caller last asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DropEventsReport {
    /// Another number after every start of the agent: the packets are counted from 1 again then.
    pub agent: u64,
    /// Oldest first.
    pub packets: Vec<DroppedPacket>,
    /// How many between what was asked for and the first of these the agent does not keep any more.
    pub lost: u64,
}

/// A packet that was dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DroppedPacket {
    /// Counted from 1 by the agent.
    pub number: u64,
    /// Since the Unix epoch.
    pub unix_milliseconds: u64,
    /// As in the counters.
    pub reason: String,
    /// The program that dropped it, for example `pod_out`.
    pub program: String,
    /// Interface of the node whose program that was,
    pub ifindex: u32,
    /// and the pod that has it, `namespace/name`.
    #[serde(default)]
    pub pod: Option<String>,
    /// A word of conntrack, `arp`, the EtherType of anything else in hexadecimal, or `malformed`.
    pub protocol: String,
    /// None if it is no IP packet, or malformed.
    #[serde(default)]
    pub source: Option<PacketEnd>,
    #[serde(default)]
    pub destination: Option<PacketEnd>,
    /// TCP's flags, ICMP's type, which part of a fragmented packet it is.
    #[serde(default)]
    pub detail: Option<String>,
    /// None of a link without such addresses.
    #[serde(default)]
    pub source_mac: Option<Mac>,
    /// Length with all headers.
    pub bytes: u32,
    /// Packets dropped for the same reason since the last one that was told of, on the same CPU.
    pub left_out: u32,
}

/// One end of a packet or a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PacketEnd {
    pub address: IpAddr,
    /// The id of an echo message; none where there is no such thing.
    #[serde(default)]
    pub port: Option<u16>,
    /// `namespace/name`, if it is a pod of this node.
    #[serde(default)]
    pub pod: Option<String>,
}

impl std::fmt::Display for PacketEnd {
    /// `10.244.1.7:53`, `[fd00::7]:53`, `10.244.1.7`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.address, self.port) {
            (address, None) => write!(f, "{address}"),
            (IpAddr::V4(address), Some(port)) => write!(f, "{address}:{port}"),
            (IpAddr::V6(address), Some(port)) => write!(f, "[{address}]:{port}"),
        }
    }
}
