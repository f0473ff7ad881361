//! The cluster as scenarios see it: objects applied and waited for, programs run on nodes, the
//! agents' own word.

use crate::{
    cluster::{Cluster, Family},
    workspace::dist,
};
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sinabro_common::api::{EndpointReport, IpamReport, NodeReport, StatusReport};
use sinabro_lab::wait::wait_within;
use std::{
    cell::RefCell,
    collections::BTreeSet,
    net::IpAddr,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

/// How long the cluster may take for what takes seconds on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// What an idle machine does sooner.
const WORTH_TELLING: Duration = Duration::from_secs(10);
/// Namespace of everything that scenarios make.
pub const NAMESPACE: &str = "sinabro-e2e";
/// Of the agents.
pub const SYSTEM: &str = "kube-system";
pub const DAEMON_SET: &str = "daemonset/sinabro";

pub struct World {
    pub cluster: Cluster,
    /// How long the API server is away in the scenario about that.
    pub outage: Duration,
    /// How long traffic runs before a scenario begins: what it sees then is the measure.
    pub before: Duration,
    longest_wait: RefCell<Option<(Duration, String)>>,
}

impl World {
    pub fn new(cluster: Cluster, outage: Duration, before: Duration) -> Result<Self> {
        let world = Self {
            cluster,
            outage,
            before,
            longest_wait: RefCell::default(),
        };
        world.cluster.apply(&format!(
            "apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n"
        ))?;
        world.wait("the default ServiceAccount of the namespace", || {
            let found = world.kubectl(&[
                "-n",
                NAMESPACE,
                "get",
                "serviceaccount",
                "default",
                "-o",
                "name",
            ]);
            Ok(found.ok())
        })?;
        Ok(world)
    }

    pub fn families(&self) -> &'static [Family] {
        self.cluster.variant().families.list()
    }

    pub fn nodes(&self) -> Vec<String> {
        self.cluster.nodes()
    }

    /// What kubectl prints; an error with its message if it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(self.cluster.kubectl().args(arguments))
            .with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.kubectl(&[&["get", "-o", "json"], arguments].concat())?;
        serde_json::from_str(&text).context("kubectl printed no JSON")
    }

    /// Asks again until there is an answer, with this module's patience.
    pub fn wait<T>(&self, what: &str, ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let start = Instant::now();
        let answer = wait_within(PATIENCE, what, ask);
        let waited = start.elapsed();
        let mut longest = self.longest_wait.borrow_mut();
        if longest
            .as_ref()
            .is_none_or(|(longest, _)| waited > *longest)
        {
            *longest = Some((waited, what.into()));
        }
        answer
    }

    /// Adds to what a scenario saw how long it had to wait for what: patience hides nothing.
    pub fn with_longest_wait(&self, detail: String) -> String {
        match self.longest_wait.take() {
            Some((waited, what)) if waited >= WORTH_TELLING => {
                format!("{detail}; waited {:.0} s for {what}", waited.as_secs_f64())
            }
            _ => detail,
        }
    }

    /// Runs a program on a node; what it prints.
    pub fn on_node(&self, node: &str, program: &str, arguments: &[&str]) -> Result<String> {
        output(self.cluster.in_node(node, program)?.args(arguments))
            .with_context(|| format!("{program} {} on {node}", arguments.join(" ")))
    }

    /// A file or directory of a node, as this process reaches it.
    pub fn path(&self, node: &str, inside: &str) -> Result<PathBuf> {
        self.cluster.node_path(node, inside)
    }

    /// Restarts every kubelet. After an outage of the API server one asks for its pods again when up to a minute
    /// has passed (client-go's reflectors wait 30 s and up to as much again), and for two minutes each
    /// further outage costs as much; one that has just begun asks at once.
    pub fn restart_kubelets(&self) -> Result<()> {
        let nodes = self.nodes();
        nodes
            .iter()
            .try_for_each(|node| self.cluster.kubelet_restart(node))
    }

    /// Replaces all agents, one after the other.
    pub fn roll_out(&self) -> Result<()> {
        self.kubectl(&["-n", SYSTEM, "rollout", "restart", DAEMON_SET])?;
        let status = [
            "-n",
            SYSTEM,
            "rollout",
            "status",
            DAEMON_SET,
            "--timeout=180s",
        ];
        self.kubectl(&status)?;
        Ok(())
    }

    pub fn status(&self, node: &str) -> Result<StatusReport> {
        self.sinabroctl(node, "status")
    }

    pub fn endpoints(&self, node: &str) -> Result<Vec<EndpointReport>> {
        self.sinabroctl(node, "endpoints")
    }

    pub fn ipam(&self, node: &str) -> Result<IpamReport> {
        self.sinabroctl(node, "ipam")
    }

    pub fn peers(&self, node: &str) -> Result<Vec<NodeReport>> {
        self.sinabroctl(node, "nodes")
    }

    fn sinabroctl<T: DeserializeOwned>(&self, node: &str, noun: &str) -> Result<T> {
        let program = sinabroctl();
        // `status` exits with 1 while the node is not ready, and prints all the same.
        let output = self
            .cluster
            .in_node(node, &program)?
            .args([noun, "-o", "json"])
            .output()?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("sinabroctl {noun} on {node}: {}", said.trim())
        })
    }

    /// Addresses that are leased on a node.
    pub fn leased(&self, node: &str) -> Result<BTreeSet<IpAddr>> {
        Ok(self
            .ipam(node)?
            .leases
            .iter()
            .map(|lease| lease.address)
            .collect())
    }

    /// Names of the pod links that a node has.
    pub fn pod_links(&self, node: &str) -> Result<BTreeSet<String>> {
        let links = self.on_node(node, "ip", &["-json", "link", "show"])?;
        let links: Vec<Value> = serde_json::from_str(&links)?;
        let names = links.iter().filter_map(|link| link["ifname"].as_str());
        Ok(names
            .filter(|name| sinabro_common::names::is_pod_link(name))
            .map(str::to_owned)
            .collect())
    }

    /// Process ids of the agents of a node, as the node counts them. There may be two for a
    /// moment, while a pod of the DaemonSet is replaced.
    pub fn agents(&self, node: &str) -> Result<Vec<String>> {
        let script = "for p in /proc/[0-9]*; do read -r n < $p/comm && [ \"$n\" = sinabro-agent ] && echo ${p#/proc/}; done 2>/dev/null; true";
        let pids = self.on_node(node, "sh", &["-c", script])?;
        Ok(pids.split_whitespace().map(str::to_owned).collect())
    }

    pub fn kill_agent(&self, node: &str) -> Result<()> {
        let pids = self.agents(node)?;
        ensure!(!pids.is_empty(), "no agent runs on {node}");
        for pid in pids {
            self.on_node(node, "kill", &["-KILL", &pid])?;
        }
        Ok(())
    }

    /// Every node is Ready, every agent is, and no startup taint is left.
    pub fn healthy(&self) -> Result<()> {
        let names = self.nodes();
        self.wait("all nodes to be ready", || {
            let nodes = self.get(&["nodes"])?;
            let items = nodes["items"]
                .as_array()
                .ok_or_else(|| anyhow!("no list of nodes"))?;
            for name in &names {
                let node = items.iter().find(|node| node["metadata"]["name"] == **name);
                let node = node.ok_or_else(|| anyhow!("{name} is not registered"))?;
                ensure!(
                    condition(node, "Ready") == Some("True"),
                    "{name} is not Ready"
                );
                let taints = node["spec"]["taints"].as_array();
                ensure!(
                    taints.is_none_or(Vec::is_empty),
                    "{name} has taints: {}",
                    node["spec"]["taints"]
                );
                let status = self.status(name)?;
                ensure!(
                    status.ready,
                    "the agent of {name} is not ready: {:?}",
                    status.conditions
                );
            }
            Ok(Some(()))
        })
    }

    /// Nothing of an earlier scenario is being taken down any more: what is counted from here on
    /// is this scenario's.
    pub fn quiet(&self) -> Result<()> {
        self.wait("the pods of the scenario before to be gone", || {
            for node in self.nodes() {
                // An address is free once the link is gone: the last thing of a pod.
                let leases = self.ipam(&node)?.leases;
                let left = leases.iter().find(|lease| lease.pod.namespace == NAMESPACE);
                if let Some(lease) = left {
                    bail!("{} still has {} on {node}", lease.pod.name, lease.address);
                }
            }
            Ok(Some(()))
        })
    }

    /// Takes away what a scenario made. The next one looks whether all is well.
    pub fn clean(&self) {
        let _ = self.kubectl(&[
            "-n",
            NAMESPACE,
            "delete",
            "pods,services,deployments",
            "--all",
            "--grace-period=0",
            "--force",
            "--wait=true",
        ]);
    }

    /// What helps to understand a failure, on standard error.
    pub fn explain(&self, scenario: &str, error: &anyhow::Error) {
        eprintln!("\n--- {scenario}: {error:#}");
        let looks: [&[&str]; 4] = [
            &["get", "nodes", "-o", "wide"],
            &["get", "pods", "-A", "-o", "wide"],
            &["get", "events", "-A", "--field-selector=type!=Normal"],
            &[
                "-n",
                SYSTEM,
                "logs",
                DAEMON_SET,
                "--tail=30",
                "--all-pods=true",
                "--prefix",
            ],
        ];
        for look in looks {
            match self.kubectl(look) {
                Ok(text) => eprintln!("--- kubectl {}\n{}", look.join(" "), last_lines(&text, 60)),
                Err(error) => eprintln!("--- {error:#}"),
            }
        }
        // Since the node's agent first began.
        for node in self.nodes() {
            match self.on_node(&node, &sinabroctl(), &["drops"]) {
                Ok(text) => eprintln!("--- {node}: sinabroctl drops\n{}", last_lines(&text, 60)),
                Err(error) => eprintln!("--- {error:#}"),
            }
        }
    }
}

/// The program, by its path.
fn sinabroctl() -> String {
    dist().join("sinabroctl").display().to_string()
}

/// Status of a condition of an object.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    let all = object["status"]["conditions"].as_array()?;
    all.iter().find(|condition| condition["type"] == kind)?["status"].as_str()
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().context("cannot start it")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {}",
        output.status,
        said.trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}
