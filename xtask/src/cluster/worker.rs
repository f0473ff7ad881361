//! What a node runs: containerd, kubelet, kube-proxy.

use super::{
    Cni, Proxy, components, images,
    layout::{self, DNS},
    machine::Machine,
};
use crate::{
    setup,
    workspace::{output, which},
};
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
pub fn start_containerd(node: &Machine, archives: &[PathBuf]) -> Result<()> {
    let plugins = setup::reference_plugins()
        .context("there are no reference plugins: run `cargo xtask setup`")?;
    for plugin in PLUGINS {
        let to = node.path("/opt/cni/bin")?.join(plugin);
        fs::copy(plugins.join(plugin), &to)
            .with_context(|| format!("cannot write {}", to.display()))?;
    }
    let config = node.dir()?.join("containerd.toml");
    let text = fill(
        include_str!("../../cluster/config/containerd.toml"),
        &[("PAUSE", images::PAUSE)],
    );
    fs::write(&config, text)?;
    let containerd =
        which("containerd").context("there is no containerd: run `cargo xtask setup`")?;
    node.daemon(
        "containerd",
        &containerd,
        &own(&["--config", &config.display().to_string()]),
    )?;
    let deadline = Instant::now() + PATIENCE;
    while !node
        .command("ctr")?
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
        import(node, archive, &imported)?;
    }
    ctr(
        node,
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
pub fn import(node: &Machine, archive: &Path, marks: &Path) -> Result<()> {
    let meta =
        fs::metadata(archive).with_context(|| format!("cannot read {}", archive.display()))?;
    let mark = marks.join(archive.file_name().unwrap_or_default());
    let state = format!("{:?} {}", meta.modified()?, meta.len());
    if fs::read_to_string(&mark).is_ok_and(|known| known == state) {
        return Ok(());
    }
    ctr(node, &["images", "import", &archive.display().to_string()])?;
    fs::create_dir_all(marks)?;
    Ok(fs::write(mark, state)?)
}

fn ctr(node: &Machine, arguments: &[&str]) -> Result<()> {
    output(node.command("ctr")?.args(["-n", "k8s.io"]).args(arguments))
        .with_context(|| format!("ctr {} on {}", arguments.join(" "), node.name))?;
    Ok(())
}

pub fn start_kubelet(node: &Machine, cni: Cni) -> Result<()> {
    let (pki, dir) = (layout::pki()?, node.dir()?);
    let config = dir.join("kubelet.yaml");
    // Taken away by the agent once it serves.
    let taints = match cni {
        Cni::Sinabro => "[{key: sinabro.io/agent-not-ready, effect: NoSchedule}]",
        Cni::Bridge | Cni::None => "[]",
    };
    let text = fill(
        include_str!("../../cluster/config/kubelet.yaml"),
        &[
            ("PKI", &pki.display().to_string()),
            ("NODE", &node.name),
            ("DNS", DNS),
            ("TAINTS", taints),
        ],
    );
    fs::write(&config, text)?;
    let number = layout::node_number(&node.name).context("not a node")?;
    let (v4, v6) = layout::node_addresses(number);
    node.daemon(
        "kubelet",
        &components::path("kubelet")?,
        &[
            format!("--config={}", config.display()),
            format!(
                "--kubeconfig={}",
                pki.join(format!("{}.kubeconfig", node.name)).display()
            ),
            format!("--hostname-override={}", node.name),
            format!("--node-ip={v4},{v6}"),
        ],
    )
}

pub fn start_proxy(node: &Machine, proxy: Proxy) -> Result<()> {
    let mode = match proxy {
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
            ("PODS", layout::PODS),
        ],
    );
    fs::write(&config, text)?;
    node.daemon(
        "kube-proxy",
        &components::path("kube-proxy")?,
        &[format!("--config={}", config.display())],
    )
}
