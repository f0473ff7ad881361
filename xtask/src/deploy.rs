//! `cargo xtask deploy-agent`: the sources as they are, in a kind cluster.
//!
//! Works from nothing and again after every change: what is there is used, and agents that run
//! are replaced one after the other, as in an upgrade. Uses kind's own credentials for just this
//! cluster, whatever the user's kubectl points at.

use crate::{
    image, manifest, ui,
    workspace::{output, root, run as show, which},
};
use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

/// As kind-config.yaml names it.
const CLUSTER: &str = "sinabro";
const NAMESPACE: &str = "kube-system";
const DAEMON_SET: &str = "daemonset/sinabro";
const LABEL: &str = "app.kubernetes.io/name=sinabro";
/// What the manifest gives the agent beside NET_ADMIN, by number (linux/capability.h).
const CAPABILITIES: [(&str, u32); 2] = [("CAP_PERFMON", 38), ("CAP_BPF", 39)];
/// A first start fetches nothing, so this is for slow machines.
const ROLLOUT: &str = "--timeout=5m";
/// How soon the kubelet sees the configuration and says that the node is ready.
const READY: &str = "--timeout=2m";
/// How soon containers that end come to rest.
const SETTLED: Duration = Duration::from_secs(60);

pub fn run() -> Result<ExitCode> {
    let tools = match Tools::find(which) {
        Ok(tools) => tools,
        Err(missing) => {
            for line in missing {
                ui::error(&line);
            }
            return Ok(ExitCode::FAILURE);
        }
    };
    tools.engine_answers()?;
    let archive = image::write()?;
    let healthy = tools.deploy(&archive)?;
    println!();
    println!("  kubectl --context kind-{CLUSTER} get pods -A    looks around");
    println!("  kind delete cluster --name {CLUSTER}            takes all away");
    Ok(match healthy {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

struct Tools {
    /// Docker, or what kind was configured to use in its place.
    engine: PathBuf,
    kind: PathBuf,
    kubectl: PathBuf,
}

impl Tools {
    /// The programs, or a line for each that is missing.
    fn find(which: impl Fn(&str) -> Option<PathBuf>) -> Result<Self, Vec<String>> {
        // kind's own switch.
        let engine = env::var("KIND_EXPERIMENTAL_PROVIDER").unwrap_or_else(|_| "docker".into());
        let mut missing = Vec::new();
        let mut find = |name: &str, how: &str| {
            which(name).unwrap_or_else(|| {
                missing.push(format!(
                    "{name} is missing: {how}; or do without a container engine: `cargo xtask \
                     cluster up`"
                ));
                PathBuf::new()
            })
        };
        let tools = Self {
            engine: find(
                &engine,
                "install your distribution's package (Debian: docker.io) or see \
                 https://docs.docker.com/engine/install",
            ),
            kind: find(
                "kind",
                "`go install sigs.k8s.io/kind@latest` or see https://kind.sigs.k8s.io",
            ),
            kubectl: find("kubectl", "see https://kubernetes.io/docs/tasks/tools"),
        };
        match missing.is_empty() {
            true => Ok(tools),
            false => Err(missing),
        }
    }

    fn engine_answers(&self) -> Result<()> {
        output(Command::new(&self.engine).arg("info"))
            .map(drop)
            .with_context(|| {
                format!(
                    "{} does not answer: start its service and see that you may use it, or do \
                     without: `cargo xtask cluster up`",
                    self.engine.display()
                )
            })
    }

    /// Brings the archive's image into the cluster; whether every node's agent is healthy.
    fn deploy(&self, archive: &Path) -> Result<bool> {
        self.cluster()?;
        self.nodes_may_grant()?;
        let credentials = tempfile::NamedTempFile::new()?;
        let kubeconfig = output(&mut self.kind(&["get", "kubeconfig"]))?;
        fs::write(credentials.path(), kubeconfig)?;
        let kubectl = |arguments: &[&str]| {
            let mut command = Command::new(&self.kubectl);
            command
                .arg("--kubeconfig")
                .arg(credentials.path())
                .args(["--namespace", NAMESPACE])
                .args(arguments);
            command
        };
        let kindnet = [
            "get",
            "daemonset/kindnet",
            "--ignore-not-found",
            "--output=name",
        ];
        if !output(&mut kubectl(&kindnet))?.is_empty() {
            bail!(
                "cluster {CLUSTER} has kind's own network: `kind delete cluster --name {CLUSTER}`, \
                 and it is made again without"
            );
        }

        let step = ui::step("loading the image into the nodes");
        let mut load = self.kind(&["load", "image-archive"]);
        output(load.arg(archive))?;
        step.done_in_time();

        let exists = ["get", DAEMON_SET, "--ignore-not-found", "--output=name"];
        let exists = !output(&mut kubectl(&exists))?.is_empty();
        let file = manifest::deploy().join("sinabro.yaml");
        show(kubectl(&["apply", "--filename"]).arg(file))?;
        if exists {
            // The tag is the same, so only this makes nodes take the image that is new.
            show(&mut kubectl(&["rollout", "restart", DAEMON_SET]))?;
        }
        if let Err(error) = show(&mut kubectl(&["rollout", "status", DAEMON_SET, ROLLOUT])) {
            // What people would ask for next.
            let _ = show(&mut kubectl(&["get", "pods", "-o", "wide", "-l", LABEL]));
            let logs = [
                "logs",
                "-l",
                LABEL,
                "--all-containers",
                "--prefix",
                "--tail=20",
            ];
            let _ = show(&mut kubectl(&logs));
            return Err(error).context("the agents do not become ready");
        }
        show(&mut kubectl(&[
            "wait",
            "--for=condition=Ready",
            "nodes",
            "--all",
            READY,
        ]))?;

        let mut healthy = true;
        for (node, pod) in agents(&kubectl)? {
            println!("\n{}", ui::bold(&node));
            let status = [
                "exec",
                &pod,
                "--container=agent",
                "--",
                "/usr/bin/sinabroctl",
                "status",
            ];
            if let Err(error) = show(&mut kubectl(&status)) {
                ui::error(&format!("node {node}: {error:#}"));
                healthy = false;
            }
        }
        Ok(healthy)
    }

    /// A node is itself a container, and can give its own only what it has.
    fn nodes_may_grant(&self) -> Result<()> {
        let nodes = output(&mut self.kind(&["get", "nodes"]))?;
        let node = nodes.lines().next().unwrap_or_default();
        let mut status = Command::new(&self.engine);
        let status = output(status.args(["exec", node, "cat", "/proc/1/status"]))?;
        let bounding = status
            .lines()
            .find_map(|line| line.strip_prefix("CapBnd:"))
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .with_context(|| format!("node {node} does not tell its capabilities"))?;
        let lacking: Vec<&str> = CAPABILITIES
            .iter()
            .filter(|(_, number)| bounding & (1 << number) == 0)
            .map(|(name, _)| *name)
            .collect();
        if !lacking.is_empty() {
            bail!(
                "the nodes of cluster {CLUSTER} have no {}: Docker gives them since version 23, \
                 so `kind delete cluster --name {CLUSTER}` and use a newer one, or do without: \
                 `cargo xtask cluster up`",
                lacking.join(" and no ")
            );
        }
        Ok(())
    }

    /// kind, about this cluster.
    fn kind(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.kind);
        command.args(arguments).args(["--name", CLUSTER]);
        command
    }

    /// Makes the cluster if there is none.
    fn cluster(&self) -> Result<()> {
        let clusters = output(Command::new(&self.kind).args(["get", "clusters"]))?;
        if clusters.lines().any(|name| name.trim() == CLUSTER) {
            println!("  kind cluster {CLUSTER} is there");
            return Ok(());
        }
        let mut create = self.kind(&["create", "cluster"]);
        create.arg("--config").arg(root().join("kind-config.yaml"));
        show(&mut create).context("cannot make the kind cluster")
    }
}

/// Node and name of each agent's pod; waits for those of earlier agents to be gone.
fn agents(kubectl: &impl Fn(&[&str]) -> Command) -> Result<Vec<(String, String)>> {
    let since = Instant::now();
    loop {
        let list = output(&mut kubectl(&["get", "pods", "-l", LABEL, "--output=json"]))?;
        let list: Value = serde_json::from_str(&list).context("kubectl printed no JSON")?;
        let pods = list["items"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        let ending = |pod: &&Value| !pod["metadata"]["deletionTimestamp"].is_null();
        if pods.iter().any(|pod| ending(&pod)) && since.elapsed() < SETTLED {
            std::thread::sleep(Duration::from_secs(1));
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut agents: Vec<(String, String)> = pods
            .iter()
            .filter(|pod| !ending(pod))
            .map(|pod| {
                (
                    text(&pod["spec"]["nodeName"]),
                    text(&pod["metadata"]["name"]),
                )
            })
            .collect();
        agents.sort();
        if agents.is_empty() {
            bail!("no agent runs, though the rollout is done");
        }
        return Ok(agents);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs that write down how they are called, and answer as the real ones would.
    struct StandIns {
        dir: tempfile::TempDir,
        tools: Tools,
    }

    const KIND: &str = r#"
case "$1 $2" in
"get clusters") cat clusters 2>/dev/null || echo "No kind clusters found." >&2 ;;
"create cluster") echo sinabro >clusters ;;
"get kubeconfig") echo "kind's own" ;;
"get nodes") echo sinabro-worker ;;
esac"#;

    const DOCKER: &str = r#"
case "$1" in
info) test ! -e stopped ;;
exec) echo "CapBnd: $(cat capabilities 2>/dev/null || echo 000001ffffffffff)" ;;
esac"#;

    const KUBECTL: &str = r#"
