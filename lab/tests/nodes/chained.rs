//! Plugins of others in our network configuration: those of a distribution, and one of the lab's
//! own that knows CNI 1.0.0 and no STATUS. Called in their order as a runtime calls them.

use serde_json::{Value, json};
use sinabro_common::names;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node,
    cni::{Answer, Call, IFNAME},
    datapath::keeps_off,
    node::netns_path,
    wait::eventually,
};
use std::{
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

const BIN_DIR: &str = "/run/lab/cni/bin";
const CONF_DIR: &str = "/run/lab/cni/net.d";
/// Where distributions put the reference plugins, if `cargo xtask test` has not said where they are.
const REFERENCE: [&str; 3] = ["/usr/lib/cni", "/usr/libexec/cni", "/opt/cni/bin"];

/// A plugin that says what it gets: passes an ADD's `prevResult` on, which the runtime's JSON has
/// between `name` and `type`, and refuses verbs and versions that it does not know.
const OLD: &str = r#"#!/bin/sh
input=$(cat)
echo "$CNI_COMMAND" >> /run/lab/cni/called
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}'; exit ;;
ADD|DEL|CHECK) ;;
*) echo '{"cniVersion":"1.0.0","code":4,"msg":"unknown CNI_COMMAND"}'; exit 1 ;;
esac
case $input in
'{"cniVersion":"1.0.0"'*) ;;
*) echo '{"cniVersion":"1.0.0","code":1,"msg":"incompatible CNI versions"}'; exit 1 ;;
esac
[ "$CNI_COMMAND" != ADD ] ||
    echo "$input" | sed -n 's/.*"prevResult":\(.*\),"type":"old".*/\1/p'
"#;

fn lab() -> Lab {
    Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap()
}

fn bin(node: &Node, name: &str) -> PathBuf {
    node.namespace().path(Path::new(BIN_DIR).join(name))
}

fn conflist(node: &Node) -> PathBuf {
    let path = Path::new(CONF_DIR).join(names::CNI_CONFLIST);
    node.namespace().path(path)
}

fn list(node: &Node) -> Value {
    serde_json::from_slice(&fs::read(conflist(node)).unwrap()).unwrap()
}

fn offered(node: &Node) -> Vec<String> {
    serde_json::from_value(list(node)["cniVersions"].clone()).unwrap()
}

/// Appends plugins as a mesh's installer does.
fn chain(node: &Node, plugins: &[Value]) {
    let mut list = list(node);
    let chained = list["plugins"].as_array_mut().unwrap();
    chained.extend_from_slice(plugins);
    let path = conflist(node);
    let new = path.with_extension("theirs");
    fs::write(&new, list.to_string()).unwrap();
    fs::rename(new, path).unwrap();
}

fn install(node: &Node, name: &str, program: &[u8]) {
    let path = bin(node, name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let new = path.with_extension("new");
    fs::write(&new, program).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, path).unwrap();
}

/// A plugin of the distribution's.
fn reference(name: &str) -> Vec<u8> {
    let said = env::var_os("SINABRO_REFERENCE_PLUGINS").map(PathBuf::from);
    let dirs = said.into_iter().chain(REFERENCE.map(PathBuf::from));
    let mut found = dirs.filter_map(|dir| fs::read(dir.join(name)).ok());
    let program = found.next();
    program.unwrap_or_else(|| panic!("no {name}: run `cargo xtask test`, which fetches it"))
}

fn start(node: &Node) {
    start_with(node, &[]);
}

fn start_with(node: &Node, flags: &[&str]) {
    let source = format!("--cni-source={}", node.binaries().plugin().display());
    node.start_agent_with(&[&[&*source], flags].concat())
        .unwrap();
    node.wait_ready().unwrap();
}

/// One plugin of the list, as libcni calls it.
fn call(node: &Node, command: &str, plugin: &Value, more: &Value) -> Answer {
    let mut config = plugin.clone();
    let asked = config.as_object_mut().unwrap().remove("capabilities");
    let runtime = json!({
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 8_000_000},
    });
    let asked = asked.as_ref().and_then(Value::as_object);
    for name in asked.into_iter().flat_map(|asked| asked.keys()) {
        if let Some(value) = runtime.get(name) {
            config["runtimeConfig"][name] = value.clone();
        }
    }
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    let name = plugin["type"].as_str().unwrap();
    let call = Call {
        plugin: &Path::new(BIN_DIR).join(name),
        command,
        container_id: "pod",
        netns: Some(&netns_path("pod")),
        args: None,
        config: &config,
    };
    call.run(node).unwrap()
}

/// ADD of a pod with all plugins of a list, in the highest version that it offers.
fn add(node: &Node) -> Result<Value, String> {
    let list = list(node);
    let version = offered(node).pop().unwrap();
    let mut result = Value::Null;
    for plugin in list["plugins"].as_array().unwrap() {
        let mut more = json!({"cniVersion": version, "name": list["name"]});
        if !result.is_null() {
            more["prevResult"] = result;
        }
        let answer = call(node, "ADD", plugin, &more);
        result = answer
            .success()
            .map_err(|error| format!("{}: {error}", plugin["type"]))?;
    }
    Ok(result)
}

fn del(node: &Node, result: &Value) {
    let list = list(node);
    let version = offered(node).pop().unwrap();
    let plugins = list["plugins"].as_array().unwrap();
    for plugin in plugins.iter().rev() {
        let more = json!({"cniVersion": version, "name": list["name"], "prevResult": result});
        call(node, "DEL", plugin, &more).success().unwrap();
    }
}

