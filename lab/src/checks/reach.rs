//! Who reaches whom inside the cluster.

use super::{Family, Scene};
use crate::{
    Place, Pod,
    traffic::{PATIENCE, bursts, icmp, packet, tcp, udp},
    wait::slowness,
};
use anyhow::{Context as _, Result, ensure};
use std::{net::IpAddr, time::Duration};

const LARGE: u64 = 64 << 20;

/// What [`large_transfer`] sends each way. An emulated machine copies and digests far less in the same
/// time.
pub fn large() -> u64 {
    LARGE / u64::from(slowness()).pow(2)
}

/// TCP, UDP, also many datagrams by one call, and ICMP echo; the other side must see `source`. Returns the ICMP round trip.
fn reaches(from: &Place, source: IpAddr, to: &Place, address: IpAddr) -> Result<Duration> {
    let time = icmp::ping(from, address, PATIENCE)?;
    let tcp = tcp::transfer(from, to, address, 2000)?.seen;
    let udp = udp::echo(from, to, address, 500, false)?;
    let bursts = bursts::seen(from, to, address)?;
    for (protocol, seen) in [
        ("TCP", tcp),
        ("UDP", udp),
        ("UDP, many by one call", bursts),
    ] {
        ensure!(
            seen == source,
            "{protocol}, {} → {address}: {} saw {seen} instead of {source}",
            from.name(),
            to.name()
        );
    }
    Ok(time)
}

fn pods_reach(family: Family, pairs: &[(&Pod, &Pod)]) -> Result<String> {
    for (from, to) in pairs {
        reaches(from.place(), family.of(from), to.place(), family.of(to))?;
    }
    let (from, to) = pairs[0];
    Ok(format!(
        "TCP, UDP, ICMP {} → {}, {} pairs",
        family.of(from),
        family.of(to),
        pairs.len()
    ))
}

fn same_node(scene: &Scene, family: Family) -> Result<String> {
    pods_reach(
        family,
        &[
            (scene.pod(1, 1), scene.pod(1, 2)),
            (scene.pod(1, 2), scene.pod(1, 1)),
            (scene.pod(2, 2), scene.pod(2, 3)),
        ],
    )
}

fn across_nodes(scene: &Scene, family: Family) -> Result<String> {
    pods_reach(
        family,
        &[
            (scene.pod(1, 1), scene.pod(2, 1)),
            (scene.pod(2, 1), scene.pod(1, 1)),
            (scene.pod(1, 3), scene.pod(2, 2)),
        ],
    )
}

pub fn same_node_ipv4(scene: &Scene) -> Result<String> {
    same_node(scene, Family::V4)
}

pub fn same_node_ipv6(scene: &Scene) -> Result<String> {
    same_node(scene, Family::V6)
}

pub fn across_nodes_ipv4(scene: &Scene) -> Result<String> {
    across_nodes(scene, Family::V4)
}

pub fn across_nodes_ipv6(scene: &Scene) -> Result<String> {
    across_nodes(scene, Family::V6)
}

/// The largest packet that the pod's interface takes arrives whole; one byte more is refused at
/// once instead of vanishing on the way.
/// IP and UDP.
const UDP_HEADERS: [(Family, usize); 2] = [(Family::V4, 20 + 8), (Family::V6, 40 + 8)];

pub fn full_mtu(scene: &Scene) -> Result<String> {
    let (from, to) = (scene.pod(1, 1), scene.pod(2, 1));
    let endpoint = scene.node(1).endpoint(from)?;
    let mtu = endpoint.and_then(|endpoint| endpoint.mtu);
    let mtu = mtu.context("the agent does not say the pod's MTU")? as usize;
    for (family, headers) in UDP_HEADERS {
        let payload = mtu - headers;
        let address = family.of(to);
        udp::echo(from.place(), to.place(), address, payload, true)?;
        udp::is_too_long(from.place(), address, payload + 1)?;
    }
    Ok(format!(
        "{mtu} bytes whole both ways, {} refused, v4 and v6",
        mtu + 1
    ))
}

pub fn local_mtu(scene: &Scene) -> Result<String> {
    let (from, to, node) = (scene.pod(1, 1), scene.pod(1, 2), scene.node(1));
    let mtu = packet::interface(from.place(), crate::cni::IFNAME)?.mtu;
    for (family, headers) in UDP_HEADERS {
        let payload = mtu - headers;
        udp::echo(from.place(), to.place(), family.of(to), payload, true)?;
        udp::echo(node.place(), to.place(), family.of(to), payload, true)?;
        for address in node.addresses() {
            if address.is_ipv4() == family.of(to).is_ipv4() {
                udp::echo(from.place(), node.place(), address, payload, true)?;
            }
        }
    }
    Ok(format!(
        "{mtu} bytes whole, pod to pod and with the node, v4 and v6"
    ))
}

pub fn pod_to_node(scene: &Scene) -> Result<String> {
    let pod = scene.pod(1, 1);
    for node in [scene.node(1), scene.node(2)] {
        for address in node.addresses() {
            // Whether the other side sees the pod's address or its node's is not looked at: a
            // node's address is outside the pod ranges, so IPv4 is masqueraded.
            icmp::ping(pod.place(), address, PATIENCE)?;
            tcp::transfer(pod.place(), node.place(), address, 2000)?;
            udp::echo(pod.place(), node.place(), address, 500, false)?;
        }
    }
    Ok("TCP, UDP, ICMP to its own and another node, v4 and v6".into())
}

pub fn node_to_pod(scene: &Scene) -> Result<String> {
    for node in [scene.node(1), scene.node(2)] {
        for pod in [scene.pod(1, 1), scene.pod(2, 2)] {
            for address in pod.addresses() {
                icmp::ping(node.place(), address, PATIENCE)?;
                tcp::transfer(node.place(), pod.place(), address, 2000)?;
                udp::echo(node.place(), pod.place(), address, 500, false)?;
            }
        }
    }
    Ok("TCP, UDP, ICMP to its own and another node's pods, v4 and v6".into())
}

/// Every path between pods, both families.
fn paths(scene: &Scene) -> Vec<(&'static str, &Place, &Place, IpAddr)> {
    let mut paths = Vec::new();
    for family in Family::BOTH {
        for (name, from, to) in [
            ("same node", scene.pod(1, 1), scene.pod(1, 2)),
            ("across nodes", scene.pod(1, 1), scene.pod(2, 1)),
        ] {
            paths.push((name, from.place(), to.place(), family.of(to)));
        }
    }
    paths
}

pub fn one_byte(scene: &Scene) -> Result<String> {
    for (_, from, to, address) in paths(scene) {
        tcp::transfer(from, to, address, 1)?;
    }
    Ok("same node and across, v4 and v6".into())
}

pub fn large_transfer(scene: &Scene) -> Result<String> {
    let mut digest = String::new();
    for (_, from, to, address) in paths(scene) {
        digest = tcp::transfer(from, to, address, large())?.digest;
    }
    Ok(format!(
        "same node and across, v4 and v6, SHA-256 {}…",
        &digest[..12]
    ))
}
