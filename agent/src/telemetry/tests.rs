use super::{metrics::Metrics, *};
use sinabro_common::api::{
    AccelerationCount, DropReport, MemoryReport, MessageCount, Owner, PathCounts, PathPackets,
    PeersReport, PodRef, RangeReport, ServiceMapUsage, ServiceUsage, ShareReport, SourceReport,
    TableReport,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
};

fn endpoint(name: &str, tx_bytes: u64) -> EndpointReport {
    EndpointReport {
        owner: Owner {
            container_id: "c0ffee".into(),
            ifname: "eth0".into(),
        },
        pod: PodRef {
            namespace: "default".into(),
            name: name.into(),
            uid: String::new(),
        },
        network: "pods".into(),
        link: "snb000000000000".into(),
        ifindex: 7,
        mac: "0a:58:0a:f4:01:02".parse().unwrap(),
        addresses: vec!["10.244.1.2".parse().unwrap()],
        mtu: Some(1450),
        local_mtu: None,
        tx_packets: 1,
        tx_bytes,
        rx_packets: 2,
        rx_bytes: 200,
        acceleration: name.is_empty().then(|| AccelerationCount {
            enrolled: 3,
            redirected: MessageCount {
                messages: 4,
                bytes: 500,
            },
            passed: [(
                "queue_full".to_owned(),
                MessageCount {
                    messages: 6,
                    bytes: 700,
                },
            )]
            .into(),
            skipped: [("short".to_owned(), 8)].into(),
            memory: MemoryReport { used: 9, limit: 10 },
        }),
        connections: name.is_empty().then_some(ShareReport {
            connections: 21,
            unanswered: 22,
            refused: 23,
        }),
        acceleration_wish: None,
        service_translation: None,
    }
}

fn reports() -> Reports {
    Reports {
        status: StatusReport {
            version: "0.1.0".into(),
            node: "node-a".into(),
            ready: false,
            troubles: ["PeerSilent", "AddressContested", "AddressContested"]
                .map(|reason| crate::troubles::trouble(reason, "…"))
                .into(),
            conditions: conditions(),
            modes: BTreeMap::new(),
            tcp_self_test: None,
            uplink: "eth0".into(),
            mtu: 1450,
            local_mtu: None,
            node_addresses: vec![],
            pod_cidrs: vec![],
            endpoints: 2,
            masquerade: None,
            connections: None,
            nodes: 2,
            peers: Some(PeersReport {
                answering: 4,
                small_only: 3,
                silent: 2,
                unknown: 1,
                problem: None,
            }),
            source: SourceReport {
                connected: true,
                ..SourceReport::default()
            },
            uptime_seconds: 3,
            adds: None,
        },
        endpoints: vec![endpoint("we\"b\n", 100), endpoint("", 9)],
        ipam: IpamReport {
            ranges: vec![RangeReport {
                cidr: "10.244.1.0/24".parse().unwrap(),
                capacity: 253,
                leased: 2,
            }],
            leases: vec![],
            problems: vec![],
        },
        nodes: ["node-a", "node-b"]
            .map(|name| NodeReport {
                name: name.into(),
                addresses: vec![],
                pod_cidrs: vec![],
                local: name == "node-a",
                tunnel: None,
                gateway: None,
                probe: None,
                path: None,
                packets: None,
                problem: (name == "node-b").then(|| "it has no address".into()),
            })
            .to_vec()
            .into(),
        metrics: MetricsReport {
            drops: vec![DropReport {
                number: 2,
                reason: "source_address".into(),
                text: "…".into(),
                packets: 5,
            }],
            nat_flows: 3,
            nat_capacity: 1024,
            connections: Some(TableReport {
                established: 31,
                unanswered: 32,
                closing: 33,
                capacity: 34,
                masqueraded: 35,
                mappings: 39,
                apart: 40,
                aliases: 36,
                refused: 37,
                sweeps: 38,
                sweep_microseconds: 2_500_000,
            }),
            acceleration_memory: Some(MemoryReport {
                used: 11,
                limit: 12,
            }),
            services: Some(ServiceUsage {
                services: 41,
                waiting: 42,
                endpoints: 43,
                maps: vec![ServiceMapUsage {
                    map: "SLOTS".into(),
                    taken: 44,
                    resting: 45,
                    capacity: 46,
                }],
            }),
            overlay_packets: Some(PathCounts {
                direct: PathPackets {
                    sent: 51,
                    received: 52,
                },
                native: PathPackets {
                    sent: 55,
                    received: 56,
                },
                kernel: PathPackets {
                    sent: 53,
                    received: 54,
                },
            }),
            counters: BTreeMap::from([
                ("sinabro_gc_freed_total".into(), 4),
                ("not a name".into(), 1),
            ]),
        },
        overlay: OverlayStatus {
            runs: 6,
            failures: 1,
            time_spent: Duration::from_millis(1500),
            last_success: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1000)),
            ..OverlayStatus::default()
        },
        programs: crate::datapath::Level::LastGood,
        named_peers: NamedPeers {
            silent: vec!["node-c".into()],
            narrow: vec!["node-d".into()],
        },
        per_pod: true,
    }
}

