//! What is reported about the connections of this node's pods.

use super::PacketEnd;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Connections in one reply, less than twice as many: fourteen hundred bytes each, with the longest names, fit
/// into a frame.
pub const CONNECTIONS_OF_A_PAGE: usize = 256;

/// Which connections; all conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectionFilter {
    /// `namespace/name` of a pod of this node that is one of the ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Where the other end is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<IpNet>,
    /// Number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
    /// Of either end, or the one that the client has outside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<StateClass>,
    /// Only those that leave the node under its own address.
    pub masqueraded: bool,
}

impl ConnectionFilter {
    /// Whether it lets everything through.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// States, as far as most people tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StateClass {
    /// Both ends have sent.
    Established,
    /// Nobody has answered yet.
    Unanswered,
    /// One end or both have closed or reset it.
    Closing,
}

/// Some of the connections, in no order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionsPage {
    pub connections: Vec<ConnectionReport>,
    /// To go on from; none if there are no more.
    pub next: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionReport {
    /// A word of conntrack.
    pub protocol: String,
    /// Who began.
    pub client: PacketEnd,
    /// Who answers.
    pub server: PacketEnd,
    /// What the client has outside of the node, if that is another address or port than its own.
    #[serde(default)]
    pub masqueraded_as: Option<PacketEnd>,
    /// What the client sends to, if that is another address or port than the server's own.
    #[serde(default)]
    pub frontend: Option<PacketEnd>,
    /// A word of conntrack.
    pub state: String,
    pub class: StateClass,
    /// The pod whose share it is in.
    #[serde(default)]
    pub payer: Option<String>,
    /// What it has to do with a mapping of its client's port, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mapping: Option<Mapped>,
    /// Between two pods of this node, translated by the host's stack.
    #[serde(default)]
    pub through_stack: bool,
    /// Since its first packet.
    pub age_seconds: u64,
    /// Since its last one.
    pub idle_seconds: u64,
    /// Until it is forgotten if nothing more comes.
    pub expires_seconds: u64,
}

/// Where UDP has endpoint-independent mappings (RFC 4787 §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Mapped {
    /// No connection but a mapping: the port that its client has outside towards all remote ends.
    Mapping,
    /// It has its client's.
    Mapped,
    /// It has another, for somebody else had that towards its server, or no port was left for a mapping.
    Apart,
}

/// What a step of a flush did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlushReport {
    pub flushed: u64,
    /// To go on from; none if it is done.
    pub next: Option<u32>,
}

/// How many connections there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoomReport {
    pub connections: u64,
    /// Of kernel memory, used or not.
    pub bytes: u64,
    pub from: RoomFrom,
}

/// Why there is room for so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RoomFrom {
    Setting,
    /// Bytes that the machine has.
    Memory(u64),
    /// Bytes that the agent's container may have.
    Limit(u64),
    /// An earlier version's programs go on with theirs.
    Earlier,
}

/// `sinabroctl connections stats`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionStats {
    pub connections: u64,
    pub capacity: u64,
    /// Of the table; none from an agent that does not say.
    #[serde(default)]
    pub room: Option<RoomReport>,
    /// Of those, the ones that leave the node under its own address.
    pub masqueraded: u64,
    /// Of those, the ones by another port than their client's mapping.
    #[serde(default)]
    pub apart: u64,
    pub by_class: BTreeMap<String, u64>,
    pub by_state: BTreeMap<String, u64>,
    pub by_protocol: BTreeMap<String, u64>,
    /// Those with most connections first.
    pub pods: Vec<PodConnections>,
    /// Where most connections lead to, most first; a few.
    pub remotes: Vec<RemoteConnections>,
}

/// What a pod's share has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodConnections {
    /// `namespace/name`.
    pub pod: String,
    pub connections: u64,
    pub limit: u64,
    pub unanswered: u64,
    pub unanswered_limit: u64,
    /// New connections that did not get in because of a limit, since the pod was added.
    pub refused: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoteConnections {
    pub protocol: String,
    /// The end that is no pod of this node; the server if both are.
    pub remote: PacketEnd,
    pub connections: u64,
}
