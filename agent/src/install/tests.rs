use super::*;
use crate::install::versions::tests::knowing;
use crate::node::{NodeState, NodeStatus};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::Arc,
};
use tempfile::TempDir;

/// A node's directories and a plugin to install.
fn scene() -> (TempDir, InstallConfig) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("plugin"), "new plugin").unwrap();
    let config = InstallConfig {
        source: at("plugin"),
        bin_dir: at("opt/bin"),
        conf_dir: at("etc/net.d"),
        state_dir: names::STATE_DIR.into(),
        socket: Path::new(names::STATE_DIR).join(names::SOCKET),
    };
    (dir, config)
}

fn plugin(config: &InstallConfig) -> PathBuf {
    config.bin_dir.join(names::CNI_PLUGIN)
}

fn conflist(config: &InstallConfig) -> PathBuf {
    config.conf_dir.join(names::CNI_CONFLIST)
}

fn known() -> NodeStatus {
    let state = NodeState {
        mtu: 1450,
        ..NodeState::default()
    };
    NodeStatus {
        state: Some(Arc::new(state)),
        problem: None,
    }
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), wait).await;
    waited.unwrap_or_else(|_| panic!("never: {what}"));
}

fn look(installer: &mut Installer, ready: bool) -> InstallStatus {
    installer.pass(ready, Instant::now()).expect("settled")
}

fn read_list(config: &InstallConfig) -> Value {
    serde_json::from_slice(&fs::read(conflist(config)).unwrap()).unwrap()
}

/// Writes the configuration as somebody else does, who is done with it.
fn rewrite(config: &InstallConfig, text: &str) {
    fs::write(conflist(config), text).unwrap();
    let file = File::options().write(true).open(conflist(config)).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
}

/// Changes the list as another's installer does, which reads it, edits it and writes it whole.
fn edit(config: &InstallConfig, change: impl FnOnce(&mut Value)) {
    let mut list = read_list(config);
    change(&mut list);
    let new = conflist(config).with_extension("theirs");
    fs::write(&new, list.to_string()).unwrap();
    fs::rename(&new, conflist(config)).unwrap();
}

/// Appends a plugin, if it is not there.
fn chain(config: &InstallConfig, plugin: &Value) {
    let chained = |list: &Value| list["plugins"].as_array().unwrap().contains(plugin);
    if !chained(&read_list(config)) {
        edit(config, |list| {
            list["plugins"].as_array_mut().unwrap().push(plugin.clone())
        });
    }
}

fn types(config: &InstallConfig) -> Vec<String> {
    let list = read_list(config);
    let types = list["plugins"].as_array().unwrap().iter();
    types
        .map(|p| p["type"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn the_configuration_comes_after_the_plugin_and_only_when_the_node_can_serve() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let status = look(&mut installer, false);
    assert_eq!(status, InstallStatus::default());
    assert_eq!(fs::read(plugin(&config)).unwrap(), b"new plugin");
    assert!(!config.conf_dir.exists());

    fs::remove_file(&config.source).unwrap();
    let status = look(&mut installer, true);
    assert!(
        !status.installed && status.problems[0].contains("--cni-source"),
        "{status:?}"
    );
    assert!(!config.conf_dir.exists());

    fs::write(&config.source, "new plugin").unwrap();
    assert!(look(&mut installer, true).installed);
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(plugin(&config)), 0o755);
    assert_eq!(mode(conflist(&config)), 0o600);
}

#[test]
fn what_is_in_place_is_not_written_again() {
    let (_dir, config) = scene();
    assert!(look(&mut Installer::new(config.clone()), true).installed);
    let times = || {
        [plugin(&config), conflist(&config)].map(|p| fs::metadata(p).unwrap().modified().unwrap())
    };
    let before = times();
    assert!(look(&mut Installer::new(config.clone()), true).installed);
    assert_eq!(times(), before);
}

#[test]
fn an_upgrade_replaces_the_plugin_and_keeps_the_configuration() {
    let (_dir, config) = scene();
    assert!(look(&mut Installer::new(config.clone()), true).installed);
    fs::write(&config.source, "newer plugin").unwrap();
    // Not ready yet, as an agent that starts.
    look(&mut Installer::new(config.clone()), false);
    assert_eq!(fs::read(plugin(&config)).unwrap(), b"newer plugin");
    assert!(conflist(&config).exists());
}

#[test]
fn what_cannot_be_written_leaves_the_old_and_says_why() {
    let (_dir, config) = scene();
    // A directory cannot be renamed over.
    fs::create_dir_all(conflist(&config).join("x")).unwrap();
    let mut installer = Installer::new(config.clone());
    let status = look(&mut installer, true);
    assert!(!status.installed, "{status:?}");
    assert!(
        status.problems[0].contains("00-sinabro.conflist: "),
        "{status:?}"
    );
    assert_eq!(fs::read_dir(&config.conf_dir).unwrap().count(), 1);
    fs::remove_dir_all(conflist(&config)).unwrap();
    assert!(look(&mut installer, true).installed);
}

#[test]
fn what_is_taken_away_again_and_again_is_left_alone() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let now = Instant::now();
    let mut pass = |now| installer.pass(true, now).unwrap();
    assert!(pass(now).installed);
    for _ in 0..TIMES {
        rewrite(&config, "theirs");
        assert!(pass(now).installed);
    }
    rewrite(&config, "theirs");
    let status = pass(now);
    assert!(!status.installed);
    assert!(status.problems[0].contains("left alone"), "{status:?}");
    assert_eq!(fs::read(conflist(&config)).unwrap(), b"theirs");
    // Later again.
    assert!(pass(now + REST).installed);
}

