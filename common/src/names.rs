//! Paths, link names, pin names and ports, each defined once.

/// Directory of everything that lasts as long as the kernel objects it describes.
pub const STATE_DIR: &str = "/run/sinabro";
/// Whose lock the agent of this node holds, inside the state directory.
pub const LOCK_FILE: &str = "agent.lock";
/// Agent socket, inside the state directory.
pub const SOCKET: &str = "agent.sock";
/// Leases, inside the state directory: one file per address.
pub const LEASES_DIR: &str = "leases";
/// Released leases, inside the state directory: the order of files is the order of release.
pub const RELEASED_DIR: &str = "released";
/// Endpoint records, inside the state directory: one file per pod link, named like the link.
pub const ENDPOINTS_DIR: &str = "endpoints";
/// Deletes that the CNI plugin could not hand to the agent: one file per pod link.
pub const DELETES_DIR: &str = "deletes";
/// When the CNI plugin last found that an ADD can work, inside the state directory.
pub const LAST_POSSIBLE_FILE: &str = "last-possible";
/// The nodes as the Kubernetes API had them last, inside the state directory.
pub const NODES_FILE: &str = "nodes.json";
/// Where the API servers were seen last, inside the state directory.
pub const API_SERVERS_FILE: &str = "api-servers.json";
/// Where the node's kubelet has the API server, inside the state directory.
pub const KUBELETS_SERVER_FILE: &str = "kubelets-api-server.json";
/// What the file that says what is not masqueraded had last, when it was good; in the state directory.
pub const KEPT_MASQUERADE_FILE: &str = "ip-masq-agent";

/// What the self-test of the TCP acceleration found, inside the state directory.
pub const SELF_TEST_FILE: &str = "tcp-self-test.json";

/// bpffs directory of pinned maps and links, below the bpffs mount.
pub const BPF_DIR: &str = "/sys/fs/bpf/sinabro";
/// Pinned links, inside the bpffs directory.
pub const BPF_LINKS_DIR: &str = "links";
/// Pins of the self-test of the TCP acceleration while it runs, inside the bpffs directory.
pub const BPF_SELF_TEST_DIR: &str = "self_test";
/// Pins of `sinabroctl verify` while it runs, inside the bpffs directory.
pub const BPF_VERIFY_DIR: &str = "verify";

/// Directory of what survives a reboot.
pub const PROGRAMS_DIR: &str = "/var/lib/sinabro";
/// The eBPF programs that ran last, inside that directory.
pub const PROGRAMS_FILE: &str = "programs.tar";
/// It is there if this node has seen a kube-proxy since Services were translated here; inside that directory.
pub const KUBE_PROXY_SEEN_FILE: &str = "kube-proxy-seen";

/// Settings file that is read if it is there and no other is named.
pub const CONFIG_FILE: &str = "/etc/sinabro/config.yaml";
/// What is not masqueraded, in the format of ip-masq-agent, if it is there.
pub const MASQUERADE_FILE: &str = "/etc/sinabro/ip-masq-agent";

pub const CNI_BIN_DIR: &str = "/opt/cni/bin";
pub const CNI_CONF_DIR: &str = "/etc/cni/net.d";
/// The plugin's file name, and so the `type` in network configurations.
pub const CNI_PLUGIN: &str = "sinabro";
/// The network's name in the configuration that the agent installs.
pub const CNI_NETWORK: &str = "sinabro";
/// What the plugin says to who starts it by hand; also tells its file from another's of its name.
pub const CNI_PLUGIN_SAYS: &str = "this is sinabro, a CNI plugin: container runtimes start it with CNI_* variables and a network configuration on stdin";
/// The network configuration that the agent installs: the first of a directory by its name.
pub const CNI_CONFLIST: &str = "00-sinabro.conflist";
/// The network by which pods have one MTU, and the directory that it is in, inside of that of networks. A directory that is called as
/// a network beside it has plugins of that one (CNI 1.1, `loadOnlyInlinedPlugins`).
pub const CNI_LOCAL_MTU_OFF: &str = "sinabro-local-mtu-off";

/// A pod's annotation: its wish about the acceleration of its TCP connections.
pub const ACCELERATION_ANNOTATION: &str = "sinabro.io/tcp-acceleration";
/// A pod's annotation: its wish about the MTU of its link.
pub const LOCAL_MTU_ANNOTATION: &str = "sinabro.io/local-mtu";
/// A pod's annotation: how it wishes what it sends to Services to be translated.
pub const SERVICE_TRANSLATION_ANNOTATION: &str = "sinabro.io/service-translation";
/// A Node's annotation, by its agent: how its pods are reached, if not by tunnels alone.
pub const ROUTING_ANNOTATION: &str = "sinabro.io/routing";
/// A Node's annotation, by its agent: [`UDP6_ZERO_CHECKSUM`] if its tunnels take that.
pub const TUNNELS_ANNOTATION: &str = "sinabro.io/tunnels";
/// Its one value: UDP over IPv6 without a checksum (RFC 6935).
pub const UDP6_ZERO_CHECKSUM: &str = "udp6-zero-checksum";
/// A Service's annotation: [`MAGLEV`] for clients outside of the cluster to have their endpoints by Maglev.
pub const SERVICE_BALANCING_ANNOTATION: &str = "sinabro.io/service-balancing";
/// Its one value.
pub const MAGLEV: &str = "maglev";
/// The capability of network configurations by which containerd and CRI-O hand a pod's
/// annotations to a plugin, and the key in `runtimeConfig` under which they come.
pub const ANNOTATIONS_CAPABILITY: &str = "io.kubernetes.cri.pod-annotations";

