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

mod value;

use crate::acceleration::choice::Mode;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, parser::ValueSource};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sinabro_common::names;
use std::{
    ffi::OsString,
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};
use value::{
    absolute_path, acceleration_mode, boolean, cidr, device, node_name, number, port_range,
};

/// Smallest MTU of a link that carries IPv6 (RFC 8200 §5).
pub const MIN_MTU: u32 = 1280;
/// Largest MTU of a veth and of a VXLAN device.
pub const MAX_MTU: u32 = 65_535;

/// The agent of one node: gives pods their addresses and interfaces, connects nodes, and keeps
/// the eBPF data path.
///
/// Each setting is a flag, an environment variable and a key of the settings file (YAML; the
/// flag's name in camelCase: --state-dir is stateDir). A flag wins over the environment, the
/// environment over the file, the file over the default.
#[derive(Debug, Default, Parser, Serialize, Deserialize)]
#[command(name = "sinabro-agent", version, max_term_width = 100)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Options {
    /// Settings file (YAML) [default: /etc/sinabro/config.yaml if there is one].
    #[arg(long, env = "SINABRO_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,

    /// Name of this node, as in the list of nodes [default: the host name].
    #[arg(long, env = "SINABRO_NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,

    /// List of all nodes (YAML or JSON), read again whenever it changes; each entry has name,
    /// addresses and podCIDRs. With it the agent does without Kubernetes [default: the nodes are
    /// watched in the Kubernetes API, by the pod's service account].
    #[arg(long, env = "SINABRO_NODES", value_name = "FILE")]
    nodes: Option<String>,

    /// How to reach the Kubernetes API from outside a pod.
    #[arg(long, env = "SINABRO_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<String>,

    /// Directory of leases, endpoint records and queued deletes. It must not survive a reboot:
    /// what it describes does not either. The CNI plugin must be told the same directory.
    #[arg(long, env = "SINABRO_STATE_DIR", value_name = "DIR", default_value = names::STATE_DIR)]
    state_dir: Option<String>,

    /// Socket that the CNI plugin and sinabroctl talk to [default: agent.sock in the state
    /// directory].
    #[arg(long, env = "SINABRO_SOCKET", value_name = "PATH")]
    socket: Option<String>,

    /// Directory of pinned maps and programs, on a bpffs.
    #[arg(long, env = "SINABRO_BPF_DIR", value_name = "DIR", default_value = names::BPF_DIR)]
    bpf_dir: Option<String>,

    /// The cgroup v2 directory of all pods, where the acceleration of TCP attaches, or one below which
    /// a cgroup v2 is mounted [default: the root of the hierarchy, found among the mounts; inside a
    /// container the node's has to be mounted].
    #[arg(long, env = "SINABRO_CGROUP_DIR", value_name = "DIR")]
    cgroup_dir: Option<String>,

    /// Where the container runtime looks for CNI plugins.
    #[arg(long, env = "SINABRO_CNI_BIN_DIR", value_name = "DIR", default_value = names::CNI_BIN_DIR)]
    cni_bin_dir: Option<String>,

    /// Where the container runtime looks for network configurations.
    #[arg(long, env = "SINABRO_CNI_CONF_DIR", value_name = "DIR", default_value = names::CNI_CONF_DIR)]
    cni_conf_dir: Option<String>,

    /// CNI plugin to install there, with a network configuration once the node can serve [default:
    /// nothing is installed].
    #[arg(long, env = "SINABRO_CNI_SOURCE", value_name = "FILE")]
    cni_source: Option<String>,

    /// Network devices that lead out of the node; masquerade works on each, the first is the
    /// overlay's [default: the device with the node's address, else that of the default route].
    #[arg(
        long,
        env = "SINABRO_UPLINKS",
        value_name = "DEVICE",
        value_delimiter = ','
    )]
    uplinks: Option<Vec<String>>,

    /// MTU of the pods' interfaces and of the VXLAN device, 1280 to 65535 [default: the uplink's,
    /// less the encapsulation's 50 bytes between IPv4 node addresses or 70 between IPv6 ones].
    #[arg(long, env = "SINABRO_MTU", value_name = "BYTES")]
    mtu: Option<String>,

    /// UDP port of the VXLAN device, the same on all nodes.
    #[arg(
        long,
        env = "SINABRO_VXLAN_PORT",
        value_name = "PORT",
        default_value = "8472"
    )]
    vxlan_port: Option<String>,

    /// VXLAN network identifier, 1 to 16777215, the same on all nodes.
    #[arg(
        long,
        env = "SINABRO_VXLAN_VNI",
        value_name = "VNI",
        default_value = "1"
    )]
    vxlan_vni: Option<String>,

    /// Whether packets from pods to addresses outside the cluster get the node's address.
    #[arg(
        long,
        env = "SINABRO_MASQUERADE",
        value_name = "BOOL",
        default_value = "true"
    )]
    masquerade: Option<String>,

    /// Destinations that see the pods' own addresses, besides all nodes' pod ranges, link-local
    /// and multicast addresses.
    #[arg(
        long = "non-masquerade-cidrs",
        env = "SINABRO_NON_MASQUERADE_CIDRS",
        value_name = "CIDR",
        value_delimiter = ','
    )]
    #[serde(rename = "nonMasqueradeCIDRs")]
    non_masquerade_cidrs: Option<Vec<String>>,

    /// Ports that masqueraded flows get, FIRST-LAST; the node's own sockets must not use them
    /// [default: from above net.ipv4.ip_local_port_range to 65535].
    #[arg(long, env = "SINABRO_MASQUERADE_PORTS", value_name = "FIRST-LAST")]
    masquerade_ports: Option<String>,

    /// Which pods' TCP connections with other pods of this node bypass the network stack, from
    /// socket to socket: auto (where the agent's test at start finds no difference that an
    /// application could see, all but those that wish it disabled; else as opt-in), opt-in (those
    /// that wish it enabled), all (whatever they wish) or off. A pod wishes by its annotation
    /// sinabro.io/tcp-acceleration: enabled or disabled.
    #[arg(
        long,
        env = "SINABRO_TCP_ACCELERATION",
        value_name = "MODE",
        default_value = "auto"
    )]
    tcp_acceleration: Option<String>,

    /// Whether connections inside a pod, over its loopback, are accelerated like its others: those
    /// between an application and a proxy beside it.
    #[arg(
        long,
        env = "SINABRO_TCP_ACCELERATION_LOOPBACK",
        value_name = "BOOL",
        default_value = "false"
    )]
    tcp_acceleration_loopback: Option<String>,

    /// How programs are attached to network devices: auto (filters on pod links, which is many
    /// times faster to set up, tcx links on uplinks where the kernel has them), tcx or clsact
    /// (the same on all).
    #[arg(
        long,
        env = "SINABRO_ATTACH",
        value_name = "MODE",
        default_value = "auto"
    )]
    attach: Option<String>,

    /// Address and port of /metrics, /healthz and /readyz; empty: off.
    #[arg(
        long,
        env = "SINABRO_METRICS_ADDRESS",
        value_name = "ADDRESS:PORT",
        default_value = names::METRICS_ADDR
    )]
    metrics_address: Option<String>,

    /// What is logged: error, warn, info, debug or trace, also per module
    /// (info,sinabro_agent::ipam=debug).
    #[arg(
        long,
        env = "SINABRO_LOG_LEVEL",
        value_name = "FILTER",
        default_value = "info"
    )]
    log_level: Option<String>,

    /// Form of the log on standard error: text or json.
    #[arg(
        long,
        env = "SINABRO_LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "text"
    )]
    log_format: Option<String>,
}