#[test]
fn what_could_not_be_written_was_taken_away_by_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plugin");
    let mut target = Target::new(path.clone());
    for version in 0..=TIMES {
        let content = version.to_string();
        let mut keep = || target.keep(content.as_bytes(), plugin::MODE, Instant::now());
        let _ = fs::remove_file(&path);
        fs::create_dir(&path).unwrap();
        assert!(matches!(keep(), Err(InstallError::File(_))));
        fs::remove_dir(&path).unwrap();
        keep().unwrap();
    }
}

#[test]
fn a_contested_list_that_serves_pods_is_a_warning() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let now = Instant::now();
    let mut pass = |now| installer.pass(true, now).unwrap();
    assert!(pass(now).installed);
    let rename = |list: &mut Value| list["name"] = json!("other");
    for _ in 0..TIMES {
        edit(&config, rename);
        assert_eq!(pass(now).warnings, []);
        assert_eq!(read_list(&config)["name"], "sinabro");
    }
    edit(&config, rename);
    let status = pass(now);
    assert!(status.installed && status.problems.is_empty(), "{status:?}");
    assert_eq!(status.warnings[0].reason, "ConfigurationContested");
    assert_eq!(read_list(&config)["name"], "other");
    // Without our plugin pods get another network.
    edit(&config, |list| list["plugins"] = json!([{"type": "other"}]));
    assert!(!pass(now).installed);
}

#[test]
fn a_mesh_that_chains_itself_is_kept_by_upgrades_and_may_go() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let mut pass = || look(&mut installer, true);
    assert!(pass().installed);
    let mesh = json!({"type": "istio-cni", "kubernetes": {"cni_bin_dir": "/opt/cni/bin"}});
    let all = r#"["0.3.1","0.4.0","1.0.0","1.1.0"]"#;
    knowing(&config.bin_dir.join("istio-cni"), all);
    for round in 0..TIMES * 3 {
        chain(&config, &mesh);
        let before = fs::read(conflist(&config)).unwrap();
        let status = pass();
        assert!(
            status.installed && status.warnings.is_empty(),
            "{round}: {status:?}"
        );
        assert_eq!(fs::read(conflist(&config)).unwrap(), before);
        edit(&config, |list| {
            list["plugins"].as_array_mut().unwrap().pop();
        });
        assert!(pass().installed);
        assert_eq!(types(&config), ["sinabro"]);
    }
    chain(&config, &mesh);
    // Others' file mode is what the CIS benchmark minds.
    fs::set_permissions(conflist(&config), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(pass().installed);
    let mode = fs::metadata(conflist(&config))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    knowing(&config.bin_dir.join("portmap"), all);
    assert!(pass().installed);
    assert_eq!(types(&config), ["sinabro", "portmap", "istio-cni"]);
    // The next release, with another state directory.
    let mut newer = config.clone();
    newer.state_dir = "/run/other".into();
    assert!(look(&mut Installer::new(newer), true).installed);
    assert_eq!(types(&config), ["sinabro", "portmap", "istio-cni"]);
    let list = read_list(&config);
    assert_eq!(list["plugins"][0]["stateDir"], "/run/other");
    assert_eq!(list["plugins"][2], mesh);
}

