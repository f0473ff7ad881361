//! The metrics, by name: `sinabro_…` with the unit in the name, in OpenMetrics text.
//!
//! | name | labels | what |
//! |-|-|-|
//! | `sinabro_build_info` | version | 1 |
//! | `sinabro_start_time_seconds` | | when the agent started, Unix time |
//! | `sinabro_ready` | | 1 if the node serves pods |
//! | `sinabro_condition` | condition | 1 if it holds |
//! | `sinabro_programs` | level | 1 for the eBPF programs that run: `current`, or what the kernel takes |
//! | `sinabro_source_connected` | | 1 if the nodes file or Kubernetes API can be read |
//! | `sinabro_endpoints` | | active pods |
//! | `sinabro_pod_transmit_packets_total`, `…_bytes_total` | namespace, pod, interface | what the pod sent |
//! | `sinabro_pod_receive_packets_total`, `…_bytes_total` | namespace, pod, interface | what reached it |
//! | `sinabro_pod_accelerated_sockets_total` | namespace, pod, interface | enrolled in the TCP acceleration |
//! | `sinabro_pod_unaccelerated_sockets_total` | …, reason | not enrolled although the pod is accelerated |
//! | `sinabro_pod_redirected_messages_total`, `…_bytes_total` | namespace, pod, interface | sent from socket to socket |
//! | `sinabro_pod_passed_messages_total`, `…_bytes_total` | …, reason | sent by enrolled sockets through TCP |
//! | `sinabro_pod_acceleration_memory_bytes`, `…_limit_bytes` | namespace, pod, interface | kernel memory charged to connections that the pod made, and what may be |
//! | `sinabro_acceleration_memory_bytes`, `…_limit_bytes` | | the same of all pods |
//! | `sinabro_dropped_packets_total` | reason | dropped by the data path |
//! | `sinabro_connections` | state | tracked connections that are established, unanswered, closing |
//! | `sinabro_connections_limit` | | room for them |
//! | `sinabro_masqueraded_connections`, `sinabro_connection_aliases` | | those under the node's address, and the ports taken for them |
//! | `sinabro_udp_mappings`, `sinabro_apart_connections` | | pods' UDP ports with one port outside towards all, and connections that did not get it |
//! | `sinabro_refused_connections_total` | | new ones that a pod's limit or a full table kept out |
//! | `sinabro_connection_sweeps_total`, `sinabro_connection_sweep_duration_seconds_total` | | looks for those that are over, time spent in them |
//! | `sinabro_pod_connections`, `sinabro_pod_unanswered_connections` | namespace, pod, interface | what the pod has of the table |
//! | `sinabro_pod_refused_connections_total` | namespace, pod, interface | of the pod |
//! | `sinabro_services`, `sinabro_services_waiting`, `sinabro_service_endpoints` | | Services that are translated, that are not as they should be, and their endpoints |
//! | `sinabro_service_map_entries`, `…_resting`, `…_limit` | map | entries taken, let go a moment ago, room for them |
//! | `sinabro_service_change_duration_seconds` | | how long it took to publish what changed, a histogram |
//! | `kubeproxy_network_programming_duration_seconds` | | from when a pod or Service changed until its endpoints were published here, a histogram |
//! | `kubeproxy_sync_proxy_rules_no_local_endpoints_total` | traffic_policy | Services with endpoints, but none for clients of policy Local |
//! | `sinabro_ipam_addresses_leased`, `…_limit` | cidr | leases, room for them |
//! | `sinabro_nodes` | | known nodes |
//! | `sinabro_peers_with_problems` | | nodes that are not reached as they should be |
//! | `sinabro_peers` | state | peers that answer through their tunnels, lose large packets, are silent, unknown |
//! | `sinabro_peer_silent`, `sinabro_peer_loses_large_packets` | peer | 1, for those alone and a few of them |
//! | `sinabro_peer_probes_answered_total`, `…_lost_total` | | echo requests to peers |
//! | `sinabro_peer_round_trip_seconds` | | how long answers took, a histogram |
//! | `sinabro_trouble` | reason | how many troubles of this kind the node has; see docs/troubleshooting.md |
//! | `sinabro_overlay_packets_total` | path, direction | packets between this node and others, in tunnels `direct` or by the `kernel`'s device, or `native` |
//! | `sinabro_overlay_passes_total`, `sinabro_overlay_failed_passes_total` | | reconciliations |
//! | `sinabro_overlay_pass_duration_seconds_total` | | time spent in them |
//! | `sinabro_overlay_last_success_time_seconds` | | when all was as planned, Unix time |
//! | `sinabro_api_requests_total` | call, result | requests on the socket |
//! | `sinabro_api_request_duration_seconds` | call | how long they took, a histogram |
//!
//! Those of kube-proxy have its names, for dashboards look for them.
//!
//! Series of pods are left out with the setting `podMetrics: false`.
//!
//! A pod without a name (a runtime without Kubernetes) has its container id in `pod`.

