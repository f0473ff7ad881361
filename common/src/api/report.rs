//! What `sinabroctl` shows; also its `-o json` output, so fields are only ever added.

use super::{
    AccelerationCount, LocalMtu, Mac, MemoryReport, Owner, PodRef, RoomReport, SelfTestReport,
    ServiceTranslation, TcpAcceleration,
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::IpAddr};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusReport {
    pub version: String,
    pub node: String,
    /// Serving pods: everything in `conditions` holds.
    pub ready: bool,
    pub conditions: Vec<Condition>,
    /// What is wrong although the node serves.
    #[serde(default)]
    pub troubles: Vec<Trouble>,
    /// What the kernel allowed, for example `attach: tcx`.
    pub modes: BTreeMap<String, String>,
    /// Whether this kernel can accelerate TCP; none if that is off or no pod has asked for it yet.
    #[serde(default)]
    pub tcp_self_test: Option<SelfTestReport>,
    pub uplink: String,
    /// MTU of what pods send out of the node.
    pub mtu: u32,
    /// MTU of the links of new pods, if it is more.
    #[serde(default)]
    pub local_mtu: Option<u32>,
    pub node_addresses: Vec<IpAddr>,
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<IpNet>,
    pub endpoints: usize,
    /// What is masqueraded; none until the node is known, and from an agent that does not say.
    #[serde(default)]
    pub masquerade: Option<MasqueradeReport>,
    /// For how many connections there is room; none from an agent that does not say.
    #[serde(default)]
    pub connections: Option<RoomReport>,
    pub nodes: usize,
    /// Whether other nodes answer through their tunnels; none from an agent that does not say.
    #[serde(default)]
    pub peers: Option<PeersReport>,
    /// Where the nodes are known from.
    #[serde(default)]
    pub source: SourceReport,
    /// Seconds since the agent started.
    pub uptime_seconds: u64,
    /// Whether an ADD can work; none from an agent that does not say.
    #[serde(default)]
    pub adds: Option<Adds>,
}

/// What pods send as their node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MasqueradeReport {
    pub ipv4: bool,
    pub ipv6: bool,
    /// Destinations that see the pods' own addresses, besides pods.
    #[serde(rename = "nonMasqueradeCIDRs")]
    pub non_masquerade_cidrs: Vec<IpNet>,
    /// Whether it is done towards 169.254.0.0/16.
    pub link_local: bool,
    /// Towards fe80::/10.
    #[serde(rename = "linkLocalIPv6")]
    pub link_local_ipv6: bool,
    /// Towards the nodes' own addresses.
    pub nodes: bool,
    /// What pods' UDP ports have outside, as the setting has it; none from an agent that does not say.
    #[serde(default, rename = "udpMapping")]
    pub udp_mapping: Option<String>,
    /// The file that says so, if one is there.
    pub file: Option<String>,
}

/// Whether an ADD can work, which is less than that everything is as it should be: a broken pod
/// does not keep another from being added. What the verb STATUS says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state", content = "why")]
pub enum Adds {
    Possible,
    /// The agent has not come so far since it started.
    NotYet(String),
    /// Every ADD would be refused.
    Impossible(String),
    /// A pod would not reach other nodes, and those that are there may not either.
    Isolated(String),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceReport {
    /// For example `nodes file /etc/sinabro/nodes.yaml`.
    pub from: String,
    /// Whether it can be read now.
    pub connected: bool,
    /// For how long it cannot be read; why is in the condition `facts`.
    pub lost_seconds: Option<u64>,
}

/// One thing that must hold for the node to serve, with what it says when it does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    pub name: String,
    pub ok: bool,
    pub detail: String,
}

