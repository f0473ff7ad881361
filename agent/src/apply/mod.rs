//! Makes the kernel match the plan.
//!
//! - [`reconcile`]: the difference between a desired and an actual table, and backoff; pure;
//! - [`links`], [`addresses`], [`routes`], [`neighbours`], [`fdb`]: one kernel table each;
//! - [`next_hops`]: ways to other nodes past the stack, in a map; [`ways`]: what is said about them;
//! - [`forwarding`]: whether what leaves the cluster goes past netfilter;
//! - [`pods`]: host routes and neighbours of this node's pods;
//! - [`pass`]: one pass over all of them, in an order that keeps traffic flowing;
//! - [`overlay`]: when to make a pass: when the facts change, when the kernel's tables change,
//!   every 30 seconds, and again with backoff after a failure;
//! - [`services`]: what Services lead to, in the maps;
//! - [`kernel_events`], [`report`]: what the kernel says has changed; what is said about a pass.
//!
//! Only what Sinabro made is ever removed: entries of its own VXLAN device, and routes of its
//! own protocol on that device. Nothing is flushed.

pub mod addresses;
pub mod beside_proxy;
pub mod fdb;
pub mod forwarding;
pub mod kernel_events;
pub mod links;
pub mod neighbours;
pub mod next_hops;
pub mod overlay;
pub mod pass;
pub mod pods;
pub mod reconcile;
pub mod report;
pub mod routes;
pub mod services;
pub mod ways;

pub use overlay::{Overlay, PERIOD, spawn, spawn_in};
pub use pods::PodRoute;

use crate::plan::Routing;
use sinabro_common::api::NodeReport;
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};
use ways::Ways;

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
    /// Whether packets between pods of two nodes may go past the stack.
    pub direct: bool,
    /// Where plugins may be chained that have a say in that.
    pub cni_conf_dir: PathBuf,
    pub routing: Routing,
    /// How often a full pass is made whatever happens; [`PERIOD`] but for tests, which are to see
    /// what the kernel's events cause.
    pub period: Duration,
}

/// How applying goes; published after every pass.
#[derive(Clone, Debug, Default)]
pub struct OverlayStatus {
    /// Every known node by name, with its problem if it has one. Shared: there may be thousands.
    pub nodes: Arc<Vec<NodeReport>>,
    /// By which way they are reached, as of the last look.
    pub ways: Arc<Ways>,
    /// Whether the VXLAN device takes UDP over IPv6 without a checksum, as of the last pass that found it.
    pub takes_zero_checksum: bool,
    /// What is wrong with the node's own part; empty when it is as it should be. A faulty peer
    /// is in `nodes` alone: it must not make this node unready.
    pub problems: Vec<String>,
    /// When everything was last as it should be, peers included.
    pub last_success: Option<SystemTime>,
    pub runs: u64,
    /// Runs that left something undone.
    pub failures: u64,
    pub time_spent: Duration,
}

impl OverlayStatus {
    /// Whether a pass was made and the node's own part is as it should be.
    pub fn ok(&self) -> bool {
        self.runs > 0 && self.problems.is_empty()
    }
}
