mod deprecated;
mod documented;

use super::{
    layers::{file_key, parse_file, settings_file},
    *,
};
use clap::{CommandFactory, FromArgMatches};
use proptest::prelude::*;
use sinabro_common::algo::lifetime::{LIFETIMES, Stage};
use std::{collections::BTreeSet, fs, path::Path};

fn load(args: &[&str]) -> Result<Settings, ConfigError> {
    let fixed = ["sinabro-agent", "--node-name=n1"];
    Settings::load(fixed.iter().chain(args).copied())
}

fn load_file(text: &str, args: &[&str]) -> Result<Settings, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.yaml");
    fs::write(&path, text).unwrap();
    let path = format!("--config={}", path.display());
    let args: Vec<_> = [path.as_str()]
        .into_iter()
        .chain(args.iter().copied())
        .collect();
    load(&args)
}

/// The error, which must name key and value.
fn refused(result: Result<Settings, ConfigError>, key: &str, value: &str) -> String {
    let text = result.unwrap_err().to_string();
    assert!(text.contains(key) && text.contains(value), "{text}");
    text
}

#[test]
fn defaults_need_only_the_nodes_file() {
    let settings = load(&["--nodes=/n.yaml"]).unwrap();
    assert_eq!(settings.node_name, "n1");
    assert_eq!(settings.state_dir, Path::new(names::STATE_DIR));
    assert_eq!(settings.socket, Path::new("/run/sinabro/agent.sock"));
    assert_eq!(settings.bpf_dir, Path::new(names::BPF_DIR));
    assert_eq!(settings.vxlan_port, names::VXLAN_PORT);
    assert_eq!(settings.vxlan_vni, names::VXLAN_VNI);
    assert_eq!(settings.overlay, OverlayMode::Auto);
    assert_eq!(settings.routing, Routing::Tunnel);
    assert_eq!(settings.forwarding, ForwardingMode::Auto);
    assert_eq!(settings.deprecated, [""; 0]);
    assert_eq!(settings.mtu, None);
    assert_eq!(settings.local_mtu, Some(65_535));
    assert!(settings.masquerade && !settings.tcp_acceleration_loopback);
    assert!(settings.pod_metrics && settings.peer_probe);
    assert_eq!(settings.masquerade_ipv6, MasqueradeIpv6::Auto);
    assert_eq!(settings.masquerading, Masquerading::default());
    assert_eq!(settings.masquerade_file, Path::new(names::MASQUERADE_FILE));
    assert_eq!(settings.udp_mapping, UdpMapping::AddressAndPortDependent);
    assert!(!settings.masquerade_portless);
    assert_eq!(settings.node_ports, Some((30_000, 32_767)));
    let none = load(&["--nodes=/n", "--node-ports=none"]).unwrap();
    assert_eq!(none.node_ports, None);
    assert_eq!(settings.service_proxy, ServiceProxy::Off);
    assert!(settings.services_file.is_none());
    assert!(settings.service_external_ips);
    assert_eq!(settings.service_cidrs, None);
    let none = load(&["--nodes=/n", "--service-cidrs=none"]).unwrap();
    assert_eq!(none.service_cidrs, Some(BTreeSet::new()));
    for wrong in [
        "--service-cidrs=none,10.0.0.0/8",
        "--service-external-ips=maybe",
    ] {
        let error = load(&["--nodes=/n", wrong]).unwrap_err().to_string();
        assert!(error.contains("service"), "{error}");
    }
    assert_eq!(settings.node_port_addresses, NodePortAddresses::Primary);
    let of = |text: &str| load(&["--nodes=/n", &format!("--node-port-addresses={text}")]);
    assert_eq!(
        of("all").unwrap().node_port_addresses,
        NodePortAddresses::All
    );
    let ranges = ["10.0.0.0/8", "fd00::/8"].map(|text| text.parse().unwrap());
    assert_eq!(
        of("10.0.0.0/8,fd00::/8").unwrap().node_port_addresses,
        NodePortAddresses::Within(ranges.into())
    );
    for wrong in ["primary,10.0.0.0/8", "10.0.0.1", "some"] {
        let why = of(wrong).unwrap_err().to_string();
        assert!(why.contains("primary or all, alone"), "{why}");
    }
    let health = settings.service_health_address.unwrap();
    assert_eq!(health.to_string(), names::SERVICE_HEALTH_ADDR);
    let nowhere = load(&["--nodes=/n", "--service-health-address="]).unwrap();
    assert_eq!(nowhere.service_health_address, None);
    assert_eq!(
        (settings.connections, settings.service_endpoints),
        (None, None)
    );
    assert_eq!(settings.connection_limits, ConnectionLimits::default());
    assert!(settings.tcp_acceleration_pod_memory.is_none());
    assert_eq!(settings.tcp_acceleration, Mode::OptIn);
    assert_eq!(settings.attach, AttachMode::Auto);
    assert_eq!(
        settings.metrics_address,
        Some(names::METRICS_ADDR.parse().unwrap())
    );
    assert_eq!(settings.facts_from, FactsFrom::NodesFile("/n.yaml".into()));
}

