//! Services pass from kube-proxy to the agents and back, as docs/handover.md tells users to do it, while they are
//! asked all the time.

use super::services::{is_theirs, rules};
use crate::e2e::{
    asking::{Asking, deploy},
    world::{DAEMON_SET, SYSTEM, World},
};
use anyhow::{Result, ensure};
use std::{thread, time::Duration};

/// How long there are requests before the next step.
const BETWEEN: Duration = Duration::from_secs(5);
/// Connections that kube-proxy may have yet when it is taken away: what never ends, as DNS' watches on the API.
const ENDLESS: u32 = 5;

pub fn handover(world: &mut World) -> Result<String> {
    let world = &*world;
    let outcome = there_and_back(world);
    if outcome.is_err() {
        for node in world.nodes() {
            let _ = world.cluster.proxy_stop(&node);
            let _ = world.cluster.proxy_start(&node);
        }
        let _ = set(world, "off");
    }
    outcome
}

fn there_and_back(world: &World) -> Result<String> {
    const NAME: &str = "handed-over";
    let nodes = world.nodes();
    let addresses = deploy(world, NAME)?;
    let pods = world.run_pods(&[("handover-asks", &nodes[0]), ("handover-sends", &nodes[0])])?;
    let asking = Asking::start(world, [&pods[0], &pods[1]], &nodes[1], &addresses)?;

    set(world, "on")?;
    mode(world, is_drained)?;
    stop_proxy(world)?;
    clean_proxy(world)?;
    mode(world, |mode| mode == "on")?;
    thread::sleep(BETWEEN);

    start_proxy(world)?;
    set(world, "off")?;
    mode(world, |mode| mode.starts_with("off"))?;
    thread::sleep(BETWEEN);

    set(world, "auto")?;
    mode(world, |mode| mode.starts_with("off, kube-proxy serves"))?;
    stop_proxy(world)?;
    // Its rules translate until it is sure that it does not come back.
    mode(world, is_drained)?;
    clean_proxy(world)?;
    mode(world, |mode| mode == "on")?;
    thread::sleep(BETWEEN);
    start_proxy(world)?;
    set(world, "off")?;
    mode(world, |mode| mode.starts_with("off"))?;
    let (requests, _) = asking.finish()?;
    Ok(format!(
        "0 of {requests} requests failed: on, kube-proxy away, back, off; auto, kube-proxy away, back, off"
    ))
}

/// Who translates, by a setting, from the agents' next start on; and that start.
fn set(world: &World, who: &str) -> Result<()> {
    world.cluster.set_service_proxy(who)?;
    for verb in ["restart", "status"] {
        world.kubectl(&["-n", SYSTEM, "rollout", verb, DAEMON_SET])?;
    }
    world.healthy()
}

/// Whether the agents translate, and what kube-proxy has translated has ended: datagrams are forgotten 30 s after the last.
fn is_drained(mode: &str) -> bool {
    let left = mode.strip_prefix("on, kube-proxy has ");
    let left = left.and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    mode.starts_with("on, nothing needs kube-proxy") || left.is_some_and(|left| left <= ENDLESS)
}

/// Waits until every agent says so of who translates.
fn mode(world: &World, is_wanted: fn(&str) -> bool) -> Result<()> {
    for node in world.nodes() {
        world.wait(
            &format!("Services to be translated otherwise on {node}"),
            || {
                let status = world.status(&node)?;
                let mode = status.modes.get("serviceProxy").map_or("", String::as_str);
                let mode = mode.trim_start_matches("auto: ");
                ensure!(is_wanted(mode), "serviceProxy is `{mode}`");
                Ok(Some(()))
            },
        )?;
    }
    Ok(())
}

fn stop_proxy(world: &World) -> Result<()> {
    let nodes = world.nodes();
    nodes
        .iter()
        .try_for_each(|node| world.cluster.proxy_stop(node))
}

/// Takes its rules away on every node.
fn clean_proxy(world: &World) -> Result<()> {
    for node in world.nodes() {
        world.cluster.proxy_clean(&node)?;
        let rules = rules(world, &node)?;
        let left = rules.lines().find(|line| is_theirs(line));
        ensure!(left.is_none(), "{node} has rules of kube-proxy: {left:?}");
    }
    Ok(())
}

/// Starts it on every node, and waits until it has written its rules.
fn start_proxy(world: &World) -> Result<()> {
    for node in world.nodes() {
        world.cluster.proxy_start(&node)?;
        world.wait(&format!("kube-proxy's rules on {node}"), || {
            // Those that lead to endpoints.
            let rules = rules(world, &node)?;
            let written = rules
                .lines()
                .any(|line| line.contains("dnat") || line.contains("DNAT"));
            Ok((written && rules.lines().any(is_theirs)).then_some(()))
        })?;
    }
    Ok(())
}
