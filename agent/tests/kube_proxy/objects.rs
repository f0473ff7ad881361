//! Random Services and their slices, as the API server would let them through.

use proptest::{collection::vec, option, prelude::*, sample::select};
use serde_json::{Value, json};

/// What a case is about.
#[derive(Clone, Debug)]
pub struct World {
    pub node: &'static str,
    pub zone: &'static str,
    kind: &'static str,
    cluster_ips: &'static [&'static str],
    ports: Vec<ServicePort>,
    node_port: Option<u16>,
    external_ips: Vec<&'static str>,
    ingress: Vec<(&'static str, Option<&'static str>)>,
    ranges: Vec<&'static str>,
    external_policy: &'static str,
    internal_policy: Option<&'static str>,
    affinity: Option<u32>,
    endpoints: Vec<Endpoint>,
    slices: Vec<Slice>,
}

#[derive(Clone, Debug)]
struct ServicePort {
    name: &'static str,
    protocol: &'static str,
    number: u16,
}

#[derive(Clone, Debug)]
struct Slice {
    is_v4: bool,
    ports: Vec<SlicePort>,
    /// Of the world's.
    endpoints: Vec<prop::sample::Index>,
}

#[derive(Clone, Debug)]
struct SlicePort {
    name: &'static str,
    protocol: &'static str,
    number: Option<u16>,
}

/// One that is in several slices says the same in all: kube-proxy takes whichever comes first.
#[derive(Clone, Debug)]
struct Endpoint {
    conditions: [Option<bool>; 3],
    node: Option<&'static str>,
    zones: Vec<&'static str>,
    nodes: Vec<&'static str>,
}

const NAMES: [&str; 3] = ["", "http", "dns"];
const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];
const EXTERNAL: [&str; 4] = ["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"];
const RANGES: [&str; 5] = [
    "198.51.100.0/24",
    "203.0.113.7/32",
    "2001:db8:1::/48",
    "0.0.0.0/0",
    "::/0",
];
const CLUSTER_IPS: [&[&str]; 6] = [
    &["10.96.0.10"],
    &["fd00:10:96::10"],
    &["10.96.0.10", "fd00:10:96::10"],
    &["fd00:10:96::10", "10.96.0.10"],
    &["10.96.0.10", "fd00:10:96::10"],
    &["None"],
];

pub fn world() -> impl Strategy<Value = World> {
    let service = (
        select(&["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"][..]),
        select(&CLUSTER_IPS[..]),
        ports(),
        option::weighted(0.8, 30_000u16..32_767),
        prop_oneof![2 => Just(vec![]), 1 => some(&EXTERNAL, 3)],
        vec(
            (
                select(&EXTERNAL[..]),
                select(&[None, Some("VIP"), Some("Proxy")][..]),
            ),
            0..3,
        ),
        prop_oneof![1 => Just(vec![]), 1 => some(&RANGES, 3)],
        select(&["Cluster", "Local"][..]),
        select(&[None, Some("Cluster"), Some("Local")][..]),
        option::of(1u32..=86_400),
    );
    let here = (select(&["n1", "n2", ""][..]), select(&["a", "b", ""][..]));
    let endpoints = (vec(endpoint(), 1..6), vec(slice(), 0..6), any::<bool>());
    (service, here, endpoints).prop_map(
        |(service, (node, zone), (mut endpoints, slices, are_hinted))| {
            let (
                kind,
                cluster_ips,
                ports,
                node_port,
                external_ips,
                ingress,
                ranges,
                external_policy,
                ..,
            ) = service;
            // Hints count only where every ready endpoint has some, which chance alone seldom makes.
            if are_hinted {
                for endpoint in &mut endpoints {
                    if endpoint.zones.is_empty() {
                        endpoint.zones.push("b");
                    }
                    if endpoint.nodes.is_empty() && node != "n2" {
                        endpoint.nodes.push("n2");
                    }
                }
            }
            World {
                node,
                zone,
                kind,
                cluster_ips,
                ports,
                node_port,
                external_ips,
                ingress,
                ranges,
                external_policy,
                internal_policy: service.8,
                affinity: service.9,
                endpoints,
                slices,
            }
        },
    )
}

fn some(from: &'static [&'static str], most: usize) -> impl Strategy<Value = Vec<&'static str>> {
    prop::sample::subsequence(from, 1..=most)
}

/// Names and numbers that no two share.
fn ports() -> impl Strategy<Value = Vec<ServicePort>> {
    let names = prop::sample::subsequence(&NAMES[..], 1..=NAMES.len());
    (names, vec(protocol(), NAMES.len())).prop_map(|(names, protocols)| {
        let ports = (80..).zip(names.into_iter().zip(protocols));
        let port = |(number, (name, protocol))| ServicePort {
            name,
            protocol,
            number,
        };
        ports.map(port).collect()
    })
}

