//! Start order, supervision, stop.
//!
//! Start: state directory → its lock → kernel settings → source of facts → lock of the pins →
//! data path → records → queued deletes → garbage → facts, node, overlay → socket → installation →
//! telemetry → announcements. So the plugin finds a socket
//! only when every pod of before is live again, and is answered "not ready" until the node knows its
//! ranges; the configuration is there, and the cluster hears that the node is ready, only then.
//!
//! Tasks run for ever; one that ends takes the agent down with what it said, and the data path
//! goes on without it. Stop: no new connections, requests under way finish, the socket goes;
//! links, programs and maps stay as they are, the pods keep their network.

mod attached;
mod follow_node;
mod forwarding;
mod handover;
mod periodic;
mod restore;
mod service_room;
pub mod services;
mod sweeps;
mod switches;

use crate::{
    announce::{self, Announcer, annotations::Takes, floods::Floods, problems},
    api::{
        server::Server,
        status::{Core, Telemetry},
    },
    apply::{OverlayStatus, beside_proxy, services::Publisher},
    chain::Chain,
    cluster_api::ClusterApi,
    config::{FactsFrom, Settings},
    datapath,
    endpoint::release::Reaper,
    handover::seen::Seen,
    install::{self, InstallConfig},
    node::{self, NodeStatus},
    plan::{OverlayMode, Reach, Reached, Routing},
    prepare::{self, Families},
    probe::{self, Probe, without_checksum::Tunnel},
    service_health::{self, Eligibility, ProxyHealth, ports::HealthChecks},
    state_lock,
    telemetry::{
        drops::{self, RecentDrops},
        http,
        metrics::Metrics,
    },
    troubles,
    watch::{kubernetes, masquerade_file, nodes::OwnNode, nodes_file, services as watch_services},
};
use anyhow::{Context as _, anyhow, bail};
use attached::follow_attached;
use follow_node::{NodeTask, follow_node};
use forwarding::{ForwardingTask, follow_forwarding};
use periodic::{every, every_or};
use restore::{Restored, log_collected, restore};
use sinabro_common::names;
use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use sweeps::{SWEEP, sweep, wants_sweep};
use switches::follow_switches;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::{JoinSet, spawn_blocking},
    time::{sleep, timeout},
};

