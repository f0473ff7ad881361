//! Beyond the cluster: a host that knows the nodes' addresses and no pod's.

use super::{Family, Scene};
use crate::traffic::{icmp, tcp, udp};
use anyhow::{Result, bail, ensure};
use std::time::Duration;

/// The outside has no route to pods, so any answer proves that it saw the node's address; what
/// it saw is compared all the same.
pub fn masquerade(scene: &Scene) -> Result<String> {
    let outside = scene.lab().outside().place();
    let address = Family::V4.pick(&scene.lab().outside_addresses()?)?;
    let mut seen_as = Vec::new();
    for number in [1, 2] {
        let node = Family::V4.pick(&scene.node(number).addresses())?;
        for pod in [scene.pod(number, 1), scene.pod(number, 2)] {
            let from = pod.place();
            let seen = [
                ("TCP", tcp::transfer(from, outside, address, 1 << 20)?.seen),
                ("UDP", udp::echo(from, outside, address, 500, false)?),
                ("ICMP", icmp::ping_seen(from, outside, address)?),
            ];
            for (protocol, seen) in seen {
                ensure!(
                    seen == node,
                    "{protocol} from {}: the outside saw {seen} instead of {node}",
                    from.name()
                );
            }
        }
        seen_as.push(node.to_string());
    }
    Ok(format!(
        "TCP, UDP, ICMP; the outside saw {}",
        seen_as.join(" and ")
    ))
}

/// Without a route nothing of a pod's may be reachable from outside, and the lab would prove
/// nothing if it were.
pub fn replies_only(scene: &Scene) -> Result<String> {
    let outside = scene.lab().outside().place();
    for address in scene.pod(1, 1).addresses() {
        if icmp::ping(outside, address, Duration::from_millis(300)).is_ok() {
            bail!("{address} answered the outside host");
        }
    }
    Ok("no route, no answer".into())
}
