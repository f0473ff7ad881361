//! Kubernetes' own kube-proxy on a node, so that its rules are those that it makes. What it knows of the cluster
//! it is told by this process, over HTTP: one answer to each list, and watches in which nothing happens.

use super::objects::{self, Services};
use crate::cluster::components;
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sinabro_lab::{Node, Program, node::FILES};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::Arc,
    thread,
};

/// Of the whole lab.
const PODS: &str = "10.244.0.0/16";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Nftables,
    Iptables,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
        }
    }
}

/// Starts kube-proxy on a node. Once its rules are there it may go.
pub fn start(node: &Node, mode: Mode, services: &Services) -> Result<Program> {
    let api = serve(node, services)?;
    let dir = node.namespace().path(FILES);
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bench", "cluster": {"server": format!("http://{api}")}}],
        "users": [{"name": "bench", "user": {}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "current-context": "bench",
    });
    let config = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode.name(),
        "hostnameOverride": node.name(),
        "clusterCIDR": PODS,
        "clientConnection": {
            "kubeconfig": format!("{FILES}/proxy.kubeconfig"),
            "contentType": "application/json",
        },
        // nf_conntrack_max cannot be written in a network namespace of its own.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s"},
    });
    fs::write(dir.join("proxy.kubeconfig"), kubeconfig.to_string())?;
    fs::write(dir.join("proxy.yaml"), config.to_string())?;
    let log = File::create(dir.join("proxy.log"))?;
    let mut command = Command::new(components::path("kube-proxy")?);
    command
        .arg(format!("--config={FILES}/proxy.yaml"))
        // Lists and watches are answered apart.
        .env("KUBE_FEATURE_WatchListClient", "false")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    Program::on_machine(node.namespace(), command)
}

/// The end of what it has said.
pub fn log(node: &Node) -> String {
    let log = node.namespace().path(FILES).join("proxy.log");
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

/// Answers by path, on a node's loopback address, as long as this process is there.
fn serve(node: &Node, services: &Services) -> Result<SocketAddr> {
    let listener = (node.place()).run(|| Ok(TcpListener::bind(("127.0.0.1", 0))?))?;
    let address = listener.local_addr()?;
    let [services, slices] = services.lists();
    let addresses: Vec<Value> = (node.addresses().iter())
        .map(|address| json!({"type": "InternalIP", "address": address}))
        .collect();
    let own = json!({
        "metadata": {"name": node.name(), "resourceVersion": "1"},
        "spec": {},
        "status": {"addresses": addresses},
    });
    let answers = BTreeMap::from([
        ("/api/v1/services", services.to_string()),
        (
            "/apis/discovery.k8s.io/v1/endpointslices",
            slices.to_string(),
        ),
        (
            "/api/v1/nodes",
            objects::list("v1", "NodeList", vec![own]).to_string(),
        ),
        (
            "/apis/networking.k8s.io/v1/servicecidrs",
            objects::list("networking.k8s.io/v1", "ServiceCIDRList", Vec::new()).to_string(),
        ),
    ]);
    let answers = Arc::new(answers);
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let answers = answers.clone();
            // It ends with the connection.
            thread::spawn(move || answer(stream, &answers));
        }
    });
    Ok(address)
}

/// The requests of one connection (RFC 9112).
fn answer(stream: TcpStream, answers: &BTreeMap<&str, String>) -> Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut request = String::new();
        if reader.read_line(&mut request)? == 0 {
            return Ok(());
        }
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            match line.trim_end().split_once(": ") {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.parse()?;
                }
                Some(_) => {}
                None => break,
            }
        }
        reader.read_exact(&mut vec![0; length])?;
        let target = request.split(' ').nth(1).context("no target")?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let json = "Content-Type: application/json\r\n";
        if query
            .split('&')
            .any(|part| part == "watch=true" || part == "watch=1")
        {
            let head = format!("HTTP/1.1 200 OK\r\n{json}Transfer-Encoding: chunked\r\n\r\n");
            reader.get_mut().write_all(head.as_bytes())?;
            // Nothing comes until the other end goes.
            reader.read_to_end(&mut Vec::new())?;
            return Ok(());
        }
        let (status, body) = match answers.get(path) {
            Some(body) => ("200 OK", body.as_str()),
            // Such as Events.
            None => ("404 Not Found", "{}"),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\n{json}Content-Length: {}\r\n\r\n",
            body.len()
        );
        reader.get_mut().write_all(head.as_bytes())?;
        reader.get_mut().write_all(body.as_bytes())?;
    }
}
