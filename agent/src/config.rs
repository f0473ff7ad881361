//! Settings: flags, environment, file and defaults become one validated [`Settings`].
//!
//! Every setting is defined once, as a field of [`Options`]: clap makes the flag, the
//! environment variable, the default and the help of it, serde the key of the settings file.
//! A flag wins over the environment, the environment over the file, the file over the default.
//! All values are text until [`Settings::from_layers`] checks them, so that whatever is wrong
//! with one is said the same way wherever it came from: key, value, source, reason.
//!
//! An empty value means "as if not set" where the agent finds the value by itself, the empty
//! list in a list, and "off" for the metrics address; anywhere else it is an error.

mod connections;
mod deprecated;
mod layers;
mod options;
pub(crate) mod value;

pub use deprecated::{DEPRECATED, Deprecated};
pub use value::cidr;

use crate::{
    acceleration::choice::Mode,
    cluster_api::servers::ApiPlaces,
    datapath::ConnectionLimits,
    handover::ServiceProxy,
    plan::{
        ForwardingMode, MasqueradeIpv6, Masquerading, OverlayMode, Routing, UdpMapping,
        masquerade::distinct, services::NodePortAddresses,
    },
};
use ipnet::IpNet;
use layers::Layers;
pub use options::Options;
use sinabro_common::names;
use std::{collections::BTreeSet, ffi::OsString, fmt, io, net::SocketAddr, path::PathBuf};
use value::{
    absolute_path, acceleration_mode, boolean, data_path, device, local_mtu, masquerade_ipv6,
    memory, node_name, node_ports, number, on_or_off, port_range, routing, service_proxy,
    socket_address, udp_mapping,
};

/// Smallest MTU of a link that carries IPv6 (RFC 8200 §5).
pub const MIN_MTU: u32 = 1280;
/// Largest MTU of a veth and of a VXLAN device.
pub const MAX_MTU: u32 = 65_535;

/// All settings of the agent, checked. What is `None` or empty is to be found on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub node_name: String,
    pub facts_from: FactsFrom,
    pub state_dir: PathBuf,
    pub socket: PathBuf,
    pub bpf_dir: PathBuf,
    /// Where the programs that ran last are kept.
    pub programs_dir: PathBuf,
    pub cgroup_dir: Option<PathBuf>,
    pub cni_bin_dir: PathBuf,
    pub cni_conf_dir: PathBuf,
    /// The plugin to install in `cni_bin_dir`; none: nothing is installed.
    pub cni_source: Option<PathBuf>,
    pub uplinks: Vec<String>,
    /// MTU of the pods' interfaces and of the VXLAN device.
    pub mtu: Option<u32>,
    /// MTU of pods' links, for what stays on the node; none: that of all else.
    pub local_mtu: Option<u32>,
    /// Of `dataPath`: the way of packets between nodes.
    pub overlay: OverlayMode,
    pub routing: Routing,
    /// Of `dataPath`: the way of packets between pods and the outside.
    pub forwarding: ForwardingMode,
    pub vxlan_port: u16,
    pub vxlan_vni: u32,
    pub masquerade: bool,
    pub masquerade_ipv6: MasqueradeIpv6,
    /// Where nothing else is said by `masquerade_file`.
    pub masquerading: Masquerading,
    /// In the format of ip-masq-agent; need not be there.
    pub masquerade_file: PathBuf,
    pub udp_mapping: UdpMapping,
    /// Whether protocols without ports are masqueraded.
    pub masquerade_portless: bool,
    /// First and last, inclusive.
    pub masquerade_ports: Option<(u16, u16)>,
    /// First and last, inclusive; none if there are none.
    pub node_ports: Option<(u16, u16)>,
    /// At which of the node's addresses these are.
    pub node_port_addresses: NodePortAddresses,
    /// Whether what is sent to Services is translated here.
    pub service_proxy: ServiceProxy,
    /// Where load balancers ask whether Services are translated here.
    pub service_health_address: Option<SocketAddr>,
    /// Whether Services have their externalIPs.
    pub service_external_ips: bool,
    /// Addresses that are Services' alone; none: as the cluster says.
    pub service_cidrs: Option<BTreeSet<IpNet>>,
    /// Where Services are, if not in the Kubernetes API.
    pub services_file: Option<PathBuf>,
    /// Endpoints of Services that there is room for; none if the node's memory says.
    pub service_endpoints: Option<u32>,
    /// Connections that the node's table has room for; none if the node's memory says.
    pub connections: Option<u32>,
    pub connection_limits: ConnectionLimits,
    pub tcp_acceleration: Mode,
    pub tcp_acceleration_loopback: bool,
    /// Bytes of kernel memory that accelerated connections which one pod makes may take.
    pub tcp_acceleration_pod_memory: Option<u64>,
    /// Of all pods of the node together.
    pub tcp_acceleration_node_memory: Option<u64>,
    pub attach: AttachMode,
    /// Whether pods need programs.
    pub require_programs: bool,
    pub metrics_address: Option<SocketAddr>,
    /// Whether each pod has metrics of its own.
    pub pod_metrics: bool,
    /// Whether peers are asked for echoes through their tunnels.
    pub peer_probe: bool,
    /// A `tracing_subscriber::EnvFilter`.
    pub log_level: String,
    pub log_format: LogFormat,
    /// What to write instead of settings that the next release refuses.
    pub deprecated: Vec<String>,
}

