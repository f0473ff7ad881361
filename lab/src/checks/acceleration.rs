//! TCP between pods that ask for its acceleration.

use super::{Scene, lifecycle::report};
use crate::{
    Node, Pod,
    traffic::{round_trips::latency, seat::Ends},
};
use anyhow::{Context as _, Result, bail, ensure};
use sinabro_common::api::{TcpAcceleration, Verdict};
use std::path::Path;

/// Round trips by each family, of which each is two messages of a byte.
const ROUNDS: usize = 1000;
/// Packets of a pod for the handshakes and ends of two connections, and more.
const HANDSHAKES: u64 = 50;

/// Messages between two pods that ask for it pass no link; others' do.
pub fn acceleration(scene: &Scene) -> Result<String> {
    let node = scene.node(1);
    let pods = ["accelerated-a", "accelerated-b"];
    let [client, server] = pods.map(|id| node.add_pod_wishing(id, TcpAcceleration::Enabled));
    let (client, server) = (client?, server?);
    let accelerated = round_trips(node, &client, &server);
    let plain = round_trips(node, scene.pod(1, 1), &server);
    node.delete_pod(&client)?;
    node.delete_pod(&server)?;
    let (accelerated, plain) = (accelerated?, plain?);
    ensure!(
        !plain.bypass()?,
        "only {} packets on the link of a pod that did not ask for it",
        plain.packets
    );
    if let Some(reason) = refused(node)? {
        ensure!(
            !accelerated.bypass()?,
            "refused, and yet only {} packets on the link",
            accelerated.packets
        );
        return Ok(format!("not on this node: {reason}"));
    }
    ensure!(
        accelerated.bypass()?,
        "{} packets on the link of a pod that asked for it",
        accelerated.packets
    );
    Ok(format!(
        "{} packets instead of {} for {} round trips, {:.0} µs each instead of {:.0}",
        accelerated.packets,
        plain.packets,
        2 * ROUNDS,
        accelerated.p50_us,
        plain.p50_us,
    ))
}

/// What round trips between two pods, by both families, took.
#[derive(Clone, Copy, Debug)]
pub struct RoundTrips {
    /// Sent by the client.
    packets: u64,
    p50_us: f64,
}

impl RoundTrips {
    /// Whether they went past the client's link; an error if it was some of them.
    pub fn bypass(&self) -> Result<bool> {
        match self.packets {
            0..HANDSHAKES => Ok(true),
            packets if packets >= 2 * ROUNDS as u64 => Ok(false),
            packets => bail!("{packets} packets: neither the stack's way nor past it"),
        }
    }
}

pub fn round_trips(node: &Node, client: &Pod, server: &Pod) -> Result<RoundTrips> {
    let before = report(node, client)?.tx_packets;
    let mut p50_us = 0.0;
    for address in server.addresses() {
        let ends = Ends::apart(client.place(), server.place(), address)?;
        let measured = latency(ends, ROUNDS)?;
        p50_us = measured.percentile(50.0).as_secs_f64() * 1e6;
    }
    let packets = report(node, client)?.tx_packets - before;
    Ok(RoundTrips { packets, p50_us })
}

/// Why nothing is accelerated on this node, if so and for a good reason: the kernel lacks what it
/// takes, or the self-test saw order or back-pressure fail. That it could not be loaded or tried on
/// a kernel that has everything is none. A pod must have asked before.
fn refused(node: &Node) -> Result<Option<String>> {
    let status = node.status()?;
    let mode = status.modes.get("tcpAcceleration");
    let mode = mode.context("the agent says nothing of acceleration")?;
    let refused = status
        .tcp_self_test
        .filter(|report| report.verdict == Verdict::Refused);
    if mode.starts_with("on") && refused.is_none() {
        return Ok(None);
    }
    let seen = refused.as_ref().is_some_and(|report| report.tried);
    let reason = refused.map_or_else(|| mode.clone(), |report| report.reason);
    let numbered = node.netlink()?.netns_cookie()?.is_some();
    let described = Path::new("/sys/kernel/btf/vmlinux").exists();
    ensure!(
        seen || !numbered || !described,
        "this kernel has what acceleration takes, and yet: {reason}"
    );
    Ok(Some(reason))
}
