//! Services, whoever translates them.

use crate::{
    cluster::Proxy,
    e2e::{
        asking::{Asking, REPLICAS, addresses, deploy, rolled},
        load::service,
        pods::KubePod,
        world::{NAMESPACE, World},
    },
};
use anyhow::{Result, ensure};
use serde_json::json;
use std::{net::IpAddr, thread, time::Duration};

/// The API server's own Service.
const API: &str = "kubernetes.default.svc.cluster.local";

/// Names and the API server, by their Services, from pods and nodes; a pod that asks itself.
pub fn reached(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let families = world.cluster.variant().families;
    let (dns, api) = (families.dns(), families.api_service());
    let pods = world.run_pods(&[("served-a", &nodes[0]), ("served-b", &nodes[1])])?;
    let record = if api.is_ipv4() { "A" } else { "AAAA" };
    let asks = [
        format!("curl -sSk --max-time 10 https://{API}/version"),
        format!("dig +short +time=5 +tries=1 @{dns} {record} {API}"),
        format!("dig +short +tcp +time=5 +tries=1 @{dns} {record} {API}"),
    ];
    let [name, by_udp, by_tcp] = &asks;
    for pod in &pods {
        for ask in [name, by_udp, by_tcp] {
            let said = in_pod(world, pod, ask)?;
            answers(&pod.name, ask, &said, api)?;
        }
    }
    // A node's own resolver knows none of the cluster's names.
    let by_address = format!("curl -gsSk --max-time 10 https://{}/version", host(api));
    for node in &nodes {
        for ask in [&by_address, by_udp, by_tcp] {
            let said = world.on_node(node, "bash", &["-c", ask])?;
            answers(node, ask, &said, api)?;
        }
    }
    let told = itself(world, &pods[0])?;
    match world.cluster.variant().proxy {
        Proxy::None => {
            for node in &nodes {
                without_proxy(world, node)?;
            }
            refused(world, &pods[0], api)?;
            Ok(format!("{told}; no kube-proxy, nor rules of one"))
        }
        Proxy::Nftables | Proxy::Iptables => Ok(told),
    }
}

/// An address as in a URL.
fn host(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    }
}

fn in_pod(world: &World, pod: &KubePod, script: &str) -> Result<String> {
    let exec = [
        "-n", NAMESPACE, "exec", &pod.name, "--", "bash", "-c", script,
    ];
    world.kubectl(&exec)
}

fn answers(who: &str, ask: &str, said: &str, api: IpAddr) -> Result<()> {
    let expected = match ask.starts_with("curl") {
        true => "gitVersion".to_owned(),
        false => api.to_string(),
    };
    ensure!(said.contains(&expected), "{who}: {ask}: `{said}`");
    Ok(())
}

/// A pod's own Service leads back to it, by TCP and UDP.
fn itself(world: &World, pod: &KubePod) -> Result<String> {
    let serve = "setsid /agnhost netexec --http-port=8080 --udp-port=8081 > /dev/null 2>&1 &";
    in_pod(world, pod, serve)?;
    service(world, pod)?;
    let all = addresses(world, &pod.name)?;
    for address in &all {
        let mut asks = vec![format!(
            "curl -gsS --max-time 2 http://{}/hostname",
            host(*address)
        )];
        // A server that is bound to no address, as netexec is, answers a link-local one from its own link-local one:
        // as whom kube-proxy has the pod ask is not ours.
        if address.is_ipv4() || world.cluster.variant().proxy == Proxy::None {
            asks.push(format!(
                "exec 3<>/dev/udp/{address}/81; echo -n hostname >&3; timeout 2 dd bs=512 count=1 <&3"
            ));
        }
        for ask in &asks {
            // Who translates hears of the endpoint a moment later.
            world.wait(&format!("{} to reach itself: {ask}", pod.name), || {
                let said = in_pod(world, pod, ask)?;
                Ok(said.contains(&pod.name).then_some(()))
            })?;
        }
    }
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    Ok(format!(
        "names and API from pods and nodes; a pod reaches itself at {}",
        all.join(" and ")
    ))
}

