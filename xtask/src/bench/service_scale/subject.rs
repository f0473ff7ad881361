//! One agent, from its start on an empty node, through a kill, to changes of single Services.

use super::objects::{self, PORT, TARGET};
use crate::bench::{
    api_server::{self, ApiServer, Client, PATIENCE},
    process,
    published::{self, Published},
};
use anyhow::{Context as _, Result, ensure};
use sinabro_lab::{Binaries, Lab, Node, Pod, traffic, wait::wait_within};
use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// How long a change may take, and a connection.
const SOON: Duration = Duration::from_secs(10);
/// What a start leaves to do.
const SETTLE: Duration = Duration::from_secs(5);
/// Each change meets an agent that has nothing else to do.
const PAUSE: Duration = Duration::from_millis(50);
const LOOK: Duration = Duration::from_millis(1);

/// How many Services there are, of how many endpoints each, and how many of them change.
#[derive(Clone, Copy)]
pub struct Size {
    pub services: usize,
    pub each: usize,
    pub changes: usize,
}

/// A start, until all is published.
pub struct Start {
    /// Seconds until pods can be added.
    pub ready: f64,
    /// Seconds until all Services are as the API server says.
    pub complete: f64,
    /// Seconds of those in which they were planned and published.
    pub publishing: f64,
    /// Seconds of processor time.
    pub cpu: f64,
    /// Bytes from the API server.
    pub received: f64,
    /// Bytes of memory.
    pub peak: f64,
}

pub struct Measured {
    pub first: Start,
    /// After a kill: all is in the kernel as it was.
    pub again: Start,
    pub memory: process::Memory,
    /// Milliseconds of each change, from the request to the API server until it is published.
    pub changes: Vec<f64>,
    /// Milliseconds in which 99 of a hundred changes were planned and published, by the agent's histogram.
    pub publishing: f64,
    /// Milliseconds of the agent's processor time for each.
    pub change_cpu: f64,
}

/// Measures on a node of its own. The last Service leads to a pod of it, and is asked again and again whether it does.
pub fn measure(
    lab: &mut Lab,
    server: &ApiServer,
    binaries: &Binaries,
    size: Size,
    mut now: impl FnMut(&str),
) -> Result<Measured> {
    let (node, kubeconfig) = server.add_node(lab, binaries)?;

    now("first start");
    let first = start(node, &kubeconfig, size)?;
    let [client, backend] = [node.add_pod("client")?, node.add_pod("backend")?];
    let last = size.services - 1;
    let endpoints = objects::listed(last, &[backend.v4()]);
    let before = published::ask(node)?.changes.count;
    let patch = serde_json::json!({"endpoints": endpoints});
    server
        .client
        .replace_in(&objects::slice_path(last), &patch)?;
    changed(node, before)?;
    leads(&client, &backend, last).context("after the first start")?;
    thread::sleep(SETTLE);
    now("start after a kill");
    node.kill_agent()?;
    leads(&client, &backend, last).context("without an agent")?;
    let again = start(node, &kubeconfig, size)?;
    leads(&client, &backend, last).context("after a kill")?;
    thread::sleep(SETTLE);
    let pid = node.agent_pid().context("the agent has ended")?;
    let memory = process::memory(pid)?;

    now("changes");
    let (before, cpu) = (published::ask(node)?, process::cpu(pid)?);
    let changes = changes(&server.client, node, size)?;
    let change_cpu = (process::cpu(pid)? - cpu).as_secs_f64() * 1e3 / size.changes as f64;
    let after = published::ask(node)?;
    leads(&client, &backend, last).context("after changes of others")?;
    node.kill_agent()?;
    server.client.delete_node(node.name())?;
    Ok(Measured {
        first,
        again,
        memory,
        changes,
        publishing: after.changes.since(&before.changes).within(0.99) * 1e3,
        change_cpu,
    })
}

fn start(node: &Node, kubeconfig: &str, size: Size) -> Result<Start> {
    let received = process::received(node.namespace())?;
    let begun = Instant::now();
    // TCP between pods has nothing to do with Services.
    let flags = ["--tcp-acceleration=off", "--service-proxy=on"];
    node.start_agent_of_cluster(kubeconfig, &flags)?;
    api_server::wait_ready(node, begun)?;
    let ready = begun.elapsed().as_secs_f64();
    // The API server's own is one more.
    let all = (size.services + 1) as f64;
    let published = wait_within(PATIENCE, "all Services to be published", || {
        let published = published::ask(node)?;
        let is_complete = published.services >= all && published.changes.count > 0.0;
        Ok(is_complete.then_some(published))
    })
    .with_context(|| format!("the agent's log:\n{}", node.log()))?;
    let complete = begun.elapsed().as_secs_f64();
    ensure!(
        published.waiting == 0.0,
        "{} Services wait for room",
        published.waiting
    );
    // The last comes to have but one.
    let endpoints = ((size.services - 1) * size.each + 1) as f64;
    ensure!(
        published.endpoints >= endpoints,
        "{} endpoints instead of {endpoints}",
        published.endpoints
    );
    let pid = node.agent_pid().context("the agent has ended")?;
    Ok(Start {
        ready,
        complete,
        publishing: published.changes.sum,
        cpu: process::cpu(pid)?.as_secs_f64(),
        received: process::received(node.namespace())? - received,
        peak: process::memory(pid)?.peak,
    })
}

/// Another endpoint in the place of a Service's first, one Service after the other.
fn changes(client: &Client, node: &Node, size: Size) -> Result<Vec<f64>> {
    let mut took = Vec::new();
    // Not the last, which leads to a pod.
    for turn in 0..size.changes {
        let service = turn * (size.services - 1) / size.changes;
        let mut endpoints = objects::endpoints(service, size.each);
        endpoints[0] = objects::endpoints(size.services + turn, size.each)[0];
        let patch = serde_json::json!({"endpoints": objects::listed(service, &endpoints)});
        thread::sleep(PAUSE);
        let before = published::ask(node)?.changes.count;
        let begun = Instant::now();
        client.replace_in(&objects::slice_path(service), &patch)?;
        changed(node, before)?;
        took.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(took)
}

/// Waits until more than so many changes are published.
fn changed(node: &Node, before: f64) -> Result<Published> {
    let begun = Instant::now();
    loop {
        let published = published::ask(node)?;
        if published.changes.count > before {
            return Ok(published);
        }
        ensure!(
            begun.elapsed() < SOON,
            "a change is not published:\n{}",
            node.log()
        );
        thread::sleep(LOOK);
    }
}

/// An error unless the pod gets to the other by a Service.
fn leads(client: &Pod, backend: &Pod, service: usize) -> Result<()> {
    let at = SocketAddr::new(backend.v4(), TARGET);
    let listener = backend.place().run(|| Ok(TcpListener::bind(at)?))?;
    let target = SocketAddr::new(objects::address(service).into(), PORT);
    let connect = || Ok(TcpStream::connect_timeout(&target, SOON)?);
    let stream = client.place().run(connect);
    let _stream = stream.with_context(|| format!("cannot reach a pod by {target}"))?;
    traffic::accept(&listener, Instant::now() + SOON)?;
    Ok(())
}
