//! From the last released state to the present one, and back, as users do it: by applying the
//! manifest of each.

use crate::{
    arch::Arch,
    cluster::{Proxy, layout},
    e2e::{
        inside::Whole,
        load::{reaches, traffic_and},
        pods::{IMAGE, manifest},
        world::{DAEMON_SET, NAMESPACE, SYSTEM, World},
    },
    earlier::Earlier,
    image, workspace,
};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use sinabro_common::names::{self, ACCELERATION_ANNOTATION};
use sinabro_lab::traffic::path::Path as Way;
use std::{collections::BTreeSet, fs, io::Write as _, path::Path};

/// A state of the project on a cluster: the manifest that users apply, with the image's name.
pub struct State {
    pub step: &'static str,
    manifest: String,
    image: String,
}

impl State {
    /// The one that is tested.
    pub fn present(step: &'static str) -> Result<Self> {
        Ok(Self {
            step,
            manifest: read(&workspace::root().join("deploy/sinabro.yaml"))?,
            image: image::NAME.into(),
        })
    }

    pub fn earlier(step: &'static str, earlier: &Earlier) -> Result<Self> {
        Ok(Self {
            step,
            manifest: with_image(
                &read(&earlier.file("deploy/sinabro.yaml"))?,
                &earlier.image(),
            ),
            image: earlier.image(),
        })
    }

    /// The present one with programs that do the same and are others: their files are longer. Its
    /// image is imported on all nodes.
    pub fn other(step: &'static str, world: &World) -> Result<Self> {
        let image = format!("{}-other", image::NAME);
        let dir = tempfile::tempdir()?;
        for program in ["sinabro", "sinabro-agent"] {
            let copy = dir.path().join(program);
            fs::copy(workspace::dist().join(program), &copy)
                .with_context(|| format!("cannot copy {program}"))?;
            fs::OpenOptions::new()
                .append(true)
                .open(&copy)?
                .write_all(b"other")?;
        }
        let archive = dir.path().join("other.tar");
        image::write_named(&image, Arch::host()?, dir.path(), &archive)?;
        world.cluster.import_image(&archive)?;
        Ok(Self {
            step,
            manifest: with_image(&Self::present(step)?.manifest, &image),
            image,
        })
    }

    /// Applies the manifest and waits until every agent is one of its image.
    pub fn apply(&self, world: &World) -> Result<()> {
        world.cluster.apply(&self.manifest)?;
        let rollout = ["rollout", "status", DAEMON_SET, "--timeout=300s"];
        world.kubectl(&[&["-n", SYSTEM], &rollout[..]].concat())?;
        let label = "app.kubernetes.io/name=sinabro";
        let pods = world.get(&["-n", SYSTEM, "pods", "-l", label])?;
        let pods = pods["items"].as_array().context("no list of pods")?;
        // Those that are going do not count.
        let pods = pods
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let images: Vec<&Value> = pods
            .map(|pod| &pod["spec"]["containers"][0]["image"])
            .collect();
        ensure!(
            images.len() == world.nodes().len()
                && images.iter().all(|image| **image == *self.image),
            "{}: the agents' images are {images:?}",
            self.step
        );
        Ok(())
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The cluster runs the present state: it is taken back to the earlier one, and upgraded.
pub fn upgrade(world: &mut World) -> Result<String> {
    let earlier = Earlier::released()?;
    let present = State::present("the upgrade")?;
    let before = State::earlier("going back", &earlier)?;
    world.cluster.import_image(&earlier.archive())?;
    let is_without_proxy = world.cluster.variant().proxy == Proxy::None;
    if is_without_proxy {
        // The default of the release is off.
        world.cluster.configure("serviceProxy: on\n")?;
    }
    let outcome = there_and_back(world, &before, &present);
    if is_without_proxy {
        world.cluster.configure("")?;
    }
    if outcome.is_err() {
        // The next scenario is about the present state.
        present.apply(world)?;
    }
    Ok(format!("{} and back: {}", earlier.short(), outcome?))
}

fn there_and_back(world: &World, before: &State, present: &State) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("up-a", &nodes[0]),
        ("up-b", &nodes[0]),
        ("up-c", &nodes[1]),
        ("up-leaves", &nodes[1]),
    ])?;
    let fast = ["up-fast-a", "up-fast-b"];
    world.apply_all(
        fast.map(|name| {
            let mut pod = manifest(name, &nodes[0], IMAGE);
            pod["metadata"]["annotations"] =
                serde_json::json!({ACCELERATION_ANNOTATION: "enabled"});
            pod
        })
        .into(),
    )?;
    let fast = [world.running(fast[0])?, world.running(fast[1])?];
    // Through the masquerade, which is for IPv4: the control plane's machine is no node.
    let control = world.cluster.place(layout::CONTROL)?;
    let addresses = world.cluster.variant().families.control().into_iter();
    let outside = addresses
        .filter(|address| address.is_ipv4())
        .map(|address| Way::new("outside, IPv4", &pods[1].place, &control, address))
        .collect();
    let traffic = traffic_and(world, [&pods[0], &pods[1], &pods[2]], outside)?;
    let accelerated = Whole::start(world, &nodes[0], fast.each_ref())?;
    let mut leaves = "up-leaves".to_owned();
    for (state, comes) in [(before, "up-came-back"), (present, "up-came-up")] {
        let leases_before = leases(world)?;
        traffic.event(state.step)?;
        // A pod comes while agents go and come.
        world.apply_all(vec![manifest(comes, &nodes[1], IMAGE)])?;
        state.apply(world)?;
        traffic.must_flow(&format!("after {}", state.step))?;
        let now = leases(world)?;
        let lost = leases_before.iter().find(|lease| !now.contains(lease));
        ensure!(lost.is_none(), "{}: a lease is lost: {lost:?}", state.step);
        reaches(&pods[0].place, &world.running(comes)?)?;
        // One that came with the other agent goes.
        world.kubectl(&["-n", NAMESPACE, "delete", "pod", &leaves, "--wait=true"])?;
        world.wait(&format!("the addresses of {leaves} to be free"), || {
            let now = leases(world)?;
            Ok((!now.iter().any(|(_, owner)| *owner == leaves)).then_some(()))
        })?;
        leaves = comes.into();
        nodes.iter().try_for_each(|node| kept(world, node))?;
    }
    nodes.iter().try_for_each(|node| settled(world, node))?;
    let megabytes = accelerated.finish()?;
    Ok(format!(
        "{}; {megabytes} MB between accelerated pods, digests equal",
        traffic.finish()?
    ))
}

