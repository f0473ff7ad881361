//! What is said about the overlay after a pass: each node's problem, the node's own problems.
//!
//! Everything here is about all nodes, so it is made when a pass looked at the overlay, never for
//! an event of a pod; and it is linear in their number but for a logarithm.

use super::{OverlayStatus, pass::Fault};
use crate::{
    plan::{OverlayPlan, overlay::node_reports},
    watch::Snapshot,
};
use sinabro_common::api::NodeReport;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};
use tracing::{info, warn};

/// What a pass over the overlay found.
#[derive(Clone, Debug, Default)]
pub struct OverlayReport {
    /// By name.
    pub nodes: Arc<Vec<NodeReport>>,
    pub problems: Vec<String>,
}

impl OverlayReport {
    pub fn new(
        own: &str,
        snapshot: &Snapshot,
        plan: Option<&OverlayPlan>,
        faults: &[Fault],
    ) -> Self {
        let mut nodes = match &snapshot.facts {
            Some(facts) => node_reports(facts, own, plan),
            None => Vec::new(),
        };
        let mut problems = Vec::new();
        if snapshot.facts.is_none() {
            let why = snapshot.problem.as_deref().unwrap_or("none read yet");
            problems.push(format!("no facts about the cluster: {why}"));
        }
        let names = match (faults, plan) {
            ([], _) | (_, None) => BTreeMap::new(),
            (_, Some(plan)) => names(plan),
        };
        for fault in faults {
            let tunnel = plan.and_then(|plan| fault.tunnel(plan));
            let name = tunnel.and_then(|tunnel| names.get(&tunnel));
            let place = name.and_then(|name| {
                nodes
                    .binary_search_by(|node| node.name.as_str().cmp(name))
                    .ok()
            });
            match place {
                Some(place) => add_problem(&mut nodes[place], &fault.text),
                None => problems.push(fault.text.clone()),
            }
        }
        Self {
            nodes: Arc::new(nodes),
            problems,
        }
    }
}

/// The peers by their tunnel address.
fn names(plan: &OverlayPlan) -> BTreeMap<IpAddr, &str> {
    let peers = plan.peers.iter();
    peers
        .filter_map(|(name, peer)| Some((peer.tunnel?, name.as_str())))
        .collect()
}

fn add_problem(node: &mut NodeReport, text: &str) {
    let problem = node.problem.get_or_insert_default();
    if !problem.is_empty() {
        problem.push_str("; ");
    }
    problem.push_str(text);
}

/// Says once which nodes' problems are new since the last pass, and which are over.
pub fn log_nodes(before: &[NodeReport], now: &[NodeReport]) {
    let mut old: BTreeMap<&str, &str> = problems_of(before).collect();
    for (name, problem) in problems_of(now) {
        if old.remove(name) != Some(problem) {
            warn!(node = name, "peer: {problem}");
        }
    }
    if old.is_empty() {
        return;
    }
    let known: BTreeSet<_> = now.iter().map(|node| node.name.as_str()).collect();
    for name in old.keys().filter(|name| known.contains(*name)) {
        info!(node = name, "peer is well again");
    }
}

fn problems_of(nodes: &[NodeReport]) -> impl Iterator<Item = (&str, &str)> {
    nodes
        .iter()
        .filter_map(|node| Some((node.name.as_str(), node.problem.as_deref()?)))
}

/// Says once what is new of the node's own problems.
pub fn log_own(before: &OverlayStatus, problems: &[String]) {
    let old: BTreeSet<_> = before.problems.iter().collect();
    for problem in problems.iter().filter(|p| !old.contains(p)) {
        warn!("overlay: {problem}");
    }
    if problems.is_empty() && !before.problems.is_empty() {
        info!("overlay is well again");
    }
}
