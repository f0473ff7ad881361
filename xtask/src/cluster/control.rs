//! The control plane: etcd, API server, controllers, scheduler, and the bridge that joins nodes.

use super::{
    components,
    layout::{self, API_PORT, CONTROL, Families},
    machine::Machine,
};
use anyhow::{Context as _, Result, bail};
use std::{
    net::IpAddr,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(180);
pub const BRIDGE: &str = "br0";

pub fn machine() -> Machine {
    Machine::new(CONTROL)
}

/// The bridge, with the addresses that nodes have as their gateway.
pub fn network(control: &Machine, families: Families) -> Result<()> {
    control.ip("link set lo up")?;
    control.ip(&format!("link add {BRIDGE} type bridge"))?;
    address(control, BRIDGE, &families.control())
}

/// Gives a link its addresses and sets it up.
fn address(machine: &Machine, link: &str, addresses: &[IpAddr]) -> Result<()> {
    for address in addresses {
        let options = match address {
            IpAddr::V4(_) => "/24",
            // Nobody else has it, and it is needed at once.
            IpAddr::V6(_) => "/64 nodad",
        };
        machine.ip(&format!("addr add dev {link} {address}{options}"))?;
    }
    machine.ip(&format!("link set {link} up"))
}

/// A cable from a node to the bridge.
pub fn connect(control: &Machine, node: &Machine, families: Families) -> Result<()> {
    let number = layout::node_number(&node.name).context("not a node")?;
    let port = format!("p-{}", node.name);
    let pid = node.require()?;
    // Its other end may still be there from before the node's reboot.
    let _ = control.ip(&format!("link del {port}"));
    control.ip(&format!(
        "link add {port} type veth peer name eth0 netns {pid}"
    ))?;
    control.ip(&format!("link set {port} master {BRIDGE} up"))?;
    node.ip("link set lo up")?;
    address(node, "eth0", &families.node(number))?;
    for gateway in families.control() {
        node.ip(&format!("route add default via {gateway}"))?;
    }
    Ok(())
}

/// Names and addresses of all machines, for /etc/hosts.
pub fn hosts(nodes: &[String], families: Families) -> String {
    let lines = |addresses: Vec<IpAddr>, name: &str| -> String {
        let lines = addresses.iter().map(|a| format!("{a} {name}\n"));
        lines.collect()
    };
    let mut text = lines(families.control(), CONTROL);
    for node in nodes {
        if let Some(number) = layout::node_number(node) {
            text += &lines(families.node(number), node);
        }
    }
    text
}

pub fn start_etcd(control: &Machine) -> Result<()> {
    let data = control.disk()?.join("etcd");
    let client = "http://127.0.0.1:2379";
    let peer = "http://127.0.0.1:2380";
    control.daemon(
        "etcd",
        &components::path("etcd")?,
        &[
            "--name=control".into(),
            format!("--data-dir={}", data.display()),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=control={peer}"),
            // What is lost with the machine's power is lost.
            "--unsafe-no-fsync".into(),
        ],
    )
}

pub fn start_api(control: &Machine, families: Families) -> Result<()> {
    let pki = layout::pki()?;
    let file = |name: &str| pki.join(name).display().to_string();
    control.daemon(
        "kube-apiserver",
        &components::path("kube-apiserver")?,
        &[
            "--etcd-servers=http://127.0.0.1:2379".into(),
            format!("--advertise-address={}", families.api().ip()),
            format!("--secure-port={API_PORT}"),
            format!("--tls-cert-file={}", file("apiserver.crt")),
            format!("--tls-private-key-file={}", file("apiserver.key")),
            format!("--client-ca-file={}", file("ca.crt")),
            format!(
                "--service-account-key-file={}",
                file("service-accounts.pub")
            ),
            format!(
                "--service-account-signing-key-file={}",
                file("service-accounts.key")
            ),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
            format!(
                "--kubelet-client-certificate={}",
                file("kubelet-client.crt")
            ),
            format!("--kubelet-client-key={}", file("kubelet-client.key")),
            format!("--kubelet-certificate-authority={}", file("ca.crt")),
            "--kubelet-preferred-address-types=InternalIP".into(),
            format!("--requestheader-client-ca-file={}", file("ca.crt")),
            "--requestheader-allowed-names=front-proxy-client".into(),
            "--requestheader-username-headers=X-Remote-User".into(),
            "--requestheader-group-headers=X-Remote-Group".into(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".into(),
            format!("--proxy-client-cert-file={}", file("front-proxy.crt")),
            format!("--proxy-client-key-file={}", file("front-proxy.key")),
            format!("--service-cluster-ip-range={}", families.services()),
            "--authorization-mode=Node,RBAC".into(),
            "--enable-admission-plugins=NodeRestriction".into(),
            "--allow-privileged=true".into(),
            "--profiling=false".into(),
        ],
    )
}

/// To be started once the API server is ready: they end at once while its roles are missing.
pub fn start_controllers(control: &Machine, families: Families) -> Result<()> {
    let pki = layout::pki()?;
    let file = |name: &str| pki.join(name).display().to_string();
    let access = |name: &str| {
        let config = file(&format!("{name}.kubeconfig"));
        [
            "kubeconfig",
            "authentication-kubeconfig",
            "authorization-kubeconfig",
        ]
        .map(|flag| format!("--{flag}={config}"))
    };
    let mut arguments = access("controllers").to_vec();
    arguments.extend([
        "--allocate-node-cidrs=true".into(),
        format!("--cluster-cidr={}", families.pods()),
        format!("--service-cluster-ip-range={}", families.services()),
        format!("--cluster-signing-cert-file={}", file("ca.crt")),
        format!("--cluster-signing-key-file={}", file("ca.key")),
        format!("--root-ca-file={}", file("ca.crt")),
        format!(
            "--service-account-private-key-file={}",
            file("service-accounts.key")
        ),
        "--use-service-account-credentials=true".into(),
        "--leader-elect=false".into(),
        "--profiling=false".into(),
    ]);
    // A flag of one family is refused where there is one family.
    let masks: &[&str] = match families {
        Families::Ipv4 => &["--node-cidr-mask-size=24"],
        Families::Ipv6 => &["--node-cidr-mask-size=64"],
        Families::Dual => &[
            "--node-cidr-mask-size-ipv4=24",
            "--node-cidr-mask-size-ipv6=64",
        ],
    };
    arguments.extend(masks.iter().map(ToString::to_string));
    control.daemon(
        "kube-controller-manager",
        &components::path("kube-controller-manager")?,
        &arguments,
    )?;
    let mut arguments = access("scheduler").to_vec();
    arguments.extend(["--leader-elect=false".into(), "--profiling=false".into()]);
    control.daemon(
        "kube-scheduler",
        &components::path("kube-scheduler")?,
        &arguments,
    )
}

/// kubectl as the cluster's administrator.
pub fn kubectl() -> Result<Command> {
    let mut command = machine().network_command(components::path("kubectl")?)?;
    command.env("KUBECONFIG", layout::pki()?.join("admin.kubeconfig"));
    Ok(command)
}

pub fn wait_ready(control: &Machine) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut ask = kubectl()?;
        ask.args(["get", "--raw", "/readyz"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if ask.status()?.success() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!(
                "the API server is not ready, see {}",
                control.dir()?.join("kube-apiserver.log").display()
            );
        }
        thread::sleep(Duration::from_millis(200));
    }
}

pub fn stop_api(control: &Machine) -> Result<()> {
    control
        .kill("kube-apiserver")
        .context("cannot stop the API server")
}