/// What the present state falls back on if a kernel refuses others: it outlives agents that know nothing
/// of it.
fn kept(world: &World, node: &str) -> Result<()> {
    let path = Path::new(names::PROGRAMS_DIR).join(names::PROGRAMS_FILE);
    let path = world.path(node, &path.to_string_lossy())?;
    ensure!(path.is_file(), "{node} keeps no programs");
    Ok(())
}

/// The present state's own programs run, and no map of another agent is left.
fn settled(world: &World, node: &str) -> Result<()> {
    let status = world.status(node)?;
    let programs = status.modes.get("programs").map(String::as_str);
    ensure!(programs == Some("current"), "{node} runs {programs:?}");
    let mut seen = BTreeSet::new();
    let mut directories = vec![world.path(node, names::BPF_DIR)?];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            ensure!(!name.ends_with("_next"), "{node} has {name} left");
            let number = name.strip_prefix('v').map(str::parse::<u32>);
            if number.is_some_and(|number| number.is_ok()) {
                directories.push(entry.path());
            } else {
                ensure!(
                    seen.insert(name.clone()),
                    "{node} has {name} of two generations"
                );
            }
        }
    }
    Ok(())
}

/// Every lease of the cluster, with its pod's name.
fn leases(world: &World) -> Result<Vec<(std::net::IpAddr, String)>> {
    let mut all = Vec::new();
    for node in world.nodes() {
        let leases = world.ipam(&node)?.leases.into_iter();
        all.extend(leases.map(|lease| (lease.address, lease.pod.name)));
    }
    Ok(all)
}

/// A manifest whose containers run another image.
fn with_image(manifest: &str, image: &str) -> String {
    let line = |line: &str| match line.split_once("image: ") {
        Some((before, _)) if before.trim().is_empty() => format!("{before}image: {image}\n"),
        _ => format!("{line}\n"),
    };
    manifest.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_images_are_changed() {
        let manifest = "a:\n  # image: x\n  image: x:1\n  imagePullPolicy: Never\n";
        let expected = "a:\n  # image: x\n  image: y:2\n  imagePullPolicy: Never\n";
        assert_eq!(with_image(manifest, "y:2"), expected);
        let path = workspace::root().join("deploy/sinabro.yaml");
        let present = fs::read_to_string(path).unwrap();
        assert_eq!(with_image(&present, image::NAME), present);
        assert_eq!(present.matches(image::NAME).count(), 2);
    }
}
