//! Makes the kernel match the plan.
//!
//! Runs on every change of the facts, on every change of the kernel's own tables, and every 30
//! seconds; retries with backoff. Only what Sinabro made is ever removed.

pub mod overlay;

use sinabro_common::api::{Mac, NodeReport};
use std::{
    net::IpAddr,
    time::{Duration, SystemTime},
};

/// What the host must hold for one active endpoint: a host route and a permanent neighbour per
/// address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRoute {
    pub addresses: Vec<IpAddr>,
    /// Host-side link.
    pub ifindex: u32,
    /// The pod's MAC address.
    pub mac: Mac,
}

/// How applying goes; published after every run.
#[derive(Clone, Debug, Default)]
pub struct OverlayStatus {
    /// Every known node, with its problem if it has one.
    pub nodes: Vec<NodeReport>,
    /// What stands between the kernel and the plan; empty when they match.
    pub problems: Vec<String>,
    pub last_success: Option<SystemTime>,
    pub runs: u64,
    pub failures: u64,
    pub time_spent: Duration,
}

impl OverlayStatus {
    /// Whether the last run left the kernel as the plan wants it.
    pub fn ok(&self) -> bool {
        self.last_success.is_some() && self.problems.is_empty()
    }
}