/// Whether the node leads its port to a pod, in whatever way portmap does it.
fn has_mapping(node: &Node) -> bool {
    let mut rules = Command::new("sh");
    rules.args(["-c", "iptables-save -t nat; nft list ruleset"]);
    node.place().put(&mut rules);
    let rules = rules.output().unwrap();
    String::from_utf8_lossy(&rules.stdout).contains("8080")
}

fn knows_1_1(node: &Node, name: &str) -> bool {
    let more = json!({"cniVersion": "1.0.0"});
    let answer = call(node, "VERSION", &json!({"type": name}), &more);
    let versions = answer.success().unwrap()["supportedVersions"].clone();
    versions.as_array().unwrap().contains(&json!("1.1.0"))
}

fn assert_well(node: &Node) {
    let status = node.status().unwrap();
    assert!(status.ready, "{:?}", status.conditions);
}

#[test]
fn plugins_of_a_distribution_add_pods_in_the_version_that_all_know() {
    let lab = lab();
    let node = lab.node(1);
    let plugins = ["portmap", "bandwidth", "tuning"];
    for name in plugins {
        install(node, name, &reference(name));
    }
    start(node);
    let all_know = plugins.iter().all(|name| knows_1_1(node, name));
    let wanted: &[&str] = match all_know {
        true => &["1.0.0", "1.1.0"],
        false => &["1.0.0"],
    };
    eventually("portmap is chained", || {
        list(node)["plugins"][1]["type"] == "portmap"
    });
    chain(
        node,
        &[
            json!({"type": "bandwidth", "capabilities": {"bandwidth": true}}),
            json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}}),
        ],
    );
    eventually("all can be spoken with", || offered(node) == wanted);
    node.make_sandbox("pod").unwrap();
    const TCP: u8 = 6;
    let kept = |port| keeps_off(node, TCP, port).unwrap();
    assert!(kept(30_000) && !kept(8080));
    let result = add(node).unwrap();
    assert_eq!(result["interfaces"][1]["name"], IFNAME);
    // portmap has its mapping, and the agent knows of it, also the next one.
    assert!(kept(8080));
    assert!(has_mapping(node));
    node.stop_agent().unwrap();
    start(node);
    assert!(kept(8080) && kept(30_000));
    del(node, &result);
    assert!(!has_mapping(node));
    eventually("the port is free", || !kept(8080));
    assert_well(node);
    assert_eq!(list(node)["plugins"].as_array().unwrap().len(), 4);
    if all_know {
        return;
    }
    // What an offer of 1.1.0 would be: a refusal of every pod.
    let mut too_new = list(node);
    too_new["cniVersions"] = json!(["1.0.0", "1.1.0"]);
    let refused = plugins.iter().any(|name| {
        let more = json!({"cniVersion": "1.1.0", "name": "sinabro", "prevResult": result});
        !call(node, "ADD", &json!({"type": name}), &more).ok()
    });
    assert!(refused);
}

#[test]
fn a_plugin_without_status_is_chained_and_replaced() {
    let lab = lab();
    let node = lab.node(1);
    install(node, "old", OLD.as_bytes());
    start(node);
    assert_eq!(offered(node), ["1.0.0", "1.1.0"]);
    chain(node, &[json!({"type": "old"})]);
    eventually("it can be spoken with", || offered(node) == ["1.0.0"]);
    assert_well(node);
    node.make_sandbox("pod").unwrap();
    let result = add(node).unwrap();
    assert_eq!(result["interfaces"][1]["name"], IFNAME);
    del(node, &result);
    // With 1.1.0 it would refuse, and STATUS it does not know.
    let more = json!({"cniVersion": "1.1.0", "name": "sinabro", "prevResult": result});
    assert!(!call(node, "ADD", &json!({"type": "old"}), &more).ok());
    assert!(!call(node, "STATUS", &json!({"type": "old"}), &more).ok());

    // An upgrade of it, which no agent was there to see.
    node.stop_agent().unwrap();
    let newer = OLD.replace(r#""0.4.0","1.0.0"]"#, r#""0.4.0","1.0.0","1.1.0"]"#);
    install(node, "old", newer.as_bytes());
    start(node);
    eventually("the newer is asked", || offered(node) == ["1.0.0", "1.1.0"]);
    install(node, "old", OLD.as_bytes());
    eventually("the older is asked", || offered(node) == ["1.0.0"]);
    assert_eq!(list(node)["plugins"][1], json!({"type": "old"}));
    assert_well(node);
}

#[test]
fn a_limit_for_what_leaves_a_pod_needs_a_place_beside_our_filters() {
    let lab = lab();
    let node = lab.node(1);
    install(node, "bandwidth", &reference("bandwidth"));
    let limit = json!({"type": "bandwidth", "egressRate": 8_000_000, "egressBurst": 8_000_000});
    for (attach, works) in [("clsact", false), ("tcx", true)] {
        start_with(node, &[&format!("--attach={attach}")]);
        if list(node)["plugins"].as_array().unwrap().len() == 1 {
            chain(node, std::slice::from_ref(&limit));
        }
        let newest = match knows_1_1(node, "bandwidth") {
            true => "1.1.0",
            false => "1.0.0",
        };
        eventually("it can be spoken with", || {
            offered(node).last().is_some_and(|last| last == newest)
        });
        node.make_sandbox("pod").unwrap();
        let added = add(node);
        assert_eq!(added.is_ok(), works, "{attach}: {added:?}");
        del(node, &added.unwrap_or_default());
        node.remove_sandbox("pod").unwrap();
        node.stop_agent().unwrap();
    }
}
