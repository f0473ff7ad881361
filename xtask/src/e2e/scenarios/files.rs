//! A node's files: other networks' configurations, a full disk, uninstalling.

use crate::{
    e2e::{
        load::{reaches, traffic},
        pods::{PAUSE, manifest},
        world::{DAEMON_SET, NAMESPACE, SYSTEM, World},
    },
    workspace,
};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use sinabro_lab::residue::bpf;
use std::fs;

const CONF_DIR: &str = "/etc/cni/net.d";
const OURS: &str = "00-sinabro.conflist";
/// A network whose plugin does not exist: a pod that gets it cannot start.
const OTHER: &str =
    r#"{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"no-such-plugin"}]}"#;

pub fn other_conflist(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let node = &nodes[0];
    let directory = world.path(node, CONF_DIR)?;
    let (first, last) = (
        directory.join("00-first.conflist"),
        directory.join("99-other.conflist"),
    );
    let ours = fs::read(directory.join(OURS))?;
    let outcome = (|| {
        fs::write(&last, OTHER)?;
        let pods = world.run_pods(&[("other-a", node), ("other-b", &nodes[1])])?;
        reaches(&pods[1].place, &pods[0])?;
        // One that the runtime takes before ours is reported, not removed.
        fs::write(&first, OTHER)?;
        world.wait("the agent to tell of 00-first.conflist", || {
            let status = world.status(node)?;
            let told = status
                .conditions
                .iter()
                .any(|c| c.name == "conflist" && c.detail.contains("00-first.conflist"));
            let events = world.kubectl(&["get", "events", "-A", "-o", "json"])?;
            Ok((told && events.contains("00-first.conflist")).then_some(()))
        })?;
        for file in [&first, &last] {
            let now = fs::read(file).context("a foreign configuration was removed")?;
            ensure!(now == OTHER.as_bytes(), "{} was changed", file.display());
        }
        ensure!(
            fs::read(directory.join(OURS))? == ours,
            "{OURS} was changed"
        );
        // Ours comes back if somebody takes it away. What is there may be of an earlier release, whose
        // text was not touched as long as it meant the same.
        let meant: Value = serde_json::from_slice(&ours)?;
        fs::remove_file(directory.join(OURS))?;
        world.wait("the conflist to come back", || {
            let text = fs::read(directory.join(OURS)).unwrap_or_default();
            let now: Option<Value> = serde_json::from_slice(&text).ok();
            Ok((now.as_ref() == Some(&meant)).then_some(()))
        })?;
        Ok(())
    })();
    for file in [&first, &last] {
        let _ = fs::remove_file(file);
    }
    outcome?;
    world.healthy()?;
    let pods = world.run_pods(&[("other-late", node)])?;
    drop(pods);
    Ok(
        "a later one is ignored, an earlier one reported as condition and Event, neither touched"
            .into(),
    )
}

/// /run of the node is made as full as it is, then pods are added.
pub fn disk_full(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let node = &nodes[0];
    let pods = world.run_pods(&[("full-a", node), ("full-b", node), ("full-c", &nodes[1])])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    let leased = world.leased(node)?;
    // The state directory gets a small disk of its own: filling /run would stop containerd first.
    world
        .on_node(node, "mount", &["-o", "remount,size=64m", "/run"])
        .ok();
    let directory = world.path(node, "/run/sinabro")?;
    let filler = directory.join("filler");
    let outcome = (|| {
        traffic.event("the disk was filled")?;
        fill(&filler)?;
        world.apply_all(vec![manifest("full-waits", node, PAUSE)])?;
        let told = world.wait("an Event that tells of the full disk", || {
            let events = world.get(&[
                "-n",
                NAMESPACE,
                "events",
                "--field-selector=involvedObject.name=full-waits",
            ])?;
            let notes = events["items"].as_array().cloned().unwrap_or_default();
            let notes = notes.iter().filter_map(|event| event["message"].as_str());
            Ok(notes
                // The kubelet's and the runtime's own troubles with a full disk are not ours.
                .filter(|note| note.contains("type=\"sinabro\"") && note.contains("/run/sinabro/"))
                .filter(|note| note.to_lowercase().contains("no space left"))
                .map(str::to_owned)
                .next())
        })?;
        traffic.must_flow("while the disk is full")?;
        ensure!(
            world.leased(node)? == leased,
            "leases changed on a full disk"
        );
        Ok(told)
    })();
    let _ = fs::remove_file(&filler);
    let _ = world.on_node(node, "mount", &["-o", "remount,size=50%", "/run"]);
    let told = outcome?;
    world.wait("the pod to start once there is room", || {
        let pod = world.get(&["-n", NAMESPACE, "pod", "full-waits"])?;
        Ok((crate::e2e::world::condition(&pod, "Ready") == Some("True")).then_some(()))
    })?;
    let flowed = traffic.finish()?;
    // The kubelet puts much before the plugin's own words.
    let words = told
        .rfind("cannot ")
        .map_or(told.as_str(), |start| &told[start..]);
    Ok(format!(
        "the pod waited and started; {flowed}; reported: {words}"
    ))
}

