//! How well it works: throughput and latency of pods beside that of the nodes under them, the
//! agent's memory, the plugin's size.
//!
//! Single measurements of a second: an impression for the demo, not a benchmark.

use crate::{
    Place, Pod,
    checks::{PODS_PER_NODE, Scene},
    node::Node,
    traffic::{one_way::one_way, round_trips::latency, seat::Ends},
    wait::wait_for,
};
use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use sinabro_common::api::{Owner, Request, Response};
use std::{collections::BTreeMap, fs, net::IpAddr, thread, time::Duration};

const TIME: Duration = Duration::from_millis(1000);
/// As many bytes as a bulk sender passes to the kernel at once.
const MESSAGE: usize = 1 << 17;
const ROUNDS: usize = 3000;

/// One path's figures.
#[derive(Clone, Debug, Serialize)]
pub struct Path {
    pub name: &'static str,
    pub title: &'static str,
    pub gbit_per_second: f64,
    pub latency_p50_us: f64,
    pub latency_p99_us: f64,
}

/// A measurement to be made: name, title, from, to, address.
pub type Planned<'a> = (&'static str, &'static str, &'a Place, &'a Place, IpAddr);

/// Paths worth a look, the bare underlay last for comparison.
pub fn paths(scene: &Scene) -> Vec<Planned<'_>> {
    let (from, near, far) = (scene.pod(1, 1), scene.pod(1, 2), scene.pod(2, 1));
    let (n1, n2) = (scene.node(1), scene.node(2));
    let underlay = crate::node::underlay_addresses(2);
    vec![
        (
            "same_node_ipv4",
            "pod → pod, same node, IPv4",
            from.place(),
            near.place(),
            near.v4(),
        ),
        (
            "same_node_ipv6",
            "pod → pod, same node, IPv6",
            from.place(),
            near.place(),
            near.v6(),
        ),
        (
            "across_nodes_ipv4",
            "pod → pod, across nodes, IPv4",
            from.place(),
            far.place(),
            far.v4(),
        ),
        (
            "across_nodes_ipv6",
            "pod → pod, across nodes, IPv6",
            from.place(),
            far.place(),
            far.v6(),
        ),
        (
            "underlay_ipv4",
            "node → node without Sinabro, IPv4",
            n1.place(),
            n2.place(),
            underlay[0],
        ),
    ]
}

pub fn measure(planned: &Planned<'_>) -> Result<Path> {
    let (name, title, from, to, address) = *planned;
    let ends = Ends::apart(from, to, address)?;
    let stream = one_way(ends, &ends.listen(0)?, MESSAGE, TIME)?;
    let latency = latency(ends, ROUNDS)?;
    Ok(Path {
        name,
        title,
        gbit_per_second: stream.per_second() * 8.0 / 1e9,
        latency_p50_us: latency.percentile(50.0).as_secs_f64() * 1e6,
        latency_p99_us: latency.percentile(99.0).as_secs_f64() * 1e6,
    })
}

/// Pods added or deleted at the same time.
const AT_ONCE: usize = 10;

/// Adds pods to a scene's node until it has `total`; returns the new ones.
pub fn fill(node: &Node, total: usize) -> Result<Vec<Pod>> {
    let numbers: Vec<usize> = (PODS_PER_NODE..total).collect();
    let chunks: Vec<&[usize]> = numbers
        .chunks(numbers.len().div_ceil(AT_ONCE).max(1))
        .collect();
    thread::scope(|scope| {
        let threads: Vec<_> = chunks
            .into_iter()
            .map(|chunk| {
                scope.spawn(move || {
                    chunk
                        .iter()
                        .map(|number| node.add_pod(&format!("{}-idle{number}", node.name())))
                        .collect::<Result<Vec<_>>>()
                })
            })
            .collect();
        let mut pods = Vec::new();
        for thread in threads {
            pods.extend(
                thread
                    .join()
                    .map_err(|_| anyhow::anyhow!("a thread panicked"))??,
            );
        }
        Ok(pods)
    })
}

/// Deletes what [`fill`] added; the agent must know none of them afterwards.
pub fn clear(node: &Node, pods: &[Pod]) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = pods
            .chunks(pods.len().div_ceil(AT_ONCE).max(1))
            .map(|chunk| scope.spawn(|| chunk.iter().try_for_each(|pod| node.delete_pod(pod))))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })
    })?;
    wait_for("the addresses of deleted pods to be free", || {
        let Response::Ipam(ipam) = node.ask(Request::Ipam)? else {
            bail!("unexpected answer about leases");
        };
        let is_deleted = |owner: &Owner| pods.iter().any(|pod| pod.owner() == *owner);
        match ipam.leases.iter().find(|lease| is_deleted(&lease.owner)) {
            Some(lease) => bail!("{} is still leased to {}", lease.address, lease.owner),
            None => Ok(Some(())),
        }
    })
}

/// Resident memory of a node's agent, in bytes (VmRSS, proc(5)).
pub fn agent_memory(node: &Node) -> Result<u64> {
    let pid = node.agent_pid().context("no agent runs")?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = line
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse().ok())
        .with_context(|| format!("no VmRSS in the status of process {pid}"))?;
    Ok(kib * 1024)
}

/// Figures by name, as in the demo's JSON.
pub fn flatten(paths: &[Path]) -> BTreeMap<String, f64> {
    let mut flat = BTreeMap::new();
    for path in paths {
        let mut put = |what: &str, value: f64| {
            flat.insert(format!("{}_{what}", path.name), value);
        };
        put("gbit_per_second", path.gbit_per_second);
        put("latency_p50_us", path.latency_p50_us);
        put("latency_p99_us", path.latency_p99_us);
    }
    flat
}
