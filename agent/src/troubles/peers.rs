//! Nodes that do not answer through their tunnels, or not to large packets.
//!
//! One trouble of each kind, whatever the number of peers, and its text changes only with the
//! first few of them: each text is an Event of its own. A peer that its cluster calls NotReady is
//! not named, and another only after the time in which the cluster would have noticed: a node that
//! is started again is not worth an Event by each of the others. `sinabroctl nodes` and the metrics
//! have it at once.

use super::trouble;
use crate::probe::{
    Probe, State,
    table::{Name, Peer},
};
use sinabro_common::api::Trouble;
use std::time::{Duration, Instant};

/// More than kube-controller-manager takes to notice that a node is gone
/// (--node-monitor-grace-period: 40 seconds, 50 from Kubernetes 1.32 on).
const GRACE: Duration = Duration::from_secs(60);
/// Peers named in one text.
const NAMED: usize = 5;
/// If so many of a hundred peers that were last heard of, or not, are silent, it is this node.
const MOST: usize = 80;

/// What peers' answers, and their silence, say.
pub fn find(probe: &Probe, port: u16) -> Vec<Trouble> {
    let (state, now) = (probe.state(), Instant::now());
    if state.problem.is_some() {
        return Vec::new();
    }
    let silent = silent(&state, now);
    let mut found = Vec::new();
    if !silent.is_empty() {
        found.push(match is_alone(&state, now) {
            true => alone(port),
            false => of_silent(&silent, port),
        });
        if let Some(refusal) = &state.refusal {
            let text = format!(
                "this node's kernel refuses to send into the tunnels: {refusal}: look for a rule that drops what this node sends (`nft list ruleset`)"
            );
            found.push(trouble("OverlaySilent", text));
        }
    }
    found.extend(of_narrow(&state));
    found
}

/// Whether a peer's silence is to be named.
fn is_named(peer: &Peer, now: Instant) -> bool {
    let Some(since) = peer.silent_since else {
        return false;
    };
    match peer.target.ready {
        None => true,
        Some(false) => false,
        Some(true) => now.saturating_duration_since(since.max(peer.ready_since)) >= GRACE,
    }
}

/// The silent peers to be named, those first that are silent for longest.
fn silent(state: &State, now: Instant) -> Vec<(&Name, &Peer)> {
    let peers = state.table.peers();
    let mut silent: Vec<_> = peers.filter(|(_, peer)| is_named(peer, now)).collect();
    silent.sort_by_key(|(name, peer)| (peer.silent_since, *name));
    silent
}

/// Whether it is this node that nobody answers.
fn is_alone(state: &State, now: Instant) -> bool {
    let is_up = |peer: &&Peer| peer.target.ready != Some(false);
    let up = state.table.peers().filter(|(_, peer)| is_up(peer)).count();
    let verdicts = state.table.verdicts.iter();
    let heard: Vec<bool> = verdicts
        .filter_map(|(name, answers)| {
            let peer = state.table.peer(name).filter(is_up)?;
            Some(!answers && is_named(peer, now))
        })
        .collect();
    let silent = heard.iter().filter(|silent| **silent).count();
    up >= 2
        && heard.len() >= up.min(crate::probe::table::Verdicts::KEPT)
        && silent * 100 >= heard.len() * MOST
}

fn alone(port: u16) -> Trouble {
    trouble(
        "OverlaySilent",
        format!(
            "no answer through the tunnels from any other node: let UDP port {port} pass between this node's address and theirs, both ways (firewall, security group); `tcpdump -ni any udp port {port}` here shows what leaves and what comes"
        ),
    )
}

fn of_silent(silent: &[(&Name, &Peer)], port: u16) -> Trouble {
    let names = names(silent);
    trouble(
        "PeerSilent",
        format!(
            "no answer through the tunnel from {names}: let UDP port {port} pass between these nodes' addresses, both ways, and ICMP echo requests from pod ranges into them; `tcpdump -ni any udp port {port}` on both shows where it ends; all of them: `sinabroctl nodes`"
        ),
    )
}

fn of_narrow(state: &State) -> Option<Trouble> {
    let peers = state.table.peers();
    let narrow: Vec<_> = peers.filter(|(_, peer)| peer.path.is_narrow()).collect();
    if narrow.is_empty() {
        return None;
    }
    let (mtu, names) = (state.table.mtu(), names(&narrow));
    let largest = narrow.iter().filter_map(|(_, p)| p.path.largest()).min();
    let (found, value) = match largest {
        Some(largest) => (
            format!(", those of {largest} are not"),
            format!("`mtu: {largest}`"),
        ),
        None => (String::new(), "a smaller `mtu`".into()),
    };
    Some(trouble(
        "PeerPathMtu",
        format!(
            "packets of {mtu} bytes, the overlay's MTU, are lost on the way to {names} or back{found}: a link between the nodes takes less than this node's uplink; set {value} on all nodes and start their pods again, or correct the link"
        ),
    ))
}

fn names(peers: &[(&Name, &Peer)]) -> String {
    let named = peers.iter().take(NAMED);
    let named: Vec<_> = named
        .map(|(name, peer)| format!("{name} ({})", peer.target.tunnel))
        .collect();
    // Not how many: that changes from second to second.
    let more = match peers.len() > NAMED {
        true => " and others",
        false => "",
    };
    format!("{}{more}", named.join(", "))
}