fn conditions() -> Vec<Condition> {
    vec![
        Condition {
            name: "datapath".into(),
            ok: true,
            detail: String::new(),
        },
        Condition {
            name: "overlay".into(),
            ok: false,
            detail: "uplink eth0 is gone".into(),
        },
    ]
}

#[test]
fn every_report_is_in_the_scrape() {
    let metrics = Metrics::default();
    metrics.api_request("allocate", "ok", Duration::from_millis(3));
    metrics.api_request("allocate", "rangeFull", Duration::from_millis(30));
    metrics.network_programmed(Duration::from_millis(200));
    metrics.network_programmed(Duration::from_secs(59));
    metrics.none_here([3, 4]);
    metrics.peer_probe_answered(Duration::from_millis(3));
    metrics.peer_probe_answered(Duration::from_micros(300));
    metrics.peer_probes_lost(5);
    let text = metrics.render(&reports()).unwrap();
    for line in [
        r#"sinabro_build_info{version="0.1.0"} 1.0"#,
        "sinabro_ready 0.0",
        "sinabro_source_connected 1.0",
        r#"sinabro_condition{condition="datapath"} 1.0"#,
        r#"sinabro_condition{condition="overlay"} 0.0"#,
        "sinabro_endpoints 2.0",
        r#"sinabro_pod_transmit_bytes_total{namespace="default",pod="we\"b\n",interface="eth0"} 100"#,
        r#"sinabro_pod_transmit_bytes_total{namespace="default",pod="c0ffee",interface="eth0"} 9"#,
        r#"sinabro_pod_receive_packets_total{namespace="default",pod="c0ffee",interface="eth0"} 2"#,
        r#"sinabro_pod_accelerated_sockets_total{namespace="default",pod="c0ffee",interface="eth0"} 3"#,
        r#"sinabro_pod_redirected_messages_total{namespace="default",pod="c0ffee",interface="eth0"} 4"#,
        r#"sinabro_pod_redirected_bytes_total{namespace="default",pod="c0ffee",interface="eth0"} 500"#,
        r#"sinabro_pod_passed_messages_total{namespace="default",pod="c0ffee",interface="eth0",reason="queue_full"} 6"#,
        r#"sinabro_pod_passed_bytes_total{namespace="default",pod="c0ffee",interface="eth0",reason="queue_full"} 700"#,
        r#"sinabro_pod_unaccelerated_sockets_total{namespace="default",pod="c0ffee",interface="eth0",reason="short"} 8"#,
        r#"sinabro_pod_acceleration_memory_bytes{namespace="default",pod="c0ffee",interface="eth0"} 9.0"#,
        r#"sinabro_pod_acceleration_memory_limit_bytes{namespace="default",pod="c0ffee",interface="eth0"} 10.0"#,
        "sinabro_acceleration_memory_bytes 11.0",
        "sinabro_acceleration_memory_limit_bytes 12.0",
        r#"sinabro_dropped_packets_total{reason="source_address"} 5"#,
        r#"sinabro_connections{state="established"} 31.0"#,
        r#"sinabro_connections{state="unanswered"} 32.0"#,
        r#"sinabro_connections{state="closing"} 33.0"#,
        "sinabro_connections_limit 34.0",
        "sinabro_masqueraded_connections 35.0",
        "sinabro_udp_mappings 39.0",
        "sinabro_apart_connections 40.0",
        "sinabro_connection_aliases 36.0",
        "sinabro_refused_connections_total 37",
        "sinabro_connection_sweeps_total 38",
        "sinabro_services 41.0",
        "sinabro_services_waiting 42.0",
        "kubeproxy_network_programming_duration_seconds_bucket{le=\"0.25\"} 1",
        "kubeproxy_network_programming_duration_seconds_bucket{le=\"59.0\"} 2",
        "kubeproxy_network_programming_duration_seconds_bucket{le=\"115.0\"} 2",
        "kubeproxy_network_programming_duration_seconds_bucket{le=\"300.0\"} 2",
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"internal\"} 3.0",
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"external\"} 4.0",
        "sinabro_service_endpoints 43.0",
        r#"sinabro_service_map_entries{map="SLOTS"} 44.0"#,
        r#"sinabro_service_map_entries_resting{map="SLOTS"} 45.0"#,
        r#"sinabro_service_map_entries_limit{map="SLOTS"} 46.0"#,
        "sinabro_connection_sweep_duration_seconds_total 2.5",
        r#"sinabro_pod_connections{namespace="default",pod="c0ffee",interface="eth0"} 21.0"#,
        r#"sinabro_pod_unanswered_connections{namespace="default",pod="c0ffee",interface="eth0"} 22.0"#,
        r#"sinabro_pod_refused_connections_total{namespace="default",pod="c0ffee",interface="eth0"} 23"#,
        "sinabro_gc_freed_total 4",
        r#"sinabro_ipam_addresses_leased{cidr="10.244.1.0/24"} 2.0"#,
        r#"sinabro_ipam_addresses_limit{cidr="10.244.1.0/24"} 253.0"#,
        "sinabro_nodes 2.0",
        "sinabro_peers_with_problems 1.0",
        r#"sinabro_peers{state="answering"} 4.0"#,
        r#"sinabro_peers{state="losing_large_packets"} 3.0"#,
        r#"sinabro_peers{state="silent"} 2.0"#,
        r#"sinabro_peers{state="unknown"} 1.0"#,
        r#"sinabro_peer_silent{peer="node-c"} 1.0"#,
        r#"sinabro_peer_loses_large_packets{peer="node-d"} 1.0"#,
        "sinabro_peer_probes_answered_total 2",
        "sinabro_peer_probes_lost_total 5",
        "sinabro_peer_round_trip_seconds_count 2",
        r#"sinabro_peer_round_trip_seconds_bucket{le="0.0005"} 1"#,
        r#"sinabro_trouble{reason="PeerSilent"} 1.0"#,
        r#"sinabro_trouble{reason="AddressContested"} 2.0"#,
        r#"sinabro_overlay_packets_total{path="direct",direction="transmit"} 51"#,
        r#"sinabro_overlay_packets_total{path="direct",direction="receive"} 52"#,
        r#"sinabro_overlay_packets_total{path="native",direction="transmit"} 55"#,
        r#"sinabro_overlay_packets_total{path="native",direction="receive"} 56"#,
        r#"sinabro_overlay_packets_total{path="kernel",direction="transmit"} 53"#,
        r#"sinabro_overlay_packets_total{path="kernel",direction="receive"} 54"#,
        "sinabro_overlay_passes_total 6",
        "sinabro_overlay_failed_passes_total 1",
        "sinabro_overlay_pass_duration_seconds_total 1.5",
        "sinabro_overlay_last_success_time_seconds 1000.0",
        r#"sinabro_api_requests_total{call="allocate",result="rangeFull"} 1"#,
        r#"sinabro_api_request_duration_seconds_count{call="allocate"} 2"#,
        r#"sinabro_api_request_duration_seconds_bucket{le="0.005",call="allocate"} 1"#,
        "# EOF",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("not a name"));
}