/// The settings that say where on the node something of Sinabro is, and what it is prepared for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    pub state_dir: PathBuf,
    pub socket: PathBuf,
    pub bpf_dir: PathBuf,
    pub programs_dir: PathBuf,
    /// As set; none if it is to be found.
    pub cgroup_dir: Option<PathBuf>,
    pub cni_bin_dir: PathBuf,
    pub cni_conf_dir: PathBuf,
    /// The plugin to install in `cni_bin_dir`; none: nothing is installed.
    pub cni_source: Option<PathBuf>,
    /// As set; empty if they are to be found.
    pub uplinks: Vec<String>,
    /// None if it was not set.
    pub node_name: Option<String>,
    /// None if nothing says which nodes there are.
    pub facts_from: Option<FactsFrom>,
    /// Whether the node is to allow what the probe of peers takes.
    pub peer_probe: bool,
    pub tcp_acceleration: Mode,
}

/// Where facts about the cluster come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FactsFrom {
    NodesFile(PathBuf),
    Kubernetes(ClusterAccess),
}

/// How the Kubernetes API is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterAccess {
    Kubeconfig(PathBuf),
    /// As a pod does it: by environment and service account.
    InCluster,
    /// By service account, from the servers' own addresses.
    Servers(ApiPlaces),
}

/// How programs are attached to network devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachMode {
    /// clsact on pod links; on uplinks tcx where the kernel has it, else clsact.
    Auto,
    Tcx,
    Clsact,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Wrong flags, or help or version asked for: clap prints it.
    #[error(transparent)]
    Flags(#[from] clap::Error),
    #[error("cannot read settings file {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("settings file {} is not valid: {reason}", path.display())]
    Parse { path: PathBuf, reason: String },
    #[error("setting {key} = `{value}` ({origin}): {reason}")]
    Invalid {
        key: String,
        value: String,
        origin: Origin,
        reason: String,
    },
    #[error(
        "nothing says which nodes there are: give --nodes FILE (SINABRO_NODES, nodes in the settings file), or --kubeconfig FILE (SINABRO_KUBECONFIG, kubeconfig in the settings file), or run in a pod with a service account (KUBERNETES_SERVICE_HOST is not set)"
    )]
    NoFacts,
    #[error("settings nodes ({nodes}) and kubeconfig ({kubeconfig}) exclude each other")]
    TwoSources { nodes: Origin, kubeconfig: Origin },
    #[error("cannot read the host name: give --node-name")]
    HostName(#[source] io::Error),
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment,
    File(PathBuf),
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("from a flag"),
            Self::Environment => f.write_str("from the environment"),
            Self::File(path) => write!(f, "from {}", path.display()),
            Self::Default => f.write_str("the default"),
        }
    }
}

impl Settings {
    /// Reads the process's flags (`args`, the program's name first), its environment and the
    /// settings file.
    ///
    /// # Errors
    /// Everything wrong with any of them; nothing is silently replaced by a default.
    pub fn load<I, T>(args: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        Self::from_layers(&Layers::load(args)?)
    }

