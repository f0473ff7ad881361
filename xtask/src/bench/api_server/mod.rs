//! Kubernetes' own API server and etcd, without anything else of a cluster: nobody decides over
//! what is in it but the bench. They run on the lab's outside host, their data on its tmpfs.

mod client;

pub use client::Client;

use super::nodes::object;
use crate::{cluster::components, ui};
use anyhow::{Context as _, Result, bail};
use rcgen::{CertifiedKey, KeyPair};
use serde_json::json;
use sinabro_common::api::{Request, Response};
use sinabro_lab::{Binaries, Lab, Node, Program, node::FILES, wait::wait_for};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::IpAddr,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

const PORT: u16 = 6443;
const TOKEN: &str = "bench";
const DIR: &str = "/run/api";

pub struct ApiServer {
    pub client: Client,
    server: String,
    certificate: String,
    api: Program,
    _etcd: Program,
}

impl ApiServer {
    pub fn start(lab: &Lab) -> Result<Self> {
        let address = lab.outside_addresses()?[0];
        let CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(vec![address.to_string()])?;
        let accounts = KeyPair::generate()?;
        let dir = lab.outside().path(DIR);
        fs::create_dir(&dir)?;
        let files = [
            ("tls.crt", cert.pem()),
            ("tls.key", signing_key.serialize_pem()),
            ("accounts.key", accounts.serialize_pem()),
            ("accounts.pub", accounts.public_key_pem()),
            (
                "tokens.csv",
                format!("{TOKEN},bench,bench,system:masters\n"),
            ),
        ];
        for (name, text) in files {
            fs::write(dir.join(name), text)?;
        }
        let etcd = start(lab, &dir, "etcd", &etcd_arguments())?;
        let api = start(lab, &dir, "kube-apiserver", &api_arguments(address))?;
        let server = format!("https://{address}:{PORT}");
        let client = Client::new(lab.outside().place(), &server, &cert.pem(), TOKEN)?;
        let ready = wait_for("the API server to be ready", || {
            client.get("/readyz").map(Some)
        });
        ready.with_context(|| {
            let log = |name: &str| fs::read_to_string(dir.join(format!("{name}.log")));
            let log = log("kube-apiserver").unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(10)..].join("\n");
            format!("the API server's log ends with:\n{last}")
        })?;
        Ok(Self {
            client,
            server,
            certificate: cert.pem(),
            api,
            _etcd: etcd,
        })
    }

    /// One more node of the lab and of the cluster, with what its agent needs to connect: the path on the node.
    pub fn add_node<'l>(
        &self,
        lab: &'l mut Lab,
        binaries: &Binaries,
    ) -> Result<(&'l Node, String)> {
        let node = lab.add_node()?;
        node.set_binaries(binaries.clone());
        self.client.create_node(&object::node(&node.entry()))?;
        let kubeconfig = self.introduce(node)?;
        Ok((node, kubeconfig))
    }

    fn introduce(&self, node: &Node) -> Result<String> {
        let path = format!("{FILES}/kubeconfig");
        // JSON is YAML, too.
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bench", "cluster": {
                "server": self.server,
                "certificate-authority": format!("{FILES}/api.crt"),
            }}],
            "users": [{"name": "bench", "user": {"token": TOKEN}}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
            "current-context": "bench",
        });
        let namespace = node.namespace();
        fs::write(
            namespace.path(format!("{FILES}/api.crt")),
            &self.certificate,
        )?;
        fs::write(namespace.path(&path), config.to_string())?;
        Ok(path)
    }

    pub fn pid(&self) -> Result<i32> {
        self.api.pid().context("the API server has ended")
    }

    /// How many requests for Nodes etcd was sent until now, by operation.
    pub fn etcd_requests(&self) -> Result<BTreeMap<String, f64>> {
        let metrics = self.client.get("/metrics")?;
        Ok(etcd_requests(&String::from_utf8_lossy(&metrics)))
    }
}

/// How long an agent's start may take.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// How exactly it is timed.
pub const LOOK: Duration = Duration::from_millis(10);

