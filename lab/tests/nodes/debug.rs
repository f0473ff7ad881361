//! `sinabroctl debug` on a node, with its agent and without.

use sinabro_common::names;
use sinabro_lab::{Lab, Node};
use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// The archive's files, without the directory that all are in.
fn unpack(archive: &[u8]) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(archive);
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        let mut parts = path.components();
        let top = parts.next().unwrap().as_os_str().to_str().unwrap();
        assert!(top.starts_with("sinabro-debug-"), "{top}");
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        let content = String::from_utf8_lossy(&content).into_owned();
        let name = parts.as_path().to_str().unwrap().to_owned();
        assert_eq!(files.insert(name.clone(), content), None, "{name} twice");
    }
    files
}

fn debug(node: &Node, output: &str) -> Output {
    let conf = ["--cni-conf-dir", "/run/lab/cni/net.d"];
    let bin = ["--cni-bin-dir", "/run/lab/cni/bin"];
    let args = [&["debug", "-o", output], &conf[..], &bin[..]].concat();
    let output = node.ctl(&args).unwrap();
    // A part that fails is inside, not outside.
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

#[test]
fn the_archive_says_what_there_is_also_without_an_agent() {
    let lab = Lab::for_test(2).unwrap();
    let node = lab.node(1);
    let pod = node.add_pod("pod").unwrap();
    let conf = node.namespace().path("/run/lab/cni/net.d");
    fs::create_dir_all(&conf).unwrap();
    let other = r#"{"type": "other", "token": "hunter2"}"#;
    fs::write(conf.join("20-other.conf"), other).unwrap();
    fs::write(conf.join("other-kubeconfig"), "token: hunter2").unwrap();

    // A plugin that says its versions, one that is missing.
    let chained = r#"{"name": "n", "plugins": [{"type": "meter"}, {"type": "gone"}]}"#;
    fs::write(conf.join("30-n.conflist"), chained).unwrap();
    let bin = node.namespace().path("/run/lab/cni/bin");
    fs::create_dir_all(&bin).unwrap();
    let meter = bin.join("meter");
    fs::write(
        &meter,
        "#!/bin/sh\necho '{\"supportedVersions\":[\"0.4.0\",\"1.0.0\"]}'\n",
    )
    .unwrap();
    fs::set_permissions(&meter, fs::Permissions::from_mode(0o755)).unwrap();

    // Somebody's firewall.
    let table = "add table ip filter; add chain ip filter FORWARD \
                 { type filter hook forward priority 0; policy drop; }; \
                 add rule ip filter FORWARD counter accept";
    let mut nft = Command::new("nft");
    nft.arg(table);
    assert!(
        node.namespace()
            .spawn(nft)
            .unwrap()
            .wait()
            .unwrap()
            .success()
    );

    let v4 = pod.v4().to_string();
    let with = unpack(&debug(node, "-").stdout);
    assert!(with["agent/endpoints.json"].contains(&v4));
    assert!(with["agent/metrics.json"].contains("drops"));
    assert!(with["agent/connections.json"].contains("capacity"));
    assert!(with["agent/drops.json"].contains("packets"));
    assert!(with["agent/services.json"].contains("serviceProxy: off"));
    let log = &with["agent/log.txt"];
    assert!(
        log.contains("agent started") && log.contains("pod added"),
        "{log}"
    );
    for files in [&with, &{
        node.kill_agent().unwrap();
        unpack(&debug(node, "-").stdout)
    }] {
        let has = |name: &str, part: &str| {
            let text = files
                .get(name)
                .unwrap_or_else(|| panic!("{name} in {files:?}"));
            assert!(text.contains(part), "{part} in {name}: {text}");
        };
        has("summary.txt", "network/links.txt: ");
        has("kernel/proc-version.txt", "Linux");
        has("kernel/sysctls.txt", "net.ipv4.ip_forward = 1");
        has("network/links.txt", "sinabro_vxlan kind vxlan");
        has("network/addresses.txt", "172.30.0.11/24 dev eth0");
        has("network/routes.txt", &format!("{v4}/32 dev snb"));
        has("network/rules.txt", "table: 254");
        has("network/neighbours.txt", "dev sinabro_vxlan mac 02:5b:");
        has("network/fdb.txt", "dev sinabro_vxlan dst 172.30.0.12");
        has(
            "network/nft-chains.txt",
            "ip filter FORWARD type filter hook forward priority 0 policy drop",
        );
        has("network/nft-rules.txt", " packets, ");
        has("network/filters.txt", " priority ");
        has("bpf/pins.txt", "ENDPOINTS: hash of");
        has("bpf/pins.txt", " 2 used");
        has("bpf/pins.txt", "links/host-");
        has("state/files.txt", "/run/sinabro/leases/");
        has(&format!("state/leases/{v4}"), "pod");
        has("cni/20-other.conf", "other");
        has("cni/conf.txt", "other-kubeconfig");
        has("cni/versions.txt", "meter: 0.4.0, 1.0.0\n");
        has("cni/versions.txt", "gone: there is no plugin gone");
        has("kubernetes/node-info.json.missing", "which node this is");
        has("places.txt", "/run/sinabro");
        assert!(files.values().all(|text| !text.contains("hunter2")));
    }
    let without = unpack(&debug(node, "-").stdout);
    assert!(without["agent/status.json.missing"].contains("cannot reach the agent"));
    assert!(without["summary.txt"].contains("agent/status.json: missing"));
}

#[test]
fn a_file_is_written_once() {
    let lab = Lab::for_test(1).unwrap();
    let node = lab.node(1);
    let path = Path::new("/run/lab/node.tar");
    let output = debug(node, path.to_str().unwrap());
    assert_eq!(output.stdout, b"wrote /run/lab/node.tar\n");
    let outside: PathBuf = node.namespace().path(path);
    let written = fs::read(&outside).unwrap();
    assert!(unpack(&written).contains_key("agent/status.json"));

    let again = node.ctl(&["debug", "-o", path.to_str().unwrap()]).unwrap();
    assert_eq!(again.status.code(), Some(1));
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(said.contains("not overwritten"), "{said}");
    assert_eq!(fs::read(&outside).unwrap(), written);
}

/// All files below a directory, as text.
fn contents(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries
        .flat_map(|entry| match entry.file_type().unwrap() {
            kind if kind.is_dir() => contents(&entry.path()),
            kind if kind.is_file() => {
                vec![String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned()]
            }
            _ => Vec::new(),
        })
        .collect()
}

/// Of the kubelet's kubeconfig nothing is kept but the server's URL: its secrets are in no bundle, log or file of the agent.
#[test]
fn the_secrets_of_a_kubelet_are_nowhere() {
    const SECRET: &str = "hunter2";
    let good = format!(
        "{{clusters: [{{name: c, cluster: {{server: 'https://192.0.2.7:6443'}}}}],
          contexts: [{{name: x, context: {{cluster: c, user: {SECRET}}}}}], current-context: x,
          users: [{{name: {SECRET}, user: {{token: {SECRET}, client-key-data: {SECRET}}}}}]}}"
    );
    let bad = format!("{{clusters: {SECRET}, users: [{SECRET}");
    let lab = Lab::for_test(1).unwrap();
    let node = lab.node(1);
    let file = node
        .namespace()
        .path("/run/lab/host/etc/kubernetes/kubelet.conf");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    for (kubeconfig, is_good) in [(&good, true), (&bad, false)] {
        fs::write(&file, kubeconfig).unwrap();
        let prepared = node.ctl(&["prepare", "--host-dir=/run/lab/host"]).unwrap();
        assert!(prepared.status.success(), "{prepared:?}");
        node.stop_agent().unwrap();
        node.start_agent().unwrap();
        node.wait_ready().unwrap();
        let state = contents(&node.namespace().path(names::STATE_DIR));
        let has_url = state.iter().any(|file| file.contains("192.0.2.7:6443"));
        assert_eq!(has_url, is_good, "{state:?}");
        let bundle = unpack(&debug(node, "-").stdout);
        let said = [&prepared.stdout, &prepared.stderr].map(|said| String::from_utf8_lossy(said));
        let texts = state.iter().chain(bundle.values()).map(String::as_str);
        let texts = texts.chain(said.iter().map(|said| &**said));
        let log = node.log();
        for text in texts.chain([&*log]) {
            assert!(!text.contains(SECRET), "{text}");
        }
    }
}