    fn from_layers(layers: &Layers) -> Result<Self, ConfigError> {
        let places = Places::from_layers(layers)?;
        let node_name = match layers.found("nodeName") {
            Some(_) => layers.parse("nodeName", node_name)?,
            None => host_name()?,
        };
        let (service_proxy, services_file) = services(layers)?;
        let (overlay, forwarding) = layers.parse("dataPath", data_path)?;
        let mut settings = Self {
            node_name,
            facts_from: layers.facts_from()?,
            socket: places.socket,
            bpf_dir: places.bpf_dir,
            programs_dir: places.programs_dir,
            cgroup_dir: places.cgroup_dir,
            cni_bin_dir: places.cni_bin_dir,
            cni_conf_dir: places.cni_conf_dir,
            cni_source: places.cni_source,
            uplinks: places.uplinks,
            mtu: layers.optional("mtu", |text| number(text, MIN_MTU, MAX_MTU))?,
            local_mtu: layers.parse("localMTU", local_mtu)?,
            overlay,
            routing: match layers.parse("routing", routing)? {
                Routing::Auto if !places.peer_probe => {
                    return Err(
                        layers.invalid("routing", "who answers is asked with peerProbe alone")
                    );
                }
                routing => routing,
            },
            forwarding,
            vxlan_port: layers.parse("vxlanPort", |text| number(text, 1, u16::MAX))?,
            // RFC 7348 §5: 24 bits.
            vxlan_vni: layers.parse("vxlanVni", |text| number(text, 1, (1 << 24) - 1))?,
            masquerade: layers.parse("masquerade", boolean)?,
            masquerade_ipv6: layers.parse("masqueradeIPv6", masquerade_ipv6)?,
            masquerading: masquerading(layers)?,
            masquerade_file: layers.parse("masqueradeFile", absolute_path)?,
            udp_mapping: layers.parse("masqueradeUDPMapping", udp_mapping)?,
            masquerade_portless: layers.parse("masqueradePortless", boolean)?,
            masquerade_ports: layers.optional("masqueradePorts", port_range)?,
            node_ports: layers.parse("nodePorts", node_ports)?,
            node_port_addresses: node_port_addresses(layers)?,
            service_proxy,
            service_external_ips: layers.parse("serviceExternalIPs", on_or_off)?,
            service_cidrs: service_cidrs(layers)?,
            services_file,
            service_endpoints: layers.parse("serviceEndpoints", service_endpoints)?,
            connections: layers.parse("connections", connections::capacity)?,
            connection_limits: connections::limits(layers)?,
            tcp_acceleration: places.tcp_acceleration,
            tcp_acceleration_loopback: layers.parse("tcpAccelerationLoopback", boolean)?,
            tcp_acceleration_pod_memory: layers.optional("tcpAccelerationPodMemory", memory)?,
            tcp_acceleration_node_memory: layers.optional("tcpAccelerationNodeMemory", memory)?,
            pod_metrics: layers.parse("podMetrics", boolean)?,
            peer_probe: places.peer_probe,
            require_programs: layers.parse("requirePrograms", boolean)?,
            attach: layers.parse("attach", |text| match text {
                "auto" => Ok(AttachMode::Auto),
                "tcx" => Ok(AttachMode::Tcx),
                "clsact" => Ok(AttachMode::Clsact),
                _ => Err("expected auto, tcx or clsact".into()),
            })?,
            metrics_address: layers.optional("metricsAddress", socket_address)?,
            service_health_address: layers.optional("serviceHealthAddress", socket_address)?,
            log_level: layers.parse("logLevel", |text| {
                // The parser counts bytes of the trimmed text in the whole one, and panics where
                // that is inside a character. Names of modules are ASCII.
                if !text.is_ascii() {
                    return Err("expected levels and names of modules, in ASCII".into());
                }
                tracing_subscriber::EnvFilter::try_new(text)
                    .map(|_| text.to_owned())
                    .map_err(|error| error.to_string())
            })?,
            log_format: layers.parse("logFormat", |text| match text {
                "text" => Ok(LogFormat::Text),
                "json" => Ok(LogFormat::Json),
                _ => Err("expected text or json".into()),
            })?,
            state_dir: places.state_dir,
            deprecated: Vec::new(),
        };
        deprecated::apply(layers, &mut settings)?;
        Ok(settings)
    }
}

impl Places {
    /// As [`Settings::load`], without what only an agent has to know.
    ///
    /// # Errors
    /// What is wrong with one of these settings.
    pub fn load<I, T>(args: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        Self::from_layers(&Layers::load(args)?)
    }

