//! Start order, supervision, stop.
//!
//! Start: state directory → its lock → kernel settings → source of facts → lock of the pins →
//! self-test of the TCP acceleration → data path → records → queued deletes → garbage → facts,
//! node, overlay → socket → installation → telemetry → announcements. So the plugin finds a socket
//! only when every pod of before is live again, and is told "not ready" until the node knows its
//! ranges; the configuration is there, and the cluster is told that the node is ready, only then.
//!
//! Tasks run for ever; one that ends takes the agent down with what it said, and the data path
//! goes on without it. Stop: no new connections, requests under way finish, the socket goes;
//! links, programs and maps stay as they are, the pods keep their network.

use crate::{
    acceleration::{
        choice::{Mode, Policy},
        self_test::{self, Obtained},
    },
    announce::{self, Announcer, problems},
    api::{
        server::Server,
        status::{Core, NodeStatus, Telemetry},
    },
    apply::{
        OverlayStatus,
        overlay::{self, OverlayConfig},
    },
    chain::Chain,
    cluster_api::ClusterApi,
    config::{self, FactsFrom, Settings},
    datapath::{self, Datapath, DatapathConfig},
    endpoint::{Endpoints, Programs, release::Reaper},
    install::{self, InstallConfig},
    ipam::Allocator,
    node::{self, NodeState},
    prepare, state_lock,
    telemetry::{http, metrics::Metrics},
    watch::{Snapshot, kubernetes, nodes::OwnNode, nodes_file},
};
use anyhow::{Context as _, anyhow, bail};
use sinabro_common::{
    api::{SelfTestReport, Verdict},
    names,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::{JoinSet, spawn_blocking},
    time::{MissedTickBehavior, interval, sleep, timeout},
};

/// How often garbage is looked for.
const COLLECT: Duration = Duration::from_secs(60);
/// How often masquerade flows are looked over, and what the programs logged is passed on.
const SWEEP: Duration = Duration::from_secs(10);
/// How often the node's links are looked at although no fact changed.
const REFRESH: Duration = Duration::from_secs(30);
/// How soon after they could not be applied.
const RETRY: Duration = Duration::from_secs(2);

