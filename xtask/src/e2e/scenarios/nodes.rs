//! Nodes that reboot, join and leave; kubelets that are restarted.

use crate::e2e::{
    load::{reaches, traffic},
    world::World,
};
use anyhow::{Context as _, Result, ensure};
use std::{fs, path::Path};

pub fn kubelet_restart(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("kubelet-a", &nodes[0]),
        ("kubelet-b", &nodes[0]),
        ("kubelet-c", &nodes[1]),
    ])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    let leased: Vec<_> = nodes
        .iter()
        .map(|node| world.leased(node))
        .collect::<Result<_>>()?;
    traffic.event("the kubelets were restarted")?;
    world.restart_kubelets()?;
    world.healthy()?;
    for (node, before) in nodes.iter().zip(leased) {
        let now = world.leased(node)?;
        ensure!(
            now == before,
            "leases of {node} changed from {before:?} to {now:?}"
        );
    }
    let late = world.run_pods(&[("kubelet-late", &nodes[0])])?;
    reaches(&pods[2].place, &late[0])?;
    traffic.finish()
}

/// All of a node ends at once; its disk stays. The others do not notice.
pub fn reboot(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let (stays, reboots) = (&nodes[0], &nodes[1]);
    world.run_pods(&[("boot-far", reboots), ("boot-far-2", reboots)])?;
    let near = world.run_pods(&[("boot-a", stays), ("boot-b", stays), ("boot-c", stays)])?;
    let traffic = traffic(world, [&near[0], &near[1], &near[2]])?;
    // What is in /run does not outlive a boot: if this does, the node has not lost its memory.
    let memory = world.path(reboots, "/run/sinabro/before-the-reboot")?;
    fs::write(&memory, "").context("no state of the agent before the reboot")?;
    traffic.event("another node lost power")?;
    world.cluster.node_stop(reboots)?;
    traffic.must_flow("while the other node is down")?;
    traffic.event("it was started again")?;
    world.cluster.node_start(reboots)?;
    world.healthy()?;
    let memory = world.path(reboots, "/run/sinabro/before-the-reboot")?;
    ensure!(
        !memory.exists() && memory.parent().is_some_and(Path::is_dir),
        "{reboots} was not rebooted: its /run is as before"
    );
    // The kubelet makes the same pods again, with new sandboxes.
    let back = ["boot-far", "boot-far-2"].map(|name| {
        world.wait(&format!("{name} to be reached again"), || {
            let pod = world.running(name)?;
            reaches(&near[0].place, &pod).map(|()| Some(pod))
        })
    });
    for pod in back {
        reaches(&pod?.place, &near[0])?;
    }
    let (leases, endpoints) = (world.ipam(reboots)?.leases, world.endpoints(reboots)?);
    let held: usize = endpoints
        .iter()
        .map(|endpoint| endpoint.addresses.len())
        .sum();
    ensure!(
        leases.len() == held,
        "{} addresses leased, {held} in use after the reboot",
        leases.len()
    );
    Ok(format!(
        "{} pods back with {held} addresses; elsewhere {}",
        endpoints.len(),
        traffic.finish()?
    ))
}

pub fn added_and_removed(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("join-a", &nodes[0]),
        ("join-b", &nodes[0]),
        ("join-c", &nodes[1]),
    ])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    traffic.event("a node was added")?;
    let new = world.cluster.node_add()?;
    world.healthy()?;
    let guest = world.run_pods(&[("join-guest", &new)])?;
    for pod in &pods {
        reaches(&pod.place, &guest[0])?;
        reaches(&guest[0].place, pod)?;
    }
    let known = world
        .peers(&nodes[0])?
        .into_iter()
        .find(|peer| peer.name == new);
    let ranges = known
        .with_context(|| format!("{} does not know {new}", nodes[0]))?
        .pod_cidrs;
    drop(guest);
    traffic.event("it was removed")?;
    world.cluster.node_remove(&new)?;
    for node in &nodes {
        world.wait(&format!("{node} to forget {new}"), || {
            let known = world.peers(node)?.iter().any(|peer| peer.name == new);
            let mut routes = world.on_node(node, "ip", &["route", "show"])?;
            routes += &world.on_node(node, "ip", &["-6", "route", "show"])?;
            let routed = ranges
                .iter()
                .any(|range| routes.contains(&range.to_string()));
            Ok((!known && !routed).then_some(()))
        })?;
    }
    Ok(format!(
        "{new} joined and left, no route to it remains; {}",
        traffic.finish()?
    ))
}