    fn from_layers(layers: &Layers) -> Result<Self, ConfigError> {
        let state_dir = layers.directory("stateDir")?;
        let socket = match layers.found("socket") {
            Some(_) => layers.parse("socket", absolute_path)?,
            None => state_dir.join(names::SOCKET),
        };
        // sockaddr_un.sun_path, unix(7), has 108 bytes with the final zero, and the socket is
        // bound under a name four bytes longer at first.
        if socket.as_os_str().len() > 103 {
            let key = if layers.found("socket").is_some() {
                "socket"
            } else {
                "stateDir"
            };
            return Err(layers.invalid(key, "the socket's path is longer than 103 bytes"));
        }
        Ok(Self {
            socket,
            bpf_dir: layers.directory("bpfDir")?,
            programs_dir: layers.directory("programsDir")?,
            cgroup_dir: layers.optional("cgroupDir", absolute_path)?,
            cni_bin_dir: layers.directory("cniBinDir")?,
            cni_conf_dir: layers.directory("cniConfDir")?,
            cni_source: layers.optional("cniSource", absolute_path)?,
            uplinks: layers.list("uplinks", device)?,
            node_name: match layers.found("nodeName") {
                Some(_) => Some(layers.parse("nodeName", node_name)?),
                None => None,
            },
            facts_from: layers.facts_from().ok(),
            peer_probe: layers.parse("peerProbe", boolean)?,
            tcp_acceleration: layers.parse("tcpAcceleration", acceleration_mode)?,
            state_dir,
        })
    }
}

fn masquerading(layers: &Layers) -> Result<Masquerading, ConfigError> {
    const CIDRS: &str = "nonMasqueradeCIDRs";
    let cidrs = layers.list(CIDRS, cidr)?;
    let non_masquerade_cidrs = distinct(cidrs).map_err(|reason| layers.invalid(CIDRS, &reason))?;
    Ok(Masquerading {
        non_masquerade_cidrs,
        link_local: layers.parse("masqueradeLinkLocal", boolean)?,
        link_local_ipv6: layers.parse("masqueradeLinkLocalIPv6", boolean)?,
        nodes: layers.parse("masqueradeNodes", boolean)?,
    })
}

/// `primary`, `all`, or ranges.
fn node_port_addresses(layers: &Layers) -> Result<NodePortAddresses, ConfigError> {
    const KEY: &str = "nodePortAddresses";
    let words = layers.list(KEY, |text| Ok(text.to_owned()))?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] | ["primary"] => Ok(NodePortAddresses::Primary),
        ["all"] => Ok(NodePortAddresses::All),
        _ => {
            let expected = |reason| format!("{reason}; or primary or all, alone");
            let ranges = layers.list(KEY, |text| cidr(text).map_err(expected))?;
            Ok(NodePortAddresses::Within(ranges))
        }
    }
}

/// How many there is room for; none if the node's memory says.
fn service_endpoints(text: &str) -> Result<Option<u32>, String> {
    match text {
        "auto" => Ok(None),
        _ => number(text, 1 << 10, 1 << 22)
            .map(Some)
            .map_err(|reason| format!("{reason}, or auto")),
    }
}

/// Where Services are read from a file, it has to be said which; where they are not, none may be.
fn service_cidrs(layers: &Layers) -> Result<Option<BTreeSet<IpNet>>, ConfigError> {
    const CIDRS: &str = "serviceCIDRs";
    let none = |text: &str| (text == "none").then_some(()).ok_or_else(String::new);
    if let Ok(list) = layers.list(CIDRS, none)
        && list.len() == 1
    {
        return Ok(Some(BTreeSet::new()));
    }
    let ranges = layers.list(CIDRS, cidr)?;
    Ok((!ranges.is_empty()).then(|| ranges.into_iter().collect()))
}

/// Who translates Services, and the file that has them.
fn services(layers: &Layers) -> Result<(ServiceProxy, Option<PathBuf>), ConfigError> {
    const FILE: &str = "servicesFile";
    let wish = layers.parse("serviceProxy", service_proxy)?;
    let file = layers.optional(FILE, absolute_path)?;
    match (layers.facts_from()?, &file, wish) {
        (FactsFrom::NodesFile(_), None, ServiceProxy::On) => Err(layers.invalid(
            FILE,
            "must be set where serviceProxy is on and the nodes are in a file",
        )),
        // Nothing says where Services are.
        (FactsFrom::NodesFile(_), None, ServiceProxy::Auto) => Ok((ServiceProxy::Off, None)),
        (FactsFrom::Kubernetes(_), Some(_), _) => Err(layers.invalid(
            FILE,
            "must be empty where the nodes are in the Kubernetes API: the Services are read there, too",
        )),
        _ => Ok((wish, file)),
    }
}

fn host_name() -> Result<String, ConfigError> {
    let name = nix::unistd::gethostname().map_err(|error| ConfigError::HostName(error.into()))?;
    let text = name.to_string_lossy();
    node_name(&text).map_err(|reason| ConfigError::Invalid {
        key: "nodeName".into(),
        value: text.into_owned(),
        origin: Origin::Default,
        reason,
    })
}

#[cfg(test)]
mod tests;
