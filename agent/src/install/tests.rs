use super::*;
use crate::node::{NodeState, NodeStatus};
use std::{os::unix::fs::PermissionsExt as _, path::Path, sync::Arc};
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
        addresses: Vec::new(),
        pod_cidrs: Vec::new(),
        uplinks: Vec::new(),
        mtu: 1450,
        masquerade_v4: None,
        non_masquerade: Vec::new(),
        warnings: Vec::new(),
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

#[test]
fn the_configuration_comes_after_the_plugin_and_only_when_the_node_can_serve() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let status = installer.pass(false, Instant::now());
    assert_eq!(status, InstallStatus::default());
    assert_eq!(fs::read(plugin(&config)).unwrap(), b"new plugin");
    assert!(!config.conf_dir.exists());

    fs::remove_file(&config.source).unwrap();
    let status = installer.pass(true, Instant::now());
    assert!(
        !status.installed && status.problems[0].contains("--cni-source"),
        "{status:?}"
    );
    assert!(!config.conf_dir.exists());

    fs::write(&config.source, "new plugin").unwrap();
    assert!(installer.pass(true, Instant::now()).installed);
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(plugin(&config)), 0o755);
    assert_eq!(mode(conflist(&config)), 0o600);
}

#[test]
fn what_is_in_place_is_not_written_again() {
    let (_dir, config) = scene();
    assert!(
        Installer::new(config.clone())
            .pass(true, Instant::now())
            .installed
    );
    let times = || {
        [plugin(&config), conflist(&config)].map(|p| fs::metadata(p).unwrap().modified().unwrap())
    };
    let before = times();
    assert!(
        Installer::new(config.clone())
            .pass(true, Instant::now())
            .installed
    );
    assert_eq!(times(), before);
}

#[test]
fn an_upgrade_replaces_the_plugin_and_keeps_the_configuration() {
    let (_dir, config) = scene();
    assert!(
        Installer::new(config.clone())
            .pass(true, Instant::now())
            .installed
    );
    fs::write(&config.source, "newer plugin").unwrap();
    // Not ready yet, as an agent that starts.
    Installer::new(config.clone()).pass(false, Instant::now());
    assert_eq!(fs::read(plugin(&config)).unwrap(), b"newer plugin");
    assert!(conflist(&config).exists());
}

#[test]
fn what_cannot_be_written_leaves_the_old_and_says_why() {
    let (_dir, config) = scene();
    // A directory cannot be renamed over.
    fs::create_dir_all(conflist(&config).join("x")).unwrap();
    let mut installer = Installer::new(config.clone());
    let status = installer.pass(true, Instant::now());
    assert!(!status.installed, "{status:?}");
    assert!(
        status.problems[0].contains("00-sinabro.conflist: "),
        "{status:?}"
    );
    assert_eq!(fs::read_dir(&config.conf_dir).unwrap().count(), 1);
    fs::remove_dir_all(conflist(&config)).unwrap();
    assert!(installer.pass(true, Instant::now()).installed);
}

#[test]
fn what_is_taken_away_again_and_again_is_left_alone() {
    let (_dir, config) = scene();
    let mut installer = Installer::new(config.clone());
    let now = Instant::now();
    assert!(installer.pass(true, now).installed);
    for _ in 0..TIMES {
        fs::write(conflist(&config), "theirs").unwrap();
        assert!(installer.pass(true, now).installed);
    }
    fs::write(conflist(&config), "theirs").unwrap();
    let status = installer.pass(true, now);
    assert!(status.problems[0].contains("left alone"), "{status:?}");
    assert_eq!(fs::read(conflist(&config)).unwrap(), b"theirs");
    // Later again.
    assert!(installer.pass(true, now + REST).installed);
}

#[test]
fn a_configuration_before_ours_is_told_and_left() {
    let (_dir, config) = scene();
    let other = config.conf_dir.join("00-other.conflist");
    fs::create_dir_all(&config.conf_dir).unwrap();
    fs::write(&other, "{}").unwrap();
    let status = Installer::new(config).pass(true, Instant::now());
    assert!(status.installed && status.problems.is_empty(), "{status:?}");
    assert!(
        status.warnings[0].contains("00-other.conflist"),
        "{status:?}"
    );
    assert!(other.exists());
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
    fs::write(config.bin_dir.join("portmap"), "").unwrap();
    until("portmap chained", || text().contains("portmap")).await;
    fs::remove_file(config.bin_dir.join("portmap")).unwrap();
    until("portmap gone", || {
        !text().contains("portmap") && text().contains("1.1.0")
    })
    .await;

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