/// Something wrong on the node or around it although it serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trouble {
    /// A word, as in the Event that tells of it.
    pub reason: String,
    /// What is wrong, and what to do.
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointReport {
    pub owner: Owner,
    pub pod: PodRef,
    pub network: String,
    pub link: String,
    pub ifindex: u32,
    pub mac: Mac,
    pub addresses: Vec<IpAddr>,
    /// MTU of all that the pod sends, but for `local_mtu`. Unknown to earlier agents.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// What may be larger, and how large the link lets it be.
    #[serde(default)]
    pub local_mtu: Option<LocalMtu>,
    pub tx_packets: u64,
    pub tx_bytes: u64,
    pub rx_packets: u64,
    pub rx_bytes: u64,
    /// None if the pod's connections are not accelerated.
    #[serde(default)]
    pub acceleration: Option<AccelerationCount>,
    /// What its connections take of the table of connections; unknown to earlier agents.
    #[serde(default)]
    pub connections: Option<ShareReport>,
    /// What the pod asked for; the node's setting and kernel may have it otherwise.
    #[serde(default)]
    pub acceleration_wish: Option<TcpAcceleration>,
    /// How what it sends to Services is translated, where the node does so; unknown to earlier agents.
    #[serde(default)]
    pub service_translation: Option<ServiceTranslation>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IpamReport {
    pub ranges: Vec<RangeReport>,
    pub leases: Vec<LeaseReport>,
    /// Lease files that could not be read, each by name.
    #[serde(default)]
    pub problems: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RangeReport {
    pub cidr: IpNet,
    /// Addresses that pods can have at once.
    pub capacity: u64,
    pub leased: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaseReport {
    pub address: IpAddr,
    pub owner: Owner,
    pub pod: PodRef,
    /// Seconds since the Unix epoch.
    pub leased_at: u64,
    /// Whether an endpoint uses it; false while an ADD is under way.
    pub active: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    pub name: String,
    pub addresses: Vec<IpAddr>,
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<IpNet>,
    /// This node itself.
    pub local: bool,
    /// Tunnel endpoint in use for it; none for the node itself.
    pub tunnel: Option<IpAddr>,
    /// Its own address inside the overlay, which is asked for an echo.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
    /// Whether it answers through the tunnel; none if it is not asked.
    #[serde(default)]
    pub probe: Option<PeerProbe>,
    /// By which way pods' packets go there; none for the node itself, and from an agent that does not say.
    #[serde(default)]
    pub path: Option<PeerPath>,
    /// Packets between it and this node, from and to pods or the nodes themselves.
    #[serde(default)]
    pub packets: Option<PathCounts>,
    /// What is wrong with its entry, if anything.
    pub problem: Option<String>,
}

/// By which way pods' packets go to a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub enum PeerPath {
    /// Past the kernel's stack, if a packet can; why in a tunnel, if that depends on what comes.
    Direct {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// So, and then without a tunnel.
    Native,
    /// By the kernel's routes and VXLAN device alone.
    Kernel { why: String },
}

/// Packets by their way. What the kernel cuts or puts together counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCounts {
    pub direct: PathPackets,
    /// Zero from an agent that counts them as direct ones.
    #[serde(default)]
    pub native: PathPackets,
    pub kernel: PathPackets,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathPackets {
    pub sent: u64,
    pub received: u64,
}

/// What a peer's answers to echo requests inside the tunnel say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "state",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum PeerProbe {
    /// Not asked often enough yet to say.
    Unknown,
    Answers {
        round_trip_microseconds: u64,
    },
    /// Packets as large as the overlay's MTU are lost on the way to it or back.
    SmallOnly {
        round_trip_microseconds: u64,
        /// The largest that are not; none while that is being tried.
        largest: Option<u32>,
    },
    Silent {
        seconds: u64,
    },
}

/// The peers, counted by what their answers say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeersReport {
    pub answering: usize,
    pub small_only: usize,
    pub silent: usize,
    pub unknown: usize,
    /// Why none is asked, if none is.
    pub problem: Option<String>,
}

/// What a pod's connections take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareReport {
    pub connections: u64,
    /// Of those, the ones that nobody has answered yet.
    pub unanswered: u64,
    /// New ones that did not get in because of a limit.
    pub refused: u64,
}

/// The table of connections as it was when it was last swept, some seconds ago.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableReport {
    pub established: u64,
    pub unanswered: u64,
    pub closing: u64,
    pub capacity: u64,
    /// Of all, the ones that leave the node under its own address.
    pub masqueraded: u64,
    /// UDP ports of pods that have one port outside towards all remote ends; in the counts, too, for they take room.
    #[serde(default)]
    pub mappings: u64,
    /// Connections by another port than their client's mapping.
    #[serde(default)]
    pub apart: u64,
    /// Ways in which packets lead to connections other than by their real ends.
    pub aliases: u64,
    /// New connections that did not get in because of a limit, of all pods.
    pub refused: u64,
    pub sweeps: u64,
    /// Time spent in them.
    pub sweep_microseconds: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetricsReport {
    pub drops: Vec<DropReport>,
    /// Masqueraded connections.
    pub nat_flows: u64,
    /// Connections that there is room for.
    pub nat_capacity: u64,
    /// Unknown to earlier agents.
    #[serde(default)]
    pub connections: Option<TableReport>,
    /// What accelerated connections cost the kernel; none if there are none.
    #[serde(default)]
    pub acceleration_memory: Option<MemoryReport>,
    /// None where others translate what is sent to Services.
    #[serde(default)]
    pub services: Option<super::ServiceUsage>,
    /// Between this node and all others, also those that are gone; unknown to earlier agents.
    #[serde(default)]
    pub overlay_packets: Option<PathCounts>,
    /// Any further counter by its Prometheus name.
    pub counters: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DropReport {
    pub number: u32,
    pub reason: String,
    pub text: String,
    pub packets: u64,
}