pub const VXLAN_LINK: &str = "sinabro_vxlan";
/// Linux's historical default, which flannel and Cilium use too; IANA's 4789 is a setting.
pub const VXLAN_PORT: u16 = 8472;
pub const VXLAN_VNI: u32 = 1;

/// Where the agent serves /metrics, /healthz and /readyz.
pub const METRICS_ADDR: &str = "127.0.0.1:9632";

/// Where load balancers ask whether a node translates Services: kube-proxy's `--healthz-bind-address`.
pub const SERVICE_HEALTH_ADDR: &str = "[::]:10256";

/// `rtm_protocol` of the routes that Sinabro makes, so that it touches no others
/// (linux/rtnetlink.h leaves values above RTPROT_STATIC to user space).
pub const ROUTE_PROTOCOL: u8 = 0x5b;

/// First characters of every host-side pod link.
pub const POD_LINK_PREFIX: &str = "snb";

/// MAC address of every pod link's host side. One for all: a pod link is point to point, and a
/// constant neighbour entry needs no update when the link is made again.
pub const HOST_MAC: [u8; 6] = [0x02, 0x53, 0x4e, 0x42, 0x00, 0x01];

/// The pods' IPv4 gateway, the same for all (RFC 3927 link-local).
pub const GATEWAY_V4: [u8; 4] = [169, 254, 1, 1];
/// The pods' IPv6 gateway, `fe80::5342:1`.
pub const GATEWAY_V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x53, 0x42, 0, 1];

/// Who asks a pod that is its own Service's endpoint, as it sees it.
pub const ITSELF_V4: [u8; 4] = GATEWAY_V4;
/// The same with IPv6, `100::5342:1`: not the gateway, for a socket that is bound to no address answers a link-local one from
/// its own link-local address (RFC 6724, section 5, rule 2). Nobody has it: the prefix is discarded everywhere (RFC 6666).
pub const ITSELF_V6: [u8; 16] = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x53, 0x42, 0, 1];

#[cfg(feature = "std")]
pub use derived::*;

#[cfg(feature = "std")]
mod derived {
    use super::*;
    use crate::algo::hash::{fnv1a, fnv1a_more};
    use std::net::IpAddr;

    /// Name of a pod's host-side link: derived, so that any command can map one to the other.
    ///
    /// Fifteen characters, the longest that IFNAMSIZ allows: the prefix and 48 bits of hash.
    pub fn pod_link(container_id: &str, ifname: &str) -> String {
        // The separator cannot occur in either part.
        let hash = fnv1a_more(fnv1a(container_id.as_bytes()), b"/");
        let hash = fnv1a_more(hash, ifname.as_bytes());
        // FNV's high bits mix better than its low ones.
        format!("{POD_LINK_PREFIX}{:012x}", hash >> 16)
    }

    /// Whether a link's name is of the form that [`pod_link`] makes.
    pub fn is_pod_link(name: &str) -> bool {
        name.strip_prefix(POD_LINK_PREFIX).is_some_and(|hash| {
            hash.len() == 12 && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        })
    }

    /// MAC address of a pod, from its address: `0a:58` and the IPv4 address, or 32 bits of hash.
    pub fn pod_mac(address: IpAddr) -> [u8; 6] {
        from_address([0x0a, 0x58], address)
    }

    /// MAC address of a node's VXLAN device, from the node's address: peers derive it from the
    /// Node object, nobody needs to ask.
    pub fn vxlan_mac(node: IpAddr) -> [u8; 6] {
        from_address([0x02, 0x5b], node)
    }

    fn from_address(head: [u8; 2], address: IpAddr) -> [u8; 6] {
        let tail = match address {
            IpAddr::V4(a) => a.octets(),
            IpAddr::V6(a) => ((fnv1a(&a.octets()) >> 16) as u32).to_be_bytes(),
        };
        [head[0], head[1], tail[0], tail[1], tail[2], tail[3]]
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn link_names_fit_and_differ() {
            let a = pod_link("3f2a", "eth0");
            assert_eq!(a.len(), 15);
            assert!(is_pod_link(&a));
            assert_ne!(a, pod_link("3f2a", "eth1"));
            assert_ne!(pod_link("a", "b/c"), pod_link("a/b", "c/"));
            assert!(!is_pod_link("sinabro_vxlan"));
            assert!(!is_pod_link("snb0123456789AB"));
        }

        #[test]
        fn macs_are_unicast_and_local() {
            for ip in ["10.0.0.1", "fd00::1"] {
                let ip: IpAddr = ip.parse().unwrap();
                for mac in [pod_mac(ip), vxlan_mac(ip)] {
                    assert_eq!(mac[0] & 0b11, 0b10, "{mac:02x?}");
                }
            }
            assert_eq!(
                pod_mac("10.244.1.5".parse().unwrap()),
                [0x0a, 0x58, 10, 244, 1, 5]
            );
        }
    }
}
