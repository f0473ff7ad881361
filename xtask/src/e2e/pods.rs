//! Pods that scenarios make, and their network namespaces, where this process makes traffic.

use super::world::{NAMESPACE, World, condition};
use crate::cluster::Family;
use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::{Value, json};
use sinabro_lab::Place;
use sinabro_netlink::NetNs;
use std::{fs, net::IpAddr};

/// A small image with tools; its default command waits for ever.
pub const IMAGE: &str = "registry.k8s.io/e2e-test-images/agnhost:2.56";
/// An image that does nothing.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.1";

/// A pod that runs.
pub struct KubePod {
    pub name: String,
    pub node: String,
    /// In the order of the cluster's families.
    pub addresses: Vec<IpAddr>,
    pub place: Place,
}

impl KubePod {
    pub fn address(&self, family: Family) -> Result<IpAddr> {
        let mut addresses = self.addresses.iter().copied();
        let address = addresses.find(|address| family.has(*address));
        address.with_context(|| format!("pod {} has no {family} address", self.name))
    }

    /// Of the cluster's first family, which is that of a Service's first address, too.
    pub fn primary(&self) -> Result<IpAddr> {
        let address = self.addresses.first().copied();
        address.with_context(|| format!("pod {} has no address", self.name))
    }
}

/// A pod for one node, that ends at once when it is asked to.
pub fn manifest(name: &str, node: &str, image: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false,
            "containers": [{"name": "main", "image": image, "imagePullPolicy": "IfNotPresent"}],
        },
    })
}

impl World {
    /// Makes pods, each a name and its node, and waits until they run.
    pub fn run_pods(&self, pods: &[(&str, &str)]) -> Result<Vec<KubePod>> {
        let items: Vec<Value> = pods
            .iter()
            .map(|(name, node)| manifest(name, node, IMAGE))
            .collect();
        self.apply_all(items)?;
        pods.iter().map(|(name, _)| self.running(name)).collect()
    }

    pub fn apply_all(&self, items: Vec<Value>) -> Result<()> {
        self.cluster
            .apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())
    }

    /// Waits until a pod runs and is ready.
    pub fn running(&self, name: &str) -> Result<KubePod> {
        self.wait(&format!("pod {name} to run"), || {
            let pod = self.get(&["-n", NAMESPACE, "pod", name])?;
            if condition(&pod, "Ready") != Some("True") {
                return Ok(None);
            }
            self.look_at(&pod).map(Some)
        })
    }

    fn look_at(&self, pod: &Value) -> Result<KubePod> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (name, node) = (
            text(&pod["metadata"]["name"]),
            text(&pod["spec"]["nodeName"]),
        );
        let addresses = pod["status"]["podIPs"]
            .as_array()
            .ok_or_else(|| anyhow!("pod {name} has no addresses"))?
            .iter()
            .map(|entry| text(&entry["ip"]).parse::<IpAddr>().map_err(Into::into))
            .collect::<Result<Vec<_>>>()?;
        let place = Place::new(&name, self.netns_of(&node, addresses.first())?);
        Ok(KubePod {
            name,
            node,
            addresses,
            place,
        })
    }

    /// The network namespace of the pod that has an address, by the agent's records.
    fn netns_of(&self, node: &str, address: Option<&IpAddr>) -> Result<NetNs> {
        let address = address.ok_or_else(|| anyhow!("no address"))?.to_string();
        let records = self.path(node, "/run/sinabro/endpoints")?;
        for entry in
            fs::read_dir(&records).with_context(|| format!("cannot read {}", records.display()))?
        {
            let Ok(text) = fs::read_to_string(entry?.path()) else {
                continue;
            };
            let record: Value = serde_json::from_str(&text)?;
            let has = |value: &Value| value.as_str() == Some(address.as_str());
            if record["addresses"]
                .as_array()
                .is_some_and(|all| all.iter().any(has))
            {
                let netns = record["netns"].as_str().unwrap_or_default();
                ensure!(
                    netns.starts_with('/'),
                    "the record of {address} names no network namespace"
                );
                return Ok(NetNs::open(self.path(node, netns)?)?);
            }
        }
        Err(anyhow!("no endpoint of {node} has {address}"))
    }
}
