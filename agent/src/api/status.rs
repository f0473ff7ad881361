//! What the agent says about itself, to `sinabroctl` and to scrapers.

use super::{acceleration, connections, paths, services};
use crate::{
    acceleration::{choice::Mode, self_test::SelfTest},
    announce::Announcer,
    apply::OverlayStatus,
    chain::Chain,
    config::Settings,
    connections::Room,
    datapath::{Datapath, DatapathError, Level, Translation},
    endpoint::{Endpoints, release::Reaper},
    handover::ServiceProxy,
    install::InstallStatus,
    node::{NodeState, NodeStatus},
    plan::{Forwarding, overlay::node_reports},
    probe::Probe,
    telemetry::{Provider, Reports, drops::RecentDrops, metrics::Metrics, recent_log::RECENT},
    watch::{Snapshot, masquerade_file},
};
use ipnet::IpNet;
use sinabro_common::abi::{acceleration::NODE_ACCOUNT, connection::Share};
use sinabro_common::api::{
    AccelerationReport, Adds, ApiError, Condition, DropReport, EndpointReport, ErrorCode,
    IpamReport, LocalMtu, LocalMtuWish, MasqueradeReport, MemoryReport, MetricsReport,
    NODES_OF_A_PAGE, NodeReport, Request, Response, RoomReport, SelfTestReport, ServiceTranslation,
    SourceReport, StatusReport, Trouble,
};
use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use tokio::{sync::watch, task::spawn_blocking};

/// How long the overlay may fail to match its plan before the node counts as not ready. Shorter
/// failures are retried and must not make a node flap.
const OVERLAY_GRACE: Duration = Duration::from_secs(120);

/// Everything that requests need.
pub struct Core {
    pub settings: Arc<Settings>,
    pub endpoints: Arc<Endpoints>,
    /// Finishes the deletes that were begun.
    pub reaper: Reaper,
    pub datapath: Arc<Datapath>,
    /// What is published of Services; none where others translate what is sent to them.
    pub services: Option<crate::run::services::Services>,
    /// Whether what is sent to Services is translated here, and why; for people.
    pub proxy: watch::Receiver<String>,
    /// For how many connections, and why so many.
    pub room: Room,
    /// Whether this kernel can accelerate TCP.
    pub self_test: Arc<SelfTest>,
    pub facts: watch::Receiver<Snapshot>,
    /// What the facts' source is.
    pub facts_from: String,
    /// What the file of what is not masqueraded says.
    pub masquerade: masquerade_file::Updates,
    pub node: watch::Receiver<NodeStatus>,
    /// Follows whichever overlay runs.
    pub overlay: watch::Receiver<OverlayStatus>,
    /// By which way packets leave the cluster, once that is known.
    pub forwarding: watch::Receiver<Option<Forwarding>>,
    /// By which way they get to other nodes where others translate Services, once that is known.
    pub beside_proxy: watch::Receiver<Option<Forwarding>>,
    /// How plugin and configuration are on the node, if they are this agent's business.
    pub install: Option<watch::Receiver<InstallStatus>>,
    /// Whether other nodes answer.
    pub probe: Arc<Probe>,
    /// What is wrong although the node serves.
    pub troubles: watch::Receiver<Vec<Trouble>>,
    /// Tells the cluster what was refused.
    pub announcer: Announcer,
    pub drops: Arc<RecentDrops>,
    pub metrics: Arc<Metrics>,
    pub started: Instant,
}

impl Core {
    /// MTU of the pods' interfaces.
    ///
    /// # Errors
    /// While the node does not know its own entry.
    pub fn mtu(&self) -> Result<u32, ApiError> {
        let node = self.node.borrow();
        match &node.state {
            Some(state) => Ok(state.mtu),
            None => {
                let facts = self.facts.borrow();
                let why = node.problem.as_deref().or(facts.problem.as_deref());
                let why = why.unwrap_or("the list of nodes is not read yet");
                let text = format!("the agent is not ready: {why}");
                Err(ApiError::new(ErrorCode::NotReady, text))
            }
        }
    }