#[test]
fn facts_come_from_a_file_a_kubeconfig_or_the_pod() {
    let from = |args: &[&str]| load(args).map(|settings| settings.facts_from);
    let kubeconfig = FactsFrom::Kubernetes(ClusterAccess::Kubeconfig("/k".into()));
    assert_eq!(from(&["--kubeconfig=/k"]).unwrap(), kubeconfig);
    // Empty: as if not set.
    assert_eq!(from(&["--kubeconfig=/k", "--nodes="]).unwrap(), kubeconfig);
    let text = from(&[]).unwrap_err().to_string();
    for way in [
        "--nodes FILE",
        "SINABRO_NODES",
        "--kubeconfig FILE",
        "SINABRO_KUBECONFIG",
        "service account",
    ] {
        assert!(text.contains(way), "{text}");
    }
    let text = load_file("nodes: /n", &["--kubeconfig=/k"])
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("agent.yaml") && text.contains("from a flag"),
        "{text}"
    );
}

#[test]
fn a_pod_needs_no_setting_at_all() {
    let mut command = child("child_prints_the_source");
    let output = command
        .env("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("source=Kubernetes(Servers("), "{text}");
}

#[test]
fn api_servers_are_asked_by_their_own_addresses_if_they_are_named() {
    let named = |text: &str| -> Vec<String> {
        let text = text.split(',').map(|text| value::api_server(text).unwrap());
        text.map(|server| server.to_string()).collect()
    };
    let list = "192.0.2.1:6443,https://api.example.com,https://api.example.com:8443/,fd00::1,[fd00::1]:6443";
    assert_eq!(
        named(list),
        [
            "192.0.2.1:6443",
            "api.example.com:443",
            "api.example.com:8443",
            "[fd00::1]:443",
            "[fd00::1]:6443"
        ]
    );
    for text in [
        "",
        ":6443",
        "http://192.0.2.1",
        "192.0.2.1:0",
        "192.0.2.1:65536",
        "192.0.2.1:",
        "[fd00::1",
        "[fd00::1]6443",
        "https://api/path",
        "a b",
        "ftp://x",
    ] {
        assert!(value::api_server(text).is_err(), "{text}");
    }
    let mut command = child("child_prints_the_source");
    let output = command
        .env("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        .env("SINABRO_API_SERVERS", "192.0.2.1:6443")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("source=Kubernetes(Servers(") && text.contains("api-servers.json"),
        "{text}"
    );
}

#[test]
#[ignore = "run by a_pod_needs_no_setting_at_all with an environment of its own"]
fn child_prints_the_source() {
    println!("source={:?}", load(&[]).unwrap().facts_from);
}

/// One of these tests in a process of its own.
fn child(test: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let test = format!("config::tests::{test}");
    command.args(["--exact", &test, "--ignored", "--nocapture"]);
    command
}

#[test]
fn a_file_sets_every_key_and_a_flag_wins_over_it() {
    let text = "
        nodes: /etc/nodes.yaml
        nodeName: 0123
        stateDir: /run/s
        socket: /run/s/x.sock
        bpfDir: /sys/fs/bpf/s
        programsDir: /var/s
        cgroupDir: /sys/fs/cgroup
        cniBinDir: /bin
        cniConfDir: /etc/cni
        cniSource: /usr/bin/sinabro
        uplinks: [eth0, eth1]
        mtu: 1450
        localMTU: 9000
        dataPath: kernel
        routing: native
        vxlanPort: 4789
        vxlanVni: 77
        masquerade: false
        masqueradeIPv6: off
        nonMasqueradeCIDRs: ['10.0.0.0/8', fd00::/8]
        masqueradeLinkLocal: false
        masqueradeLinkLocalIPv6: true
        masqueradeNodes: false
        masqueradeFile: /etc/m
        masqueradeUDPMapping: endpoint-independent
        masqueradePortless: true
        masqueradePorts: 61000-65535
        nodePorts: 31000-31999
        nodePortAddresses: [all]
        serviceProxy: on
        servicesFile: /etc/services.yaml
        serviceEndpoints: 300000
        serviceHealthAddress: 127.0.0.1:1
        serviceExternalIPs: off
        serviceCIDRs: [10.96.0.0/12, 'fd00:10:96::/112']
        connections: 500000
        connectionsPerPod: 20000
        connectionsPerPodUnanswered: 2000
        connectionTcpTimeoutEstablished: 2h4m
        connectionTcpTimeoutCloseWait: 10m
        connectionUdpTimeout: 40s
        connectionUdpTimeoutStream: 5m
        connectionIcmpTimeout: 20s
        connectionGenericTimeout: 1h
        tcpAcceleration: opt-in
        tcpAccelerationLoopback: true
        tcpAccelerationPodMemory: 64Mi
        tcpAccelerationNodeMemory: 1Gi
        attach: clsact
        requirePrograms: false
        metricsAddress: ''
        podMetrics: false
        peerProbe: false
        logLevel: debug
        logFormat: json";
    let settings = load_file(text, &["--mtu=1400", "--uplinks=a,b"]).unwrap();
    let mut lifetimes = LIFETIMES;
    for (stage, seconds) in [
        (Stage::Established, 7440),
        (Stage::HalfClosed, 600),
        (Stage::Unreplied, 40),
        (Stage::Replied, 40),
        (Stage::Stream, 300),
        (Stage::Echo, 20),
        (Stage::EchoReplied, 20),
        (Stage::Other, 3600),
    ] {
        lifetimes[stage as usize] = seconds;
    }
    let expected = Settings {
        node_name: "n1".into(),
        facts_from: FactsFrom::NodesFile("/etc/nodes.yaml".into()),
        state_dir: "/run/s".into(),
        socket: "/run/s/x.sock".into(),
        bpf_dir: "/sys/fs/bpf/s".into(),
        programs_dir: "/var/s".into(),
        cgroup_dir: Some("/sys/fs/cgroup".into()),
        cni_bin_dir: "/bin".into(),
        cni_conf_dir: "/etc/cni".into(),
        cni_source: Some("/usr/bin/sinabro".into()),
        uplinks: vec!["a".into(), "b".into()],
        mtu: Some(1400),
        local_mtu: Some(9000),
        overlay: OverlayMode::Kernel,
        routing: Routing::Native,
        forwarding: ForwardingMode::Kernel,
        vxlan_port: 4789,
        vxlan_vni: 77,
        masquerade: false,
        masquerade_ipv6: MasqueradeIpv6::Off,
        masquerading: Masquerading {
            non_masquerade_cidrs: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
            link_local: false,
            link_local_ipv6: true,
            nodes: false,
        },
        masquerade_file: "/etc/m".into(),
        udp_mapping: UdpMapping::EndpointIndependent,
        masquerade_portless: true,
        masquerade_ports: Some((61000, 65535)),
        node_ports: Some((31000, 31999)),
        service_proxy: ServiceProxy::On,
        node_port_addresses: NodePortAddresses::All,
        services_file: Some("/etc/services.yaml".into()),
        service_endpoints: Some(300_000),
        service_health_address: Some(([127, 0, 0, 1], 1).into()),
        service_external_ips: false,
        service_cidrs: Some(
            ["10.96.0.0/12", "fd00:10:96::/112"]
                .map(|range| range.parse().unwrap())
                .into(),
        ),
        connections: Some(500_000),
        connection_limits: ConnectionLimits {
            per_pod: 20_000,
            embryonic_per_pod: 2_000,
            lifetimes,
        },
        tcp_acceleration: Mode::OptIn,
        tcp_acceleration_loopback: true,
        tcp_acceleration_pod_memory: Some(64 << 20),
        tcp_acceleration_node_memory: Some(1 << 30),
        attach: AttachMode::Clsact,
        require_programs: false,
        metrics_address: None,
        pod_metrics: false,
        peer_probe: false,
        log_level: "debug".into(),
        log_format: LogFormat::Json,
        deprecated: Vec::new(),
    };
    assert_eq!(settings, expected);
}

#[test]
fn text_that_looks_like_a_number_keeps_its_zeros() {
    let matches = Options::command().get_matches_from(["sinabro-agent"]);
    let given = Options::from_arg_matches(&matches).unwrap();
    let file = parse_file("{nodes: /n, nodeName: 0123}").unwrap();
    let settings =
        Settings::from_layers(&Layers::new(&given, &matches, Some(("/f".into(), file)))).unwrap();
    assert_eq!(settings.node_name, "0123");
}

#[test]
fn the_environment_wins_over_the_file() {
    // The process's own environment is shared by all tests: a child's is not.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.yaml");
    fs::write(&path, "{nodes: /n, mtu: 1400, vxlanVni: 5}").unwrap();
    let output = child("child_prints_settings")
        .env("SINABRO_CONFIG", &path)
        .env("SINABRO_MTU", "1300")
        .env("SINABRO_NON_MASQUERADE_CIDRS", "10.0.0.0/8,fd00::/8")
        .env("SINABRO_UPLINKS", "")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("mtu=Some(1300) vni=5 cidrs=2 uplinks=[]"),
        "{text}"
    );
}

#[test]
#[ignore = "run by the_environment_wins_over_the_file with an environment of its own"]
fn child_prints_settings() {
    let s = load(&[]).unwrap();
    println!(
        "mtu={:?} vni={} cidrs={} uplinks={:?}",
        s.mtu,
        s.vxlan_vni,
        s.masquerading.non_masquerade_cidrs.len(),
        s.uplinks
    );
}

#[test]
fn who_is_reached_without_a_tunnel_is_known_to_who_asks() {
    let auto = ["--nodes=/n", "--routing=auto"];
    assert_eq!(load(&auto).unwrap().routing, Routing::Auto);
    let error = load(&[&auto[..], &["--peer-probe=false"]].concat()).unwrap_err();
    assert!(error.to_string().contains("peerProbe"), "{error}");
}

/// In each of the two modes one of them would wait for ever.
#[test]
fn services_come_from_where_the_nodes_do() {
    let error = load(&["--nodes=/n", "--service-proxy=on"]).unwrap_err();
    assert!(error.to_string().contains("servicesFile"), "{error}");
    let both = [
        "--kubeconfig=/k",
        "--service-proxy=on",
        "--services-file=/s",
    ];
    let error = load(&both).unwrap_err();
    assert!(error.to_string().contains("servicesFile"), "{error}");
    let proxy = |args: &[&str]| load(args).unwrap().service_proxy;
    assert_eq!(proxy(&both[..2]), ServiceProxy::On);
    assert_eq!(proxy(&["--nodes=/n", both[1], both[2]]), ServiceProxy::On);
    // Without another wish.
    assert_eq!(proxy(&both[..1]), ServiceProxy::Auto);
    assert_eq!(proxy(&["--nodes=/n", both[2]]), ServiceProxy::Auto);
    let nothing = ["--nodes=/n", "--service-proxy=auto"];
    assert_eq!(proxy(&nothing), ServiceProxy::Off);
    assert_eq!(proxy(&nothing[..1]), ServiceProxy::Off);
}

#[test]
fn bad_values_are_named_with_key_value_and_source() {
    for (key, value) in [
        ("mtu", "1279"),
        ("mtu", "70000"),
        ("mtu", "fifteen"),
        ("localMTU", "65536"),
        ("localMTU", "on"),
        ("vxlanVni", "16777216"),
        ("dataPath", "direct"),
        ("overlay", "native"),
        ("routing", "direct"),
        ("forwarding", "on"),
        ("vxlanVni", "0"),
        ("vxlanPort", "65536"),
        ("nonMasqueradeCIDRs", "[10.0.0.0/33]"),
        ("nonMasqueradeCIDRs", "[10.0.0.1/8]"),
        ("masqueradePorts", "5-4"),
        ("masqueradePorts", "0-4"),
        ("nodePorts", "30000"),
        ("nodePorts", "32767-30000"),
        ("serviceProxy", "ipvs"),
        ("serviceProxy", "yes"),
        ("servicesFile", "services.yaml"),
        ("serviceEndpoints", "1023"),
        ("serviceEndpoints", "4194305"),
        ("serviceEndpoints", "all"),
        ("connections", "1023"),
        ("connections", "16777217"),
        ("connections", "-1"),
        ("connections", "Auto"),
        ("connectionsPerPod", "0"),
        ("connectionsPerPod", "many"),
        ("connectionsPerPodUnanswered", "16777217"),
        ("connectionTcpTimeoutEstablished", "4s"),
        ("connectionTcpTimeoutEstablished", "721h"),
        ("connectionTcpTimeoutCloseWait", "1d"),
        ("connectionUdpTimeout", "30"),
        ("connectionUdpTimeoutStream", "1.5m"),
        ("connectionIcmpTimeout", "0s"),
        ("connectionGenericTimeout", "-10m"),
        ("nonMasqueradeCIDRs", "['::ffff:10.0.0.0/104']"),
        ("masquerade", "maybe"),
        ("masqueradeIPv6", "yes"),
        ("masqueradeLinkLocal", "1"),
        ("masqueradeLinkLocalIPv6", "no"),
        ("masqueradeNodes", "auto"),
        ("masqueradeFile", "ip-masq-agent"),
        ("masqueradeUDPMapping", "address-dependent"),
        ("masqueradeUDPMapping", "true"),
        ("masqueradePortless", "GRE"),
        ("tcpAcceleration", "true"),
        ("tcpAcceleration", "Auto"),
        ("tcpAccelerationLoopback", "opt-in"),
        ("tcpAccelerationPodMemory", "64MB"),
        ("tcpAccelerationPodMemory", "-1"),
        ("tcpAccelerationNodeMemory", "+1"),
        ("tcpAccelerationNodeMemory", "17179869184Gi"),
        ("podMetrics", "1"),
        ("peerProbe", "0"),
        ("requirePrograms", "no"),
        ("attach", "xdp"),
        ("metricsAddress", "localhost"),
        ("logLevel", "a=b=c"),
        ("logFormat", "xml"),
        ("stateDir", "relative/path"),
        ("uplinks", "[a/b]"),
        ("uplinks", "[averyverylongname]"),
        ("apiServers", "['http://192.0.2.1']"),
    ] {
        let text = refused(
            load_file(&format!("{{nodes: /n, {key}: {value}}}"), &[]),
            key,
            value.trim_matches(['[', ']', '\'']),
        );
        assert!(text.contains("agent.yaml"), "{text}");
    }
    let bad_name = Settings::load(["sinabro-agent", "--nodes=/n", "--node-name=a_b"]);
    refused(bad_name, "nodeName", "a_b");
    refused(load(&["--nodes=/n", "--mtu=1"]), "mtu", "from a flag");
    refused(
        load(&["--nodes=/n", "--bpf-dir="]),
        "bpfDir",
        "must not be empty",
    );
    let long = format!("--state-dir=/{}", "x".repeat(93));
    refused(load(&["--nodes=/n", &long]), "stateDir", "103 bytes");
}

#[test]
fn every_mode_of_acceleration_is_a_word_and_off_may_come_as_a_boolean() {
    let mode = |value: &str| {
        let text = format!("{{nodes: /n, tcpAcceleration: {value}}}");
        load_file(&text, &[]).unwrap().tcp_acceleration
    };
    for expected in Mode::EVERY {
        assert_eq!(mode(expected.as_str()), expected);
    }
    assert_eq!(mode("false"), Mode::Off);
    // Of versions before.
    assert_eq!(mode("auto"), Mode::OptIn);
}

#[test]
fn masquerade_of_ipv6_is_a_word_and_on_and_off_may_come_as_booleans() {
    let mode = |value: &str| {
        let text = format!("{{nodes: /n, masqueradeIPv6: {value}}}");
        load_file(&text, &[]).unwrap().masquerade_ipv6
    };
    for (on, off) in [("on", "off"), ("true", "false")] {
        assert_eq!(
            (mode(on), mode(off)),
            (MasqueradeIpv6::On, MasqueradeIpv6::Off)
        );
    }
}

#[test]
fn more_destinations_than_the_data_path_takes_are_refused() {
    let load_up_to = |last: usize| {
        // Every other one, so that none joins another.
        let cidrs =
            (0..last).map(|n| format!("10.{}.{}.{}/32", n >> 15 & 255, n >> 7 & 255, n << 1 & 255));
        load_file(
            &format!(
                "nonMasqueradeCIDRs: [{}]",
                cidrs.collect::<Vec<_>>().join(", ")
            ),
            &["--nodes=/n"],
        )
    };
    assert_eq!(
        load_up_to(4096)
            .unwrap()
            .masquerading
            .non_masquerade_cidrs
            .len(),
        4096
    );
    let text = refused(load_up_to(4097), "nonMasqueradeCIDRs", "room for 4096");
    assert!(text.contains("agent.yaml"), "{text}");
}

#[test]
fn bad_files_are_named_with_their_key() {
    for (text, part) in [
        ("mut: 1500", "mut"),
        ("mtu: 1500\nmtu: 1400", "mtu"),
        ("mtu: [1500]", "mtu"),
        ("uplinks: {a: b}", "uplinks"),
        ("just text", ""),
        ("a: [", ""),
    ] {
        let text = load_file(text, &[]).unwrap_err().to_string();
        assert!(text.contains("agent.yaml") && text.contains(part), "{text}");
    }
    let text = load(&["--config=/no/such/file"]).unwrap_err().to_string();
    assert!(text.contains("/no/such/file"), "{text}");
    assert!(load_file("# nothing\n\n", &["--nodes=/n"]).is_ok());
}

#[test]
fn the_default_file_may_be_absent_but_not_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let default = dir.path().join("config.yaml");
    assert!(settings_file(None, &default).unwrap().is_none());
    assert!(matches!(
        settings_file(Some(&default), &default),
        Err(ConfigError::Read { .. })
    ));

    fs::write(&default, "mtu: 1400\n").unwrap();
    let (path, options) = settings_file(None, &default).unwrap().unwrap();
    let mtu = &serde_json::to_value(options).unwrap()["mtu"];
    assert_eq!((&path, mtu.as_str()), (&default, Some("1400")));

    fs::write(&default, "mut: 1400\n").unwrap();
    assert!(matches!(
        settings_file(None, &default),
        Err(ConfigError::Parse { .. })
    ));
}

/// A key that flag and file spell differently would silently ignore one of them.
#[test]
fn flags_environment_and_file_have_the_same_settings() {
    let full = Options::command();
    let from_flags: BTreeSet<_> = full
        .get_arguments()
        .map(|arg| arg.get_id().as_str())
        .filter(|id| !["config", "help", "version"].contains(id))
        .map(file_key)
        .collect();
    let options = serde_json::to_value(Options::default()).unwrap();
    let from_file: BTreeSet<_> = options.as_object().unwrap().keys().cloned().collect();
    assert_eq!(from_flags, from_file);
    for arg in full.get_arguments() {
        let Some(env) = arg.get_env() else { continue };
        let flag = arg.get_long().unwrap().to_uppercase().replace('-', "_");
        assert_eq!(env.to_str().unwrap(), format!("SINABRO_{flag}"));
        assert!(arg.get_help().is_some());
    }
}

#[test]
fn a_log_level_that_makes_the_parser_panic_is_refused() {
    let error = load(&["--nodes=/n", "--log-level= Σ="]).unwrap_err();
    assert!(error.to_string().contains("ASCII"), "{error}");
}

proptest! {
    #[test]
    fn garbage_in_a_file_never_panics(text in "\\PC{0,200}") {
        let _ = parse_file(&text);
    }

    #[test]
    fn garbage_in_a_value_never_panics(
        key in proptest::sample::select(vec![
            "--mtu", "--uplinks", "--non-masquerade-cidrs", "--masquerade-ports", "--node-ports",
            "--metrics-address", "--log-level", "--node-name", "--state-dir", "--attach",
        ]),
        value in "\\PC{0,40}",
    ) {
        let _ = load(&["--nodes=/n", &format!("{key}={value}")]);
    }

    #[test]
    fn yaml_shaped_garbage_never_panics(text in "[a-z:\\-\\[\\]{}&*!|>'\"#%@, \n\t0-9]{0,120}") {
        let _ = parse_file(&text);
    }
}
