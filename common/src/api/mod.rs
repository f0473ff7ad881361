//! Messages on the agent's Unix socket, between the CNI plugin or `sinabroctl` and the agent.
//!
//! A connection carries requests and replies in turn, each a [`frame`]: four bytes of length in
//! network order, then that much JSON. A request is `{"version":1,"request":{…}}`, a reply
//! `{"version":1,"ok":{…}}` or `{"version":1,"error":{…}}`.
//!
//! An ADD is one connection from [`Request::Allocate`] to [`Request::Activate`]: as long as it
//! is open the addresses are the plugin's to set up, and if it closes before the endpoint is
//! active the agent takes everything back. So a plugin that is killed leaves nothing.

mod acceleration;
mod connections;
mod drops;
pub mod frame;
mod host_port;
mod mac;
mod protocol;
mod report;
mod self_test;
mod services;
mod verify;
mod wish;

pub use acceleration::*;
pub use connections::*;
pub use drops::*;
pub use host_port::{HostPort, MAX_HOST_PORTS, ParseHostPortError, PortProtocol};
pub use mac::Mac;
pub use protocol::{protocol_name, protocol_number};
pub use report::*;
pub use self_test::*;
pub use services::*;
pub use verify::*;
pub use wish::{
    LocalMtuWish, ParseLocalMtuWishError, ParseServiceTranslationError, ParseTcpAccelerationError,
    ServiceTranslation, TcpAcceleration,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The only version so far. A field may be added with a default; anything else raises it.
/// `version` and an error reply keep their shape in every one: plugin and agent of two releases
/// meet for a moment in each upgrade, and then tell each other to try again.
pub const VERSION: u32 = 1;

/// Nodes in one reply: a thousand bytes each fit into a frame twice.
pub const NODES_OF_A_PAGE: usize = 500;

/// A request with its version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestEnvelope {
    pub version: u32,
    pub request: Request,
}

/// A reply with its version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplyEnvelope {
    pub version: u32,
    #[serde(flatten)]
    pub reply: Reply,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply {
    Ok(Response),
    Error(ApiError),
}

/// Which attachment: the CNI specification's key (container id, interface name).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    #[serde(rename = "containerID")]
    pub container_id: String,
    pub ifname: String,
}

impl Owner {
    /// Name of the host-side link, [`crate::names::pod_link`].
    pub fn link(&self) -> String {
        crate::names::pod_link(&self.container_id, &self.ifname)
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.container_id, self.ifname)
    }
}