    /// What may be larger than [`Self::mtu`] for a pod with these addresses; none if nothing may.
    pub fn local_mtu(&self, wish: Option<LocalMtuWish>, addresses: &[IpAddr]) -> Option<LocalMtu> {
        let node = self.node.borrow();
        let state = node.state.as_ref()?;
        let mtu = self.link_mtu(state)?;
        let destinations = state.local_destinations();
        let of_pod = |net: &IpNet| {
            addresses
                .iter()
                .any(|a| a.is_ipv4() == net.addr().is_ipv4())
        };
        (wish != Some(LocalMtuWish::Off)).then(|| LocalMtu {
            mtu,
            destinations: destinations.into_iter().filter(of_pod).collect(),
        })
    }

    /// MTU of new pods' links, if it is more than that of the ways out.
    fn link_mtu(&self, state: &NodeState) -> Option<u32> {
        self.settings.local_mtu.filter(|&mtu| mtu > state.mtu)
    }

    /// Whether pods can have the programs that they are to have.
    ///
    /// # Errors
    /// If the kernel refused them all.
    pub fn programs(&self) -> Result<(), ApiError> {
        let choice = self.datapath.choice();
        match choice.level {
            Level::None if self.settings.require_programs => {
                let why = choice.why();
                let text = format!(
                    "the kernel refused the eBPF programs, without which no pod is started: {why}"
                );
                Err(ApiError::new(ErrorCode::NotReady, text))
            }
            _ => Ok(()),
        }
    }

