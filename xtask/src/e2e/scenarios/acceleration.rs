//! TCP between pods of one node.

use crate::e2e::{
    pods::{IMAGE, KubePod, manifest},
    world::{NAMESPACE, World},
};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use sinabro_common::{
    api::{EndpointReport, TcpAcceleration},
    names::ACCELERATION_ANNOTATION,
};
use std::net::SocketAddr;

/// Requests on one connection, of which there is one for each family. Each is a packet of the
/// client's at least.
const REQUESTS: u64 = 500;
const PORT: u16 = 8080;
/// Packets of the handshakes and ends of two connections, and more.
const HANDSHAKES: u64 = 50;

/// An annotation has the pods' TCP bypass the stack; one that makes no sense is reported on the pod.
pub fn annotated(world: &mut World) -> Result<String> {
    let node = &world.nodes()[0];
    let mode = world.status(node)?.modes["tcpAcceleration"].clone();
    ensure!(mode.starts_with("on, cgroup "), "the agent says {mode}");
    let pods = [
        ("fast-a", Some("enabled")),
        ("fast-b", Some("enabled")),
        ("slow", Some("disabled")),
        ("odd", Some("as fast as you can")),
        ("silent", None),
    ];
    let annotated = pods.iter().map(|(name, wish)| {
        let mut pod = manifest(name, node, IMAGE);
        pod["spec"]["containers"][0]["args"] = json!(["netexec", format!("--http-port={PORT}")]);
        if let Some(wish) = wish {
            pod["metadata"]["annotations"] = json!({ACCELERATION_ANNOTATION: wish});
        }
        pod
    });
    world.apply_all(annotated.collect())?;
    let running = pods.map(|(name, _)| world.running(name));
    let [fast, other, slow, odd, silent] = running;
    let (fast, other, slow, odd, silent) = (fast?, other?, slow?, odd?, silent?);

    for (pod, wish) in [
        (&fast, Some(TcpAcceleration::Enabled)),
        (&slow, Some(TcpAcceleration::Disabled)),
        (&odd, None),
        (&silent, None),
    ] {
        let found = report(world, node, pod)?.acceleration_wish;
        ensure!(
            found == wish,
            "{} wishes {wish:?}, the agent knows {found:?}",
            pod.name
        );
    }
    let past = packets(world, node, [&fast, &other])?;
    ensure!(
        past < HANDSHAKES,
        "{past} packets on the link of an accelerated pod"
    );
    let through = packets(world, node, [&slow, &other])?;
    let requests = REQUESTS * world.families().len() as u64;
    ensure!(
        through >= requests,
        "only {through} packets on the link of a pod that wishes no acceleration"
    );
    world.wait(
        "an Event on the pod whose annotation makes no sense",
        || {
            let events = world.get(&["-n", NAMESPACE, "events.v1.events.k8s.io"])?;
            let events = events["items"].as_array().context("no events")?;
            let told = events.iter().any(|event| {
                event["reason"] == "InvalidSetting"
                    && event["regarding"]["name"] == odd.name.as_str()
            });
            Ok(told.then_some(()))
        },
    )?;
    let names = pods.map(|(name, _)| name);
    world.kubectl(&[&["-n", NAMESPACE, "delete", "pods"], &names[..]].concat())?;
    Ok(format!(
        "{past} packets instead of {through} for {requests} requests; {mode}"
    ))
}

/// How many packets a pod sends on its link for requests to another, by each family.
///
/// Both ends are programs in the pods: one of this process would be in no cgroup of the node.
fn packets(world: &World, node: &str, [from, to]: [&KubePod; 2]) -> Result<u64> {
    let sent = || Ok::<u64, anyhow::Error>(report(world, node, from)?.tx_packets);
    let mut packets = 0;
    for &address in &to.addresses {
        let server = SocketAddr::new(address, PORT);
        let urls = format!("http://{server}/hostname?[1-{REQUESTS}]");
        let curl = ["curl", "--silent", "--fail", "--output", "/dev/null", &urls];
        let exec = ["-n", NAMESPACE, "exec", &from.name, "--"];
        let run = |program: &[&str]| world.kubectl(&[&exec, program].concat());
        // The server may not listen yet. Once it does, every request counts, and none is repeated.
        let once = format!("http://{server}/hostname");
        world.wait(&format!("an answer of {}", to.name), || {
            run(&["curl", "--silent", "--fail", "--output", "/dev/null", &once]).map(Some)
        })?;
        let before = sent()?;
        run(&curl)?;
        packets += sent()? - before;
    }
    Ok(packets)
}

fn report(world: &World, node: &str, pod: &KubePod) -> Result<EndpointReport> {
    let mut reports = world.endpoints(node)?.into_iter();
    match reports.find(|report| report.pod.name == pod.name) {
        Some(report) => Ok(report),
        None => bail!("{node} has no endpoint of {}", pod.name),
    }
}
