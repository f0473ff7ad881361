//! The task that keeps the data path as facts and links say about this node, and runs the overlay
//! over the node's uplink.

use crate::{
    apply::{self, OverlayConfig, OverlayStatus, kernel_events::KernelEvents},
    chain::Chain,
    config::Settings,
    datapath::{Datapath, Mtus, PortsOf},
    endpoint::Endpoints,
    node::{NodeState, NodeStatus, Uplink, is_of_link},
    plan::{OverlayMode, Reached},
    prepare,
    watch::{Snapshot, masquerade_file},
};
use anyhow::{Context as _, bail};
use sinabro_common::{abi::uplink as abi, names};
use sinabro_netlink::Event;
use std::{future::pending, sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    task::{JoinSet, spawn_blocking},
    time::sleep,
};

/// How often the node's links are looked at although no fact changed.
const REFRESH: Duration = Duration::from_secs(30);
/// Events come in groups.
const SETTLE: Duration = Duration::from_millis(50);
/// How soon after they could not be applied.
const RETRY: Duration = Duration::from_secs(2);

/// What the task that follows the node needs.
pub(super) struct NodeTask {
    pub(super) settings: Arc<Settings>,
    pub(super) datapath: Arc<Datapath>,
    pub(super) endpoints: Arc<Endpoints>,
    pub(super) ports: (u16, u16),
    pub(super) facts: watch::Receiver<Snapshot>,
    pub(super) masquerade: masquerade_file::Updates,
    /// To whom packets get without a tunnel.
    pub(super) reached: watch::Receiver<Reached>,
    pub(super) node: watch::Sender<NodeStatus>,
    pub(super) overlay: watch::Sender<OverlayStatus>,
}

const MASQUERADE_ENDED: &str = "what follows the file of what is not masqueraded ended";

impl NodeTask {
    /// The settings, with what is not masqueraded as the file says it now.
    fn settings_now(&mut self) -> Settings {
        let mut settings = Settings::clone(&self.settings);
        if let Some(said) = &*self.masquerade.borrow_and_update() {
            settings.masquerading = settings.masquerading.with(&said.overrides);
        }
        settings
    }
}