    /// Answers a request for a report.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn report(self: &Arc<Self>, request: Request) -> Result<Response, ApiError> {
        if let Request::DropEvents {
            after,
            wait_milliseconds,
        } = request
        {
            let report = self.drops.wait(after, wait_milliseconds).await;
            return Ok(Response::DropEvents(report));
        }
        let core = self.clone();
        let answer = |core: &Core, request: &Request| {
            connections::answer(core, request).or_else(|| services::answer(core, request))
        };
        let work = move || match answer(&core, &request) {
            Some(answer) => answer,
            None => core
                .report_now(request)
                .map_err(|text| ApiError::new(ErrorCode::Internal, text)),
        };
        let outcome = spawn_blocking(work).await;
        outcome
            .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))
            .flatten()
    }

    fn report_now(&self, request: Request) -> Result<Response, String> {
        match request {
            Request::Status => Ok(Response::Status(Box::new(self.status()))),
            Request::Endpoints => self.endpoint_reports().map(Response::Endpoints),
            Request::Ipam => Ok(Response::Ipam(self.ipam_report())),
            Request::Nodes { after } => self.nodes_after(after.as_deref()).map(Response::Nodes),
            Request::Metrics => self
                .metrics_report()
                .map(|report| Response::Metrics(Box::new(report))),
            Request::Acceleration => self.acceleration_report().map(Response::Acceleration),
            Request::Log => Ok(Response::Log(RECENT.text())),
            _ => Err("this is not a request for a report".to_owned()),
        }
    }

    /// Whether everything holds that this node needs to serve.
    pub fn is_ready(&self) -> bool {
        self.conditions_now().iter().all(|condition| condition.ok)
    }

    fn status(&self) -> StatusReport {
        let node = self.node.borrow().clone();
        let conditions = self.conditions_now();
        let state = node.state.as_deref();
        let uplinks = state.map(|s| {
            s.uplinks
                .iter()
                .map(|u| u.name.as_str())
                .collect::<Vec<_>>()
        });
        StatusReport {
            version: env!("CARGO_PKG_VERSION").into(),
            node: self.settings.node_name.clone(),
            ready: conditions.iter().all(|c| c.ok),
            conditions,
            troubles: self.troubles.borrow().clone(),
            modes: self.modes(),
            tcp_self_test: self.self_test_report(),
            uplink: uplinks.unwrap_or_default().join(","),
            mtu: state.map_or(0, |s| s.mtu),
            local_mtu: state.and_then(|s| self.link_mtu(s)),
            node_addresses: state.map(|s| s.addresses.clone()).unwrap_or_default(),
            pod_cidrs: state.map(|s| s.pod_cidrs.clone()).unwrap_or_default(),
            endpoints: self.endpoints.count(),
            masquerade: state.map(|state| self.masquerade_report(state)),
            connections: Some(self.room()),
            nodes: self
                .facts
                .borrow()
                .facts
                .as_ref()
                .map_or(0, |f| f.nodes.len()),
            peers: Some(self.probe.report()),
            source: self.source_report(),
            uptime_seconds: self.started.elapsed().as_secs(),
            adds: Some(self.adds()),
        }
    }

    /// None if nothing is to be accelerated, or no pod has asked for it yet.
    fn self_test_report(&self) -> Option<SelfTestReport> {
        match self.settings.tcp_acceleration {
            Mode::Off => None,
            Mode::OptIn | Mode::All => self.self_test.found().cloned(),
        }
    }

    fn modes(&self) -> BTreeMap<String, String> {
        let mut modes = self.datapath.modes();
        let (wish, now) = (self.settings.service_proxy, self.proxy.borrow());
        let text = match wish {
            ServiceProxy::Auto => format!("auto: {}", *now),
            ServiceProxy::Off | ServiceProxy::On => now.clone(),
        };
        modes.insert("serviceProxy".into(), text);
        if let Some(way) = &*self.forwarding.borrow() {
            let text = match (way, self.datapath.translation(), paths::of_programs(self)) {
                (Forwarding::Direct, Ok(translation), _) if translation != Translation::On => {
                    "kernel: Services are not translated here alone, see mode serviceProxy".into()
                }
                (Forwarding::Direct, _, Some(why)) => format!("kernel: {why}"),
                (way, ..) => way.to_string(),
            };
            modes.insert("forwarding".into(), text);
        }
        modes.insert("overlay".into(), paths::mode(self));
        let facts = self.services.iter().flat_map(|services| &services.facts);
        let ranges: Vec<_> = facts.flat_map(|facts| facts.dropped_ranges()).collect();
        if !ranges.is_empty() {
            let ranges: Vec<_> = ranges.iter().map(ToString::to_string).collect();
            modes.insert("serviceCIDRs".into(), ranges.join(", "));
        }
        modes
    }

    /// Of the table of connections.
    pub fn room(&self) -> RoomReport {
        self.room.report(self.datapath.connection_usage().capacity)
    }

    fn masquerade_report(&self, state: &NodeState) -> MasqueradeReport {
        let said = self.masquerade.borrow().clone().unwrap_or_default();
        let choice = self.settings.masquerading.clone().with(&said.overrides);
        MasqueradeReport {
            ipv4: state.uplinks.iter().any(|uplink| uplink.v4.is_some()),
            ipv6: state.uplinks.iter().any(|uplink| uplink.v6.is_some()),
            non_masquerade_cidrs: choice.non_masquerade_cidrs,
            link_local: choice.link_local,
            link_local_ipv6: choice.link_local_ipv6,
            nodes: choice.nodes,
            udp_mapping: Some(state.udp_mapping.to_string()),
            file: said.from.map(|path| path.display().to_string()),
        }
    }

    /// Whether an ADD can work; what else is not as it should be is no reason to call a node
    /// NotReady.
    fn adds(&self) -> Adds {
        if let Err(error) = self.programs() {
            return Adds::Isolated(error.message);
        }
        if let Err(error) = self.mtu() {
            return Adds::NotYet(error.message);
        }
        let overlay = self.overlay.borrow();
        if !is_fresh(&overlay) {
            let why = overlay.problems.join("; ");
            return match overlay.last_success {
                Some(_) => Adds::Isolated(why),
                None => Adds::NotYet(format!("the way to other nodes is not there yet: {why}")),
            };
        }
        match self.endpoints.ipam.full() {
            Some(why) => Adds::Impossible(why),
            None => Adds::Possible,
        }
    }

    fn source_report(&self) -> SourceReport {
        let facts = self.facts.borrow();
        let age = |since| SystemTime::now().duration_since(since).unwrap_or_default();
        SourceReport {
            from: self.facts_from.clone(),
            connected: facts.problem.is_none() && facts.facts.is_some(),
            lost_seconds: facts.stale_since.map(|since| age(since).as_secs()),
        }
    }

    fn conditions_now(&self) -> Vec<Condition> {
        let condition = |name: &str, ok, detail: String| Condition {
            name: name.into(),
            ok,
            detail,
        };
        let facts = self.facts.borrow();
        let node = self.node.borrow();
        let overlay = self.overlay.borrow();
        let broken = self.endpoints.problems();
        let waiting = || Some("not known yet".to_owned());
        let facts_detail = facts.problem.clone();
        let facts_detail = facts_detail.or_else(|| facts.facts.is_none().then(waiting)?);
        let node_detail = node.problem.clone();
        let node_detail = node_detail.or_else(|| node.state.is_none().then(waiting)?);
        let mut conditions = vec![
            condition(
                "programs",
                self.programs().is_ok(),
                self.datapath.choice().why(),
            ),
            condition(
                "facts",
                facts.facts.is_some(),
                facts_detail.unwrap_or_default(),
            ),
            condition(
                "node",
                node.state.is_some(),
                node_detail.unwrap_or_default(),
            ),
            condition("overlay", is_fresh(&overlay), overlay.problems.join("; ")),
            // Each costs one pod, and each of these one address: not the node.
            condition("endpoints", true, broken.join("; ")),
            condition("leases", true, self.endpoints.ipam.problems().join("; ")),
        ];
        conditions.extend(
            self.install
                .as_ref()
                .map(|install| conflist(&install.borrow())),
        );
        conditions
    }

    fn endpoint_reports(&self) -> Result<Vec<EndpointReport>, String> {
        let shares = self.datapath.connections().shares();
        let shares = shares.map_err(|error| Chain(&error).to_string())?;
        let shares: HashMap<u32, Share> = shares.into_iter().collect();
        let report = |record: crate::endpoint::EndpointRecord| {
            let counters = self
                .datapath
                .pod_counters(record.ifindex)?
                .unwrap_or_default();
            let acceleration = self.datapath.acceleration_counters(record.ifindex)?;
            let memory = self.datapath.queue_usage(record.ifindex)?;
            let memory = memory.unwrap_or_default();
            Ok(EndpointReport {
                owner: record.owner,
                pod: record.pod,
                network: record.network,
                link: record.link,
                ifindex: record.ifindex,
                mac: record.mac,
                addresses: record.addresses,
                mtu: Some(record.mtu),
                local_mtu: record.local,
                tx_packets: counters.tx_packets,
                tx_bytes: counters.tx_bytes,
                rx_packets: counters.rx_packets,
                rx_bytes: counters.rx_bytes,
                acceleration: acceleration
                    .as_ref()
                    .map(|counters| acceleration::count(counters, memory)),
                connections: shares.get(&record.ifindex).map(connections::share),
                acceleration_wish: record.acceleration,
                service_translation: Some(
                    record
                        .service_translation
                        .unwrap_or(ServiceTranslation::Auto),
                ),
            })
        };
        let reports = self.endpoints.all().into_iter().map(report);
        reports
            .collect::<Result<_, DatapathError>>()
            .map_err(|error| Chain(&error).to_string())
    }

    fn acceleration_report(&self) -> Result<AccelerationReport, String> {
        let pods = self.endpoint_reports()?.into_iter();
        let servers = self.datapath.acceleration_servers();
        let servers = servers.map_err(|error| Chain(&error).to_string())?;
        Ok(acceleration::report(
            pods,
            servers,
            self.acceleration_memory()?,
        ))
    }

    fn acceleration_memory(&self) -> Result<Option<MemoryReport>, String> {
        let usage = self.datapath.queue_usage(NODE_ACCOUNT);
        let usage = usage.map_err(|error| Chain(&error).to_string())?;
        Ok(usage.map(acceleration::memory))
    }

    fn ipam_report(&self) -> IpamReport {
        let endpoints = &self.endpoints;
        endpoints
            .ipam
            .report(|owner| endpoints.get(owner).is_some())
    }

    /// A page of the nodes. They are in the order of their names, so one that comes or goes
    /// meanwhile moves no other to another page.
    fn nodes_after(&self, after: Option<&str>) -> Result<Vec<NodeReport>, String> {
        let all = self.node_reports();
        let begin = after.map_or(0, |after| {
            all.partition_point(|node| node.name.as_str() <= after)
        });
        let end = all.len().min(begin + NODES_OF_A_PAGE);
        let mut page = all[begin..end].to_vec();
        self.probe.complete(&mut page);
        paths::complete(self, &mut page).map_err(|error| Chain(&error).to_string())?;
        Ok(page)
    }

    fn node_reports(&self) -> Arc<Vec<NodeReport>> {
        let overlay = self.overlay.borrow();
        if !overlay.nodes.is_empty() {
            return overlay.nodes.clone();
        }
        let facts = self.facts.borrow().facts.clone();
        let reports = facts.map(|facts| node_reports(&facts, &self.settings.node_name, None));
        Arc::new(reports.unwrap_or_default())
    }

    fn metrics_report(&self) -> Result<MetricsReport, String> {
        let drops = self
            .datapath
            .drops()
            .map_err(|error| Chain(&error).to_string())?;
        let drop = |(reason, packets): (sinabro_common::abi::drop::DropReason, u64)| DropReport {
            number: reason as u32,
            reason: reason.label().into(),
            text: reason.text().into(),
            packets,
        };
        let packets = paths::packets(self);
        let table = connections::table(&self.datapath);
        let table = table.map_err(|error| Chain(&error).to_string())?;
        Ok(MetricsReport {
            drops: drops.into_iter().map(drop).collect(),
            nat_flows: table.masqueraded,
            nat_capacity: table.capacity,
            connections: Some(table),
            acceleration_memory: self.acceleration_memory()?,
            services: services::usage(self),
            overlay_packets: Some(packets.map_err(|error| Chain(&error).to_string())?),
            ..MetricsReport::default()
        })
    }

    fn reports(&self) -> Result<Reports, String> {
        Ok(Reports {
            status: self.status(),
            endpoints: self.endpoint_reports()?,
            ipam: self.ipam_report(),
            nodes: self.node_reports(),
            metrics: self.metrics_report()?,
            overlay: self.overlay.borrow().clone(),
            named_peers: self.probe.named_peers(),
            programs: self.datapath.choice().level,
            per_pod: self.settings.pod_metrics,
        })
    }
}

