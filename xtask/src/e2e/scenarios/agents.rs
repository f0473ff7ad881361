//! Agents that are replaced or die.

use super::upgrade::State;
use crate::{
    cluster::{Containerd, Proxy},
    e2e::{
        availability::{self, Availability},
        load::{reaches, traffic},
        world::{DAEMON_SET, SYSTEM, World},
    },
    image,
};
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sinabro_common::{fail_point, names};
use std::fs;

/// Half as much again as they have: what doubles is seen.
const MEMORY_LIMIT: u64 = 14 << 20;
/// The same where they translate Services.
const MEMORY_LIMIT_SERVICES: u64 = 22 << 20;

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
    let limit = match world.cluster.variant().proxy {
        Proxy::None => MEMORY_LIMIT_SERVICES,
        Proxy::Nftables | Proxy::Iptables => MEMORY_LIMIT,
    };
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
                kib * 1024 < limit,
                "the agent of {node} has {kib} KiB resident, the limit is {limit} bytes"
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

/// Upgraded to other programs and back: nobody takes a node for not ready meanwhile.
pub fn replaced(world: &mut World) -> Result<String> {
    let steps = [
        State::other("the upgrade", world)?,
        State::present("the way back")?,
    ];
    let outcome = watched(world, &steps);
    if outcome.is_err() {
        steps[1].apply(world)?;
    }
    outcome
}

fn watched(world: &World, steps: &[State]) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("roll-a", &nodes[0]),
        ("roll-b", &nodes[0]),
        ("roll-c", &nodes[1]),
    ])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    let availability = Availability::watch(world)?;
    let plugins = || -> Result<Vec<Vec<u8>>> {
        let read = |node: &String| Ok(fs::read(world.path(node, "/opt/cni/bin/sinabro")?)?);
        nodes.iter().map(read).collect()
    };
    for step in steps {
        let before = plugins()?;
        traffic.event(step.step)?;
        step.apply(world)?;
        world.healthy()?;
        let now = plugins()?;
        ensure!(
            before.iter().zip(&now).all(|(before, now)| before != now),
            "{}: a plugin was not replaced",
            step.step
        );
    }
    let ready = availability.finish().context("a node was not ready")?;
    Ok(format!("{ready}; {}", traffic.finish()?))
}

/// No agent comes back. The runtime asks each plugin of the list for STATUS, so that is where the
/// cluster hears of it, and not before it has lasted: what the other scenarios see of STATUS counts.
pub fn stay_away(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[("alone-a", &nodes[0]), ("alone-b", &nodes[1])])?;
    let asks = world.cluster.variant().containerd != Containerd::V1_6;
    for node in &nodes {
        let list = world.path(node, "/etc/cni/net.d/00-sinabro.conflist")?;
        let list: Value = serde_json::from_slice(&fs::read(list)?)?;
        let versions = list["cniVersions"].as_array().context("no cniVersions")?;
        ensure!(
            versions.contains(&json!("1.1.0")) == asks,
            "with this runtime's plugins the list of {node} offers {versions:?}"
        );
    }
    select(world, json!("none"))?;
    let outcome = (|| {
        world.wait("the agents to be gone", || {
            let mut left = nodes.iter().map(|node| world.agents(node));
            let none = left.all(|pids| pids.is_ok_and(|pids| pids.is_empty()));
            Ok(none.then_some(()))
        })?;
        for node in &nodes {
            let said = availability::ask(world, node)?;
            ensure!(
                said == availability::READY,
                "{node} just after its agent ended: {said}"
            );
            // As if more time had passed than an agent may take.
            fs::remove_file(
                world
                    .path(node, "/run/sinabro")?
                    .join(names::LAST_POSSIBLE_FILE),
            )?;
            let said = availability::ask(world, node)?;
            ensure!(said.starts_with("refused"), "{node} without agent: {said}");
        }
        reaches(&pods[0].place, &pods[1])?;
        if !asks {
            return Ok("Debian's plugins keep the list at CNI 1.0.0, without STATUS".to_owned());
        }
        let mut why = String::new();
        for node in &nodes {
            why = world.wait(&format!("{node} to be NotReady"), || {
                let node = world.get(&["node", node])?;
                let all = node["status"]["conditions"].as_array();
                let ready = all.and_then(|all| all.iter().find(|one| one["type"] == "Ready"));
                let ready = ready.context("no condition Ready")?;
                let message = ready["message"].as_str().unwrap_or_default();
                Ok((ready["status"] == "False").then(|| message.to_owned()))
            })?;
            ensure!(
                why.contains("NetworkPluginNotReady") && why.contains("sinabro"),
                "{node} is NotReady for another reason: {why}"
            );
        }
        reaches(&pods[1].place, &pods[0])?;
        // The kubelet's own words come before it, advice after it.
        let start = why.find("NetworkPluginNotReady").unwrap_or_default();
        let told = why[start..].split(';').next().unwrap_or_default();
        Ok(format!("NotReady, pods still connected: {told}"))
    })();
    select(world, Value::Null)?;
    let seen = outcome?;
    world.healthy()?;
    Ok(seen)
}

/// Has agents run only on nodes that have a label with this value; null: on all.
fn select(world: &World, value: Value) -> Result<()> {
    let label = json!({"sinabro-e2e": value});
    let patch = json!({"spec": {"template": {"spec": {"nodeSelector": label}}}}).to_string();
    world.kubectl(&["-n", SYSTEM, "patch", DAEMON_SET, "--patch", &patch])?;
    Ok(())
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