/// So that most ports of slices are some of the Service's.
fn protocol() -> impl Strategy<Value = &'static str> {
    prop_oneof![3 => Just(PROTOCOLS[0]), 1 => select(&PROTOCOLS[..])]
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let condition = || prop_oneof![1 => Just(None), 2 => any::<bool>().prop_map(Some)];
    let conditions = [condition(), condition(), condition()];
    let zones = vec(select(&["a", "b", "c"][..]), 0..3);
    let nodes = vec(select(&["n1", "n2", "n3"][..]), 0..3);
    let node = option::weighted(0.8, select(&["n1", "n2", "n3"][..]));
    (conditions, node, zones, nodes).prop_map(|(conditions, node, zones, nodes)| Endpoint {
        conditions,
        node,
        zones,
        nodes,
    })
}

fn slice() -> impl Strategy<Value = Slice> {
    let number = option::weighted(0.9, select(&[0u16, 8080, 8080, 8081, 53][..]));
    let port = (select(&NAMES[..]), protocol(), number);
    let port = port.prop_map(|(name, protocol, number)| SlicePort {
        name,
        protocol,
        number,
    });
    let endpoints = vec(any::<prop::sample::Index>(), 0..5);
    (any::<bool>(), vec(port, 1..5), endpoints).prop_map(|(is_v4, ports, endpoints)| Slice {
        is_v4,
        ports,
        endpoints,
    })
}

fn family(address: &&str) -> &'static str {
    match address.contains(':') {
        true => "IPv6",
        false => "IPv4",
    }
}

impl World {
    pub fn service(&self) -> Value {
        let mut node_port = self.node_port.filter(|_| self.is_at_nodes());
        let mut ports = Vec::new();
        for port in &self.ports {
            let ServicePort {
                name,
                protocol,
                number,
            } = port;
            ports.push(json!({
                "name": name, "protocol": protocol, "port": number, "nodePort": node_port.unwrap_or(0),
            }));
            node_port = node_port.map(|port| port + 1);
        }
        let ingress: Vec<_> = self
            .ingress
            .iter()
            .map(|(ip, mode)| match mode {
                Some(mode) => json!({"ip": ip, "ipMode": mode}),
                None => json!({"ip": ip}),
            })
            .collect();
        let balances = self.kind == "LoadBalancer";
        let is_asked = balances && self.external_policy == "Local";
        json!({
            "kind": "Service", "apiVersion": "v1",
            "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "type": self.kind, "clusterIP": self.cluster_ips[0], "clusterIPs": self.cluster_ips,
                "ipFamilies": self.cluster_ips.iter().map(family).collect::<Vec<_>>(),
                "ports": ports, "externalIPs": self.external_ips,
                "loadBalancerSourceRanges": if balances { &self.ranges[..] } else { &[] },
                "externalTrafficPolicy": self.external_policy,
                "internalTrafficPolicy": self.internal_policy,
                "healthCheckNodePort": if is_asked { 32_767 } else { 0 },
                "sessionAffinity": if self.affinity.is_some() { "ClientIP" } else { "None" },
                "sessionAffinityConfig": self.affinity.map(|seconds| json!({"clientIP": {"timeoutSeconds": seconds}})),
            },
            "status": {"loadBalancer": {"ingress": if balances { ingress } else { Vec::new() }}},
        })
    }

    fn is_at_nodes(&self) -> bool {
        matches!(self.kind, "NodePort" | "LoadBalancer")
    }

    pub fn slices(&self) -> Vec<Value> {
        let slices = self.slices.iter().enumerate();
        slices.map(|(at, slice)| self.slice(at, slice)).collect()
    }

    fn slice(&self, at: usize, slice: &Slice) -> Value {
        let endpoint = |index: &prop::sample::Index| {
            let number = index.index(self.endpoints.len());
            let address = match slice.is_v4 {
                true => format!("10.244.1.{number}"),
                false => format!("fd00:10:244:1::{number:x}"),
            };
            let Endpoint {
                conditions: [ready, serving, terminating],
                node,
                zones,
                nodes,
            } = &self.endpoints[number];
            let named = |names: &[&str]| -> Vec<_> {
                names.iter().map(|name| json!({"name": name})).collect()
            };
            json!({
                "addresses": [address], "nodeName": node,
                "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
                "hints": {"forZones": named(zones), "forNodes": named(nodes)},
            })
        };
        let port = |port: &SlicePort| json!({"name": port.name, "protocol": port.protocol, "port": port.number});
        json!({
            "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
            "addressType": if slice.is_v4 { "IPv4" } else { "IPv6" },
            "metadata": {
                "namespace": "default", "name": format!("web-{at}"),
                "labels": {"kubernetes.io/service-name": "web"},
            },
            "endpoints": slice.endpoints.iter().map(endpoint).collect::<Vec<_>>(),
            "ports": slice.ports.iter().map(port).collect::<Vec<_>>(),
        })
    }
}