/// What runtimes need in order to ask for anything.
fn conflist(install: &InstallStatus) -> Condition {
    let warnings = install.warnings.iter().map(|warning| &warning.text);
    let texts = install
        .problems
        .iter()
        .chain(warnings)
        .chain(&install.notes);
    let texts: Vec<_> = texts.map(String::as_str).collect();
    Condition {
        name: "conflist".into(),
        ok: install.installed,
        detail: match (install.installed, &texts[..]) {
            (false, []) => "not written before the node can serve".into(),
            _ => texts.join("; "),
        },
    }
}

fn is_fresh(overlay: &OverlayStatus) -> bool {
    let age = |t: SystemTime| SystemTime::now().duration_since(t).unwrap_or_default();
    overlay.ok() || overlay.last_success.is_some_and(|t| age(t) < OVERLAY_GRACE)
}

/// A handle that telemetry owns.
pub struct Telemetry(pub Arc<Core>);

impl Provider for Telemetry {
    async fn gather(&self) -> Result<Reports, String> {
        let core = self.0.clone();
        let outcome = spawn_blocking(move || core.reports()).await;
        outcome.map_err(|error| error.to_string()).flatten()
    }

    async fn conditions(&self) -> Vec<Condition> {
        self.0.conditions_now()
    }
}
