//! Node objects as kubelets make them: what the agent needs of one is a hundredth of it.

use serde_json::{Value, json};
use sinabro_lab::NodeEntry;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A kubelet reports 50 images by default (nodeStatusMaxImages); many nodes have fewer.
const IMAGES: usize = 30;

/// More there are not: 10.64.0.0/10 has as many ranges of /24.
pub const MOST: usize = 16_000;

pub fn name(number: usize) -> String {
    format!("node-{number:05}")
}

/// Addresses and pod ranges of the node with this number.
pub fn entry(number: usize) -> NodeEntry {
    let [.., high, low] = (number as u32).to_be_bytes();
    let v4 = Ipv4Addr::new(10, 64 + high, low, 0);
    let v6 = Ipv6Addr::new(0xfd00, 0x10, 0x64, number as u16, 0, 0, 0, 0);
    NodeEntry {
        name: name(number),
        addresses: addresses(128, number),
        pod_cidrs: vec![
            ipnet::Ipv4Net::new_assert(v4, 24).into(),
            ipnet::Ipv6Net::new_assert(v6, 64).into(),
        ],
        native: false,
        zero_checksum: false,
    }
}

/// Where a node is that moved to another machine.
pub fn moved(number: usize) -> Vec<IpAddr> {
    addresses(192, number)
}

fn addresses(second: u8, number: usize) -> Vec<IpAddr> {
    let [.., high, low] = (number as u32).to_be_bytes();
    let (second, number) = (u16::from(second), number as u16);
    vec![
        Ipv4Addr::new(10, second as u8, high, low).into(),
        Ipv6Addr::new(0xfd00, 0x10, second, 0, 0, 0, 0, number).into(),
    ]
}

/// `status.addresses`.
pub fn shown(name: &str, addresses: &[IpAddr]) -> Value {
    let mut shown = vec![json!({"type": "Hostname", "address": name})];
    let internal = addresses.iter();
    shown.extend(internal.map(|a| json!({"type": "InternalIP", "address": a.to_string()})));
    shown.into()
}

/// `status.conditions` as a heartbeat writes them.
pub fn conditions(beat: u64) -> Value {
    let time = time(beat);
    let condition = |kind: &str, status: &str, reason: &str| {
        json!({
            "type": kind, "status": status, "reason": reason,
            "message": format!("kubelet: {reason}"),
            "lastHeartbeatTime": time, "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    };
    json!([
        condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
        condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
        condition("PIDPressure", "False", "KubeletHasSufficientPID"),
        condition("Ready", "True", "KubeletReady"),
    ])
}

/// Another one for every heartbeat: which it is, nobody asks.
fn time(beat: u64) -> String {
    let (minutes, seconds) = (beat / 60, beat % 60);
    let (hours, minutes) = (minutes / 60, minutes % 60);
    let (days, hours) = (hours / 24, hours % 24);
    let day = days % 28 + 1;
    format!("2026-02-{day:02}T{hours:02}:{minutes:02}:{seconds:02}Z")
}

pub fn node(entry: &NodeEntry) -> Value {
    let name = &entry.name;
    let cidrs: Vec<_> = entry.pod_cidrs.iter().map(ToString::to_string).collect();
    let images: Vec<Value> = (0..IMAGES).map(image).collect();
    let resources = json!({
        "cpu": "16", "ephemeral-storage": "95551679124", "hugepages-1Gi": "0",
        "hugepages-2Mi": "0", "memory": "64889128Ki", "pods": "110",
    });
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "beta.kubernetes.io/arch": "amd64",
                "beta.kubernetes.io/instance-type": "m6i.4xlarge",
                "beta.kubernetes.io/os": "linux",
                "failure-domain.beta.kubernetes.io/region": "eu-central-1",
                "failure-domain.beta.kubernetes.io/zone": "eu-central-1a",
                "kubernetes.io/arch": "amd64",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "node.kubernetes.io/instance-type": "m6i.4xlarge",
                "topology.kubernetes.io/region": "eu-central-1",
                "topology.kubernetes.io/zone": "eu-central-1a",
            },
            "annotations": {
                "csi.volume.kubernetes.io/nodeid": format!("{{\"ebs.csi.aws.com\":\"{name}\"}}"),
                "node.alpha.kubernetes.io/ttl": "0",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
            },
        },
        "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs, "providerID": format!("aws:///{name}")},
        "status": {
            "addresses": shown(name, &entry.addresses),
            "allocatable": resources,
            "capacity": resources,
            "conditions": conditions(0),
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "images": images,
            "nodeInfo": {
                "architecture": "amd64", "bootID": "2f7b1a0e-6f8d-4d42-9f5c-3a51a3b7a0d1",
                "containerRuntimeVersion": "containerd://2.1.4", "kernelVersion": "6.12.41",
                "kubeProxyVersion": "", "kubeletVersion": "v1.34.4",
                "machineID": "ec2b7a3c21d94f7cb6a1dd1bb2bb4b0d", "operatingSystem": "linux",
                "osImage": "Debian GNU/Linux 13 (trixie)",
                "systemUUID": "ec2b7a3c-21d9-4f7c-b6a1-dd1bb2bb4b0d",
            },
        },
    })
}

fn image(number: usize) -> Value {
    let repository = format!("registry.example.com/platform/component-{number:02}");
    let digest = format!("{number:02x}").repeat(32);
    json!({
        "names": [format!("{repository}@sha256:{digest}"), format!("{repository}:v1.{number}.0")],
        "sizeBytes": 40_000_000 + number,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_two_nodes_have_anything_in_common() {
        let mut seen = BTreeSet::new();
        for number in 0..MOST {
            let entry = entry(number);
            let addresses = entry.addresses.into_iter().chain(moved(number));
            seen.extend(addresses.map(|address| address.to_string()));
            seen.extend(entry.pod_cidrs.iter().map(|cidr| cidr.trunc().to_string()));
        }
        assert_eq!(seen.len(), MOST * 6);
    }

    #[test]
    fn a_node_is_as_large_as_real_ones() {
        let bytes = node(&entry(7)).to_string().len();
        assert!((5_000..12_000).contains(&bytes), "{bytes}");
    }

    #[test]
    fn every_heartbeat_is_news() {
        assert_eq!(time(0), "2026-02-01T00:00:00Z");
        assert_eq!(time(90_061), "2026-02-02T01:01:01Z");
    }
}