#[test]
fn pods_have_no_series_of_their_own_where_that_is_set() {
    let mut reports = reports();
    let series = |reports: &Reports| {
        let text = Metrics::default().render(reports).unwrap();
        let all = text.lines().filter(|line| !line.starts_with('#'));
        let lines: Vec<String> = all.map(str::to_owned).collect();
        lines
    };
    let every = series(&reports);
    reports.per_pod = false;
    let left = series(&reports);
    assert!(!left.iter().any(|line| line.contains("pod=")), "{left:?}");
    // And nothing else is missing.
    let of_node: Vec<_> = every.iter().filter(|line| !line.contains("pod=")).collect();
    assert_eq!(of_node.len(), left.len());
    assert!(left.contains(&"sinabro_endpoints 2.0".to_owned()));
}

struct Core {
    failure: Mutex<Option<String>>,
    conditions: Mutex<Vec<Condition>>,
}

impl Provider for Core {
    async fn gather(&self) -> Result<Reports, String> {
        match self.failure.lock().unwrap().clone() {
            Some(error) => Err(error),
            None => Ok(reports()),
        }
    }

    async fn conditions(&self) -> Vec<Condition> {
        self.conditions.lock().unwrap().clone()
    }
}

async fn fetch(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    reply
}

#[tokio::test]
async fn health_readiness_and_metrics_are_served() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let core = Arc::new(Core {
        failure: Mutex::new(None),
        conditions: Mutex::new(conditions()),
    });
    let (stop, stopped) = oneshot::channel();
    let stopped = async { stopped.await.unwrap() };
    let server = tokio::spawn(http::serve(listener, core.clone(), Arc::default(), stopped));

    assert!(fetch(port, "/healthz").await.starts_with("HTTP/1.1 200"));
    let reply = fetch(port, "/readyz").await;
    assert!(reply.starts_with("HTTP/1.1 503"), "{reply}");
    assert!(
        reply.ends_with("\r\n\r\noverlay: uplink eth0 is gone\n"),
        "{reply}"
    );
    core.conditions.lock().unwrap().clear();
    assert!(fetch(port, "/readyz").await.starts_with("HTTP/1.1 200"));

    let reply = fetch(port, "/metrics").await;
    assert!(
        reply.contains("content-type: application/openmetrics-text"),
        "{reply}"
    );
    assert!(reply.contains("# EOF"));
    *core.failure.lock().unwrap() = Some("map DROPS is gone".into());
    let reply = fetch(port, "/metrics").await;
    assert!(
        reply.starts_with("HTTP/1.1 500") && reply.contains("map DROPS"),
        "{reply}"
    );
    assert!(fetch(port, "/other").await.starts_with("HTTP/1.1 404"));

    stop.send(()).unwrap();
    server.await.unwrap().unwrap();
}