/// How soon it is tried again to listen on the metrics address.
const LISTEN_AGAIN: Duration = Duration::from_secs(5);
/// How often garbage is looked for.
const COLLECT: Duration = Duration::from_secs(60);
/// Runs the agent until it is asked to stop.
///
/// # Errors
/// If it cannot start, or a part of it fails for good.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    let started = Instant::now();
    let settings = Arc::new(settings);
    let _lock = state_lock::lock(&settings.state_dir)?;
    let standing = troubles::Standing::default();
    for text in &settings.deprecated {
        troubles::stand(&standing, troubles::trouble("SettingDeprecated", text));
    }
    let ports = match settings.masquerade {
        true => node::masquerade_ports(&settings),
        false => (0, 0),
    };
    let mut prepared = prepare::forwarding(&settings.uplinks, Families::prepared_or_both())?;
    // Where it may not, it was prepared.
    prepared.changes.extend(prepare::announcements().changes);
    if settings.peer_probe {
        // Where it may not, the probe says so.
        prepared.changes.extend(prepare::ping_sockets().changes);
    }
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
            if let Some(text) = api.servers.as_ref().and_then(|servers| servers.trouble()) {
                troubles::stand(&standing, troubles::trouble("KubeconfigUnusable", text));
            }
            let cache = settings.state_dir.join(names::NODES_FILE);
            let (source, own) = kubernetes::spawn(api.clone(), name.clone(), cache);
            let writer;
            (announcer, writer) = Announcer::start(&api, name.clone(), own.clone());
            tasks.spawn(ends("the writer of events", writer));
            (source, Some((api, own)))
        }
    };
    let (masquerade, task) = masquerade_file::spawn(
        settings.masquerade_file.clone(),
        settings.state_dir.join(names::KEPT_MASQUERADE_FILE),
    );
    tasks.spawn(ends("the watch of what is not masqueraded", task));
    datapath::make_directory(&settings.bpf_dir).context("cannot load the data path")?;
    let _pins = state_lock::lock_pins(&settings.bpf_dir)?;
    let Restored {
        datapath,
        endpoints,
        room,
        self_test,
    } = {
        let settings = settings.clone();
        spawn_blocking(move || restore(&settings)).await??
    };

    // From here on what is asked for is what the programs that run can do.
    let settings = Arc::new(Settings {
        routing: datapath.routing(settings.routing),
        ..Settings::clone(&settings)
    });

    if let Some(trouble) = troubles::programs::classifiers(datapath.choice()) {
        troubles::stand(&standing, trouble);
    }

    let (stop, stopping) = watch::channel(false);
    let (facts, facts_from) = (source.updates.clone(), source.from);
    tasks.spawn(ends("the watch of the nodes", source.task));
    let (node_sender, node) = watch::channel(NodeStatus::default());
    let (overlay_sender, overlay) = watch::channel(OverlayStatus::default());
    let asks_without_checksum = settings.peer_probe && settings.overlay == OverlayMode::Auto;
    // Until somebody has answered.
    let nobody = Reach {
        without_checksum: asks_without_checksum.then(BTreeSet::new),
        ..Reach::default()
    };
    let (reached_sender, reached) = watch::channel(Reached::from(nobody));
    tasks.spawn(follow_node(NodeTask {
        settings: settings.clone(),
        datapath: datapath.clone(),
        endpoints: endpoints.clone(),
        ports,
        facts: facts.clone(),
        masquerade: masquerade.clone(),
        reached,
        node: node_sender,
        overlay: overlay_sender,
    }));
    let (forwarding_sender, forwarding) = watch::channel(None);
    let (beside_proxy_sender, beside_proxy) = watch::channel(None);
    tasks.spawn(follow_forwarding(ForwardingTask {
        settings: settings.clone(),
        datapath: datapath.clone(),
        node: node.clone(),
        overlay: overlay.clone(),
        forwarding: forwarding_sender,
        beside_proxy: beside_proxy_sender,
    }));
    tasks.spawn(follow_attached(datapath.clone(), standing.clone()));
    tasks.spawn(follow_switches(node.clone(), standing.clone()));
    tasks.spawn(every(COLLECT, {
        let endpoints = endpoints.clone();
        move || log_collected(&endpoints)
    }));
    let recent_drops = Arc::new(RecentDrops::new(stopping.clone()));
    let wanted = {
        let (datapath, drops) = (datapath.clone(), recent_drops.clone());
        move || wants_sweep(datapath.clone(), drops.clone())
    };
    tasks.spawn(every_or(SWEEP, wanted, {
        let (datapath, endpoints) = (datapath.clone(), endpoints.clone());
        let announcer = announcer.clone();
        let shares = datapath.connections().shares();
        let shares = shares.context("cannot read pods' shares of the connections")?;
        let floods = Arc::new(Mutex::new(Floods::since(&shares)));
        move || {
            sweep(&datapath);
            datapath.forward_logs();
            match datapath.connections().shares() {
                Ok(shares) => {
                    let mut floods = floods.lock().unwrap_or_else(PoisonError::into_inner);
                    floods.tell(&announcer, &endpoints.all(), &shares);
                }
                Err(error) => tracing::warn!("cannot read pods' shares: {}", Chain(&error)),
            }
        }
    }));

    for ring in datapath.take_drop_events() {
        let endpoints = endpoints.clone();
        let pods = move || endpoints.all();
        tasks.spawn(drops::read(ring, recent_drops.clone(), pods));
    }

    let publisher = match handover::is_ours(settings.service_proxy, &datapath)? {
        true => {
            let datapath = datapath.clone();
            let publisher = spawn_blocking(move || Publisher::restore(datapath)).await?;
            let publisher = publisher.context("cannot read what is published of Services")?;
            Some(Arc::new(Mutex::new(publisher)))
        }
        false => None,
    };
    let server = Server::bind(&settings.socket)
        .with_context(|| format!("cannot bind socket {}", settings.socket.display()))?;
    let install = InstallConfig::of(&settings).map(|config| {
        let (status, task) = install::spawn(config, node.clone());
        tasks.spawn(ends("the installation", task));
        status
    });
    let metrics = Arc::new(Metrics::default());
    let (complete, is_complete) = watch::channel(false);
    let (translating, translates) = watch::channel(false);
    let (proxy_sender, proxy) = watch::channel(String::new());
    tasks.spawn(handover::follow_handover(handover::HandoverTask {
        settings: settings.clone(),
        datapath: datapath.clone(),
        seen: Seen::read(settings.programs_dir.join(names::KUBE_PROXY_SEEN_FILE)),
        standing: standing.clone(),
        published: is_complete,
        status: proxy_sender,
        translating,
    }));
    let source = match (settings.services_file.clone(), &own_node) {
        _ if publisher.is_none() => None,
        (Some(file), _) => Some(watch_services::spawn_file(
            file,
            settings.service_cidrs.clone(),
        )),
        (None, Some((api, _))) => Some(watch_services::spawn_kubernetes(
            api.clone(),
            settings.service_cidrs.clone(),
        )),
        (None, None) if settings.service_proxy.may_be_on() => {
            bail!("nothing says where Services are: set servicesFile")
        }
        // What is still translated leads where it led.
        (None, None) => None,
    };
    let mut services = publisher.map(|publisher| services::Services {
        publisher,
        facts: None,
    });
    if let (Some(services), Some(source)) = (&mut services, source) {
        tracing::info!(from = source.from, "following Services");
        let health = Arc::new(ProxyHealth::default());
        let (checks, wanted) = watch::channel(HealthChecks::default());
        tasks.spawn(service_health::ports::serve(
            wanted,
            translates.clone(),
            health.clone(),
            standing.clone(),
        ));
        let own = own_node.as_ref().map(|(_, own)| own.clone());
        if let Some(address) = settings.service_health_address {
            let asked = service_health::node::Asked {
                health: health.clone(),
                eligibility: Eligibility::new(own.clone()),
                translates,
            };
            let (standing, stopping) = (standing.clone(), stopping.clone());
            let answers = service_health::node::serve(address, asked, standing, stopping);
            tasks.spawn(answers);
        }
        let servers = own_node.as_ref().and_then(|(api, _)| api.servers.clone());
        let facts = services::Facts::new(source.store.clone(), servers, checks);
        let facts = Arc::new(facts);
        services.facts = Some(facts.clone());
        tasks.spawn(services::follow_services(services::ServicesTask {
            source,
            publisher: services.publisher.clone(),
            datapath: datapath.clone(),
            facts,
            complete,
            whereabouts: services::Whereabouts::new(
                settings.node_name.clone(),
                node.clone(),
                own,
                !settings.service_external_ips,
            ),
            metrics: metrics.clone(),
            health,
            standing: standing.clone(),
        }));
    }
    let probe = match settings.peer_probe {
        true => {
            let (probe, task) = probe::spawn(probe::Sources {
                device: names::VXLAN_LINK,
                facts: facts.clone(),
                node: node.clone(),
                overlay: overlay.clone(),
                metrics: metrics.clone(),
                natively: (settings.routing == Routing::Auto).then(|| datapath.clone()),
                without_checksum: asks_without_checksum.then_some(Tunnel {
                    vni: settings.vxlan_vni,
                    port: settings.vxlan_port,
                }),
                reached: reached_sender,
            });
            tasks.spawn(ends("the probe of peers", task));
            probe
        }
        false => Probe::off("the setting peerProbe is false"),
    };
    let (troubles, task) = troubles::spawn(troubles::Sources {
        node_name: settings.node_name.clone(),
        facts: facts.clone(),
        node: node.clone(),
        endpoints: endpoints.clone(),
        masquerade: masquerade.clone(),
        probe: probe.clone(),
        asked: troubles::peers::Asked {
            port: settings.vxlan_port,
            routing: settings.routing,
        },
        rules: troubles::Rules::default(),
        node_ports: settings
            .node_ports
            .filter(|_| settings.service_proxy.may_be_on())
            .map(|(first, last)| first..=last),
        standing: standing.clone(),
        datapath: datapath.clone(),
        self_test: self_test.clone(),
    });
    tasks.spawn(ends("the look-out for troubles", task));
    let leaving = (datapath.clone(), overlay.clone());
    let core = Arc::new(Core {
        settings: settings.clone(),
        reaper: Reaper::start(endpoints.clone()),
        endpoints,
        datapath,
        services,
        proxy,
        room,
        self_test,
        facts,
        facts_from,
        masquerade,
        node,
        overlay,
        forwarding,
        beside_proxy,
        install,
        troubles,
        announcer,
        drops: recent_drops,
        probe,
        metrics,
        started,
    });
    log_start(&core);
    if let Some(address) = settings.metrics_address {
        tasks.spawn(serve_metrics(
            address,
            core.clone(),
            stopping.clone(),
            standing,
        ));
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
    let leave = move || {
        let (datapath, overlay) = leaving;
        let ways = overlay.borrow().ways.clone();
        let ready = beside_proxy::before_leaving(&datapath, &ways);
        datapath.leave()?;
        ready.context("connections between nodes go by the stack")
    };
    match spawn_blocking(leave).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("the data path is not left as it should be: {error:#}"),
        Err(error) => tracing::warn!("packets still go past the stack: {error}"),
    }
    outcome
}

