//! What the agent knows of a pod, and that it forgets it.

use super::Scene;
use crate::{
    Node, Pod,
    datapath::map,
    traffic::{PATIENCE, icmp, udp},
    wait::wait_for,
};
use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, MapData};
use sinabro_common::{
    abi::{
        Addr,
        endpoint::{Endpoint, PodLink},
    },
    api::EndpointReport,
    names,
};
use sinabro_netlink::route::RouteFilter;
use std::net::IpAddr;

/// Every packet of a pod is counted, delivered by redirection or by the stack.
pub fn counters(scene: &Scene) -> Result<String> {
    // Pods of its own: other checks may use the scene's at the same time.
    let (n1, n2) = (scene.node(1), scene.node(2));
    let pods = [
        (n1, n1.add_pod("n1-counted")?),
        (n1, n1.add_pod("n1-counted-near")?),
        (n2, n2.add_pod("n2-counted-far")?),
    ];
    let [from, near, far] = pods.each_ref().map(|(_, pod)| pod);
    let before = (
        report(scene.node(1), from)?,
        report(scene.node(1), near)?,
        report(scene.node(2), far)?,
    );
    const ECHOES: u64 = 50;
    /// Ethernet, IPv6 and UDP.
    const HEADERS: u64 = 14 + 40 + 8;
    /// What a pod's kernel sends by itself in the meantime: solicitations, group reports. A retried
    /// echo would be among them, too.
    const OWN: u64 = 8;
    for _ in 0..ECHOES {
        udp::echo(from.place(), near.place(), near.v4(), 1000, false)?;
        udp::echo(from.place(), far.place(), far.v6(), 1000, false)?;
    }
    let after = (
        report(scene.node(1), from)?,
        report(scene.node(1), near)?,
        report(scene.node(2), far)?,
    );
    for (pod, before, after, echoes) in [
        (from, before.0, after.0, 2 * ECHOES),
        (near, before.1, after.1, ECHOES),
        (far, before.2, after.2, ECHOES),
    ] {
        for (way, packets, bytes) in [
            (
                "sent",
                after.tx_packets - before.tx_packets,
                after.tx_bytes - before.tx_bytes,
            ),
            (
                "received",
                after.rx_packets - before.rx_packets,
                after.rx_bytes - before.rx_bytes,
            ),
        ] {
            let most = (echoes + OWN, echoes * (1000 + HEADERS) + OWN * 200);
            ensure!(
                (echoes..=most.0).contains(&packets) && (echoes * 1000..=most.1).contains(&bytes),
                "pod {} {way} {echoes} packets of 1000 bytes and their headers, but {packets} packets, {bytes} bytes were counted",
                pod.id()
            );
        }
    }
    for (node, pod) in &pods {
        node.delete_pod(pod)?;
    }
    Ok("packets and bytes, both directions, same node and across".into())
}

pub fn verify(scene: &Scene) -> Result<String> {
    let pod = scene.pod(2, 3);
    scene.node(2).check_pod(pod)?.success().context("CHECK")?;
    Ok("interface, addresses, routes, the agent's record".into())
}

/// Adds a pod, looks for its traces, deletes it and looks again.
pub fn deletion(scene: &Scene) -> Result<String> {
    let node = scene.node(1);
    let id = "n1-deleted";
    let pod = node.add_pod(id)?;
    let link = names::pod_link(id, crate::cni::IFNAME);
    for address in pod.addresses() {
        icmp::ping(node.place(), address, PATIENCE)?;
    }
    let present = traces(node, &pod, &link)?;
    let certain = present.iter().filter(|trace| !trace.starts_with(PIN));
    ensure!(
        certain.count() == EVERY_TRACE,
        "a living pod should leave {EVERY_TRACE} traces, but left: {}",
        present.join(", ")
    );
    node.delete_pod(&pod)?;
    // The plugin answers once the pod is off the network; what it had is freed right after.
    wait_for("a deleted pod to be forgotten", || {
        let left = traces(node, &pod, &link)?;
        ensure!(left.is_empty(), "left behind: {}", left.join(", "));
        Ok(Some(()))
    })?;
    // A runtime may repeat a DEL, and there is nothing left to delete.
    node.cni("DEL", id)?.success().context("repeated DEL")?;

    let next = node.add_pod("n1-next")?;
    let reused = next
        .addresses()
        .iter()
        .any(|address| pod.addresses().contains(address));
    node.delete_pod(&next)?;
    ensure!(
        !reused,
        "the address just released was given to the next pod"
    );
    Ok("link, routes, leases, records, map entries gone; DEL repeatable".into())
}

/// Link, record file, the agent's endpoint, entry of the map by link; for each of two addresses
/// a lease, a route, and an entry of the map by address.
const EVERY_TRACE: usize = 4 + 2 * 3;
/// Program links are pinned where the kernel has them, so they do not count.
const PIN: &str = "pin ";

/// Everything that exists because of a pod.
fn traces(node: &Node, pod: &Pod, link: &str) -> Result<Vec<String>> {
    let mut traces = Vec::new();
    let mut conn = node.netlink()?;
    match conn.link_by_name(link) {
        Ok(_) => traces.push(format!("link {link}")),
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    for way in ["in", "out"] {
        let pin = format!("{}/{}/{link}-{way}", names::BPF_DIR, names::BPF_LINKS_DIR);
        if node.namespace().path(&pin).exists() {
            traces.push(format!("{PIN}{pin}"));
        }
    }
    let by_link: HashMap<MapData, u32, PodLink> = map(node, "POD_LINKS")?;
    let by_address: HashMap<MapData, Addr, Endpoint> = map(node, "ENDPOINTS")?;
    for entry in by_link.iter() {
        let (ifindex, entry) = entry?;
        let own = pod.addresses().map(Addr::from);
        if own.contains(&entry.v4) || own.contains(&entry.v6) {
            traces.push(format!("map entry of link #{ifindex}"));
        }
    }
    let record = format!("{}/{link}.json", names::ENDPOINTS_DIR);
    if node.state(&record).exists() {
        traces.push(record);
    }
    if node.endpoint(pod)?.is_some() {
        traces.push(format!("endpoint {}", pod.owner()));
    }
    let routes = conn.routes(&RouteFilter::default())?;
    for address in pod.addresses() {
        let lease = format!("{}/{address}", names::LEASES_DIR);
        if node.state(&lease).exists() {
            traces.push(lease);
        }
        if by_address.get(&address.into(), 0).is_ok() {
            traces.push(format!("map entry of {address}"));
        }
        let is_route =
            |dst: IpAddr, len: u8| dst == address && len == if dst.is_ipv4() { 32 } else { 128 };
        if routes
            .iter()
            .any(|route| is_route(route.dst.addr(), route.dst.prefix_len()))
        {
            traces.push(format!("route to {address}"));
        }
    }
    Ok(traces)
}

pub(super) fn report(node: &Node, pod: &Pod) -> Result<EndpointReport> {
    let report = node.endpoint(pod)?;
    report.with_context(|| format!("the agent does not know pod {}", pod.id()))
}
