//! One agent, from its first start on an empty node to its last pod.

use super::{
    changes::{self, Changes},
    heartbeats::Heartbeats,
};
use crate::bench::{
    api_server::{self, ApiServer, LOOK, PATIENCE},
    cni, process,
};
use anyhow::{Context as _, Result, bail, ensure};
use sinabro_common::{
    api::{Request, Response},
    names::ROUTE_PROTOCOL,
};
use sinabro_lab::{Binaries, Lab, Node};
use sinabro_netlink::route::{RouteFilter, TABLE_MAIN};
use std::{
    thread,
    time::{Duration, Instant},
};

/// What a start leaves to do, or a pod.
const SETTLE: Duration = Duration::from_secs(5);
/// Bytes of a heartbeat by the watch: a whole Node.
const LEAST_OF_A_BEAT: f64 = 1e3;
const BETWEEN_PODS: Duration = Duration::from_millis(300);

/// How long and how often things are measured.
#[derive(Clone, Copy)]
pub struct Effort {
    pub rest: Duration,
    /// Nodes that come, move and go.
    pub changes: usize,
    pub pods: usize,
}

/// A start, until the agent is ready and the kernel has what it should.
pub struct Start {
    pub seconds: f64,
    pub cpu: f64,
    pub received: f64,
    pub peak: f64,
}

pub struct Measured {
    pub first: Start,
    /// After a kill: nodes.json is there, and so is all in the kernel.
    pub again: Start,
    /// Seconds of processor time per minute while there are only heartbeats.
    pub rest_cpu: f64,
    pub rest_received: f64,
    /// Heartbeats per minute.
    pub heartbeats: f64,
    pub resident: f64,
    pub changes: Changes,
    /// Processor time of each change, in milliseconds.
    pub change_cpu: f64,
    /// Milliseconds of each ADD.
    pub adds: Vec<f64>,
    /// Processor time of the agent from a pod's ADD to the end of its DEL, in milliseconds.
    pub pod_cpu: f64,
    /// At the end of it all.
    pub peak: f64,
}

/// Measures on a node of its own, which leaves the cluster again.
pub fn measure(
    lab: &mut Lab,
    server: &ApiServer,
    binaries: &Binaries,
    nodes: usize,
    heartbeats: &Heartbeats,
    effort: Effort,
    mut now: impl FnMut(&str),
) -> Result<Measured> {
    let (node, kubeconfig) = server.add_node(lab, binaries)?;

    now("first start");
    let first = start(node, &kubeconfig, nodes)?;
    thread::sleep(SETTLE);
    now("start after a kill");
    node.kill_agent()?;
    let again = start(node, &kubeconfig, nodes)?;
    // It is ready by the nodes that it kept, before it has read those of the API server.
    wait_connected(node)?;
    thread::sleep(SETTLE);

    now("at rest");
    let pid = node.agent_pid().context("the agent has ended")?;
    let before = (
        process::cpu(pid)?,
        process::received(node.namespace())?,
        heartbeats.sent()?,
    );
    let begun = Instant::now();
    thread::sleep(effort.rest);
    let minutes = begun.elapsed().as_secs_f64() / 60.0;
    let rest_cpu = (process::cpu(pid)? - before.0).as_secs_f64() / minutes;
    let rest_received = (process::received(node.namespace())? - before.1) / minutes;
    let beats = (heartbeats.sent()? - before.2) as f64 / minutes;
    ensure!(
        rest_received >= beats * LEAST_OF_A_BEAT,
        "the agent heard of less than {beats:.0} heartbeats a minute, {rest_received:.0} bytes:\n{}",
        node.log()
    );
    let resident = process::memory(pid)?.resident;

    // What rest costs is no part of what a change or a pod does.
    let costs = |work: &mut dyn FnMut() -> Result<()>, times: usize| -> Result<f64> {
        let (cpu, begun) = (process::cpu(pid)?, Instant::now());
        work()?;
        let spent = (process::cpu(pid)? - cpu).as_secs_f64();
        let rest = rest_cpu / 60.0 * begun.elapsed().as_secs_f64();
        Ok((spent - rest).max(0.0) * 1e3 / times as f64)
    };
    now("changes");
    let mut changes = Changes::default();
    let change_cpu = costs(
        &mut || {
            changes = changes::measure(&server.client, node, nodes, effort.changes)?;
            thread::sleep(SETTLE);
            Ok(())
        },
        effort.changes * 3,
    )?;
    now("pods");
    let mut adds = Vec::new();
    let pod_cpu = costs(
        &mut || {
            adds = pods(node, binaries, effort.pods)?;
            Ok(())
        },
        effort.pods,
    )?;
    let peak = process::memory(pid)?.peak;
    node.kill_agent()?;
    server.client.delete_node(node.name())?;
    Ok(Measured {
        first,
        again,
        rest_cpu,
        rest_received,
        heartbeats: beats,
        resident,
        changes,
        change_cpu,
        adds,
        pod_cpu,
        peak,
    })
}

fn wait_connected(node: &Node) -> Result<()> {
    let begun = Instant::now();
    loop {
        match node.ask(Request::Status)? {
            Response::Status(status) if status.source.connected => return Ok(()),
            _ if begun.elapsed() > PATIENCE => {
                bail!("the agent has not read the nodes:\n{}", node.log());
            }
            _ => thread::sleep(LOOK),
        }
    }
}

fn start(node: &Node, kubeconfig: &str, nodes: usize) -> Result<Start> {
    let received = process::received(node.namespace())?;
    let begun = Instant::now();
    // TCP between pods has nothing to do with nodes.
    node.start_agent_of_cluster(kubeconfig, &["--tcp-acceleration", "off"])?;
    api_server::wait_ready(node, begun)?;
    let seconds = begun.elapsed().as_secs_f64();
    let pid = node.agent_pid().context("the agent has ended")?;
    let start = Start {
        seconds,
        cpu: process::cpu(pid)?.as_secs_f64(),
        received: process::received(node.namespace())? - received,
        peak: process::memory(pid)?.peak,
    };
    let routes = node.netlink()?.routes(&RouteFilter {
        protocol: Some(ROUTE_PROTOCOL),
        table: Some(TABLE_MAIN),
        ..RouteFilter::default()
    })?;
    ensure!(
        routes.len() == nodes * 2,
        "the agent is ready with {} routes instead of {}",
        routes.len(),
        nodes * 2
    );
    Ok(start)
}

/// Pods that come and go one by one; how long each ADD took.
fn pods(node: &Node, binaries: &Binaries, pods: usize) -> Result<Vec<f64>> {
    let subject = cni::sinabro("sinabro", 1, binaries);
    let mut adds = Vec::new();
    for number in 0..pods {
        let id = [format!("pod-{number}")];
        cni::quick_sandbox(node, &id[0])?;
        thread::sleep(BETWEEN_PODS);
        adds.extend(cni::in_sequence(node, &subject, "ADD", &id)?);
        thread::sleep(BETWEEN_PODS);
        cni::in_sequence(node, &subject, "DEL", &id)?;
        node.remove_sandbox(&id[0])?;
    }
    Ok(adds)
}
