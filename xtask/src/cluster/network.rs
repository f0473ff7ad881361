//! The cluster's pod network: Sinabro as users deploy it, or the reference plugin.

use super::{
    Cluster, Cni, control, images,
    layout::{self, Families},
    machine::Machine,
};
use crate::{image, setup, ui, workspace};
use anyhow::{Context as _, Result};
use serde_json::json;
use std::{fs, path::PathBuf};

/// Key of the agents' ConfigMap.
const SETTINGS: &str = "config.yaml";

pub fn deploy(cluster: &Cluster) -> Result<()> {
    match cluster.options.cni {
        Cni::Sinabro => sinabro(cluster),
        Cni::Bridge => bridge(cluster),
        Cni::None => Ok(()),
    }
}

fn sinabro(cluster: &Cluster) -> Result<()> {
    let step = ui::step("deploying Sinabro");
    cluster.import_image(&image::archive()?)?;
    let manifest = workspace::root().join("deploy/sinabro.yaml");
    let known = cluster
        .ask(&[
            "-n",
            "kube-system",
            "get",
            "daemonset",
            "sinabro",
            "-o",
            "name",
        ])
        .is_ok();
    cluster.ask(&["apply", "-f", &manifest.display().to_string()])?;
    if known {
        // The image's name is the same although its content may not be.
        cluster.ask(&[
            "-n",
            "kube-system",
            "rollout",
            "restart",
            "daemonset/sinabro",
        ])?;
    }
    cluster.ask(&[
        "-n",
        "kube-system",
        "rollout",
        "status",
        "daemonset/sinabro",
        "--timeout=240s",
    ])?;
    step.done_in_time();
    Ok(())
}

/// Gives agents that start from now on these settings, in the ConfigMap that the manifest leaves alone.
pub fn configure(cluster: &Cluster, settings: &str) -> Result<()> {
    let map = ["-n", "kube-system", "configmap", "sinabro"];
    let verb = |verb, more: &[&str]| cluster.ask(&[&[verb], &map[..], more].concat());
    match verb("get", &["-o", "name"]) {
        Ok(_) => {
            let patch = json!({"data": {SETTINGS: settings}}).to_string();
            verb("patch", &["--type=merge", "--patch", &patch])?;
        }
        // Not applied: the manifest, which sets nothing, would take away what another apply has set.
        Err(_) => {
            verb(
                "create",
                &[&format!("--from-literal={SETTINGS}={settings}")],
            )?;
        }
    }
    Ok(())
}

/// Each node and its pod ranges.
fn ranges(cluster: &Cluster) -> Result<Vec<(String, Vec<String>)>> {
    let of = |node: String| {
        let text = cluster.ask(&["get", "node", &node, "-o", "jsonpath={.spec.podCIDRs[*]}"])?;
        Ok((node, text.split_whitespace().map(str::to_owned).collect()))
    };
    cluster.nodes().into_iter().map(of).collect()
}

/// The node's address of a range's family.
fn way_to(cluster: &Cluster, node: &str, range: &str) -> Result<String> {
    let number = layout::node_number(node).context("not a node")?;
    let addresses = cluster.options.variant.families.node(number);
    let address = addresses
        .iter()
        .find(|address| address.is_ipv6() == range.contains(':'));
    Ok(address
        .with_context(|| format!("{node} has no address of the family of {range}"))?
        .to_string())
}

/// The API server asks pods (webhooks, aggregated APIs, `kubectl proxy`), and its machine is no
/// node: it has a route to each node's pods, as a cloud's network gives it.
pub fn route(cluster: &Cluster) -> Result<()> {
    for (node, ranges) in ranges(cluster)? {
        for range in ranges {
            control::machine().ip(&format!(
                "route replace {range} via {}",
                way_to(cluster, &node, &range)?
            ))?;
        }
    }
    Ok(())
}

/// bridge, host-local and portmap on each node, and routes between them.
fn bridge(cluster: &Cluster) -> Result<()> {
    let plugins = setup::reference_plugins().context("there are no reference plugins")?;
    let ranges = ranges(cluster)?;
    for (node, own) in &ranges {
        let machine = Machine::new(node);
        for plugin in ["bridge", "host-local"] {
            fs::copy(
                plugins.join(plugin),
                machine.path("/opt/cni/bin")?.join(plugin),
            )?;
        }
        for (other, theirs) in ranges.iter().filter(|(other, _)| other != node) {
            for range in theirs {
                machine.ip(&format!(
                    "route replace {range} via {}",
                    way_to(cluster, other, range)?
                ))?;
            }
        }
        let subnets: Vec<_> = own.iter().map(|range| json!([{"subnet": range}])).collect();
        let routes: Vec<_> = own
            .iter()
            .map(|range| match range.contains(':') {
                true => json!({"dst": "::/0"}),
                false => json!({"dst": "0.0.0.0/0"}),
            })
            .collect();
        let conflist = json!({
            "cniVersion": "0.4.0",
            "name": "bridge",
            "plugins": [
                {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
                 "ipam": {"type": "host-local", "ranges": subnets, "routes": routes}},
                {"type": "portmap", "capabilities": {"portMappings": true}},
            ],
        });
        fs::write(
            machine.path("/etc/cni/net.d/10-bridge.conflist")?,
            conflist.to_string(),
        )?;
        machine
            .command("sysctl")?
            .args([
                "-qw",
                "net.ipv4.ip_forward=1",
                "net.ipv6.conf.all.forwarding=1",
            ])
            .status()?;
    }
    Ok(())
}

/// The manifest of the cluster's DNS.
pub fn write_dns(families: Families) -> Result<PathBuf> {
    let text = include_str!("../../cluster/config/coredns.yaml")
        .replace("@COREDNS@", images::COREDNS)
        .replace("@DNS@", &families.dns().to_string());
    let path = layout::state()?.join("coredns.yaml");
    fs::write(&path, text)?;
    Ok(path)
}
