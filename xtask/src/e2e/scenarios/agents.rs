//! Agents that are replaced or die.

use crate::{
    e2e::{
        availability::Availability,
        load::{reaches, traffic},
        world::{DAEMON_SET, SYSTEM, World},
    },
    image,
};
use anyhow::{Context as _, Result, ensure};
use sinabro_common::fail_point;
use std::fs;

/// Half as much again as they have: what doubles is seen.
const MEMORY_LIMIT: u64 = 14 << 20;

pub fn size(world: &mut World) -> Result<String> {
    let archive = image::archive()?;
    // Layers are stored as they are, so what a program contains is found in the archive.
    let content =
        fs::read(&archive).with_context(|| format!("cannot read {}", archive.display()))?;
    let contains = |text: &str| {
        content
            .windows(text.len())
            .any(|part| part == text.as_bytes())
    };
    ensure!(
        contains("SINABRO_STATE_DIR") && !contains(fail_point::VARIABLE),
        "{} has fail-points",
        archive.display()
    );
    let bytes = content.len() as u64;
    ensure!(
        bytes < image::LIMIT,
        "{} has {bytes} bytes, the limit is {}",
        archive.display(),
        image::LIMIT
    );
    let mut resident = Vec::new();
    for node in world.nodes() {
        for pid in world.agents(&node)? {
            let status = world.on_node(&node, "cat", &[&format!("/proc/{pid}/status")])?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
            let kib: u64 = line
                .context("no VmRSS")?
                .trim()
                .trim_end_matches(" kB")
                .parse()?;
            ensure!(
                kib * 1024 < MEMORY_LIMIT,
                "the agent of {node} has {kib} KiB resident, the limit is {MEMORY_LIMIT} bytes"
            );
            resident.push(format!("{:.1} MB", kib as f64 / 1024.0));
        }
    }
    ensure!(
        resident.len() == world.nodes().len(),
        "{} agents on {} nodes",
        resident.len(),
        world.nodes().len()
    );
    Ok(format!(
        "image {:.1} MB, agents {} resident",
        bytes as f64 / (1 << 20) as f64,
        resident.join(" and ")
    ))
}

/// All agents are replaced in turn by ones of the same image, and nobody takes a node for not ready.
pub fn replaced(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("roll-a", &nodes[0]),
        ("roll-b", &nodes[0]),
        ("roll-c", &nodes[1]),
    ])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    let availability = Availability::watch(world)?;
    let agents = |world: &World| -> Result<Vec<Vec<String>>> {
        nodes.iter().map(|node| world.agents(node)).collect()
    };
    let before = agents(world)?;
    traffic.event("the agents were being replaced")?;
    world.kubectl(&["-n", SYSTEM, "rollout", "restart", DAEMON_SET])?;
    let rollout = ["rollout", "status", DAEMON_SET, "--timeout=300s"];
    world.kubectl(&[&["-n", SYSTEM], &rollout[..]].concat())?;
    world.healthy()?;
    let now = agents(world)?;
    ensure!(
        before
            .iter()
            .flatten()
            .all(|pid| !now.iter().flatten().any(|new| new == pid)),
        "an agent was not replaced: {before:?}, {now:?}"
    );
    let ready = availability.finish().context("a node was not ready")?;
    Ok(format!("{ready}; {}", traffic.finish()?))
}

pub fn killed(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("kill-a", &nodes[0]),
        ("kill-b", &nodes[0]),
        ("kill-c", &nodes[1]),
    ])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    for node in &nodes {
        let before = world.agents(node)?;
        traffic.event(&format!("the agent of {node} was killed"))?;
        world.kill_agent(node)?;
        traffic.must_flow("after an agent was killed")?;
        world.wait(&format!("a new agent on {node}"), || {
            let now = world.agents(node)?;
            let new = !now.is_empty() && now.iter().all(|pid| !before.contains(pid));
            Ok((new && world.status(node)?.ready).then_some(()))
        })?;
        traffic.must_flow("after the agent came back")?;
    }
    let late = world.run_pods(&[("kill-late", &nodes[1])])?;
    reaches(&pods[0].place, &late[0])?;
    traffic.finish()
}
