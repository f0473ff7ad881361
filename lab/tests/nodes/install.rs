//! What the agent puts on a node so that runtimes find it.

use nix::mount::{MsFlags, mount};
use serde_json::Value;
use sinabro_common::{api::Condition, names};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    cni::{Call, IFNAME},
    node::netns_path,
    wait::eventually_some,
};
use std::{
    fs,
    path::{Path, PathBuf},
};

const BIN_DIR: &str = "/run/lab/cni/bin";
/// The same directory by another path.
const WRITABLE: &str = "/run/lab/cni/writable";
const CONF_DIR: &str = "/run/lab/cni/net.d";

fn lab() -> Lab {
    Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap()
}

fn start(node: &Node) {
    let source = format!("--cni-source={}", node.binaries().plugin().display());
    node.start_agent_with(&[&source]).unwrap();
}

fn condition(node: &Node) -> Option<Condition> {
    let mut conditions = node.status().ok()?.conditions.into_iter();
    conditions.find(|condition| condition.name == "conflist")
}

fn plugin(node: &Node) -> PathBuf {
    node.namespace()
        .path(Path::new(BIN_DIR).join(names::CNI_PLUGIN))
}

fn conflist(node: &Node) -> PathBuf {
    node.namespace()
        .path(Path::new(CONF_DIR).join(names::CNI_CONFLIST))
}

/// The first plugin's configuration as a runtime composes it from the installed list.
fn configuration(node: &Node) -> Value {
    let list: Value = serde_json::from_slice(&fs::read(conflist(node)).unwrap()).unwrap();
    let mut configuration = list["plugins"][0].clone();
    configuration["name"] = list["name"].clone();
    configuration["cniVersion"] = list["cniVersions"][1].clone();
    configuration
}

#[test]
fn a_runtime_can_use_what_the_agent_installed() {
    let lab = lab();
    let node = lab.node(1);
    start(node);
    node.wait_ready().unwrap();
    assert_eq!(condition(node).unwrap().detail, "");
    let configuration = configuration(node);
    node.make_sandbox("pod").unwrap();
    let call = |command, config: &Value| {
        let call = Call {
            plugin: &Path::new(BIN_DIR).join(names::CNI_PLUGIN),
            command,
            container_id: "pod",
            netns: Some(&netns_path("pod")),
            args: None,
            config,
        };
        call.run(node).unwrap().success().unwrap()
    };
    call("STATUS", &configuration);
    let result = call("ADD", &configuration);
    assert_eq!(result["interfaces"][1]["name"], IFNAME);
    // It stays when the agent stops, so that nothing is missed by who starts meanwhile.
    node.stop_agent().unwrap();
    call("DEL", &configuration);
    assert!(conflist(node).exists() && plugin(node).exists());
}

#[test]
fn a_full_disk_is_told_and_waited_for() {
    let lab = lab();
    let node = lab.node(1);
    let resize = |flags, size: &str| {
        let data = format!("size={size}");
        let resize = || {
            fs::create_dir_all("/run/lab/cni")?;
            let tmpfs = Some("tmpfs");
            Ok(mount(tmpfs, "/run/lab/cni", tmpfs, flags, Some(&*data))?)
        };
        node.namespace().run(resize).unwrap();
    };
    resize(MsFlags::empty(), "16k");
    start(node);
    let told = eventually_some("told", || {
        condition(node).filter(|condition| condition.detail.contains("No space left"))
    });
    assert!(
        !told.ok && told.detail.contains(names::CNI_PLUGIN),
        "{told:?}"
    );
    // Neither half a plugin nor a configuration without one.
    let left = fs::read_dir(node.namespace().path(BIN_DIR)).unwrap();
    assert_eq!(left.count(), 0);
    assert!(!conflist(node).exists());
    resize(MsFlags::MS_REMOUNT, "64m");
    node.wait_ready().unwrap();
    assert!(conflist(node).exists() && plugin(node).exists());
}

/// The plugin's directory as an agent in Kubernetes has it; others write to it by another path.
fn read_only(node: &Node) {
    let bind = || {
        let none = None::<&str>;
        for dir in [BIN_DIR, WRITABLE] {
            fs::create_dir_all(dir)?;
        }
        mount(Some(BIN_DIR), WRITABLE, none, MsFlags::MS_BIND, none)?;
        mount(Some(BIN_DIR), BIN_DIR, none, MsFlags::MS_BIND, none)?;
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        Ok(mount(none, BIN_DIR, none, flags, none)?)
    };
    node.namespace().run(bind).unwrap();
}

fn prepare(node: &Node, source: &Path) -> String {
    let source = format!("--cni-source={}", source.display());
    let dir = format!("--cni-bin-dir={WRITABLE}");
    let output = node.ctl(&["prepare", &source, &dir]).unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn an_agent_that_may_not_write_plugins_says_who_installs_them() {
    let lab = lab();
    let node = lab.node(1);
    read_only(node);
    start(node);
    let told = eventually_some("the plugin is missing", || {
        condition(node).filter(|c| !c.ok && c.detail.contains("sinabroctl prepare"))
    });
    assert!(told.detail.contains("delete this node's sinabro pod"));
    assert!(!conflist(node).exists());

    // What `prepare` does, in a container that has the directory writable.
    let source = node.binaries().plugin();
    let written = Path::new(WRITABLE).join(names::CNI_PLUGIN);
    let written = node.namespace().path(written);
    assert!(prepare(node, &source).contains("installed /run/lab/cni/writable/sinabro"));
    assert!(!prepare(node, &source).contains("installed"));
    node.wait_ready().unwrap();
    assert!(conflist(node).exists());

    // Of another release: pods can be added, and it is said.
    let other = [fs::read(&source).unwrap(), b"other".to_vec()].concat();
    fs::write(&written, other).unwrap();
    eventually_some("it is of another release", || {
        condition(node).filter(|c| c.ok && c.detail.contains("of another version"))
    });
    // Gone, as when somebody cleans up.
    fs::remove_file(written).unwrap();
    eventually_some("it is gone", || {
        condition(node).filter(|c| !c.ok && c.detail.contains("sinabroctl prepare"))
    });
}