/// Everything the agent was told, checked. What is `None` or empty is to be found on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub node_name: String,
    pub facts_from: FactsFrom,
    pub state_dir: PathBuf,
    pub socket: PathBuf,
    pub bpf_dir: PathBuf,
    pub cgroup_dir: Option<PathBuf>,
    pub cni_bin_dir: PathBuf,
    pub cni_conf_dir: PathBuf,
    /// The plugin to install in `cni_bin_dir`; none: nothing is installed.
    pub cni_source: Option<PathBuf>,
    pub uplinks: Vec<String>,
    /// MTU of the pods' interfaces and of the VXLAN device.
    pub mtu: Option<u32>,
    pub vxlan_port: u16,
    pub vxlan_vni: u32,
    pub masquerade: bool,
    pub non_masquerade_cidrs: Vec<IpNet>,
    /// First and last, inclusive.
    pub masquerade_ports: Option<(u16, u16)>,
    pub tcp_acceleration: Mode,
    pub tcp_acceleration_loopback: bool,
    pub attach: AttachMode,
    pub metrics_address: Option<SocketAddr>,
    /// A `tracing_subscriber::EnvFilter`.
    pub log_level: String,
    pub log_format: LogFormat,
}

/// The settings that say where on the node something of Sinabro is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    pub state_dir: PathBuf,
    pub socket: PathBuf,
    pub bpf_dir: PathBuf,
    /// As set; none if it is to be found.
    pub cgroup_dir: Option<PathBuf>,
    pub cni_bin_dir: PathBuf,
    pub cni_conf_dir: PathBuf,
    /// As set; empty if they are to be found.
    pub uplinks: Vec<String>,
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
        Ok(Self {
            node_name,
            facts_from: layers.facts_from()?,
            socket: places.socket,
            bpf_dir: places.bpf_dir,
            cgroup_dir: places.cgroup_dir,
            cni_bin_dir: places.cni_bin_dir,
            cni_conf_dir: places.cni_conf_dir,
            cni_source: layers.optional("cniSource", absolute_path)?,
            uplinks: places.uplinks,
            mtu: layers.optional("mtu", |text| number(text, MIN_MTU, MAX_MTU))?,
            vxlan_port: layers.parse("vxlanPort", |text| number(text, 1, u16::MAX))?,
            // RFC 7348 §5: 24 bits.
            vxlan_vni: layers.parse("vxlanVni", |text| number(text, 1, (1 << 24) - 1))?,
            masquerade: layers.parse("masquerade", boolean)?,
            non_masquerade_cidrs: layers.list("nonMasqueradeCIDRs", cidr)?,
            masquerade_ports: layers.optional("masqueradePorts", port_range)?,
            tcp_acceleration: layers.parse("tcpAcceleration", acceleration_mode)?,
            tcp_acceleration_loopback: layers.parse("tcpAccelerationLoopback", boolean)?,
            attach: layers.parse("attach", |text| match text {
                "auto" => Ok(AttachMode::Auto),
                "tcx" => Ok(AttachMode::Tcx),
                "clsact" => Ok(AttachMode::Clsact),
                _ => Err("expected auto, tcx or clsact".into()),
            })?,
            metrics_address: layers.optional("metricsAddress", |text| {
                text.parse()
                    .map_err(|_| "expected ADDRESS:PORT, an IPv6 address in brackets".into())
            })?,
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
        })
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
            cgroup_dir: layers.optional("cgroupDir", absolute_path)?,
            cni_bin_dir: layers.directory("cniBinDir")?,
            cni_conf_dir: layers.directory("cniConfDir")?,
            uplinks: layers.list("uplinks", device)?,
            state_dir,
        })
    }
}

