//! Many agents that ask for all Nodes at once, as after a restart of the API server, and what that
//! costs it: in processor time, in memory, and in what it has to ask etcd for.

use crate::bench::{api_server::ApiServer, process};
use anyhow::{Result, anyhow};
use serde::Serialize;
use std::{collections::BTreeMap, fs, thread, time::Instant};

/// How many ask at once.
pub const AGENTS: usize = 10;

/// How the line that ends a streamed list begins, and what it has in it (KEP-3157).
const END: (&str, &str) = ("{\"type\":\"BOOKMARK\"", "k8s.io/initial-events-end");

/// What a way to ask is, the request, and the last line of the answer, if lines follow for ever.
type Way = (
    &'static str,
    &'static str,
    Option<(&'static str, &'static str)>,
);

const WAYS: [Way; 3] = [
    (
        "streamed from the cache, as the agent asks",
        "/api/v1/nodes?watch=true&sendInitialEvents=true&resourceVersion=0&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=300",
        Some(END),
    ),
    (
        "one list from the cache, as the agent asks older servers",
        "/api/v1/nodes?resourceVersion=0&resourceVersionMatch=NotOlderThan",
        None,
    ),
    ("a list without resourceVersion", "/api/v1/nodes", None),
];

#[derive(Clone, Debug, Serialize)]
pub struct Storm {
    pub nodes: usize,
    pub way: &'static str,
    pub from_cache: bool,
    pub lists: usize,
    pub megabytes_each: f64,
    /// Until the last one had its answer.
    pub seconds: f64,
    /// Of the API server.
    pub cpu_seconds_each: f64,
    /// How much higher the API server's memory went than it was.
    pub more_memory_megabytes: f64,
    /// Requests for Nodes that the API server sent to etcd meanwhile, by operation.
    pub etcd_requests: BTreeMap<String, f64>,
}

pub fn measure(server: &ApiServer, nodes: usize) -> Result<Vec<Storm>> {
    let ways = WAYS.iter();
    ways.map(|&(way, path, last)| one(server, nodes, way, path, last))
        .collect()
}

fn one(
    server: &ApiServer,
    nodes: usize,
    way: &'static str,
    path: &str,
    last: Option<(&str, &str)>,
) -> Result<Storm> {
    let pid = server.pid()?;
    // The peak begins again (proc_pid_clear_refs(5)).
    fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
    let (etcd, memory, cpu) = (
        server.etcd_requests()?,
        process::memory(pid)?,
        process::cpu(pid)?,
    );
    let start = Instant::now();
    let bytes = thread::scope(|scope| {
        let client = &server.client;
        let asking: Vec<_> = (0..AGENTS)
            .map(|_| scope.spawn(move || client.read(path, last)))
            .collect();
        let joined = asking.into_iter().map(|thread| {
            let read = thread.join();
            read.map_err(|_| anyhow!("a thread panicked")).flatten()
        });
        joined.sum::<Result<usize>>()
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let each = 1.0 / AGENTS as f64;
    let cpu = (process::cpu(pid)? - cpu).as_secs_f64();
    let peak = process::memory(pid)?.peak;
    let mut etcd_requests = server.etcd_requests()?;
    for (operation, count) in &mut etcd_requests {
        *count -= etcd.get(operation).copied().unwrap_or(0.0);
    }
    etcd_requests.retain(|_, count| *count > 0.0);
    Ok(Storm {
        nodes,
        way,
        from_cache: path.contains("resourceVersion=0"),
        lists: AGENTS,
        megabytes_each: bytes as f64 * each / 1e6,
        seconds,
        cpu_seconds_each: cpu * each,
        more_memory_megabytes: (peak - memory.resident).max(0.0) / 1e6,
        etcd_requests,
    })
}
