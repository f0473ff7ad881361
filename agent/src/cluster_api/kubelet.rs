//! The API server by the address that the node's kubelet has: where nobody but this agent leads to the Service `kubernetes`,
//! no other address is known when a node starts.
//!
//! Only `sinabroctl prepare` sees the kubelet's files. It leaves the agent the URL of the server and nothing else of them: no credentials,
//! and no CA. The server has to have a certificate of the cluster's own CA, whatever the file says of that.

use super::servers::ApiServer;
use crate::{
    config::value::api_server,
    state_file::{self, FileError},
};
use serde_json::{Value, json};
use std::{io, path::Path};

/// Below the root of the node's file system, where distributions have the kubelet's kubeconfig.
const FILES: [&str; 7] = [
    // kubeadm, kind.
    "etc/kubernetes/kubelet.conf",
    "var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "var/lib/k0s/kubelet.conf",
    "var/snap/microk8s/current/credentials/kubelet.config",
    // Clouds' nodes.
    "var/lib/kubelet/kubeconfig",
    "etc/kubernetes/kubeconfig",
];
/// Longest kubeconfig that is read: with certificates inside it has some 10,000 bytes.
const MAX_LEN: u64 = 1024 * 1024;

/// What was found, as it is in the state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// URL of the server.
    pub server: Option<String>,
    /// The file that has it, on the node.
    pub file: Option<String>,
    /// Why other files have none.
    pub problems: Vec<String>,
}

/// Looks for the kubelet's kubeconfig below the root of the node's file system. Files that are not there are no problem.
pub fn look(root: &Path) -> Found {
    let mut found = Found::default();
    for name in FILES {
        let file = format!("/{name}");
        match server(&root.join(name)) {
            Ok(None) => {}
            Ok(Some(server)) => {
                found.server = Some(server);
                found.file = Some(file);
                break;
            }
            Err(why) => found.problems.push(format!("{file} {why}")),
        }
    }
    found
}

/// Leaves the agent what was found; whether that is new.
///
/// # Errors
/// If it cannot be written.
pub fn keep(found: &Found, path: &Path) -> Result<bool, FileError> {
    let text = found.text();
    if state_file::read_small(path).is_ok_and(|kept| kept == text.as_bytes()) {
        return Ok(false);
    }
    state_file::replace(path, text.as_bytes())?;
    Ok(true)
}

/// What was left; nothing if the file is missing or damaged, which the next start of the pod mends.
pub fn read(path: &Path) -> Found {
    let kept = state_file::read_small(path).unwrap_or_default();
    let kept: Value = serde_json::from_slice(&kept).unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let problems = kept["problems"].as_array();
    Found {
        server: text(&kept["server"]),
        file: text(&kept["file"]),
        problems: problems.into_iter().flatten().filter_map(text).collect(),
    }
}

impl Found {
    fn text(&self) -> String {
        json!({"server": self.server, "file": self.file, "problems": self.problems}).to_string()
    }

    pub fn api_server(&self) -> Option<ApiServer> {
        api_server(self.server.as_deref()?).ok()
    }
}

/// The URL of the server, or why there is none. What is wrong is never quoted: the file has secrets.
fn server(path: &Path) -> Result<Option<String>, String> {
    let text = match state_file::read_of_others(path, MAX_LEN) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("cannot be read: {error}")),
    };
    let text = String::from_utf8(text).map_err(|_| "is not text")?;
    let config: Value = serde_saphyr::from_str(&text).map_err(|_| "is no kubeconfig")?;
    let server = current_server(&config).ok_or("has no server of a current cluster")?;
    if !server.starts_with("https://") {
        return Err("has a server that is not asked by https".into());
    }
    let parsed = api_server(server).map_err(|_| "has a server that is no address and port")?;
    Ok(Some(format!("https://{parsed}")))
}