/// The value of each key that wins, and where it came from.
struct Layers {
    values: Map<String, Value>,
    origins: std::collections::BTreeMap<String, Origin>,
}

impl Layers {
    fn load<I, T>(args: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        let matches = Options::command().try_get_matches_from(args)?;
        let given = Options::from_arg_matches(&matches)?;
        let file = settings_file(given.config.as_deref(), Path::new(names::CONFIG_FILE))?;
        Ok(Self::new(&given, &matches, file))
    }

    fn new(given: &Options, matches: &ArgMatches, file: Option<(PathBuf, Options)>) -> Self {
        let mut layers = Self {
            values: Map::new(),
            origins: Default::default(),
        };
        let origins = origins_of_flags(matches);
        let (given, default): (Vec<_>, Vec<_>) = entries(given)
            .map(|(key, value)| {
                let origin = origins.get(&key).cloned().unwrap_or(Origin::Default);
                (key, value, origin)
            })
            .partition(|(_, _, origin)| *origin != Origin::Default);
        for (key, value, origin) in default {
            layers.set(key, value, origin);
        }
        if let Some((path, options)) = file {
            for (key, value) in entries(&options) {
                layers.set(key, value, Origin::File(path.clone()));
            }
        }
        for (key, value, origin) in given {
            layers.set(key, value, origin);
        }
        layers
    }

    fn set(&mut self, key: String, value: Value, origin: Origin) {
        self.origins.insert(key.clone(), origin);
        self.values.insert(key, value);
    }

    /// The text of a key, if it is set and not empty.
    fn found(&self, key: &str) -> Option<&str> {
        self.values
            .get(key)
            .and_then(Value::as_str)
            .filter(|text| !text.is_empty())
    }

