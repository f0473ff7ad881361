//! The task that keeps the data path as facts and links say about this node, and runs the overlay
//! over the node's uplink.

use crate::{
    apply::{self, OverlayConfig, OverlayStatus},
    chain::Chain,
    config::Settings,
    datapath::Datapath,
    endpoint::Endpoints,
    node::{NodeState, NodeStatus},
    prepare::{self, Families},
    watch::Snapshot,
};
use anyhow::{Context as _, bail};
use sinabro_common::names;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    task::{JoinSet, spawn_blocking},
    time::sleep,
};

/// How often the node's links are looked at although no fact changed.
const REFRESH: Duration = Duration::from_secs(30);
/// How soon after they could not be applied.
const RETRY: Duration = Duration::from_secs(2);

/// What the task that follows the node needs.
pub(super) struct NodeTask {
    pub(super) settings: Arc<Settings>,
    pub(super) datapath: Arc<Datapath>,
    pub(super) endpoints: Arc<Endpoints>,
    pub(super) ports: (u16, u16),
    pub(super) facts: watch::Receiver<Snapshot>,
    pub(super) node: watch::Sender<NodeStatus>,
    pub(super) overlay: watch::Sender<OverlayStatus>,
}

/// Applies what facts and links say about this node, and runs the overlay over its uplink.
pub(super) async fn follow_node(mut task: NodeTask) -> anyhow::Result<()> {
    let mut overlay: Option<(String, tokio::task::AbortHandle)> = None;
    let mut overlays = JoinSet::new();
    loop {
        let facts = task.facts.borrow_and_update().facts.clone();
        let mut wait = REFRESH;
        if let Some(facts) = facts {
            let before = task.node.borrow().state.clone();
            let (settings, datapath) = (task.settings.clone(), task.datapath.clone());
            let (endpoints, ports) = (task.endpoints.clone(), task.ports);
            let applied = spawn_blocking(move || -> anyhow::Result<Arc<NodeState>> {
                let state = NodeState::find(&settings, &facts)?;
                if before.as_deref() == Some(&state) {
                    // Attached again if somebody took the programs off.
                    datapath.set_uplinks(&indexes(&state))?;
                    return Ok(Arc::new(state));
                }
                apply_node(&datapath, &endpoints, ports, &state)?;
                // Peers come and go without a word from here.
                if !before.is_some_and(|before| before.same_but_for_peers(&state)) {
                    log_node(&state);
                }
                Ok(Arc::new(state))
            });
            match applied.await.context("applying the node's state failed")? {
                Ok(state) => {
                    let uplink = &state.uplinks[0].name;
                    if overlay.as_ref().is_none_or(|(name, _)| name != uplink) {
                        if let Some((_, running)) = overlay.take() {
                            running.abort();
                        }
                        let running = overlays.spawn(run_overlay(&task, uplink));
                        overlay = Some((uplink.clone(), running));
                    }
                    let problem = match state.warnings.is_empty() {
                        true => None,
                        false => Some(state.warnings.join("; ")),
                    };
                    task.node.send_replace(NodeStatus {
                        state: Some(state),
                        problem,
                    });
                }
                Err(error) => {
                    wait = RETRY;
                    let text = format!("{error:#}");
                    let known = task.node.borrow().problem.as_ref() == Some(&text);
                    if !known {
                        tracing::error!("{text}");
                        // What was applied stays: pods keep what they have.
                        task.node.send_modify(|node| node.problem = Some(text));
                    }
                }
            }
        }
        tokio::select! {
            changed = task.facts.changed() => changed.context("the source of facts ended")?,
            () = sleep(wait) => {}
            Some(ended) = overlays.join_next() => match ended {
                Err(error) if error.is_cancelled() => {}
                Err(error) => return Err(error).context("the overlay failed"),
                Ok(()) => bail!("the overlay ended"),
            },
        }
    }
}

fn indexes(state: &NodeState) -> Vec<u32> {
    state.uplinks.iter().map(|uplink| uplink.index).collect()
}

fn apply_node(
    datapath: &Datapath,
    endpoints: &Endpoints,
    ports: (u16, u16),
    state: &NodeState,
) -> anyhow::Result<()> {
    for uplink in &state.uplinks {
        // Only for those who wait for router advertisements: no reason to serve no pod.
        match prepare::accept_ra(&uplink.name) {
            Ok(Some(change)) => tracing::info!("{change}"),
            Ok(None) => {}
            Err(error) => tracing::warn!("{}", Chain(&error)),
        }
    }
    // Turned on where it may be; elsewhere `prepare` has done it.
    let uplinks: Vec<_> = state.uplinks.iter().map(|u| u.name.clone()).collect();
    match prepare::sysctls(&uplinks, Families::of(&state.pod_cidrs)) {
        Ok(prepared) => {
            for change in &prepared.changes {
                tracing::info!("{change}");
            }
        }
        Err(error) => tracing::warn!("{}", Chain(&error)),
    }
    let outside = endpoints.ipam.set_ranges(&state.pod_cidrs)?;
    if !outside.is_empty() {
        tracing::warn!(
            ?outside,
            "addresses outside this node's pod ranges stay in use until their pods are deleted"
        );
    }
    // What is not to be translated is known before anything is.
    datapath
        .set_non_masquerade(&state.non_masquerade)
        .context("cannot set the destinations that are not masqueraded")?;
    datapath
        .set_node_config(state.config(ports))
        .context("cannot set the data path's settings")?;
    datapath
        .set_uplinks(&indexes(state))
        .context("cannot attach to the uplink")?;
    Ok(())
}

fn log_node(state: &NodeState) {
    for warning in &state.warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!(
        uplinks = ?state.uplinks.iter().map(|u| &u.name).collect::<Vec<_>>(),
        mtu = state.mtu,
        pod_cidrs = ?state.pod_cidrs,
        masquerade = ?state.masquerade_v4,
        "node ready"
    );
}

/// Runs the overlay over one uplink, and passes its status on.
fn run_overlay(task: &NodeTask, uplink: &str) -> impl Future<Output = ()> + Send + use<> {
    let config = OverlayConfig {
        node: task.settings.node_name.clone(),
        device: names::VXLAN_LINK.into(),
        vni: task.settings.vxlan_vni,
        port: task.settings.vxlan_port,
        uplink: uplink.to_owned(),
        mtu: task.settings.mtu,
    };
    let (facts, routes) = (task.facts.clone(), task.endpoints.routes());
    let sender = task.overlay.clone();
    let datapath = task.datapath.clone();
    async move {
        let overlay = apply::spawn(config, datapath, facts, routes);
        let mut status = overlay.status;
        let mut running = AbortOnDrop(overlay.task);
        loop {
            tokio::select! {
                _ = &mut running.0 => return,
                changed = status.changed() => match changed {
                    Ok(()) => {
                        sender.send_replace(status.borrow_and_update().clone());
                    }
                    // It is ending.
                    Err(_) => {
                        let _ = (&mut running.0).await;
                        return;
                    }
                },
            }
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
