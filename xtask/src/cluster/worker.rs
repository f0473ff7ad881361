//! What a node runs: containerd, kubelet, kube-proxy.

use super::{
    Cni, Options, Proxy,
    components::{self, Containerd},
    images,
    layout::{self, Families},
    machine::Machine,
};
use crate::{setup, workspace::output};
use anyhow::{Context as _, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(60);

/// Plugins of the reference set that nodes have besides: loopback is containerd's, portmap makes
/// hostPort work.
const PLUGINS: [&str; 2] = ["loopback", "portmap"];

fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut text = template.to_string();
    for (name, value) in values {
        text = text.replace(&format!("@{name}@"), value);
    }
    text
}

fn own(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// containerd and a node's sysctls; images are imported if the disk has none yet.
pub fn start_containerd(node: &Machine, version: Containerd, archives: &[PathBuf]) -> Result<()> {
    let plugins = version.plugins()?;
    for plugin in PLUGINS {
        let to = node.path("/opt/cni/bin")?.join(plugin);
        fs::copy(plugins.join(plugin), &to)
            .with_context(|| format!("cannot write {}", to.display()))?;
    }
    let config = node.dir()?.join("containerd.toml");
    let template = match version {
        Containerd::V1_6 => include_str!("../../cluster/config/containerd-1.6.toml"),
        Containerd::V2 => include_str!("../../cluster/config/containerd-2.toml"),
    };
    let runc = setup::runc().context("there is no runc: run `cargo xtask setup`")?;
    let text = fill(
        template,
        &[
            ("PAUSE", images::PAUSE),
            ("RUNC", &runc.display().to_string()),
        ],
    );
    fs::write(&config, text)?;
    node.daemon(
        "containerd",
        &version.program("containerd")?,
        &own(&["--config", &config.display().to_string()]),
    )?;
    let deadline = Instant::now() + PATIENCE;
    while !node
        .command(version.program("ctr")?)?
        .arg("version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?
        .success()
    {
        if Instant::now() > deadline {
            bail!(
                "containerd does not answer on {}, see {}",
                node.name,
                node.dir()?.join("containerd.log").display()
            );
        }
        thread::sleep(Duration::from_millis(100));
    }
    let imported = node.dir()?.join("imported");
    for archive in archives {
        import(node, version, archive, &imported)?;
    }
    ctr(
        node,
        version,
        &[
            "images",
            "tag",
            "--force",
            images::AGNHOST,
            images::DNS_UTILS,
        ],
    )
}

/// Imports an archive unless the same one was imported before.
pub fn import(node: &Machine, version: Containerd, archive: &Path, marks: &Path) -> Result<()> {
    let meta =
        fs::metadata(archive).with_context(|| format!("cannot read {}", archive.display()))?;
    let mark = marks.join(archive.file_name().unwrap_or_default());
    let state = format!("{:?} {}", meta.modified()?, meta.len());
    if fs::read_to_string(&mark).is_ok_and(|known| known == state) {
        return Ok(());
    }
    ctr(
        node,
        version,
        &["images", "import", &archive.display().to_string()],
    )?;
    fs::create_dir_all(marks)?;
    Ok(fs::write(mark, state)?)
}

fn ctr(node: &Machine, version: Containerd, arguments: &[&str]) -> Result<()> {
    let mut command = node.command(version.program("ctr")?)?;
    output(command.args(["-n", "k8s.io"]).args(arguments))
        .with_context(|| format!("ctr {} on {}", arguments.join(" "), node.name))?;
    Ok(())
}

pub fn start_kubelet(node: &Machine, options: &Options) -> Result<()> {
    let families = options.variant.families;
    // In Go 0.0.0.0 is every address of IPv4 only.
    let any = match families {
        Families::Ipv4 | Families::Dual => "0.0.0.0",
        Families::Ipv6 => "::",
    };
    let (pki, dir) = (layout::pki()?, node.dir()?);
    let config = dir.join("kubelet.yaml");
    // Taken away by the agent once it serves.
    let taints = match options.cni {
        Cni::Sinabro => "[{key: sinabro.io/agent-not-ready, effect: NoSchedule}]",
        Cni::Bridge | Cni::None => "[]",
    };
    let text = fill(
        include_str!("../../cluster/config/kubelet.yaml"),
        &[
            ("PKI", &pki.display().to_string()),
            ("NODE", &node.name),
            ("DNS", &families.dns().to_string()),
            ("ADDRESS", any),
            ("TAINTS", taints),
        ],
    );
    fs::write(&config, text)?;
    // Where clouds' nodes have it.
    let kubeconfig = node.disk()?.join("var/lib/kubelet/kubeconfig");
    let of_node = pki.join(format!("{}.kubeconfig", node.name));
    fs::copy(&of_node, &kubeconfig)
        .with_context(|| format!("cannot write {}", kubeconfig.display()))?;
    let number = layout::node_number(&node.name).context("not a node")?;
    let addresses = families.node(number);
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let mut arguments = vec![
        format!("--config={}", config.display()),
        "--kubeconfig=/var/lib/kubelet/kubeconfig".into(),
        format!("--hostname-override={}", node.name),
        format!("--node-ip={}", addresses.join(",")),
    ];
    if let Some(zone) = (number - 1).checked_rem(options.zones) {
        arguments.push(format!(
            "--node-labels=topology.kubernetes.io/zone=z{}",
            zone + 1
        ));
    }
    node.daemon("kubelet", &components::path("kubelet")?, &arguments)
}

pub fn start_proxy(node: &Machine, options: &Options) -> Result<()> {
    let mode = match options.variant.proxy {
        Proxy::Nftables => "nftables",
        Proxy::Iptables => "iptables",
        Proxy::None => return Ok(()),
    };
    let config = node.dir()?.join("kube-proxy.yaml");
    let text = fill(
        include_str!("../../cluster/config/kube-proxy.yaml"),
        &[
            ("PKI", &layout::pki()?.display().to_string()),
            ("NODE", &node.name),
            ("MODE", mode),
            ("PODS", &options.variant.families.pods()),
        ],
    );
    fs::write(&config, text)?;
    node.daemon(
        "kube-proxy",
        &components::path("kube-proxy")?,
        &[format!("--config={}", config.display())],
    )
}
