//! Every setting's flag, environment variable, key, default and help.

use clap::Parser;
use serde::{Deserialize, Serialize};
use sinabro_common::names;
use std::path::PathBuf;

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
    pub(super) config: Option<PathBuf>,

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

    /// API servers by their own addresses, HOST:PORT or https://HOST:PORT, for nodes on which nobody but
    /// this agent translates the Service `kubernetes`. Their certificates must be for
    /// kubernetes.default.svc, as those of API servers are. Those that the Service led to are remembered
    /// and asked, too [default: the Service's address, as the kubelet tells it].
    #[arg(
        long,
        env = "SINABRO_API_SERVERS",
        value_name = "SERVER",
        value_delimiter = ','
    )]
    api_servers: Option<Vec<String>>,

    /// Directory of leases, endpoint records and queued deletes. It must not survive a reboot:
    /// what it describes does not either. The CNI plugin must be given the same directory.
    #[arg(long, env = "SINABRO_STATE_DIR", value_name = "DIR", default_value = names::STATE_DIR)]
    state_dir: Option<String>,

    /// Socket that the CNI plugin and sinabroctl talk to [default: agent.sock in the state
    /// directory].
    #[arg(long, env = "SINABRO_SOCKET", value_name = "PATH", hide = true)]
    socket: Option<String>,

    /// Directory of pinned maps and programs, on a bpffs.
    #[arg(long, env = "SINABRO_BPF_DIR", value_name = "DIR", default_value = names::BPF_DIR, hide = true)]
    bpf_dir: Option<String>,

    /// Directory that survives reboots, where the eBPF programs that ran last are kept: for when the
    /// kernel refuses the next ones.
    #[arg(long, env = "SINABRO_PROGRAMS_DIR", value_name = "DIR", default_value = names::PROGRAMS_DIR, hide = true)]
    programs_dir: Option<String>,

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
    /// overlay's [default: those with the node's addresses, the first of these first, and those of
    /// the default routes].
    #[arg(
        long,
        env = "SINABRO_UPLINKS",
        value_name = "DEVICE",
        value_delimiter = ','
    )]
    uplinks: Option<Vec<String>>,

    /// MTU of the pods' interfaces and of the VXLAN device, 1280 to 65535 [default: the uplink's,
    /// less the encapsulation's 50 bytes between IPv4 node addresses or 70 between IPv6 ones; with
    /// --routing=native pods' is the uplink's].
    #[arg(long, env = "SINABRO_MTU", value_name = "BYTES")]
    mtu: Option<String>,

    /// MTU of pods' links, which what stays on the node may have: auto (as large as a link's can
    /// be), off (as all else) or a number up to 65535. A pod that cannot have it, such as a virtual
    /// machine, has the annotation sinabro.io/local-mtu: off. Pods that run keep what they have.
    #[arg(
        long,
        env = "SINABRO_LOCAL_MTU",
        value_name = "MTU",
        default_value = "auto"
    )]
    #[serde(rename = "localMTU")]
    local_mtu: Option<String>,

    /// Way of pods' packets between nodes and to the outside: auto (the eBPF fast path past
    /// netfilter and the VXLAN device, wherever that is safe) or kernel (everything through the
    /// kernel's network stack). Nodes may differ.
    #[arg(
        long,
        env = "SINABRO_DATA_PATH",
        value_name = "WAY",
        default_value = "auto"
    )]
    data_path: Option<String>,

    /// An old name of --data-path, of packets between nodes alone: auto or kernel.
    #[arg(long, env = "SINABRO_OVERLAY", value_name = "WAY", hide = true)]
    overlay: Option<String>,

    /// An old name of --data-path, of packets between pods and the outside alone: auto, direct
    /// (also past the rules of firewalls) or kernel.
    #[arg(long, env = "SINABRO_FORWARDING", value_name = "WAY", hide = true)]
    forwarding: Option<String>,

    /// What packets between pods of two nodes are in on the wire: VXLAN (tunnel), or nothing between nodes of one link that
    /// both have another setting than this, if packets go past the stack there: always (native), which the network between the nodes must
    /// let pass, or to those that answer requests which are sent so (auto).
    #[arg(
        long,
        env = "SINABRO_ROUTING",
        value_name = "WHICH",
        default_value = "tunnel"
    )]
    routing: Option<String>,

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

    /// Whether IPv6 is masqueraded, too: auto (where the pods have unique local addresses, fc00::/7,
    /// to which nobody outside answers), on or off.
    #[arg(
        long = "masquerade-ipv6",
        env = "SINABRO_MASQUERADE_IPV6",
        value_name = "MODE",
        default_value = "auto"
    )]
    #[serde(rename = "masqueradeIPv6")]
    masquerade_ipv6: Option<String>,

    /// Destinations that see the pods' own addresses, besides all nodes' pod ranges and multicast
    /// addresses. Another list in the file of --masquerade-file takes the place of this one.
    #[arg(
        long = "non-masquerade-cidrs",
        env = "SINABRO_NON_MASQUERADE_CIDRS",
        value_name = "CIDR",
        value_delimiter = ','
    )]
    #[serde(rename = "nonMasqueradeCIDRs")]
    non_masquerade_cidrs: Option<Vec<String>>,

    /// Whether packets to link-local addresses of IPv4, 169.254.0.0/16, get the node's address. The
    /// resolvers and metadata services of clouds are there, and answer nobody else.
    #[arg(
        long,
        env = "SINABRO_MASQUERADE_LINK_LOCAL",
        value_name = "BOOL",
        default_value = "true"
    )]
    masquerade_link_local: Option<String>,

    /// The same of IPv6, fe80::/10.
    #[arg(
        long = "masquerade-link-local-ipv6",
        env = "SINABRO_MASQUERADE_LINK_LOCAL_IPV6",
        value_name = "BOOL",
        default_value = "false"
    )]
    #[serde(rename = "masqueradeLinkLocalIPv6")]
    masquerade_link_local_ipv6: Option<String>,

    /// Whether packets to the nodes' own addresses get the node's address. Without it nodes see which
    /// pod speaks, and must not filter what comes from pods by the reverse path.
    #[arg(
        long,
        env = "SINABRO_MASQUERADE_NODES",
        value_name = "BOOL",
        default_value = "true"
    )]
    masquerade_nodes: Option<String>,

    /// Whether a pod's UDP port has a port outside for each remote address and port
    /// (address-and-port-dependent) or one for all of them (endpoint-independent), as peers behind
    /// other NATs need it: STUN, WebRTC, SIP, games. RFC 4787, section 4.1.
    #[arg(
        long = "masquerade-udp-mapping",
        env = "SINABRO_MASQUERADE_UDP_MAPPING",
        value_name = "MAPPING",
        default_value = "address-and-port-dependent"
    )]
    #[serde(rename = "masqueradeUDPMapping")]
    masquerade_udp_mapping: Option<String>,

    /// Whether pods' packets of protocols without ports (GRE, ESP, IPIP, 6in4) get the node's address.
    /// A pod that sends one to some address takes what comes from there by that protocol from the
    /// node: its own tunnels and IPsec.
    #[arg(
        long,
        env = "SINABRO_MASQUERADE_PORTLESS",
        value_name = "BOOL",
        default_value = "false"
    )]
    masquerade_portless: Option<String>,

    /// What is not masqueraded, in the format of ip-masq-agent (YAML or JSON: nonMasqueradeCIDRs,
    /// masqLinkLocal, masqLinkLocalIPv6, resyncInterval), read again whenever it changes. What it
    /// says takes the place of the settings; it need not be there.
    #[arg(
        long,
        env = "SINABRO_MASQUERADE_FILE",
        value_name = "FILE",
        default_value = names::MASQUERADE_FILE
    )]
    masquerade_file: Option<String>,

    /// Ports that masqueraded flows get, FIRST-LAST, but for those that the node's own sockets have
    /// [default: 1024-65535].
    #[arg(long, env = "SINABRO_MASQUERADE_PORTS", value_name = "FIRST-LAST")]
    masquerade_ports: Option<String>,

    /// Ports of Services on every node, FIRST-LAST, as the API server has them
    /// (--service-node-port-range): masqueraded flows keep off them. none: there are no such ports.
    #[arg(
        long,
        env = "SINABRO_NODE_PORTS",
        value_name = "FIRST-LAST",
        default_value = "30000-32767"
    )]
    node_ports: Option<String>,

    /// At which of this node's addresses the ports of Services are, with --service-proxy=on: primary (the
    /// first of each family that the cluster knows it by), all, or ranges that they are in. For the
    /// node's own processes they are at 127.0.0.1 and ::1, too.
    #[arg(
        long,
        env = "SINABRO_NODE_PORT_ADDRESSES",
        value_name = "WHICH",
        value_delimiter = ',',
        default_value = "primary"
    )]
    node_port_addresses: Option<Vec<String>>,

    /// Who translates what pods and this node send to Services: off (somebody else, such as
    /// kube-proxy), on (this agent's programs) or auto (these where no kube-proxy is; one that the node has seen is waited for five
    /// minutes). Beside kube-proxy on is safe: connections that it has translated stay with it until they end. Where the nodes are in a
    /// file and Services in none, auto is off.
    #[arg(
        long,
        env = "SINABRO_SERVICE_PROXY",
        value_name = "MODE",
        default_value = "auto"
    )]
    service_proxy: Option<String>,

    /// Where load balancers ask whether this node translates Services, with --service-proxy=on: /healthz and
    /// /livez, as kube-proxy has them; empty: nowhere.
    #[arg(
        long,
        env = "SINABRO_SERVICE_HEALTH_ADDRESS",
        value_name = "ADDRESS:PORT",
        default_value = names::SERVICE_HEALTH_ADDR
    )]
    service_health_address: Option<String>,

    /// Whether Services have their externalIPs, with --service-proxy=on: on, or off. Who may write a Service may
    /// take any address by them (CVE-2020-8554).
    #[arg(
        long = "service-external-ips",
        env = "SINABRO_SERVICE_EXTERNAL_IPS",
        value_name = "on|off",
        default_value = "on"
    )]
    #[serde(rename = "serviceExternalIPs")]
    service_external_ips: Option<String>,

    /// Ranges of addresses that nothing but Services has, with --service-proxy=on: what is sent to one of them that no
    /// Service has is dropped [default: as the cluster's ServiceCIDR objects say]. none: nothing is.
    #[arg(
        long = "service-cidrs",
        env = "SINABRO_SERVICE_CIDRS",
        value_name = "CIDR",
        value_delimiter = ','
    )]
    #[serde(rename = "serviceCIDRs")]
    service_cidrs: Option<Vec<String>>,

    /// Services and EndpointSlices (YAML or JSON, as `kubectl get services,endpointslices -A -o yaml`
    /// prints them), read again whenever they change. For --service-proxy=on without Kubernetes, with
    /// which they are watched in its API.
    #[arg(long, env = "SINABRO_SERVICES_FILE", value_name = "FILE")]
    services_file: Option<String>,

    /// Endpoints of Services that there is room for, a port of a pod each, with --service-proxy=on. Each takes about 64
    /// bytes of kernel memory, used or not. auto (65536 to 262144, one for each 16 KiB of the machine's
    /// memory, within a sixteenth of the memory limit of the agent's container) or a number from 1024 to 4194304.
    /// The agent takes it when it starts; a smaller one while Services are published waits until none are.
    #[arg(
        long,
        env = "SINABRO_SERVICE_ENDPOINTS",
        value_name = "NUMBER",
        default_value = "auto",
        hide = true
    )]
    service_endpoints: Option<String>,

    /// Connections that there is room for: those that are masqueraded, those that come in to pods' own
    /// addresses, and those between pods of the node that the host translates. Each takes about 336
    /// bytes of kernel memory, used or not. auto (131072 to 1048576, one for each 64 KiB of the
    /// machine's memory, within the memory limit of the agent's container) or a number from 1024
    /// to 16777216.
    #[arg(
        long,
        env = "SINABRO_CONNECTIONS",
        value_name = "NUMBER",
        default_value = "auto"
    )]
    connections: Option<String>,

    /// Connections of one pod, however much room there is [default: as many as there is room left].
    #[arg(long, env = "SINABRO_CONNECTIONS_PER_POD", value_name = "NUMBER")]
    connections_per_pod: Option<String>,

    /// Of those, the ones that nobody has answered yet [default: an eighth of the room that is left].
    #[arg(
        long,
        env = "SINABRO_CONNECTIONS_PER_POD_UNANSWERED",
        value_name = "NUMBER",
        hide = true
    )]
    connections_per_pod_unanswered: Option<String>,

    /// How long an established TCP connection may be idle before the node forgets it, 5s to 720h, as
    /// all of these; nf_conntrack_tcp_timeout_established is the same for the host's.
    #[arg(
        long,
        env = "SINABRO_CONNECTION_TCP_TIMEOUT_ESTABLISHED",
        value_name = "DURATION",
        default_value = "24h"
    )]
    connection_tcp_timeout_established: Option<String>,

    /// The same where one side has closed.
    #[arg(
        long,
        env = "SINABRO_CONNECTION_TCP_TIMEOUT_CLOSE_WAIT",
        value_name = "DURATION",
        default_value = "1h"
    )]
    connection_tcp_timeout_close_wait: Option<String>,

    /// The same of datagrams that nobody answers, or that were a question and its answer.
    #[arg(
        long,
        env = "SINABRO_CONNECTION_UDP_TIMEOUT",
        value_name = "DURATION",
        default_value = "30s"
    )]
    connection_udp_timeout: Option<String>,

    /// The same of datagrams that went both ways for two seconds and longer.
    #[arg(
        long,
        env = "SINABRO_CONNECTION_UDP_TIMEOUT_STREAM",
        value_name = "DURATION",
        default_value = "2m"
    )]
    connection_udp_timeout_stream: Option<String>,

    /// The same of echo requests.
    #[arg(
        long,
        env = "SINABRO_CONNECTION_ICMP_TIMEOUT",
        value_name = "DURATION",
        default_value = "30s",
        hide = true
    )]
    connection_icmp_timeout: Option<String>,

    /// The same of all other protocols, once they were answered.
    #[arg(
        long,
        env = "SINABRO_CONNECTION_GENERIC_TIMEOUT",
        value_name = "DURATION",
        default_value = "10m",
        hide = true
    )]
    connection_generic_timeout: Option<String>,

    /// Which pods' TCP connections with other pods of this node bypass the network stack, from
    /// socket to socket: opt-in (those of pods with the annotation sinabro.io/tcp-acceleration:
    /// enabled), all or off.
    #[arg(
        long,
        env = "SINABRO_TCP_ACCELERATION",
        value_name = "MODE",
        default_value = "opt-in"
    )]
    tcp_acceleration: Option<String>,

    /// Whether connections inside a pod, over its loopback, are accelerated like its others: those
    /// between an application and a proxy beside it.
    #[arg(
        long,
        env = "SINABRO_TCP_ACCELERATION_LOOPBACK",
        value_name = "BOOL",
        default_value = "false",
        hide = true
    )]
    tcp_acceleration_loopback: Option<String>,

    /// Kernel memory that the accelerated connections which one pod makes may take, such as 64Mi;
    /// what does not fit goes through TCP [default: an eighth of the node's].
    #[arg(
        long,
        env = "SINABRO_TCP_ACCELERATION_POD_MEMORY",
        value_name = "BYTES"
    )]
    tcp_acceleration_pod_memory: Option<String>,

    /// Kernel memory that accelerated connections of all pods together may take, such as 512Mi
    /// [default: 1/32 of the machine's memory].
    #[arg(
        long,
        env = "SINABRO_TCP_ACCELERATION_NODE_MEMORY",
        value_name = "BYTES"
    )]
    tcp_acceleration_node_memory: Option<String>,

    /// How programs are attached to network devices: auto (filters on pod links, which is many
    /// times faster to set up, tcx links on uplinks where the kernel has them), tcx or clsact
    /// (the same on all).
    #[arg(
        long,
        env = "SINABRO_ATTACH",
        value_name = "MODE",
        default_value = "auto",
        hide = true
    )]
    attach: Option<String>,

    /// Whether a node whose kernel refuses every program takes no new pods; without them nothing keeps
    /// a pod from using others' addresses, and nothing is masqueraded.
    #[arg(
        long,
        env = "SINABRO_REQUIRE_PROGRAMS",
        value_name = "BOOL",
        default_value = "true",
        hide = true
    )]
    require_programs: Option<String>,

    /// Address and port of /metrics, /healthz and /readyz; empty: off.
    #[arg(
        long,
        env = "SINABRO_METRICS_ADDRESS",
        value_name = "ADDRESS:PORT",
        default_value = names::METRICS_ADDR
    )]
    metrics_address: Option<String>,

    /// Whether /metrics has series of each pod: four, and up to a score more if it is accelerated.
    #[arg(
        long,
        env = "SINABRO_POD_METRICS",
        value_name = "BOOL",
        default_value = "true"
    )]
    pod_metrics: Option<String>,

    /// Whether the other nodes are asked for an echo through their tunnels, ten a second at most: who
    /// is silent, or loses large packets, is named. It takes a net.ipv4.ping_group_range that has
    /// the agent's group.
    #[arg(
        long,
        env = "SINABRO_PEER_PROBE",
        value_name = "BOOL",
        default_value = "true",
        hide = true
    )]
    peer_probe: Option<String>,

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
