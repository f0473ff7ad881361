//! The network configuration: what is in it, and which others come before it.
//!
//! Capabilities ask the runtime for a `runtimeConfig` of that name (CNI conventions, "Dynamic
//! plugin specific fields"). `io.kubernetes.cri.pod-annotations` is one that containerd (since 1.5,
//! cniNamespaceOpts of its CRI service) and CRI-O (since 1.29, newPodNetwork) have: an object of all
//! annotations that the kubelet gave the pod's sandbox, each a string; null, empty or missing if
//! there are none. It comes with the DEL as well. The sandbox is made once: a changed annotation
//! comes with the next. Other runtimes, and CRI-O before, pass over the capability.

use super::InstallConfig;
use crate::state_file;
use serde::Serialize;
use serde_json::Value;
use sinabro_common::names;
use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

/// The plugin of hostPort, if the node has it.
pub const PORTMAP: &str = "portmap";

/// What runtimes take for configurations (libcni's ConfFiles as go-cni calls it).
const EXTENSIONS: [&str; 3] = ["conf", "conflist", "json"];

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ConfList<'a> {
    cni_version: &'static str,
    cni_versions: [&'static str; 2],
    name: &'static str,
    plugins: Vec<Plugin<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Plugin<'a> {
    #[serde(rename_all = "camelCase")]
    Sinabro {
        r#type: &'static str,
        capabilities: Asked,
        #[serde(skip_serializing_if = "Option::is_none")]
        state_dir: Option<&'a Path>,
        #[serde(skip_serializing_if = "Option::is_none")]
        socket: Option<&'a Path>,
    },
    #[serde(rename_all = "camelCase")]
    Portmap {
        r#type: &'static str,
        capabilities: PortMappings,
        snat: bool,
    },
}

#[derive(Serialize)]
struct Asked {
    ips: bool,
    mac: bool,
    #[serde(rename = "io.kubernetes.cri.pod-annotations")]
    annotations: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PortMappings {
    port_mappings: bool,
}

/// The file's content. `cniVersions` is of CNI 1.1 (§1, "Configuration format"): an older libcni
/// passes over it and speaks 1.0.0, a newer one speaks 1.1.0 and so asks for STATUS and GC.
pub fn render(config: &InstallConfig, portmap: bool) -> Result<Vec<u8>, serde_json::Error> {
    let state_dir = config.state_dir.as_path();
    let other_dir = state_dir != Path::new(names::STATE_DIR);
    let other_socket = config.socket != state_dir.join(names::SOCKET);
    let mut plugins = vec![Plugin::Sinabro {
        r#type: names::CNI_PLUGIN,
        capabilities: Asked {
            ips: true,
            mac: true,
            annotations: true,
        },
        state_dir: other_dir.then_some(state_dir),
        socket: other_socket.then_some(&config.socket),
    }];
    if portmap {
        plugins.push(Plugin::Portmap {
            r#type: PORTMAP,
            capabilities: PortMappings {
                port_mappings: true,
            },
            // Else a pod cannot reach itself by a port of its node.
            snat: true,
        });
    }
    let list = ConfList {
        cni_version: "1.0.0",
        cni_versions: ["1.0.0", "1.1.0"],
        name: "sinabro",
        plugins,
    };
    let mut text = serde_json::to_vec_pretty(&list)?;
    text.push(b'\n');
    Ok(text)
}

/// Configurations that a runtime takes rather than ours: it takes the first by name.
pub fn before_ours(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let ours = Some(OsStr::new(names::CNI_CONFLIST));
    let mut found = all(dir)?;
    found.retain(|path| path.file_name() < ours);
    Ok(found)
}

/// Configurations that call our plugin; those that cannot be read do not.
pub fn naming_us(dir: &Path) -> Vec<PathBuf> {
    let names_us = |plugin: &Value| plugin["type"] == names::CNI_PLUGIN;
    let mut found = all(dir).unwrap_or_default();
    found.retain(|path| {
        let text = state_file::read_small(path).unwrap_or_default();
        let list: Value = serde_json::from_slice(&text).unwrap_or_default();
        let plugins = list["plugins"].as_array();
        names_us(&list) || plugins.is_some_and(|plugins| plugins.iter().any(names_us))
    });
    found
}

/// All configurations, in the order of their names.
fn all(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        let counts = path
            .extension()
            .is_some_and(|found| EXTENSIONS.iter().any(|extension| found == *extension));
        if counts && !entry.file_type()?.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config() -> InstallConfig {
        InstallConfig {
            source: "/usr/bin/sinabro".into(),
            bin_dir: names::CNI_BIN_DIR.into(),
            conf_dir: names::CNI_CONF_DIR.into(),
            state_dir: names::STATE_DIR.into(),
            socket: Path::new(names::STATE_DIR).join(names::SOCKET),
        }
    }

    fn rendered(config: &InstallConfig, portmap: bool) -> Value {
        serde_json::from_slice(&render(config, portmap).unwrap()).unwrap()
    }

    #[test]
    fn the_list_has_what_a_runtime_needs() {
        let mut sinabro = json!({"type": "sinabro", "capabilities": {"ips": true, "mac": true}});
        sinabro["capabilities"][names::ANNOTATIONS_CAPABILITY] = json!(true);
        let mut list = json!({
            "cniVersion": "1.0.0",
            "cniVersions": ["1.0.0", "1.1.0"],
            "name": "sinabro",
            "plugins": [sinabro],
        });
        assert_eq!(rendered(&config(), false), list);
        let portmap =
            json!({"type": "portmap", "capabilities": {"portMappings": true}, "snat": true});
        list["plugins"] = json!([sinabro, portmap]);
        assert_eq!(rendered(&config(), true), list);
    }

    #[test]
    fn places_are_told_only_if_they_are_not_the_usual_ones() {
        let mut config = config();
        config.state_dir = "/run/other".into();
        config.socket = "/run/other/agent.sock".into();
        let plugin = rendered(&config, false)["plugins"][0].clone();
        assert_eq!(plugin["stateDir"], "/run/other");
        assert_eq!(plugin["socket"], Value::Null);
        config.socket = "/run/a.sock".into();
        let plugin = rendered(&config, false)["plugins"][0].clone();
        assert_eq!(plugin["socket"], "/run/a.sock");
    }

    #[test]
    fn what_a_runtime_would_take_first_is_found() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "00-aaa.conflist",
            "00-sinabro.conf",
            "0.json",
            // After ours, or no configuration.
            "10-other.conflist",
            "00-sinabro.conflist",
            "00-b.conflist.bak",
            "00-c",
            ".00-sinabro.conflist.tmp",
        ] {
            fs::write(dir.path().join(name), "{}").unwrap();
        }
        fs::create_dir(dir.path().join("00-d.conf")).unwrap();
        let found = before_ours(dir.path()).unwrap();
        let names: Vec<_> = found
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap())
            .collect();
        assert_eq!(names, ["0.json", "00-aaa.conflist", "00-sinabro.conf"]);
    }
}