/// Waits until the agent that was started then is ready.
pub fn wait_ready(node: &Node, begun: Instant) -> Result<()> {
    loop {
        match node.ask(Request::Status) {
            Ok(Response::Status(status)) if status.ready => return Ok(()),
            Err(error) if begun.elapsed() > PATIENCE => return Err(error),
            _ if begun.elapsed() > PATIENCE => {
                bail!("the agent is not ready:\n{}", node.log());
            }
            _ => thread::sleep(LOOK),
        }
    }
}

/// Makes the objects with these numbers, as fast as the API server takes them.
pub fn create_all(
    what: &str,
    numbers: std::ops::Range<usize>,
    create: impl Fn(usize) -> Result<()> + Sync,
) -> Result<()> {
    const AT_ONCE: usize = 8;
    let all = numbers.len();
    let mut step = ui::step(format!("making {all} {what}"));
    let next = AtomicUsize::new(numbers.start);
    thread::scope(|scope| {
        let creating: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if !numbers.contains(&number) {
                            return Ok(());
                        }
                        create(number)?;
                    }
                })
            })
            .collect();
        while !creating.iter().all(thread::ScopedJoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(200));
            let made = next.load(Ordering::Relaxed).min(numbers.end) - numbers.start;
            step.now(format!("making {what}: {made} of {all}"));
        }
        creating
            .into_iter()
            .try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            })
    })?;
    step.done_in_time();
    Ok(())
}

fn start(lab: &Lab, dir: &Path, program: &str, arguments: &[String]) -> Result<Program> {
    let log = File::create(dir.join(format!("{program}.log")))?;
    let mut command = Command::new(components::path(program)?);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    Program::on_machine(lab.outside(), command)
}

fn etcd_arguments() -> Vec<String> {
    let client = "http://127.0.0.1:2379";
    let peer = "http://127.0.0.1:2380";
    vec![
        "--name=bench".into(),
        format!("--data-dir={DIR}/etcd"),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=bench={peer}"),
        "--unsafe-no-fsync".into(),
        // Every heartbeat is another revision of a whole Node.
        format!("--quota-backend-bytes={}", 8u64 << 30),
    ]
}

/// As in a cluster, but for what only kubelets, controllers and pods need.
fn api_arguments(address: IpAddr) -> Vec<String> {
    vec![
        "--etcd-servers=http://127.0.0.1:2379".into(),
        // Its machine has no default route to find one by.
        format!("--advertise-address={address}"),
        format!("--secure-port={PORT}"),
        format!("--tls-cert-file={DIR}/tls.crt"),
        format!("--tls-private-key-file={DIR}/tls.key"),
        format!("--token-auth-file={DIR}/tokens.csv"),
        format!("--service-account-key-file={DIR}/accounts.pub"),
        format!("--service-account-signing-key-file={DIR}/accounts.key"),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        "--service-cluster-ip-range=10.96.0.0/16".into(),
        "--authorization-mode=RBAC".into(),
        "--profiling=false".into(),
    ]
}

/// From lines such as `etcd_requests_total{operation="get",resource="nodes"} 12`.
fn etcd_requests(metrics: &str) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for line in metrics.lines() {
        let Some((labels, value)) = line
            .strip_prefix("etcd_requests_total{")
            .and_then(|rest| rest.split_once("} "))
        else {
            continue;
        };
        if !labels.contains("=\"nodes\"") {
            continue;
        }
        let operation = labels
            .split(',')
            .find_map(|label| label.strip_prefix("operation="));
        if let (Some(operation), Ok(value)) = (operation, value.parse::<f64>()) {
            *found.entry(operation.trim_matches('"').into()).or_default() += value;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_nodes_are_summed_by_operation() {
        let metrics = "# TYPE etcd_requests_total counter\n\
            etcd_requests_total{group=\"\",operation=\"list\",resource=\"nodes\"} 3\n\
            etcd_requests_total{group=\"\",operation=\"list\",resource=\"pods\"} 9\n\
            etcd_requests_total{group=\"x\",operation=\"list\",resource=\"nodes\"} 1\n\
            etcd_requests_total{operation=\"get\",resource=\"nodes\"} 5\n\
            etcd_requests_total{broken\n";
        let found = etcd_requests(metrics);
        assert_eq!(
            found,
            BTreeMap::from([("list".into(), 4.0), ("get".into(), 5.0)])
        );
    }
}