/// Runs the agent until it is told to stop.
///
/// # Errors
/// If it cannot start, or a part of it fails for good.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    let started = Instant::now();
    let settings = Arc::new(settings);
    let _lock = state_lock::lock(&settings.state_dir)?;
    let ports = match settings.masquerade {
        true => node::masquerade_ports(&settings)?,
        false => (0, 0),
    };
    let prepared = prepare::sysctls(&settings.uplinks)?;
    for change in &prepared.changes {
        tracing::info!("{change}");
    }
    for warning in &prepared.warnings {
        tracing::warn!("{warning}");
    }
    let mut tasks = JoinSet::new();
    let mut announcer = Announcer::default();
    let (source, own_node) = match &settings.facts_from {
        FactsFrom::NodesFile(path) => (nodes_file::spawn(path.clone()), None),
        FactsFrom::Kubernetes(access) => {
            let (api, name) = (ClusterApi::new(access).await?, &settings.node_name);
            let cache = settings.state_dir.join(names::NODES_FILE);
            let (source, own) = kubernetes::spawn(api.clone(), name.clone(), cache);
            let writer;
            (announcer, writer) = Announcer::start(&api, name.clone(), own.clone());
            tasks.spawn(ends("the writer of events", writer));
            (source, Some((api, own)))
        }
    };
    datapath::make_directory(&settings.bpf_dir).context("cannot load the data path")?;
    let _pins = state_lock::lock_pins(&settings.bpf_dir)?;
    let Restored {
        datapath,
        endpoints,
        self_test,
    } = {
        let settings = settings.clone();
        spawn_blocking(move || restore(&settings)).await??
    };

    let (stop, stopping) = watch::channel(false);
    let (facts, facts_from) = (source.updates.clone(), source.from);
    tasks.spawn(ends("the watch of the nodes", source.task));
    let (node_sender, node) = watch::channel(NodeStatus::default());
    let (overlay_sender, overlay) = watch::channel(OverlayStatus::default());
    tasks.spawn(follow_node(NodeTask {
        settings: settings.clone(),
        datapath: datapath.clone(),
        endpoints: endpoints.clone(),
        ports,
        facts: facts.clone(),
        node: node_sender,
        overlay: overlay_sender,
    }));
    tasks.spawn(every(COLLECT, {
        let endpoints = endpoints.clone();
        move || log_collected(&endpoints)
    }));
    tasks.spawn(every(SWEEP, {
        let datapath = datapath.clone();
        move || {
            sweep(&datapath);
            datapath.forward_logs();
        }
    }));

    let server = Server::bind(&settings.socket)
        .with_context(|| format!("cannot bind socket {}", settings.socket.display()))?;
    let install = InstallConfig::of(&settings).map(|config| {
        let (status, task) = install::spawn(config, node.clone());
        tasks.spawn(ends("the installation", task));
        status
    });
    let core = Arc::new(Core {
        settings: settings.clone(),
        reaper: Reaper::start(endpoints.clone()),
        endpoints,
        datapath,
        self_test,
        facts,
        facts_from,
        node,
        overlay,
        install,
        announcer,
        metrics: Arc::new(Metrics::default()),
        started,
    });
    log_start(&core);
    if let Some(address) = settings.metrics_address {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on metrics address {address}"))?;
        let provider = Arc::new(Telemetry(core.clone()));
        let (metrics, mut stopping) = (core.metrics.clone(), stopping.clone());
        tasks.spawn(async move {
            let stopped = async move {
                let _ = stopping.wait_for(|stop| *stop).await;
            };
            http::serve(listener, provider, metrics, stopped)
                .await
                .context("the metrics server failed")?;
            // It ends when told to; what ends unasked is an error.
            std::future::pending().await
        });
    }
    if let Some((api, own)) = own_node {
        tasks.spawn(announce(api, own, core.clone()));
    }
    let mut server = tokio::spawn(server.serve(core, stopping));

    let outcome = tokio::select! {
        signal = told_to_stop() => signal.map(|name| tracing::info!("stopping on {name}")),
        Some(ended) = tasks.join_next() => ended.context("a part of the agent failed").flatten(),
        ended = &mut server => match ended {
            Ok(Ok(())) => Err(anyhow!("the socket's server ended")),
            Ok(Err(error)) => Err(error).context("the socket failed"),
            Err(error) => Err(error).context("the socket's server failed"),
        },
    };
    stop.send_replace(true);
    if !server.is_finished() {
        // Its own deadline is shorter; this is for what cannot be waited for.
        let _ = timeout(Duration::from_secs(10), server).await;
    }
    outcome
}

/// Tells the cluster how this node is; begun when the socket is there.
async fn announce(
    api: ClusterApi,
    own: watch::Receiver<Option<OwnNode>>,
    core: Arc<Core>,
) -> anyhow::Result<()> {
    let name = core.settings.node_name.clone();
    let told = problems::tell(
        core.announcer.clone(),
        core.node.clone(),
        core.overlay.clone(),
        core.install.clone(),
    );
    tokio::select! {
        () = told => {}
        () = announce::node::keep(api, name, own, move || core.is_ready()) => {}
    }
    bail!("what tells the cluster how this node is ended")
}

struct Restored {
    datapath: Arc<Datapath>,
    endpoints: Arc<Endpoints>,
    /// None if nothing is to be accelerated.
    self_test: Option<SelfTestReport>,
}

/// Brings back what an earlier agent left, and clears away what is no pod's any more.
fn restore(settings: &Settings) -> anyhow::Result<Restored> {
    let wanted = settings.tcp_acceleration != Mode::Off;
    let self_test = wanted.then(|| self_test(settings));
    let verdict = self_test
        .as_ref()
        .map_or(Verdict::Refused, |report| report.verdict);
    let datapath = Datapath::load(&DatapathConfig {
        bpf_dir: settings.bpf_dir.clone(),
        cgroup: settings.cgroup_dir.clone(),
        acceleration: verdict != Verdict::Refused,
        attach: match settings.attach {
            config::AttachMode::Auto => datapath::AttachMode::Auto,
            config::AttachMode::Tcx => datapath::AttachMode::Tcx,
            config::AttachMode::Clsact => datapath::AttachMode::Clsact,
        },
        nat_entries: None,
    })
    .context("cannot load the data path")?;
    let datapath = Arc::new(datapath);
    let ipam = Allocator::open(&settings.state_dir).context("cannot read the leases")?;
    let programs = Arc::new(Programs {
        datapath: datapath.clone(),
        acceleration: Policy {
            mode: settings.tcp_acceleration,
            verdict,
            loopback: settings.tcp_acceleration_loopback,
        },
    });
    let endpoints = Endpoints::open(&settings.state_dir, ipam, programs)
        .context("cannot open the endpoint records")?;
    let restored = endpoints
        .restore()
        .context("cannot restore the endpoints")?;
    tracing::info!(?restored, "endpoints restored");
    let endpoints = Arc::new(endpoints);
    log_collected(&endpoints);
    // An address must not be given again with the flows of its last pod.
    sweep(&datapath);
    Ok(Restored {
        datapath,
        endpoints,
        self_test,
    })
}