/// `server` of the cluster that the current context names, or of the only one where no context is current
/// (k8s.io/client-go/tools/clientcmd/api/v1).
fn current_server(config: &Value) -> Option<&str> {
    let named = |list: &str, name: &str| {
        let mut all = config[list].as_array()?.iter();
        all.find(|one| one["name"] == name)
    };
    let cluster = match config["current-context"].as_str() {
        None | Some("") => match &config["clusters"].as_array()?[..] {
            [only] => only,
            _ => return None,
        },
        Some(current) => named(
            "clusters",
            named("contexts", current)?["context"]["cluster"].as_str()?,
        )?,
    };
    cluster["cluster"]["server"].as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    fn kubeconfig(server: &str) -> String {
        format!(
            "apiVersion: v1
kind: Config
clusters:
- name: other
  cluster: {{server: 'https://192.0.2.99:1'}}
- name: here
  cluster:
    server: {server}
    certificate-authority-data: U0VDUkVU
    insecure-skip-tls-verify: true
    proxy-url: http://192.0.2.98
contexts:
- {{name: node@here, context: {{cluster: here, user: node}}}}
current-context: node@here
users:
- {{name: node, user: {{token: SECRET, client-key-data: SECRET}}}}
"
        )
    }

    fn node(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn every_distributions_file_says_where_the_server_is() {
        for (file, server, url) in [
            (FILES[0], "https://192.0.2.1:6443", "https://192.0.2.1:6443"),
            (FILES[1], "https://127.0.0.1:6444", "https://127.0.0.1:6444"),
            (
                FILES[2],
                "https://127.0.0.1:6443/",
                "https://127.0.0.1:6443",
            ),
            (
                FILES[3],
                "'https://[fd00::1]:6443'",
                "https://[fd00::1]:6443",
            ),
            (
                FILES[4],
                "https://127.0.0.1:16443",
                "https://127.0.0.1:16443",
            ),
            (FILES[5], "https://api.example", "https://api.example:443"),
            (FILES[6], "https://192.0.2.1:6443", "https://192.0.2.1:6443"),
        ] {
            let root = node(&[(file, &kubeconfig(server))]);
            let found = look(root.path());
            assert_eq!(found.server.as_deref(), Some(url));
            assert_eq!(found.file, Some(format!("/{file}")));
            assert!(found.api_server().is_some() && found.problems.is_empty());
            let before: Vec<_> = walk(root.path());
            look(root.path());
            assert_eq!(walk(root.path()), before, "nothing is made");
        }
    }

    fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
        let entries = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut all: Vec<_> = entries.collect();
        for at in all.clone().iter().filter(|path| path.is_dir()) {
            all.extend(walk(at));
        }
        all.sort();
        all
    }

    #[test]
    fn an_empty_node_has_none_and_stays_empty() {
        let root = node(&[]);
        assert_eq!(look(root.path()), Found::default());
        assert!(walk(root.path()).is_empty());
    }

    #[test]
    fn what_cannot_be_used_is_said_without_what_is_in_it() {
        let no_context =
            kubeconfig("https://192.0.2.1").replace("current-context: node", "current-context: x");
        for (text, why) in [
            (
                &kubeconfig("http://192.0.2.1:6443")[..],
                "has a server that is not asked by https",
            ),
            (
                &kubeconfig("https://192.0.2.1/SECRET"),
                "has a server that is no address and port",
            ),
            (
                &kubeconfig("https://SECRET@192.0.2.1"),
                "has a server that is no address and port",
            ),
            (&no_context, "has no server of a current cluster"),
            ("", "has no server of a current cluster"),
            ("SECRET", "has no server of a current cluster"),
            ("[SECRET", "is no kubeconfig"),
            (
                "clusters: {SECRET: SECRET}",
                "has no server of a current cluster",
            ),
            (
                "clusters: [{name: a, cluster: {token: SECRET}}]",
                "has no server of a current cluster",
            ),
        ] {
            let root = node(&[(FILES[0], text)]);
            let found = look(root.path());
            assert_eq!(found.server, None, "{text}");
            let problem = format!("/{} {why}", FILES[0]);
            assert!(found.problems == [problem], "{text}: {found:?}");
            assert!(!format!("{found:?}").contains("SECRET"));
        }
        let root = node(&[]);
        fs::create_dir_all(root.path().join(FILES[0])).unwrap();
        assert!(look(root.path()).problems[0].contains("cannot be read"));
        let large = "#".repeat(MAX_LEN as usize + 1);
        let root = node(&[
            (FILES[0], &large),
            (FILES[5], &kubeconfig("https://192.0.2.1")),
        ]);
        let found = look(root.path());
        assert!(found.problems[0].contains("cannot be read"));
        assert_eq!(found.file, Some(format!("/{}", FILES[5])), "the next one");
    }

    #[test]
    fn what_is_left_to_the_agent_is_the_url_alone() {
        let root = node(&[(FILES[0], &kubeconfig("https://192.0.2.1:6443"))]);
        let path = root.path().join("kept.json");
        let found = look(root.path());
        assert!(keep(&found, &path).unwrap());
        assert!(!keep(&found, &path).unwrap(), "nothing is new");
        assert_eq!(read(&path), found);
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            !text.contains("SECRET") && !text.contains("U0VDUkVU"),
            "{text}"
        );
        for damaged in ["", "{", "[]", "{\"server\": 1}"] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read(&path), Found::default(), "{damaged}");
        }
        assert!(keep(&found, &path).unwrap());
    }

    proptest! {
        #[test]
        fn garbage_is_no_server(text in "\\PC*") {
            let root = node(&[(FILES[0], &text)]);
            prop_assert_eq!(look(root.path()).server, None);
        }
    }
}