#[test]
fn a_directory_for_pods_with_one_mtu_has_the_same_but_for_that() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let now = Instant::now();
    let mut pass = |now| installer.pass(true, now).unwrap();
    let other = local_mtu_off::path(&config.conf_dir);
    let dir = other.parent().unwrap();
    assert!(pass(now).installed);
    // Nobody wants it.
    assert!(!dir.exists());
    fs::create_dir(dir).unwrap();
    assert!(pass(now).installed);
    let is_same = || {
        let mut wanted = read_list(&config);
        wanted["name"] = json!("sinabro-local-mtu-off");
        for plugin in wanted["plugins"].as_array_mut().unwrap() {
            if plugin["type"] == "sinabro" {
                plugin["localMTU"] = json!("off");
            }
        }
        let found: Value = serde_json::from_slice(&fs::read(&other).unwrap()).unwrap();
        found == wanted
    };
    assert!(is_same());
    let mode = fs::metadata(&other).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(read_list(&config)["plugins"][0]["localMTU"].is_null());
    // What others chain is in both, and what an upgrade changes.
    chain(&config, &json!({"type": "istio-cni"}));
    assert!(pass(now).installed && is_same());
    let mut newer = config.clone();
    newer.state_dir = "/run/other".into();
    assert!(look(&mut Installer::new(newer), true).installed && is_same());
    // An agent of the one before: the same again.
    assert!(look(&mut Installer::new(config.clone()), true).installed && is_same());
    let is_contested = |status: InstallStatus| {
        assert!(status.installed, "{status:?}");
        let mut reasons = status.warnings.iter().map(|warning| warning.reason);
        reasons.any(|reason| reason == "ConfigurationContested")
    };
    for _ in 0..TIMES {
        fs::remove_file(&other).unwrap();
        assert!(!is_contested(pass(now)) && is_same());
    }
    fs::write(&other, "theirs").unwrap();
    assert!(is_contested(pass(now)));
    assert_eq!(fs::read(&other).unwrap(), b"theirs");
    assert!(pass(now + REST).installed && is_same());
}