/// Serves metrics and health. That the address is taken is no reason to serve no pods: it is said,
/// and tried again.
async fn serve_metrics(
    address: SocketAddr,
    core: Arc<Core>,
    mut stopping: watch::Receiver<bool>,
    standing: troubles::Standing,
) -> anyhow::Result<()> {
    const TAKEN: &str = "MetricsAddressTaken";
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                let text = format!(
                    "there are no metrics and no health checks, {address} cannot be listened on: {error}; free it (`ss -lptn`) or choose another with --metrics-address"
                );
                troubles::replace(&standing, TAKEN, Some(text));
                sleep(LISTEN_AGAIN).await;
            }
        }
    };
    troubles::replace(&standing, TAKEN, None);
    let stopped = async move {
        let _ = stopping.wait_for(|stop| *stop).await;
    };
    let metrics = core.metrics.clone();
    http::serve(listener, Arc::new(Telemetry(core)), metrics, stopped)
        .await
        .context("the metrics server failed")?;
    // It ends when told to; what ends unasked is an error.
    std::future::pending().await
}

/// Tells the cluster how this node is; begun when the socket is there.
async fn announce(
    api: ClusterApi,
    own: watch::Receiver<Option<OwnNode>>,
    core: Arc<Core>,
) -> anyhow::Result<()> {
    let name = core.settings.node_name.clone();
    let takes = {
        let core = core.clone();
        move || Takes {
            native: core.settings.routing.takes_native(),
            zero_checksum: core.overlay.borrow().takes_zero_checksum,
        }
    };
    let told = problems::tell(
        core.announcer.clone(),
        core.node.clone(),
        core.overlay.clone(),
        core.install.clone(),
        core.troubles.clone(),
    );
    tokio::select! {
        () = told => {}
        () = announce::node::keep(api, name, own, takes, move || core.is_ready()) => {}
    }
    bail!("what tells the cluster how this node is ended")
}

/// A task that should never end.
async fn ends(what: &'static str, task: tokio::task::JoinHandle<()>) -> anyhow::Result<()> {
    task.await.with_context(|| format!("{what} failed"))?;
    bail!("{what} ended")
}

/// Does blocking work again and again.
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