test "$(cat "$2")" = "kind's own" || exit 1
shift 4
case "$1 $2" in
"get daemonset/sinabro") cat applied 2>/dev/null ;;
"get daemonset/kindnet") cat kindnet 2>/dev/null ;;
"apply --filename") echo daemonset.apps/sinabro >applied ;;
"rollout status") test ! -e broken || exit 1 ;;
"get pods") cat pods ;;
"exec b") exit 1 ;;
esac
true"#;

    impl StandIns {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let make = |name: &str, body: &str| {
                let path = dir.path().join(name);
                let at = dir.path().display();
                let text = format!("#!/bin/sh\ncd {at}\necho \"{name} $*\" >>log\n{body}\n");
                let source = dir.path().join(format!("{name}.text"));
                fs::write(&source, text).unwrap();
                // By a process of its own: what this one has open for writing, the processes that other tests start at that
                // moment have too, and nothing is executed that anybody writes to (ETXTBSY).
                let mut install = Command::new("install");
                output(install.args(["-m", "755"]).args([&source, &path])).unwrap();
                path
            };
            let tools = Tools {
                engine: make("docker", DOCKER),
                kind: make("kind", KIND),
                kubectl: make("kubectl", KUBECTL),
            };
            fs::write(
                dir.path().join("pods"),
                r#"{"items":[{"metadata":{"name":"p2"},"spec":{"nodeName":"n2"}},
                    {"metadata":{"name":"p1"},"spec":{"nodeName":"n1"}}]}"#,
            )
            .unwrap();
            Self { dir, tools }
        }

        /// The calls since the last look, without paths and credentials.
        fn calls(&self) -> Vec<String> {
            let log = self.dir.path().join("log");
            let text = fs::read_to_string(&log).unwrap();
            fs::remove_file(log).unwrap();
            text.lines()
                .map(|line| {
                    let words = line.split(' ');
                    let words = words.map(|word| word.rsplit('/').next().unwrap_or(word));
                    let line = words.collect::<Vec<_>>().join(" ");
                    match line.split_once(" --namespace kube-system ") {
                        Some((_, call)) => format!("kubectl {call}"),
                        None => line,
                    }
                })
                .collect()
        }
    }

    #[test]
    fn each_missing_program_gets_a_line_with_the_way_out() {
        let missing = Tools::find(|name| (name == "docker").then(|| "/bin/docker".into()));
        let missing = missing.err().unwrap();
        assert_eq!(missing.len(), 2);
        for (line, name) in missing.iter().zip(["kind", "kubectl"]) {
            assert!(line.starts_with(&format!("{name} is missing: ")));
            assert!(line.contains("https://") && line.ends_with("`cargo xtask cluster up`"));
            assert!(!line.contains('\n'));
        }
    }

    #[test]
    fn an_engine_that_is_not_running_is_told_with_the_way_out() {
        let stand_ins = StandIns::new();
        stand_ins.tools.engine_answers().unwrap();
        fs::write(stand_ins.dir.path().join("stopped"), "").unwrap();
        let error = stand_ins.tools.engine_answers().unwrap_err().to_string();
        assert!(error.contains("does not answer") && error.contains("cargo xtask cluster up"));
    }

    #[test]
    fn a_first_time_makes_the_cluster_and_a_second_replaces_the_agents() {
        let stand_ins = StandIns::new();
        let deploy = || {
            stand_ins
                .tools
                .deploy(Path::new("/dist/image.tar"))
                .unwrap()
        };
        assert!(deploy());
        let end = [
            "kubectl rollout status sinabro --timeout=5m",
            "kubectl wait --for=condition=Ready nodes --all --timeout=2m",
            "kubectl get pods -l name=sinabro --output=json",
            "kubectl exec p1 --container=agent -- sinabroctl status",
            "kubectl exec p2 --container=agent -- sinabroctl status",
        ];
        let first = [
            "kind get clusters",
            "kind create cluster --name sinabro --config kind-config.yaml",
            "kind get nodes --name sinabro",
            "docker exec sinabro-worker cat status",
            "kind get kubeconfig --name sinabro",
            "kubectl get kindnet --ignore-not-found --output=name",
            "kind load image-archive --name sinabro image.tar",
            "kubectl get sinabro --ignore-not-found --output=name",
            "kubectl apply --filename sinabro.yaml",
        ];
        assert_eq!(stand_ins.calls(), [&first[..], &end].concat());
        assert!(deploy());
        let again = [
            &[first[0]],
            &first[2..],
            &["kubectl rollout restart sinabro"],
            &end,
        ];
        assert_eq!(stand_ins.calls(), again.concat());
    }

    #[test]
    fn a_cluster_with_another_network_is_refused_and_left_alone() {
        let stand_ins = StandIns::new();
        fs::write(
            stand_ins.dir.path().join("kindnet"),
            "daemonset.apps/kindnet",
        )
        .unwrap();
        let error = stand_ins.tools.deploy(Path::new("/dist/image.tar"));
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("kind delete cluster")
        );
        assert!(!stand_ins.calls().iter().any(|call| call.contains("apply")));
    }

    #[test]
    fn nodes_that_cannot_give_the_agent_its_capabilities_are_told() {
        let stand_ins = StandIns::new();
        // A privileged container's by Docker 20.10.
        fs::write(
            stand_ins.dir.path().join("capabilities"),
            "0000003fffffffff",
        )
        .unwrap();
        let error = stand_ins.tools.deploy(Path::new("/dist/image.tar"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("no CAP_PERFMON and no CAP_BPF: Docker"));
        assert!(!stand_ins.calls().iter().any(|call| call.contains("apply")));
    }

    #[test]
    fn a_rollout_that_fails_shows_the_pods_and_their_logs() {
        let stand_ins = StandIns::new();
        fs::write(stand_ins.dir.path().join("broken"), "").unwrap();
        assert!(
            stand_ins
                .tools
                .deploy(Path::new("/dist/image.tar"))
                .is_err()
        );
        let calls = stand_ins.calls();
        let last: Vec<&str> = calls.iter().rev().take(2).map(String::as_str).collect();
        assert!(last[0].starts_with("kubectl logs "));
        assert!(last[1].starts_with("kubectl get pods "));
    }

    #[test]
    fn a_node_that_is_not_healthy_is_told_after_the_others_were_asked() {
        let stand_ins = StandIns::new();
        fs::write(
            stand_ins.dir.path().join("pods"),
            r#"{"items":[{"metadata":{"name":"b"},"spec":{"nodeName":"n1"}},
                {"metadata":{"name":"c"},"spec":{"nodeName":"n2"}}]}"#,
        )
        .unwrap();
        assert!(
            !stand_ins
                .tools
                .deploy(Path::new("/dist/image.tar"))
                .unwrap()
        );
        assert!(stand_ins.calls().iter().any(|call| call.contains("exec c")));
    }

    #[test]
    fn the_cluster_is_the_one_that_the_configuration_names() {
        let config = fs::read_to_string(root().join("kind-config.yaml")).unwrap();
        let config: Value = serde_saphyr::from_str(&config).unwrap();
        assert_eq!(config["name"], CLUSTER);
        assert_eq!(config["networking"]["disableDefaultCNI"], true);
        assert_eq!(config["networking"]["kubeProxyMode"], "none");
        assert_eq!(config["networking"]["ipFamily"], "dual");
    }
}
