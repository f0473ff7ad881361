//! Configurations of others in the directory: which a runtime takes before ours, and which call
//! our plugin themselves.

use crate::state_file;
use serde_json::Value;
use sinabro_common::names;
use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

/// What runtimes take for configurations (libcni's ConfFiles as go-cni calls it).
const EXTENSIONS: [&str; 3] = ["conf", "conflist", "json"];

/// A configuration that a runtime takes rather than ours: it takes the first by name.
#[derive(Debug, PartialEq, Eq)]
pub struct Before {
    pub path: PathBuf,
    /// It passes pods on to our network, as Multus' does.
    pub delegates: bool,
}

pub fn before_ours(dir: &Path) -> io::Result<Vec<Before>> {
    let ours = Some(OsStr::new(names::CNI_CONFLIST));
    let mut found = all(dir)?;
    found.retain(|path| path.file_name() < ours);
    let before = |path: PathBuf| Before {
        delegates: delegates(&read(&path)),
        path,
    };
    Ok(found.into_iter().map(before).collect())
}

/// Configurations that call our plugin; those that cannot be read do not.
pub fn naming_us(dir: &Path) -> Vec<PathBuf> {
    let mut found = all(dir).unwrap_or_default();
    found.retain(|path| {
        let list = read(path);
        let plugins = list["plugins"].as_array();
        names_us(&list) || plugins.is_some_and(|plugins| plugins.iter().any(names_us))
    });
    found
}

/// Whether a plugin of that type is chained to ours.
pub fn is_chained(dir: &Path, kind: &str) -> bool {
    let is_chained = |path: &PathBuf| {
        let list = read(path);
        let plugins = list["plugins"].as_array();
        plugins.is_some_and(|plugins| {
            plugins.iter().any(names_us) && plugins.iter().any(|plugin| plugin["type"] == kind)
        })
    };
    all(dir).unwrap_or_default().iter().any(is_chained)
}

fn read(path: &Path) -> Value {
    let text = state_file::read_small(path).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn names_us(plugin: &Value) -> bool {
    plugin["type"] == names::CNI_PLUGIN
}

/// Whether a meta plugin's configuration leads to ours: a copy of it among its `delegates`, or its
/// `clusterNetwork` by name or by file (Multus, "Configuration Reference").
fn delegates(conf: &Value) -> bool {
    let plugins = |list: &Value| list["plugins"].as_array().cloned().unwrap_or_default();
    let of = |conf: &Value| {
        let network = conf["clusterNetwork"].as_str().unwrap_or_default();
        let file = network.rsplit('/').next().unwrap_or_default();
        let delegates = conf["delegates"].as_array().into_iter().flatten();
        network == names::CNI_NETWORK
            || file == names::CNI_CONFLIST
            || delegates
                .into_iter()
                .any(|list| names_us(list) || plugins(list).iter().any(names_us))
    };
    of(conf) || plugins(conf).iter().any(of)
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
        assert!(found.iter().all(|before| !before.delegates));
        let names: Vec<_> = found
            .iter()
            .map(|before| before.path.file_name().unwrap().to_str().unwrap())
            .collect();
        assert_eq!(names, ["0.json", "00-aaa.conflist", "00-sinabro.conf"]);
    }

    #[test]
    fn a_plugin_is_chained_only_behind_ours() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, types: &[&str]| {
            let plugins: Vec<_> = types.iter().map(|kind| json!({"type": kind})).collect();
            fs::write(
                dir.path().join(name),
                json!({"plugins": plugins}).to_string(),
            )
            .unwrap();
        };
        assert!(!is_chained(&dir.path().join("missing"), "istio-cni"));
        write("00-sinabro.conflist", &["sinabro", "portmap"]);
        write("10-other.conflist", &["bridge", "istio-cni"]);
        fs::write(dir.path().join("20-istio.conf"), r#"{"type": "istio-cni"}"#).unwrap();
        assert!(!is_chained(dir.path(), "istio-cni"));
        write("00-sinabro.conflist", &["sinabro", "portmap", "istio-cni"]);
        assert!(is_chained(dir.path(), "istio-cni"));
    }

    #[test]
    fn a_meta_plugin_that_leads_here_is_told_from_another_network() {
        let copy =
            json!({"name": "sinabro", "plugins": [{"type": "sinabro"}, {"type": "portmap"}]});
        for conf in [
            json!({"type": "multus", "delegates": [copy]}),
            json!({"type": "multus", "delegates": [{"type": "sinabro"}]}),
            json!({"type": "multus-shim", "clusterNetwork": "sinabro"}),
            json!({"type": "multus-shim", "clusterNetwork": "/host/etc/cni/net.d/00-sinabro.conflist"}),
            json!({"name": "n", "plugins": [{"type": "multus-shim", "clusterNetwork": "sinabro"}]}),
        ] {
            assert!(delegates(&conf), "{conf}");
        }
        for conf in [
            json!({"type": "multus", "delegates": [{"type": "other"}]}),
            json!({"type": "multus-shim", "clusterNetwork": "other"}),
            json!({"type": "bridge"}),
            json!([1, {"delegates": "sinabro"}]),
            Value::Null,
        ] {
            assert!(!delegates(&conf), "{conf}");
        }
    }
}
