//! By which way packets between nodes go: as the agents say it, and as is counted.

use anyhow::{Context as _, Result, bail, ensure};
use sinabro_common::api::{PathCounts, PathPackets, Request, Response};
use sinabro_lab::{Node, checks::Scene, kernel, traffic::tcp};
use std::net::IpAddr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Direct,
    Native,
    Kernel,
}

/// What has to be said, and counted.
pub struct Expected<'a> {
    /// Mode `overlay`.
    pub mode: &'a str,
    pub sent: Way,
    /// By whether the packet in the tunnel is of the same IP version as what it is in.
    pub received: fn(bool) -> Way,
}

impl Expected<'static> {
    /// Of links with an Ethernet header, by what is said of kernels (docs/overlay.md).
    pub fn by_kernel() -> Result<Self> {
        let wraps = kernel::wraps()?;
        Ok(Self {
            mode: match wraps {
                true => "direct",
                false => "kernel: this node's Linux is older than 5.13",
            },
            sent: if wraps { Way::Direct } else { Way::Kernel },
            // What is of another version than the tunnel's headers the kernel alone takes out of them before that.
            received: match kernel::unwraps_others()? {
                true => |_| Way::Direct,
                false => |is_alike| if is_alike { Way::Direct } else { Way::Kernel },
            },
        })
    }
}

impl Expected<'_> {
    pub fn holds(&self, scene: &Scene) -> Result<String> {
        for node in scene.lab().nodes() {
            let status = node.status()?;
            let mode = status.modes.get("overlay").context("no mode overlay")?;
            ensure!(mode == self.mode, "{}: {mode}", node.name());
        }
        let outer = scene.node(2).addresses()[0];
        for address in scene.pod(2, 1).addresses() {
            let is_alike = address.is_ipv4() == outer.is_ipv4();
            self.is_counted(scene, address, (self.received)(is_alike))?;
        }
        Ok(self.mode.into())
    }

    fn is_counted(&self, scene: &Scene, address: IpAddr, received: Way) -> Result<()> {
        let (near, far) = (scene.pod(1, 1), scene.pod(2, 1));
        let (before, took_before) = (counts(scene.node(1))?, counts(scene.node(2))?);
        tcp::transfer(near.place(), far.place(), address, 1 << 20)?;
        let (after, took) = (counts(scene.node(1))?, counts(scene.node(2))?);
        let sent = |packets: PathPackets| packets.sent;
        let taken = |packets: PathPackets| packets.received;
        for (what, way, expected) in [
            ("sent", most(before, after, sent), self.sent),
            ("received", most(took_before, took, taken), received),
        ] {
            let (way, packets) = way;
            ensure!(
                way == expected,
                "to {address}: most packets were {what} by the way {way:?}, not {expected:?}: {packets:?}"
            );
        }
        Ok(())
    }
}

/// By which way most packets went, and how many by each.
fn most(
    before: PathCounts,
    after: PathCounts,
    of: fn(PathPackets) -> u64,
) -> (Way, [(u64, Way); 3]) {
    let packets = [
        (of(after.direct) - of(before.direct), Way::Direct),
        (of(after.native) - of(before.native), Way::Native),
        (of(after.kernel) - of(before.kernel), Way::Kernel),
    ];
    let most = packets.iter().max_by_key(|(count, _)| *count);
    (most.map_or(Way::Kernel, |(_, way)| *way), packets)
}

/// Packets between a node and all others.
pub fn counts(node: &Node) -> Result<PathCounts> {
    match node.ask(Request::Metrics)? {
        Response::Metrics(metrics) => metrics.overlay_packets.context("no packets are counted"),
        _ => bail!("unexpected answer about the agent's metrics"),
    }
}
