//! Services and EndpointSlices as a cluster has them: of Pods of a Deployment, each with what its controller and the
//! API server write into it.

use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr};

/// Of a Service, and of its endpoints.
pub const PORT: u16 = 80;
pub const TARGET: u16 = 8080;
/// More there are not: the cluster's range of Services is a /16, of which the API server has some, and each change takes the
/// endpoints of one that is not there.
pub const MOST: usize = 55_000;
pub const MOST_CHANGES: usize = 10_000;
const NAMESPACES: usize = 100;
const NODES: usize = 1_000;

pub fn namespaces() -> impl Iterator<Item = Value> {
    let namespace = |number| {
        json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace(number)},
        })
    };
    (0..NAMESPACES).map(namespace)
}

fn namespace(service: usize) -> String {
    format!("team-{:02}", service % NAMESPACES)
}

fn name(service: usize) -> String {
    format!("component-{service:05}")
}

pub fn address(service: usize) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 96, 1, 0)) + service as u32)
}

/// Where its endpoints are: on no machine.
pub fn endpoints(service: usize, each: usize) -> Vec<IpAddr> {
    let first = u32::from(Ipv4Addr::new(10, 128, 0, 0)) + (service * each) as u32;
    (0..each as u32)
        .map(|number| Ipv4Addr::from(first + number).into())
        .collect()
}

pub fn services_path(service: usize) -> String {
    format!("/api/v1/namespaces/{}/services", namespace(service))
}

pub fn slices_path(service: usize) -> String {
    let namespace = namespace(service);
    format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices")
}

pub fn slice_path(service: usize) -> String {
    format!("{}/{}", slices_path(service), slice_name(service))
}

fn slice_name(service: usize) -> String {
    format!("{}-x7k2p", name(service))
}

pub fn service(service: usize) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name(service),
            "namespace": namespace(service),
            "labels": labels(service),
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": address(service),
            "selector": {"app.kubernetes.io/name": name(service)},
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    })
}

pub fn slice(service: usize, endpoints: &[IpAddr]) -> Value {
    let mut labels = labels(service);
    labels["kubernetes.io/service-name"] = name(service).into();
    labels["endpointslice.kubernetes.io/managed-by"] = "endpointslice-controller.k8s.io".into();
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": slice_name(service),
            "namespace": namespace(service),
            "labels": labels,
            "annotations": {
                "endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z",
            },
        },
        "addressType": "IPv4",
        "endpoints": listed(service, endpoints),
        "ports": [{"name": "http", "protocol": "TCP", "port": TARGET}],
    })
}

/// `endpoints` of an EndpointSlice.
pub fn listed(service: usize, endpoints: &[IpAddr]) -> Value {
    let endpoint = |(number, address): (usize, &IpAddr)| {
        let node = (service + number * 7) % NODES;
        json!({
            "addresses": [address],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "nodeName": format!("node-{node:05}"),
            "zone": format!("eu-central-1{}", ["a", "b", "c"][node % 3]),
            "targetRef": {
                "kind": "Pod",
                "name": format!("{}-5d4f8c7b9-{number:05}", name(service)),
                "namespace": namespace(service),
                "uid": format!("{service:08}-0000-4000-8000-{number:012}"),
            },
        })
    };
    endpoints.iter().enumerate().map(endpoint).collect()
}

fn labels(service: usize) -> Value {
    json!({
        "app.kubernetes.io/name": name(service),
        "app.kubernetes.io/instance": name(service),
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": "component-1.4.2",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_two_services_have_anything_in_common() {
        let mut seen = BTreeSet::new();
        for number in 0..MOST + MOST_CHANGES {
            seen.insert(address(number).into());
            seen.extend(endpoints(number, 5));
        }
        assert_eq!(seen.len(), (MOST + MOST_CHANGES) * 6);
        let last = address(MOST - 1);
        assert_eq!(last.octets()[..2], [10, 96], "{last}");
    }
}