    fn parse<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T, ConfigError> {
        match self.found(key) {
            Some(text) => parse(text).map_err(|reason| self.invalid(key, &reason)),
            None => Err(self.invalid(key, "must not be empty")),
        }
    }

    fn optional<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        self.found(key)
            .map(|text| parse(text).map_err(|reason| self.invalid(key, &reason)))
            .transpose()
    }

    fn facts_from(&self) -> Result<FactsFrom, ConfigError> {
        let origin = |key| self.origins.get(key).cloned().unwrap_or(Origin::Default);
        match (self.found("nodes"), self.found("kubeconfig")) {
            (Some(_), Some(_)) => Err(ConfigError::TwoSources {
                nodes: origin("nodes"),
                kubeconfig: origin("kubeconfig"),
            }),
            (Some(path), None) => Ok(FactsFrom::NodesFile(path.into())),
            (None, Some(path)) => {
                let access = ClusterAccess::Kubeconfig(path.into());
                Ok(FactsFrom::Kubernetes(access))
            }
            // Set in every container by the kubelet.
            (None, None) if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() => {
                Ok(FactsFrom::Kubernetes(ClusterAccess::InCluster))
            }
            (None, None) => Err(ConfigError::NoFacts),
        }
    }

    fn directory(&self, key: &str) -> Result<PathBuf, ConfigError> {
        self.parse(key, absolute_path)
    }

    fn list<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, ConfigError> {
        let items = self.values.get(key).and_then(Value::as_array);
        items
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .map(|text| parse(text).map_err(|reason| self.invalid_value(key, text, &reason)))
            .collect()
    }

    fn invalid(&self, key: &str, reason: &str) -> ConfigError {
        let value = self.values.get(key).and_then(Value::as_str);
        self.invalid_value(key, value.unwrap_or_default(), reason)
    }

    fn invalid_value(&self, key: &str, value: &str, reason: &str) -> ConfigError {
        ConfigError::Invalid {
            key: key.to_owned(),
            value: value.to_owned(),
            origin: self.origins.get(key).cloned().unwrap_or(Origin::Default),
            reason: reason.to_owned(),
        }
    }
}

/// The options that are set, by their key in the settings file.
fn entries(options: &Options) -> impl Iterator<Item = (String, Value)> + use<> {
    let map = match serde_json::to_value(options) {
        Ok(Value::Object(map)) => map,
        // Text and lists of text under fixed names: always an object.
        _ => Map::new(),
    };
    map.into_iter().filter(|(_, value)| !value.is_null())
}

/// Where clap took each value from, by its key in the settings file.
fn origins_of_flags(matches: &ArgMatches) -> std::collections::BTreeMap<String, Origin> {
    matches
        .ids()
        .filter_map(|id| {
            let origin = match matches.value_source(id.as_str())? {
                ValueSource::CommandLine => Origin::Flag,
                ValueSource::EnvVariable => Origin::Environment,
                _ => Origin::Default,
            };
            Some((file_key(id.as_str()), origin))
        })
        .collect()
}

/// `state_dir` → `stateDir`, as serde's `camelCase` does.
fn file_key(id: &str) -> String {
    if id == "non_masquerade_cidrs" {
        return "nonMasqueradeCIDRs".into();
    }
    let mut words = id.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |mut key, word| {
        let mut letters = word.chars();
        key.extend(letters.next().map(|c| c.to_ascii_uppercase()));
        key.push_str(letters.as_str());
        key
    })
}

/// The settings file: the one that was asked for must be there, the default one may be.
fn settings_file(
    given: Option<&Path>,
    default: &Path,
) -> Result<Option<(PathBuf, Options)>, ConfigError> {
    let path = given.unwrap_or(default);
    match read_file(path) {
        Err(ConfigError::Read { source, .. })
            if given.is_none() && source.kind() == io::ErrorKind::NotFound =>
        {
            Ok(None)
        }
        read => Ok(Some((path.to_owned(), read?))),
    }
}

fn read_file(path: &Path) -> Result<Options, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })?;
    parse_file(&text).map_err(|reason| ConfigError::Parse {
        path: path.to_owned(),
        reason,
    })
}

fn parse_file(text: &str) -> Result<Options, String> {
    // A file of nothing but comments sets nothing.
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
    {
        return Ok(Options::default());
    }
    serde_saphyr::from_str(text).map_err(|error| error.to_string())
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