/// What acceleration changes for applications on this kernel.
fn self_test(settings: &Settings) -> SelfTestReport {
    let (state_dir, bpf_dir) = (&settings.state_dir, &settings.bpf_dir);
    let cgroup = settings.cgroup_dir.as_deref();
    let Obtained {
        report, problem, ..
    } = self_test::obtain(state_dir, bpf_dir, cgroup);
    if let Some(error) = problem {
        tracing::warn!("{}", Chain(&error));
    }
    match report.verdict {
        Verdict::Refused => tracing::warn!("no tcp acceleration: {}", report.reason),
        Verdict::AllPass | Verdict::SomeFail => {
            tracing::info!("self-test of the tcp acceleration: {}", report.reason);
        }
    }
    report
}

fn sweep(datapath: &Datapath) {
    if let Err(error) = datapath.sweep(datapath::monotonic_ns()) {
        tracing::warn!("cannot sweep masquerade flows: {}", Chain(&error));
    }
}

fn log_collected(endpoints: &Endpoints) {
    let collected = endpoints.collect();
    for owner in &collected.deletes {
        tracing::info!("carried out the queued delete of {owner}");
    }
    for owner in &collected.endpoints {
        tracing::info!("freed {owner}, its link is gone");
    }
    for owner in &collected.leases {
        tracing::info!("freed the addresses of {owner}, whose ADD was not finished");
    }
    for link in &collected.links {
        tracing::info!("deleted {link}, which belongs to no pod");
    }
}

/// What the task that follows the node needs.
struct NodeTask {
    settings: Arc<Settings>,
    datapath: Arc<Datapath>,
    endpoints: Arc<Endpoints>,
    ports: (u16, u16),
    facts: watch::Receiver<Snapshot>,
    node: watch::Sender<NodeStatus>,
    overlay: watch::Sender<OverlayStatus>,
}

/// Applies what facts and links say about this node, and runs the overlay over its uplink.
async fn follow_node(mut task: NodeTask) -> anyhow::Result<()> {
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
    async move {
        let overlay = overlay::spawn(config, facts, routes);
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

/// A task that should never end.
async fn ends(what: &'static str, task: tokio::task::JoinHandle<()>) -> anyhow::Result<()> {
    task.await.with_context(|| format!("{what} failed"))?;
    bail!("{what} ended")
}

/// Does blocking work again and again.
async fn every(period: Duration, work: impl Fn() + Clone + Send + 'static) -> anyhow::Result<()> {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once, and was done before serving.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        spawn_blocking(work.clone())
            .await
            .context("periodic work failed")?;
    }
}

async fn told_to_stop() -> anyhow::Result<&'static str> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    })
}

fn log_start(core: &Core) {
    let s = &core.settings;
    let modes = core.datapath.modes();
    let modes: Vec<_> = modes.iter().map(|(k, v)| format!("{k}={v}")).collect();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        node = s.node_name,
        nodes = core.facts_from,
        state_dir = %s.state_dir.display(),
        socket = %s.socket.display(),
        bpf_dir = %s.bpf_dir.display(),
        vxlan_port = s.vxlan_port,
        vni = s.vxlan_vni,
        masquerade = s.masquerade,
        tcp_acceleration = %s.tcp_acceleration,
        metrics = ?s.metrics_address,
        modes = modes.join(" "),
        endpoints = core.endpoints.count(),
        "agent started"
    );
}