/// The pod an attachment belongs to, as far as the runtime said (CNI_ARGS K8S_POD_*).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl PodRef {
    /// `namespace/name`, or the container where the runtime named no pod.
    pub fn display(&self, owner: &Owner) -> String {
        match self.name.is_empty() {
            true => owner.container_id.chars().take(16).collect(),
            false => format!("{}/{}", self.namespace, self.name),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "call",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum Request {
    /// Leases one address of each family. Repeated for the same owner: the same addresses.
    Allocate {
        owner: Owner,
        /// The network configuration's `name`; GC is per network.
        network: String,
        /// CNI_NETNS.
        netns: String,
        #[serde(default)]
        pod: PodRef,
        /// Addresses asked for (runtimeConfig.ips), at most one of each family.
        #[serde(default)]
        addresses: Vec<IpAddr>,
        /// MAC address asked for (runtimeConfig.mac).
        #[serde(default)]
        mac: Option<Mac>,
        /// What the pod wishes about its TCP connections to pods of its node.
        #[serde(default)]
        acceleration: Option<TcpAcceleration>,
        /// What it wishes about the MTU of its link.
        #[serde(default)]
        local_mtu: Option<LocalMtuWish>,
        /// How it wishes what it sends to Services to be translated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service_translation: Option<ServiceTranslation>,
        /// Ports of the node that another plugin has lead to the pod (runtimeConfig.portMappings), if the runtime says so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host_ports: Option<Vec<HostPort>>,
        /// What the plugin passed over, for the node's log and the pod's Events.
        #[serde(default)]
        warnings: Vec<String>,
    },
    /// Makes the endpoint live once the plugin has made the link: record, programs, maps.
    Activate {
        owner: Owner,
        ifindex: u32,
        /// The pod's network namespace as sockets know it (SO_NETNS_COOKIE, Linux 5.14).
        #[serde(default)]
        netns_cookie: Option<u64>,
        /// Whether the link has [`Attachment::local`]: plugins of earlier versions do not know it.
        #[serde(default)]
        local_mtu: bool,
    },
    /// The agent's record of an active endpoint; not found if there is none.
    Check {
        owner: Owner,
    },
    /// Takes the pod off the network. When the reply comes it can send and receive nothing and
    /// the delete is on disk; its link and then its addresses go right after. Succeeds if there
    /// is nothing to delete.
    Release {
        owner: Owner,
    },
    /// Removes every attachment of `network` that is not in `valid`, links included.
    Gc {
        network: String,
        valid: Vec<Owner>,
    },
    Status,
    Endpoints,
    Ipam,
    /// The known nodes by name, at most [`NODES_OF_A_PAGE`] of them: those after this name, or
    /// the first ones.
    Nodes {
        #[serde(default)]
        after: Option<String>,
    },
    Metrics,
    Acceleration,
    Log,
    /// Packets that were dropped after the one of this number; zero: all that the agent keeps. At most
    /// [`DROPS_OF_A_PAGE`].
    DropEvents {
        #[serde(default)]
        after: u64,
        /// How long to wait if there are none, at most [`MAX_DROP_WAIT_MS`].
        #[serde(default)]
        wait_milliseconds: u64,
    },
    /// A page of the connections.
    Connections {
        #[serde(default)]
        filter: ConnectionFilter,
        /// [`ConnectionsPage::next`] of the page before.
        #[serde(default)]
        from: Option<u32>,
    },
    /// Forgets connections, a step at a time.
    FlushConnections {
        #[serde(default)]
        filter: ConnectionFilter,
        /// Has to be said where the filter lets everything through.
        #[serde(default)]
        all: bool,
        /// [`FlushReport::next`] of the step before.
        #[serde(default)]
        from: Option<u32>,
    },
    ConnectionStats,
    /// A page of the Services, or one of them.
    Services {
        /// `namespace/name` of the last one of the page before.
        #[serde(default)]
        after: Option<String>,
        /// `namespace/name`.
        #[serde(default)]
        only: Option<String>,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "value", rename_all = "camelCase")]
pub enum Response {
    /// To Allocate, Activate and Check.
    Attachment(Attachment),
    /// To Release.
    Done,
    /// To Gc: what was removed.
    Removed(Vec<Owner>),
    Status(Box<StatusReport>),
    Endpoints(Vec<EndpointReport>),
    Ipam(IpamReport),
    Nodes(Vec<NodeReport>),
    Metrics(Box<MetricsReport>),
    Acceleration(AccelerationReport),
    /// To Log: the last lines of the agent's log.
    Log(String),
    DropEvents(DropEventsReport),
    Connections(ConnectionsPage),
    /// To FlushConnections.
    Flushed(FlushReport),
    ConnectionStats(ConnectionStats),
    Services(ServicesPage),
}

/// Everything the plugin needs to set a pod up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// Host-side link name.
    pub link: String,
    /// Host-side MAC address.
    pub host_mac: Mac,
    /// MAC address of the pod's interface.
    pub mac: Mac,
    /// MTU of all that the pod sends, but for [`Self::local`].
    pub mtu: u32,
    /// What may be larger; without it the link has `mtu` and the default routes have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalMtu>,
    /// One of each family the node has a range for; the pod has them as /32 and /128.
    pub addresses: Vec<IpAddr>,
    /// Link-local gateway of each family in `addresses`, in the same order.
    pub gateways: Vec<IpAddr>,
    /// Whether the agent's programs on the host-side link will be filters of a clsact qdisc. Others'
    /// plugins may want that place where they are not.
    #[serde(default)]
    pub clsact: bool,
}

/// What stays on the node, and how large it may be: no segment size is between pods of one node but
/// that of their links.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalMtu {
    /// Of the pod's link, both sides.
    pub mtu: u32,
    /// The node's pod ranges and its own addresses, of the pod's families.
    pub destinations: Vec<IpNet>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
#[serde(rename_all = "camelCase")]
pub struct ApiError {
    pub code: ErrorCode,
    /// Lower case, names the object.
    pub message: String,
}

impl ApiError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ErrorCode {
    /// The agent is starting or stopping.
    NotReady,
    /// No address left in a range.
    RangeFull,
    /// An address asked for is taken or outside the node's ranges.
    AddressUnavailable,
    NotFound,
    /// The request contradicts itself or its connection.
    Invalid,
    /// The request's version is not spoken here.
    Version,
    /// A system call or file failed.
    Internal,
}