/// Writes until there is no room for a single byte.
fn fill(path: &std::path::Path) -> Result<()> {
    use std::io::Write as _;
    let mut file = fs::File::create(path)?;
    for size in [1 << 20, 4096, 1] {
        let block = vec![0; size];
        while file.write_all(&block).is_ok() {}
    }
    let full = file
        .write_all(&[0])
        .is_err_and(|error| error.kind() == std::io::ErrorKind::StorageFull);
    ensure!(
        full,
        "{} could not be made to fill the disk",
        path.display()
    );
    Ok(())
}

pub fn uninstall(world: &mut World) -> Result<String> {
    let manifest = |name: &str| {
        workspace::root()
            .join("deploy")
            .join(name)
            .display()
            .to_string()
    };
    world.clean();
    // As uninstall.yaml says at its top.
    world.kubectl(&["-n", SYSTEM, "delete", DAEMON_SET])?;
    world.kubectl(&["apply", "-f", &manifest("uninstall.yaml")])?;
    let rolled = world.kubectl(&[
        "-n",
        SYSTEM,
        "rollout",
        "status",
        "daemonset/sinabro-uninstall",
        "--timeout=180s",
    ]);
    let looked: Result<Vec<String>> = world
        .nodes()
        .iter()
        .map(|node| remains(world, node))
        .collect();
    world.kubectl(&[
        "delete",
        "--ignore-not-found",
        "-f",
        &manifest("uninstall.yaml"),
        "-f",
        &manifest("sinabro.yaml"),
    ])?;
    world.kubectl(&["apply", "-f", &manifest("sinabro.yaml")])?;
    world.kubectl(&[
        "-n",
        SYSTEM,
        "rollout",
        "status",
        DAEMON_SET,
        "--timeout=180s",
    ])?;
    rolled?;
    let remains = looked?.concat();
    ensure!(remains.is_empty(), "left behind: {remains}");
    world.healthy()?;
    let nodes = world.nodes();
    let pods = world.run_pods(&[("again-a", &nodes[0]), ("again-b", &nodes[1])])?;
    reaches(&pods[0].place, &pods[1])?;
    Ok("no files, links, routes, programs or pins on any node; installed again, pods run".into())
}

/// What of Sinabro a node still has, for people; empty if nothing.
fn remains(world: &World, node: &str) -> Result<String> {
    let mut found = Vec::new();
    for file in [
        "/opt/cni/bin/sinabro",
        "/etc/cni/net.d/00-sinabro.conflist",
        "/etc/cni/net.d/sinabro-local-mtu-off/00-sinabro.conflist",
        "/run/sinabro",
        "/sys/fs/bpf/sinabro",
    ] {
        if world.path(node, file)?.exists() {
            found.push(file.to_string());
        }
    }
    let looks = world.on_node(node, "ip", &["-o", "link", "show"])?;
    for family in ["-4", "-6"] {
        // 91 is sinabro_common::names::ROUTE_PROTOCOL.
        let protocol = sinabro_common::names::ROUTE_PROTOCOL.to_string();
        let routes = world.on_node(
            node,
            "ip",
            &[family, "route", "show", "table", "all", "proto", &protocol],
        )?;
        if !routes.is_empty() {
            found.push(routes);
        }
    }

    found.extend(
        looks
            .lines()
            .filter(|line| line.contains("sinabro") || line.contains(": snb"))
            .map(str::to_owned),
    );
    let links = world.on_node(node, "ip", &["-json", "link", "show"])?;
    for link in serde_json::from_str::<Vec<serde_json::Value>>(&links)? {
        let name = link["ifname"].as_str().unwrap_or_default().to_owned();
        for side in ["ingress", "egress"] {
            let filters = world
                .on_node(node, "tc", &["filter", "show", "dev", &name, side])
                .unwrap_or_default();
            if filters.contains("sinabro") || filters.contains("bpf") {
                found.push(format!("{name} {side}: {filters}"));
            }
        }
        let programs = world.cluster.place(node)?.run(|| Ok(bpf::on_link(&name)))?;
        found.extend(
            programs
                .iter()
                .map(|program| format!("{program} on {name}")),
        );
    }
    for root in world.cluster.cgroups(node)? {
        let programs = bpf::on_cgroup(&root)?;
        found.extend((programs.iter()).map(|program| format!("{program} on its cgroup")));
    }
    Ok(match found.is_empty() {
        true => String::new(),
        false => format!("{node}: {}; ", found.join(", ")),
    })
}