use super::Reports;
use crate::datapath::Level;
use prometheus_client::{
    encoding::text::{encode_eof, encode_registry},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use sinabro_common::api::{
    AccelerationCount, EndpointReport, MessageCount, PathCounts, PathPackets, ServiceMapUsage,
    ServiceUsage, ShareReport, TableReport,
};
use std::{
    collections::BTreeMap,
    fmt,
    sync::atomic::AtomicU64,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

type Labels = Vec<(&'static str, String)>;
type Counters = Family<Labels, Counter<u64, AtomicU64>>;
type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// Upper bounds of the latency histogram, in seconds: an ADD takes some milliseconds, a
/// deadline some seconds.
const BUCKETS: [f64; 12] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0,
];

/// The same of round trips between nodes: in a rack some ten microseconds, between continents
/// some hundred milliseconds.
const ROUND_TRIPS: [f64; 10] = [
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0,
];

/// As kube-proxy has them: quarters of a second, seconds up to a minute, five of them up to two, half minutes up to five.
fn network_programming() -> impl Iterator<Item = f64> {
    let seconds = (1..60)
        .chain((60..120).step_by(5))
        .chain((120..=300).step_by(30));
    [0.25, 0.5].into_iter().chain(seconds.map(f64::from))
}

/// Counters that are fed as things happen. Everything else is asked for on scrape.
#[derive(Debug)]
pub struct Metrics {
    started: SystemTime,
    requests: Counters,
    latency: Family<Labels, Histogram, fn() -> Histogram>,
    probes_answered: Counter<u64, AtomicU64>,
    probes_lost: Counter<u64, AtomicU64>,
    round_trips: Histogram,
    service_changes: Histogram,
    network_programming: Histogram,
    none_here: Gauges,
}

impl Default for Metrics {
    /// As of now: the agent's start.
    fn default() -> Self {
        Self {
            started: SystemTime::now(),
            requests: Counters::default(),
            latency: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            probes_answered: Counter::default(),
            probes_lost: Counter::default(),
            round_trips: Histogram::new(ROUND_TRIPS),
            service_changes: Histogram::new(ROUND_TRIPS),
            network_programming: Histogram::new(network_programming()),
            none_here: Gauges::default(),
        }
    }
}

impl Metrics {
    /// Counts one request on the agent's socket. `result` is `ok` or the error's code.
    pub fn api_request(&self, call: &'static str, result: &'static str, took: Duration) {
        let labels = vec![("call", call.into()), ("result", result.into())];
        self.requests.get_or_create(&labels).inc();
        let labels = vec![("call", call.into())];
        self.latency
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// Counts an answer of a peer.
    pub fn peer_probe_answered(&self, took: Duration) {
        self.probes_answered.inc();
        self.round_trips.observe(took.as_secs_f64());
    }

    /// Counts a change of Services that is published.
    pub fn services_changed(&self, took: Duration) {
        self.service_changes.observe(took.as_secs_f64());
    }

    /// Counts endpoints that are published so long after what they changed for.
    pub fn network_programmed(&self, took: Duration) {
        self.network_programming.observe(took.as_secs_f64());
    }

    /// How many Services have endpoints, but none for clients by the policies of internal and external traffic.
    pub fn none_here(&self, [internal, external]: [usize; 2]) {
        for (policy, count) in [("internal", internal), ("external", external)] {
            let labels = vec![("traffic_policy", policy.into())];
            self.none_here.get_or_create(&labels).set(count as f64);
        }
    }

    /// Counts requests to peers that were not answered.
    pub fn peer_probes_lost(&self, count: usize) {
        self.probes_lost.inc_by(count as u64);
    }

    /// The text of a scrape.
    ///
    /// # Errors
    /// Only if a label cannot be formatted.
    pub fn render(&self, reports: &Reports) -> Result<String, fmt::Error> {
        let mut page = Page(Registry::with_prefix("sinabro"));
        self.agent(&mut page, reports);
        page.gauge("endpoints", "Active pods", reports.endpoints.len() as f64);
        if reports.per_pod {
            pods(&mut page, &reports.endpoints);
            acceleration(&mut page, &reports.endpoints);
        }
        data_path(&mut page, reports);
        addresses(&mut page, reports);
        if let Some(usage) = &reports.metrics.services {
            services(&mut page, usage);
            page.0.register(
                "service_change_duration_seconds",
                "Time taken to publish what changed of Services",
                self.service_changes.clone(),
            );
        }
        overlay(&mut page, reports);
        self.peers(&mut page, reports);
        let mut text = String::new();
        encode_registry(&mut text, &page.0)?;
        if reports.metrics.services.is_some() {
            encode_registry(&mut text, &self.of_kube_proxy())?;
        }
        encode_eof(&mut text)?;
        Ok(text)
    }

    fn of_kube_proxy(&self) -> Registry {
        let mut registry = Registry::with_prefix("kubeproxy");
        registry.register(
            "network_programming_duration_seconds",
            "Time from a change of a pod or Service until its endpoints were published on this node",
            self.network_programming.clone(),
        );
        registry.register(
            "sync_proxy_rules_no_local_endpoints_total",
            "Services with a Local traffic policy and endpoints, but none on this node",
            self.none_here.clone(),
        );
        registry
    }

    fn peers(&self, page: &mut Page, reports: &Reports) {
        let counts = reports.status.peers.clone().unwrap_or_default();
        if counts.problem.is_none() {
            let states = [
                ("answering", counts.answering),
                ("losing_large_packets", counts.small_only),
                ("silent", counts.silent),
                ("unknown", counts.unknown),
            ];
            let rows = states.map(|(state, n)| (vec![("state", state.into())], n as f64));
            page.gauges("peers", "Peers by what their answers say", rows);
        }
        let named = |names: &[String]| -> Vec<(Labels, f64)> {
            let label = |name: &String| (vec![("peer", name.clone())], 1.0);
            names.iter().map(label).collect()
        };
        let named_peers = &reports.named_peers;
        page.gauges(
            "peer_silent",
            "Peers that do not answer through their tunnels, the first of them",
            named(&named_peers.silent),
        );
        page.gauges(
            "peer_loses_large_packets",
            "Peers that packets of the overlay's MTU do not reach, the first of them",
            named(&named_peers.narrow),
        );
        page.0.register(
            "peer_probes_answered",
            "Echo requests that peers answered",
            self.probes_answered.clone(),
        );
        page.0.register(
            "peer_probes_lost",
            "Echo requests that peers did not answer in time",
            self.probes_lost.clone(),
        );
        page.0.register(
            "peer_round_trip_seconds",
            "Time that answers of peers took",
            self.round_trips.clone(),
        );
    }

    fn agent(&self, page: &mut Page, reports: &Reports) {
        let status = &reports.status;
        let version = vec![("version", status.version.clone())];
        page.gauges("build_info", "Version of the agent", [(version, 1.0)]);
        page.gauge(
            "start_time_seconds",
            "When the agent started",
            unix(self.started),
        );
        page.gauge("ready", "Whether the node serves pods", flag(status.ready));
        let conditions = status.conditions.iter();
        let conditions = conditions.map(|c| (vec![("condition", c.name.clone())], flag(c.ok)));
        page.gauges(
            "condition",
            "Whether a condition of readiness holds",
            conditions,
        );
        let levels = Level::ALL.map(|level| {
            let label = vec![("level", level.name().to_owned())];
            (label, flag(level == reports.programs))
        });
        page.gauges("programs", "Which eBPF programs run", levels);
        let mut troubles: BTreeMap<&str, f64> = BTreeMap::new();
        for trouble in &status.troubles {
            *troubles.entry(&trouble.reason).or_default() += 1.0;
        }
        let troubles = troubles.into_iter();
        let troubles = troubles.map(|(reason, n)| (vec![("reason", reason.to_owned())], n));
        page.gauges(
            "trouble",
            "What is wrong although the node may serve",
            troubles,
        );
        page.gauge(
            "source_connected",
            "Whether the source of the nodes can be read",
            flag(status.source.connected),
        );
        page.0.register(
            "api_requests",
            "Requests on the agent's socket",
            self.requests.clone(),
        );
        page.0.register(
            "api_request_duration_seconds",
            "Time taken by requests on the agent's socket",
            self.latency.clone(),
        );
    }
}

/// A counter of every pod: name, help, value.
type Field = (&'static str, &'static str, fn(&EndpointReport) -> u64);

fn pods(page: &mut Page, endpoints: &[EndpointReport]) {
    let counters: [Field; 4] = [
        ("pod_transmit_packets", "Packets sent by a pod", |e| {
            e.tx_packets
        }),
        ("pod_transmit_bytes", "Bytes of frames sent by a pod", |e| {
            e.tx_bytes
        }),
        ("pod_receive_packets", "Packets delivered to a pod", |e| {
            e.rx_packets
        }),
        (
            "pod_receive_bytes",
            "Bytes of frames delivered to a pod",
            |e| e.rx_bytes,
        ),
    ];
    for (name, help, value) in counters {
        let rows = endpoints.iter().map(|e| (pod_labels(e), value(e)));
        page.counters(name, help, rows);
    }
    let shares: Vec<(Labels, ShareReport)> = endpoints
        .iter()
        .filter_map(|e| Some((pod_labels(e), e.connections?)))
        .collect();
    let gauges = |value: fn(&ShareReport) -> u64| {
        let rows = shares.iter();
        rows.map(move |(labels, share)| (labels.clone(), value(share) as f64))
    };
    page.gauges(
        "pod_connections",
        "Tracked connections in a pod's share",
        gauges(|share| share.connections),
    );
    page.gauges(
        "pod_unanswered_connections",
        "Tracked connections in a pod's share that nobody has answered yet",
        gauges(|share| share.unanswered),
    );
    let refused = shares.iter();
    page.counters(
        "pod_refused_connections",
        "New connections of a pod that did not get in because of a limit",
        refused.map(|(labels, share)| (labels.clone(), share.refused)),
    );
}

/// A counter of every accelerated pod: name, help, value.
type AccelerationField = (&'static str, &'static str, fn(&AccelerationCount) -> u64);
/// The same by reason: name, help, value.
type PassedField = (&'static str, &'static str, fn(&MessageCount) -> u64);

fn acceleration(page: &mut Page, endpoints: &[EndpointReport]) {
    let pods: Vec<(Labels, &AccelerationCount)> = endpoints
        .iter()
        .filter_map(|e| Some((pod_labels(e), e.acceleration.as_ref()?)))
        .collect();
    let because = |labels: &Labels, reason: &String| {
        let mut labels = labels.clone();
        labels.push(("reason", reason.clone()));
        labels
    };
    let fields: [AccelerationField; 3] = [
        (
            "pod_accelerated_sockets",
            "Sockets enrolled in the TCP acceleration",
            |c| c.enrolled,
        ),
        (
            "pod_redirected_messages",
            "Messages sent from socket to socket",
            |c| c.redirected.messages,
        ),
        (
            "pod_redirected_bytes",
            "Bytes sent from socket to socket",
            |c| c.redirected.bytes,
        ),
    ];
    for (name, help, value) in fields {
        let rows = pods.iter().map(|(labels, c)| (labels.clone(), value(c)));
        page.counters(name, help, rows);
    }
    page.gauges(
        "pod_acceleration_memory_bytes",
        "Kernel memory that the accelerated connections made by a pod may have in use",
        pods.iter()
            .map(|(labels, c)| (labels.clone(), c.memory.used as f64)),
    );
    page.gauges(
        "pod_acceleration_memory_limit_bytes",
        "Kernel memory that the accelerated connections made by a pod may take",
        pods.iter()
            .map(|(labels, c)| (labels.clone(), c.memory.limit as f64)),
    );
    let skipped = pods.iter().flat_map(|(labels, c)| {
        let reasons = c.skipped.iter();
        reasons.map(|(reason, sockets)| (because(labels, reason), *sockets))
    });
    page.counters(
        "pod_unaccelerated_sockets",
        "Sockets not enrolled in the TCP acceleration",
        skipped,
    );
    let passed: [PassedField; 2] = [
        (
            "pod_passed_messages",
            "Messages that enrolled sockets sent through TCP",
            |p| p.messages,
        ),
        (
            "pod_passed_bytes",
            "Bytes that enrolled sockets sent through TCP",
            |p| p.bytes,
        ),
    ];
    for (name, help, value) in passed {
        let rows = pods.iter().flat_map(|(labels, c)| {
            let reasons = c.passed.iter();
            reasons.map(|(reason, count)| (because(labels, reason), value(count)))
        });
        page.counters(name, help, rows);
    }
}

fn pod_labels(endpoint: &EndpointReport) -> Labels {
    let name = match endpoint.pod.name.as_str() {
        "" => &endpoint.owner.container_id,
        name => name,
    };
    vec![
        ("namespace", endpoint.pod.namespace.clone()),
        ("pod", name.to_owned()),
        ("interface", endpoint.owner.ifname.clone()),
    ]
}

fn data_path(page: &mut Page, reports: &Reports) {
    let metrics = &reports.metrics;
    let drops = metrics.drops.iter();
    let drops = drops.map(|drop| (vec![("reason", drop.reason.clone())], drop.packets));
    page.counters("dropped_packets", "Packets dropped by the data path", drops);
    if let Some(memory) = &metrics.acceleration_memory {
        page.gauge(
            "acceleration_memory_bytes",
            "Kernel memory that accelerated connections may have in use",
            memory.used as f64,
        );
        page.gauge(
            "acceleration_memory_limit_bytes",
            "Kernel memory that accelerated connections may take",
            memory.limit as f64,
        );
    }
    if let Some(table) = &metrics.connections {
        connections(page, table);
    }
    for (name, value) in &metrics.counters {
        // Names come with prefix and suffix; the registry adds both.
        let name = name.strip_prefix("sinabro_").unwrap_or(name);
        let name = name.strip_suffix("_total").unwrap_or(name);
        let mut bytes = name.bytes();
        if !name.is_empty() && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            page.counter(name, "Counter of the agent", *value);
        }
    }
}

fn services(page: &mut Page, usage: &ServiceUsage) {
    let gauges = [
        ("services", "Services that are translated", usage.services),
        (
            "services_waiting",
            "Services that are not as they should be, for want of room",
            usage.waiting,
        ),
        (
            "service_endpoints",
            "Endpoints of Services",
            usage.endpoints,
        ),
    ];
    for (name, help, value) in gauges {
        page.gauge(name, help, value as f64);
    }
    let of_maps = |value: fn(&ServiceMapUsage) -> u64| {
        let rows = usage.maps.iter();
        rows.map(move |of| (vec![("map", of.map.clone())], value(of) as f64))
    };
    page.gauges(
        "service_map_entries",
        "Entries of the maps of Services",
        of_maps(|of| of.taken),
    );
    page.gauges(
        "service_map_entries_resting",
        "Of those, the ones that were let go a moment ago",
        of_maps(|of| of.resting),
    );
    page.gauges(
        "service_map_entries_limit",
        "Room in the maps of Services",
        of_maps(|of| of.capacity),
    );
}

fn connections(page: &mut Page, table: &TableReport) {
    let states = [
        ("established", table.established),
        ("unanswered", table.unanswered),
        ("closing", table.closing),
    ];
    let states = states.map(|(state, n)| (vec![("state", state.to_owned())], n as f64));
    page.gauges("connections", "Tracked connections", states);
    page.gauge(
        "connections_limit",
        "Room for tracked connections",
        table.capacity as f64,
    );
    page.gauge(
        "masqueraded_connections",
        "Tracked connections that leave under the node's address",
        table.masqueraded as f64,
    );
    page.gauge(
        "udp_mappings",
        "UDP ports of pods that have one port outside towards all remote ends",
        table.mappings as f64,
    );
    page.gauge(
        "apart_connections",
        "Tracked connections by another port than their client's mapping, which somebody else has",
        table.apart as f64,
    );
    page.gauge(
        "connection_aliases",
        "Translated ports in use",
        table.aliases as f64,
    );
    page.counter(
        "refused_connections",
        "New connections that did not get in because of a limit",
        table.refused,
    );
    page.counter(
        "connection_sweeps",
        "Looks for connections that are over",
        table.sweeps,
    );
    let spent: Counter<f64, AtomicU64> = Counter::default();
    spent.inc_by(table.sweep_microseconds as f64 / 1e6);
    page.0.register(
        "connection_sweep_duration_seconds",
        "Time spent looking for connections that are over",
        spent,
    );
}

fn addresses(page: &mut Page, reports: &Reports) {
    let ranges = &reports.ipam.ranges;
    let cidr = |cidr: &ipnet::IpNet| vec![("cidr", cidr.to_string())];
    let leased = ranges.iter().map(|r| (cidr(&r.cidr), r.leased as f64));
    page.gauges(
        "ipam_addresses_leased",
        "Leased addresses of a range",
        leased,
    );
    let limit = ranges.iter().map(|r| (cidr(&r.cidr), r.capacity as f64));
    page.gauges(
        "ipam_addresses_limit",
        "Addresses of a range that pods can have",
        limit,
    );
}

fn overlay(page: &mut Page, reports: &Reports) {
    let (nodes, overlay) = (&reports.nodes, &reports.overlay);
    page.gauge("nodes", "Known nodes", nodes.len() as f64);
    let faulty = nodes.iter().filter(|node| node.problem.is_some()).count();
    page.gauge(
        "peers_with_problems",
        "Nodes not reached as they should be",
        faulty as f64,
    );
    if let Some(packets) = reports.metrics.overlay_packets {
        let PathCounts {
            direct,
            native,
            kernel,
        } = packets;
        let of_path = |(path, packets): (&str, PathPackets)| {
            let of = [("transmit", packets.sent), ("receive", packets.received)];
            of.map(|(direction, n)| {
                let labels: Labels = vec![("path", path.into()), ("direction", direction.into())];
                (labels, n)
            })
        };
        page.counters(
            "overlay_packets",
            "Packets between this node and others by their way",
            [("direct", direct), ("native", native), ("kernel", kernel)]
                .into_iter()
                .flat_map(of_path),
        );
    }
    page.counter(
        "overlay_passes",
        "Reconciliations of the overlay",
        overlay.runs,
    );
    page.counter(
        "overlay_failed_passes",
        "Reconciliations that left something undone",
        overlay.failures,
    );
    let spent: Counter<f64, AtomicU64> = Counter::default();
    spent.inc_by(overlay.time_spent.as_secs_f64());
    page.0.register(
        "overlay_pass_duration_seconds",
        "Time spent reconciling the overlay",
        spent,
    );
    if let Some(at) = overlay.last_success {
        page.gauge(
            "overlay_last_success_time_seconds",
            "When the kernel last was as planned",
            unix(at),
        );
    }
}

/// One scrape's registry.
struct Page(Registry);

impl Page {
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        let gauge: Gauge<f64, AtomicU64> = Gauge::default();
        gauge.set(value);
        self.0.register(name, help, gauge);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        let counter: Counter<u64, AtomicU64> = Counter::default();
        counter.inc_by(value);
        self.0.register(name, help, counter);
    }

    fn gauges(&mut self, name: &str, help: &str, rows: impl IntoIterator<Item = (Labels, f64)>) {
        let family = Gauges::default();
        for (labels, value) in rows {
            family.get_or_create(&labels).set(value);
        }
        self.0.register(name, help, family);
    }

    /// Rows with the same labels are added up.
    fn counters(&mut self, name: &str, help: &str, rows: impl IntoIterator<Item = (Labels, u64)>) {
        let family = Counters::default();
        for (labels, value) in rows {
            family.get_or_create(&labels).inc_by(value);
        }
        self.0.register(name, help, family);
    }
}

fn flag(value: bool) -> f64 {
    f64::from(u8::from(value))
}

fn unix(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}