#[test]
fn only_what_every_chained_plugin_knows_is_offered() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let mut offered = || {
        let status = look(&mut installer, true);
        assert!(status.installed, "{status:?}");
        let list = read_list(&config);
        (
            list["cniVersion"].clone(),
            list["cniVersions"].clone(),
            status,
        )
    };
    let chained = config.bin_dir.join("chained");
    assert_eq!(offered().1, json!(["1.0.0", "1.1.0"]));
    chain(&config, &json!({"type": "chained"}));
    let (_, missing, status) = offered();
    assert_eq!(missing, json!(["1.0.0"]));
    assert_eq!(status.warnings[0].reason, "PluginMissing");
    knowing(&chained, r#"["0.4.0","1.0.0"]"#);
    let (_, plain, status) = offered();
    assert_eq!((plain, status.warnings), (json!(["1.0.0"]), vec![]));
    // Replaced by a newer one, by an older one.
    knowing(&chained, r#"["0.4.0","1.0.0","1.1.0"]"#);
    assert_eq!(offered().1, json!(["1.0.0", "1.1.0"]));
    knowing(&chained, r#"["0.3.0","0.3.1","0.4.0"]"#);
    let (version, versions, _) = offered();
    assert_eq!((version, versions), (json!("0.4.0"), json!(["0.4.0"])));
    knowing(&chained, r#"["0.1.0"]"#);
    let (_, versions, status) = offered();
    assert_eq!(versions, json!(["1.0.0"]));
    assert_eq!(status.warnings[0].reason, "PluginIncompatible");
    // Without the one that nobody can speak with, hostPorts alone are lost.
    edit(&config, |list| {
        list["plugins"].as_array_mut().unwrap().pop();
    });
    knowing(&config.bin_dir.join("portmap"), r#"["0.1.0"]"#);
    let (_, versions, status) = offered();
    assert_eq!(versions, json!(["1.0.0", "1.1.0"]));
    assert!(status.warnings[0].text.contains("hostPorts"), "{status:?}");
    assert_eq!(types(&config), ["sinabro"]);
}

#[test]
fn half_a_file_is_waited_for_and_half_a_file_for_ever_is_replaced() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    assert!(look(&mut installer, true).installed);
    let mesh = json!({"type": "linkerd-cni"});
    chain(&config, &mesh);
    let whole = fs::read(conflist(&config)).unwrap();
    let now = Instant::now();
    for part in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs::write(conflist(&config), &whole[..part]).unwrap();
        assert!(installer.pass(true, now).is_none(), "{part}");
        assert_eq!(fs::read(conflist(&config)).unwrap(), whole[..part]);
    }
    fs::write(conflist(&config), &whole).unwrap();
    assert!(look(&mut installer, true).installed);
    assert_eq!(types(&config), ["sinabro", "linkerd-cni"]);
    // Somebody who never ends writing, and somebody who ended long ago.
    fs::write(conflist(&config), &whole[..9]).unwrap();
    assert!(installer.pass(true, now).is_none());
    assert!(installer.pass(true, now + SETTLED).unwrap().installed);
    assert_eq!(types(&config), ["sinabro"]);
    rewrite(&config, "[");
    assert!(look(&mut installer, true).installed);
    assert_eq!(types(&config), ["sinabro"]);
}

#[test]
fn a_configuration_before_ours_is_told_and_left() {
    let (_dir, config) = scene();
    let other = config.conf_dir.join("00-other.conflist");
    fs::create_dir_all(&config.conf_dir).unwrap();
    fs::write(&other, "{}").unwrap();
    let multus = config.conf_dir.join("00-multus.conf");
    let text = json!({"type": "multus-shim", "clusterNetwork": conflist(&config)});
    fs::write(&multus, text.to_string()).unwrap();
    let status = look(&mut Installer::new(config), true);
    assert!(status.installed && status.problems.is_empty(), "{status:?}");
    let [warning] = &status.warnings[..] else {
        panic!("{status:?}");
    };
    assert_eq!(warning.reason, "OtherNetworkFirst");
    assert!(warning.text.contains("00-other.conflist"), "{status:?}");
    assert!(status.notes[0].contains("00-multus.conf"), "{status:?}");
    assert!(other.exists() && multus.exists());
}

/// Another's installer that puts its plugin in whenever it is not there, beside ours, which takes
/// up what portmap knows: neither loses, and both come to rest.
#[tokio::test]
async fn two_installers_that_watch_one_file_come_to_rest() {
    let (_dir, config) = scene();
    let (node, facts) = watch::channel(known());
    let (status, task) = spawn(config.clone(), facts);
    until("conflist", || status.borrow().installed).await;
    let mesh = json!({"type": "istio-cni"});
    let all = r#"["0.4.0","1.0.0","1.1.0"]"#;
    knowing(&config.bin_dir.join("istio-cni"), all);
    let portmap = config.bin_dir.join("portmap");
    for (versions, offered) in [
        (r#"["1.0.0"]"#, json!(["1.0.0"])),
        (all, json!(["1.0.0", "1.1.0"])),
        (r#"["0.4.0","1.0.0"]"#, json!(["1.0.0"])),
    ] {
        knowing(&portmap, versions);
        until("both are in the list", || {
            chain(&config, &mesh);
            let list = read_list(&config);
            list["cniVersions"] == offered && types(&config) == ["sinabro", "portmap", "istio-cni"]
        })
        .await;
    }
    until("it is well", || status.borrow().installed).await;
    assert_eq!(status.borrow().problems, [""; 0]);
    drop(node);
    task.await.unwrap();
}

#[tokio::test]
async fn changes_by_others_are_answered_at_once() {
    let (_dir, config) = scene();
    let (node, facts) = watch::channel(NodeStatus::default());
    let (status, task) = spawn(config.clone(), facts);
    until("plugin", || plugin(&config).exists()).await;
    assert!(!conflist(&config).exists());
    node.send_replace(known());
    until("conflist", || status.borrow().installed).await;

    let text = || fs::read_to_string(conflist(&config)).unwrap_or_default();
    knowing(&config.bin_dir.join("portmap"), r#"["1.0.0"]"#);
    until("portmap chained", || text().contains("portmap")).await;
    fs::remove_file(config.bin_dir.join("portmap")).unwrap();
    until("portmap gone", || {
        !text().contains("portmap") && text().contains("1.1.0")
    })
    .await;

    let of_one_mtu = local_mtu_off::path(&config.conf_dir);
    fs::create_dir(of_one_mtu.parent().unwrap()).unwrap();
    until("a second conflist", || of_one_mtu.exists()).await;

    fs::remove_file(conflist(&config)).unwrap();
    until("conflist put back", || conflist(&config).exists()).await;
    fs::remove_file(plugin(&config)).unwrap();
    until("plugin put back", || plugin(&config).exists()).await;
    fs::write(config.conf_dir.join("00-other.conf"), "{}").unwrap();
    until("other told", || !status.borrow().warnings.is_empty()).await;
    fs::remove_file(config.conf_dir.join("00-other.conf")).unwrap();
    until("other gone", || status.borrow().warnings.is_empty()).await;

    drop(node);
    task.await.unwrap();
}
