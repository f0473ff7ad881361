//! The Services of a node's cluster: how many are wanted, of which a few lead to pods that are there.

use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Of a Service, and of its endpoints.
pub const PORT: u16 = 80;
pub const TARGET: u16 = 8080;
/// Of the first Service that leads to the first pod, on every node; the first that leads to the next has the next.
const NODE_PORT: u16 = 30_000;
/// So many Services lead to a pod, spread evenly over all: where a list of rules is gone along, they stand
/// for the list's mean.
const LEADING: u32 = 8;
const NAMESPACE: &str = "bench";

pub struct Services {
    number: u32,
    /// Where those lead to that lead somewhere.
    pods: Vec<IpAddr>,
}

impl Services {
    /// So many, at least two for each pod.
    pub fn new(number: u32, pods: Vec<IpAddr>) -> Self {
        Self { number, pods }
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// How many Services lead to each pod.
    fn each(&self) -> u32 {
        LEADING.min(self.number / self.pods.len() as u32)
    }

    /// The Service that is the `turn`th to lead to a pod.
    fn leading(&self, pod: usize, turn: u32) -> u32 {
        let all = self.each() * self.pods.len() as u32;
        let place = turn * self.pods.len() as u32 + pod as u32;
        place * self.number / all
    }

    /// Where clients find a pod.
    pub fn targets(&self, pod: usize) -> Vec<SocketAddr> {
        (0..self.each())
            .map(|turn| SocketAddr::new(address(self.leading(pod, turn)).into(), PORT))
            .collect()
    }

    /// The port of every node by which clients outside find it. There is one: such clients keep their ports, and by two ways to
    /// one server they would meet their own connections of before in TIME_WAIT there.
    pub fn node_port(&self, pod: usize) -> u16 {
        NODE_PORT + pod as u16
    }

    fn node_port_of(&self, number: u32) -> Option<u16> {
        let pod = (0..self.pods.len()).find(|pod| self.leading(*pod, 0) == number)?;
        Some(self.node_port(pod))
    }

    /// Lists as the API server answers with them: Services, and EndpointSlices.
    pub fn lists(&self) -> [Value; 2] {
        // On no machine.
        let mut endpoints: Vec<IpAddr> = (0..self.number)
            .map(|number| Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 250, 1, 0)) + number).into())
            .collect();
        for (pod, address) in self.pods.iter().enumerate() {
            for turn in 0..self.each() {
                endpoints[self.leading(pod, turn) as usize] = *address;
            }
        }
        let services = (0..).zip(&endpoints).map(|(number, endpoint)| {
            service(number, self.ports(endpoint), self.node_port_of(number))
        });
        let services = services.collect();
        let slices = (0..)
            .zip(&endpoints)
            .map(|(number, endpoint)| slice(number, endpoint, self.ports(endpoint)));
        [
            list("v1", "ServiceList", services),
            list("discovery.k8s.io/v1", "EndpointSliceList", slices.collect()),
        ]
    }

    /// Most Services have one port; those that are measured have the same of UDP.
    fn ports(&self, endpoint: &IpAddr) -> &'static [&'static str] {
        match self.pods.contains(endpoint) {
            true => &["TCP", "UDP"],
            false => &["TCP"],
        }
    }

    /// The file that an agent follows. JSON is YAML, too.
    pub fn file(&self) -> String {
        let [services, slices] = self.lists();
        format!("{services}\n---\n{slices}\n")
    }
}

pub fn list(version: &str, kind: &str, items: Vec<Value>) -> Value {
    json!({
        "apiVersion": version,
        "kind": kind,
        "metadata": {"resourceVersion": "1"},
        "items": items,
    })
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 96, 1, 0)) + number)
}

fn metadata(number: u32) -> Value {
    json!({
        "name": format!("s{number}"),
        "namespace": NAMESPACE,
        "uid": format!("00000000-0000-4000-8000-{number:012}"),
        "resourceVersion": "1",
        "creationTimestamp": "2025-01-01T00:00:00Z",
    })
}

fn service(number: u32, protocols: &[&str], node_port: Option<u16>) -> Value {
    let address = address(number);
    let port = |protocol: &&str| {
        let name = protocol.to_lowercase();
        let mut port = json!({
            "name": name,
            "protocol": protocol,
            "port": PORT,
            "targetPort": TARGET,
        });
        if let Some(node_port) = node_port {
            port["nodePort"] = node_port.into();
        }
        port
    };
    json!({
        "metadata": metadata(number),
        "spec": {
            "type": node_port.map_or("ClusterIP", |_| "NodePort"),
            "clusterIP": address,
            "clusterIPs": [address],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "sessionAffinity": "None",
            "internalTrafficPolicy": "Cluster",
            "ports": protocols.iter().map(port).collect::<Vec<_>>(),
        },
        "status": {"loadBalancer": {}},
    })
}

fn slice(number: u32, endpoint: &IpAddr, protocols: &[&str]) -> Value {
    let mut metadata = metadata(number);
    metadata["labels"] = json!({"kubernetes.io/service-name": format!("s{number}")});
    let port = |protocol: &&str| {
        let name = protocol.to_lowercase();
        json!({"name": name, "protocol": protocol, "port": TARGET})
    };
    json!({
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": [{
            "addresses": [endpoint],
            "conditions": {"ready": true, "serving": true, "terminating": false},
        }],
        "ports": protocols.iter().map(port).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_pod_is_led_to_by_services_all_over_the_list() {
        for number in [10, 1_000, 10_000] {
            let pods = ["10.244.1.2", "10.244.2.2"].map(|pod| pod.parse().unwrap());
            let services = Services::new(number, pods.into());
            let [list, slices] = services.lists();
            assert_eq!(list["items"].as_array().unwrap().len(), number as usize);
            let slices = slices["items"].as_array().unwrap();
            for (pod, address) in pods.iter().enumerate() {
                let leading: Vec<usize> = (0..number as usize)
                    .filter(|at| slices[*at]["endpoints"][0]["addresses"][0] == address.to_string())
                    .collect();
                let addresses: BTreeSet<String> = leading
                    .iter()
                    .map(|at| {
                        format!(
                            "{}:80",
                            list["items"][*at]["spec"]["clusterIP"].as_str().unwrap()
                        )
                    })
                    .collect();
                let targets = services
                    .targets(pod)
                    .into_iter()
                    .map(|target| target.to_string());
                assert_eq!(targets.collect::<BTreeSet<_>>(), addresses);
                assert_eq!(leading.len(), if number == 10 { 5 } else { 8 });
                for at in &leading {
                    let spec = &list["items"][*at]["spec"];
                    let is_first = at == &leading[0];
                    let kind = if is_first { "NodePort" } else { "ClusterIP" };
                    assert_eq!(spec["type"], kind);
                    let expected = is_first.then(|| services.node_port(pod));
                    assert_eq!(
                        spec["ports"][0].get("nodePort"),
                        expected.map(Value::from).as_ref()
                    );
                }
                let mean = leading.iter().sum::<usize>() as f64 / leading.len() as f64;
                assert!(
                    (mean / f64::from(number) - 0.5).abs() < 0.11,
                    "{number}: {mean}"
                );
            }
        }
    }
}