/// It is the agent, and nobody else.
fn without_proxy(world: &World, node: &str) -> Result<()> {
    let status = world.status(node)?;
    let sockets = status.modes.get("serviceSockets").map(String::as_str);
    ensure!(
        sockets.is_some_and(|mode| mode.starts_with("on")),
        "{node}: the mode of Services at sockets is {sockets:?}"
    );
    for list in ["nft list ruleset", "iptables-save", "ip6tables-save"] {
        let rules = world.on_node(node, "sh", &["-c", &format!("{list} 2>/dev/null; true")])?;
        let theirs = rules.lines().find(|line| {
            line.contains("KUBE-SVC")
                || line.contains("KUBE-SERVICES")
                || line.contains("kube-proxy")
        });
        ensure!(
            theirs.is_none(),
            "{node} has rules of kube-proxy: {theirs:?}"
        );
    }
    Ok(())
}

/// A port that the Service has not is refused at once, and nothing waits for it.
fn refused(world: &World, pod: &KubePod, api: IpAddr) -> Result<()> {
    let ask = format!(
        "curl -gsS --max-time 10 http://{}:9/ 2>&1; echo status $?",
        host(api)
    );
    let said = in_pod(world, pod, &ask)?;
    // curl(1): 7 is a connection that failed, 28 one that timed out.
    ensure!(
        said.ends_with("status 7"),
        "a port that the API has not: `{said}`"
    );
    Ok(())
}

/// A Deployment is rolled twice under load: each request has an answer, and of the new pods.
pub fn rolled_out(world: &mut World) -> Result<String> {
    const NAME: &str = "rolled";
    let nodes = world.nodes();
    let addresses = deploy(world, NAME)?;
    let pods = world.run_pods(&[("rolled-asks", &nodes[0]), ("rolled-sends", &nodes[0])])?;
    let asking = Asking::start(world, [&pods[0], &pods[1]], &nodes[1], &addresses)?;
    let mut now = Default::default();
    for _ in 0..2 {
        let before = std::mem::replace(&mut now, {
            let deployment = format!("deployment/{NAME}");
            world.kubectl(&["-n", NAMESPACE, "rollout", "restart", &deployment])?;
            rolled(world, NAME)?
        });
        ensure!(before.is_disjoint(&now), "pods were not replaced: {now:?}");
        thread::sleep(world.before / 5);
    }
    let (requests, answered) = asking.finish()?;
    ensure!(
        now.is_subset(&answered),
        "not all of {now:?} answered every asker, but {answered:?}"
    );
    Ok(format!(
        "0 of {requests} requests failed while {REPLICAS} pods were replaced twice"
    ))
}

/// Agents are replaced, and one is killed while the API server is away: endpoints stay.
pub fn alone(world: &mut World) -> Result<String> {
    const NAME: &str = "alone";
    let nodes = world.nodes();
    let addresses = deploy(world, NAME)?;
    // When the API server comes back, the controllers call every node not ready until they hear of it.
    let patch = json!({"spec": {"publishNotReadyAddresses": true}}).to_string();
    world.kubectl(&["-n", NAMESPACE, "patch", "service", NAME, "--patch", &patch])?;
    let pods = world.run_pods(&[("alone-asks", &nodes[0]), ("alone-sends", &nodes[0])])?;
    let asking = Asking::start(world, [&pods[0], &pods[1]], &nodes[1], &addresses)?;
    world.roll_out()?;
    world.healthy()?;
    world.cluster.api_stop()?;
    let away = (|| -> Result<()> {
        for node in &nodes {
            world.kill_agent(node)?;
            world.wait(&format!("a new agent on {node}"), || {
                Ok(world.status(node)?.ready.then_some(()))
            })?;
        }
        thread::sleep(world.before / 3);
        Ok(())
    })();
    world.cluster.api_start()?;
    away?;
    world.healthy()?;
    thread::sleep(Duration::from_secs(2));
    let names = rolled(world, NAME)?;
    let (requests, answered) = asking.finish()?;
    ensure!(
        names.is_subset(&answered),
        "not all of {names:?} answered every asker, but {answered:?}"
    );
    // Its pods are to be gone soon.
    world.restart_kubelets()?;
    Ok(format!(
        "0 of {requests} requests failed while agents were replaced, and killed without the API server"
    ))
}