/// Applies what facts and links say about this node, and runs the overlay over its uplink.
pub(super) async fn follow_node(mut task: NodeTask) -> anyhow::Result<()> {
    let mut overlay: Option<(String, tokio::task::AbortHandle)> = None;
    let mut overlays = JoinSet::new();
    let uplinks = watch::Sender::new(Vec::new());
    // Without them a replaced uplink is noticed by the next look.
    let mut events = KernelEvents::open(None);
    // What is not to be translated is known before anything is.
    let looked = task.masquerade.wait_for(Option::is_some).await;
    looked.context(MASQUERADE_ENDED)?;
    loop {
        let facts = task.facts.borrow_and_update().facts.clone();
        let mut wait = REFRESH;
        if let Some(facts) = facts {
            let before = task.node.borrow().state.clone();
            let (settings, datapath) = (task.settings_now(), task.datapath.clone());
            let (endpoints, ports) = (task.endpoints.clone(), task.ports);
            let applied = spawn_blocking(move || -> anyhow::Result<Arc<NodeState>> {
                let state = NodeState::find(&settings, &facts)?;
                if before.as_deref() == Some(&state) {
                    // Attached again if somebody took the programs off.
                    datapath.set_uplinks(&records(&state))?;
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
                    uplinks.send_if_modified(|known| {
                        let before = std::mem::replace(known, indexes(&state));
                        before != *known
                    });
                    let uplink = &state.uplinks[0].name;
                    if overlay.as_ref().is_none_or(|(name, _)| name != uplink) {
                        if let Some((_, running)) = overlay.take() {
                            running.abort();
                        }
                        let running =
                            overlays.spawn(run_overlay(&task, uplink, uplinks.subscribe()));
                        overlay = Some((uplink.clone(), running));
                    }
                    task.node.send_replace(NodeStatus {
                        state: Some(state),
                        problem: None,
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
            changed = task.masquerade.changed() => changed.context(MASQUERADE_ENDED)?,
            () = sleep(wait) => {}
            () = ways_out_change(&mut events, &task.node) => {}
            Some(ended) = overlays.join_next() => match ended {
                Err(error) if error.is_cancelled() => {}
                Err(error) => return Err(error).context("the overlay failed"),
                Ok(()) => bail!("the overlay ended"),
            },
        }
    }
}

/// Waits until the kernel says something of what leads out of this node. What happens to pods and
/// to the overlay is not looked at: there is much of it, and it changes nothing here.
async fn ways_out_change(events: &mut Option<KernelEvents>, node: &watch::Sender<NodeStatus>) {
    loop {
        let Some(open) = events else {
            return pending().await;
        };
        open.readable().await;
        let read = match open.read() {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!("lost the kernel's events, looking again: {}", Chain(&error));
                *events = KernelEvents::open(None);
                return;
            }
        };
        let state = node.borrow().state.clone();
        let uplinks = state.as_deref().map(indexes).unwrap_or_default();
        if read.iter().any(|event| leads_out(event, &uplinks)) {
            // The rest of the group.
            sleep(SETTLE).await;
            let _ = open.read();
            return;
        }
    }
}

fn leads_out(event: &Event, uplinks: &[u32]) -> bool {
    match event {
        Event::Link { name, index, .. } => {
            uplinks.contains(index)
                || !(name.starts_with(names::POD_LINK_PREFIX) || name == names::VXLAN_LINK)
        }
        // Those of the loopback device are sources, too, and a Service's cluster address may be a link's.
        Event::Addr { link, address, .. } => uplinks.contains(link) || !is_of_link(address),
        Event::Route { route, .. } => {
            let ours = route.protocol == names::ROUTE_PROTOCOL;
            let kernels = route.protocol == libc::RTPROT_KERNEL;
            !ours && (!kernels || route.oif.is_some_and(|oif| uplinks.contains(&oif)))
        }
        Event::Neigh { .. } | Event::Fdb { .. } => false,
        _ => true,
    }
}

fn indexes(state: &NodeState) -> Vec<u32> {
    state.uplinks.iter().map(|uplink| uplink.index).collect()
}

/// What programs can be on, and what they need to know of it.
fn records(state: &NodeState) -> Vec<(u32, abi::Uplink)> {
    let record = |uplink: &Uplink| Some((uplink.index, uplink.record()?));
    state.uplinks.iter().filter_map(record).collect()
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
    if state.pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6()) {
        // What it may not write, `prepare` has written.
        match prepare::pod_links() {
            Ok(prepared) => prepared
                .changes
                .iter()
                .for_each(|change| tracing::info!("{change}")),
            Err(error) => tracing::warn!("{}", Chain(&error)),
        }
    }
    endpoints.ipam.set_ranges(&state.pod_cidrs)?;
    // What is not to be translated is known before anything is.
    datapath
        .set_non_masquerade(&state.non_masquerade)
        .context("cannot set the destinations that are not masqueraded")?;
    datapath
        .set_host_ports(PortsOf::Node, state.host_ports.clone())
        .context("cannot keep connections off the node's ports")?;
    datapath
        .set_node_config(state.config(ports))
        .context("cannot set the data path's settings")?;
    datapath
        .set_mtus(Mtus {
            tunnels: state.tunnel_mtu,
            uplinks: state.mtu,
        })
        .context("cannot set the MTU of the ways out")?;
    datapath
        .set_uplinks(&records(state))
        .context("cannot attach to the uplink")?;
    Ok(())
}

fn log_node(state: &NodeState) {
    tracing::info!(
        uplinks = ?state.uplinks.iter().map(|u| &u.name).collect::<Vec<_>>(),
        mtu = state.mtu,
        tunnel_mtu = state.tunnel_mtu,
        pod_cidrs = ?state.pod_cidrs,
        masquerade = ?state.uplinks.iter().flat_map(Uplink::sources).collect::<Vec<_>>(),
        "node ready"
    );
}

/// Runs the overlay over one uplink, and passes its status on.
fn run_overlay(
    task: &NodeTask,
    uplink: &str,
    uplinks: watch::Receiver<Vec<u32>>,
) -> impl Future<Output = ()> + Send + use<> {
    let config = OverlayConfig {
        node: task.settings.node_name.clone(),
        device: names::VXLAN_LINK.into(),
        vni: task.settings.vxlan_vni,
        port: task.settings.vxlan_port,
        uplink: uplink.to_owned(),
        mtu: task.settings.mtu,
        direct: task.settings.overlay == OverlayMode::Auto,
        cni_conf_dir: task.settings.cni_conf_dir.clone(),
        routing: task.settings.routing,
        period: apply::PERIOD,
    };
    let (facts, routes) = (task.facts.clone(), task.endpoints.routes());
    let sender = task.overlay.clone();
    let (datapath, reached) = (task.datapath.clone(), task.reached.clone());
    async move {
        let overlay = apply::spawn(config, datapath, facts, routes, reached, uplinks);
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
