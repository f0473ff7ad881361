//! Pods whose runtime has networks of its own.

use crate::e2e::{
    load::reaches,
    pods::{KubePod, PAUSE, manifest},
    world::{NAMESPACE, World},
};
use anyhow::{Result, ensure};
use serde_json::json;

/// The handler in the nodes' configuration of containerd, and the class that leads to it.
const OWN_STACK: &str = "own-stack";

/// Nothing but their RuntimeClass says that they are to have one MTU.
pub fn with_one_mtu(world: &mut World) -> Result<String> {
    let node = &world.nodes()[0];
    let class = json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": OWN_STACK},
        "handler": OWN_STACK,
    });
    let mut small = manifest("mtu-own-stack", node, PAUSE);
    small["spec"]["runtimeClassName"] = OWN_STACK.into();
    world.apply_all(vec![class, small, manifest("mtu-usual", node, PAUSE)])?;
    let names = ["mtu-own-stack", "mtu-usual"];
    let [small, large] = names.map(|name| world.running(name));
    let (small, large) = (small?, large?);
    let status = world.status(node)?;
    let found = [mtu(&small)?, mtu(&large)?];
    ensure!(
        found.map(Some) == [Some(status.mtu), status.local_mtu],
        "links of {found:?}, the agent says {} and {:?}",
        status.mtu,
        status.local_mtu
    );
    reaches(&small.place, &large)?;
    reaches(&large.place, &small)?;
    // By the same network, and after the class that led to it.
    world.kubectl(&["delete", "runtimeclass", OWN_STACK])?;
    world.kubectl(&[&["-n", NAMESPACE, "delete", "pods"], &names[..]].concat())?;
    world.wait("their addresses to be free", || {
        let reports = world.endpoints(node)?;
        let gone = |name: &&str| reports.iter().all(|report| report.pod.name != **name);
        Ok(names.iter().all(gone).then_some(()))
    })?;
    Ok(format!("{} instead of {}", found[0], found[1]))
}

fn mtu(pod: &KubePod) -> Result<u32> {
    Ok(pod.place.conn()?.link_by_name("eth0")?.mtu)
}
