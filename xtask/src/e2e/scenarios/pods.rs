//! What pods get, and pods in numbers.

use crate::e2e::{
    load::{reaches, service},
    pods::{IMAGE, PAUSE, manifest},
    world::{NAMESPACE, World, condition},
};
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sinabro_lab::traffic::{http::Load, icmp, path::Path, tcp};
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, TcpListener},
    time::{Duration, Instant},
};

/// At once on one node.
const HUNDRED: usize = 100;

/// Addresses of each family that the cluster has, and of no other.
pub fn families(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let families = world.families();
    let pods = world.run_pods(&[
        ("family-a", &nodes[0]),
        ("family-b", &nodes[0]),
        ("family-c", &nodes[1]),
    ])?;
    for pod in &pods {
        for family in families {
            pod.address(*family)?;
        }
        ensure!(
            pod.addresses.len() == families.len(),
            "{} has {:?}",
            pod.name,
            pod.addresses
        );
    }
    let patience = Duration::from_secs(10);
    for (from, to) in [(0, 1), (0, 2), (2, 0)] {
        reaches(&pods[from].place, &pods[to])?;
        for address in &pods[to].addresses {
            icmp::ping(&pods[from].place, *address, patience)?;
        }
    }
    // From a node to pods of its own and of another, and from a pod to nodes.
    let node = world.cluster.place(&nodes[0])?;
    reaches(&node, &pods[0])?;
    reaches(&node, &pods[2])?;
    let all = world.get(&["nodes"])?;
    let mut asked = 0;
    for node in all["items"].as_array().context("no nodes")? {
        let addresses = node["status"]["addresses"]
            .as_array()
            .context("no addresses")?;
        for address in addresses
            .iter()
            .filter(|address| address["type"] == "InternalIP")
        {
            let address: IpAddr = address["address"].as_str().unwrap_or_default().parse()?;
            icmp::ping(&pods[0].place, address, patience)?;
            asked += 1;
        }
    }
    ensure!(
        asked == families.len() * nodes.len(),
        "the nodes have {asked} addresses"
    );
    service(world, &pods[2])?;
    let services = world.kubectl(&[
        "-n",
        NAMESPACE,
        "get",
        "service",
        "family-c",
        "-o",
        "jsonpath={.spec.clusterIPs[*]}",
    ])?;
    let services = services
        .split_whitespace()
        .map(|text| Ok(text.parse()?))
        .collect::<Result<Vec<IpAddr>>>()?;
    for family in families {
        let mut addresses = services.iter().copied();
        let address = addresses.find(|address| family.has(*address));
        let address = address.with_context(|| format!("the Service has no {family} address"))?;
        let target = SocketAddr::new(address, 80);
        let listen = SocketAddr::new(pods[2].address(*family)?, 8080);
        world.wait(&format!("the {family} Service"), || {
            let _server = pods[2].place.run(|| Ok(TcpListener::bind(listen)?))?;
            Ok(tcp::connects(&pods[0].place, target).ok())
        })?;
    }
    let own: Vec<String> = (pods[0].addresses.iter().map(ToString::to_string)).collect();
    let names: Vec<String> = families.iter().map(ToString::to_string).collect();
    Ok(format!(
        "pods {} and so on; {asked} node addresses; Services of {}",
        own.join(" "),
        names.join(" and ")
    ))
}

pub fn host_port(world: &mut World) -> Result<String> {
    const PORT: u16 = 18_080;
    let nodes = world.nodes();
    let mut server = manifest("port-server", &nodes[0], IMAGE);
    server["spec"]["containers"][0]["ports"] = json!([{"containerPort": 8080, "hostPort": PORT}]);
    world.apply_all(vec![server])?;
    let server = world.running("port-server")?;
    let clients = world.run_pods(&[("port-near", &nodes[0]), ("port-far", &nodes[1])])?;
    let node = world.kubectl(&[
        "get",
        "node",
        &nodes[0],
        "-o",
        "jsonpath={.status.addresses[?(@.type==\"InternalIP\")].address}",
    ])?;
    let node: IpAddr = node.split_whitespace().next().unwrap_or_default().parse()?;
    let target = SocketAddr::new(node, PORT);
    let places = [
        clients[0].place.clone(),
        clients[1].place.clone(),
        world.cluster.place(&nodes[1])?,
    ];
    for from in &places {
        let path = Path::new("host port", from, &server.place, server.primary()?);
        let load = Load::on(&path.through(target, 8080), 1, Duration::ZERO)?;
        world.wait(
            &format!("an answer from {target} to {}", from.name()),
            || Ok((load.requests() > 10).then_some(())),
        )?;
        let report = load.finish()?;
        ensure!(
            report.failures.is_empty(),
            "{} asks {target}: {}",
            from.name(),
            report.failures[0]
        );
    }
    Ok(format!(
        "{target} answers a pod of the same node, of another, and another node"
    ))
}

pub fn hundred(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let observer = world.run_pods(&[("hundred-observer", &nodes[1])])?;
    let before = world.leased(&nodes[0])?;
    let names: Vec<String> = (0..HUNDRED)
        .map(|number| format!("hundred-{number}"))
        .collect();
    let start = Instant::now();
    world.apply_all(
        names
            .iter()
            .map(|name| manifest(name, &nodes[0], PAUSE))
            .collect(),
    )?;
    let items = world.wait("a hundred pods to run", || {
        let all = world.get(&["-n", NAMESPACE, "pods"])?;
        let all = all["items"].as_array().cloned().unwrap_or_default();
        let ready = |pod: &Value| {
            condition(pod, "Ready") == Some("True") && pod["spec"]["nodeName"] == *nodes[0]
        };
        let ready: Vec<Value> = all.into_iter().filter(ready).collect();
        Ok((ready.len() == HUNDRED).then_some(ready))
    })?;
    let took = start.elapsed();
    let addresses: BTreeSet<IpAddr> = items
        .iter()
        .flat_map(|pod| {
            pod["status"]["podIPs"]
                .as_array()
                .cloned()
                .unwrap_or_default()
        })
        .map(|entry| Ok(entry["ip"].as_str().unwrap_or_default().parse()?))
        .collect::<Result<_>>()?;
    ensure!(
        addresses.len() == world.families().len() * HUNDRED,
        "{} addresses of {HUNDRED} pods",
        addresses.len()
    );
    for address in &addresses {
        icmp::ping(&observer[0].place, *address, Duration::from_secs(10))?;
    }
    delete(world, &names)?;
    freed(world, &nodes[0], &before)?;
    Ok(format!(
        "running after {:.0} s, {} addresses answer from the other node, all freed",
        took.as_secs_f64(),
        addresses.len()
    ))
}

pub fn force_deleted(world: &mut World) -> Result<String> {
    const PODS: usize = 20;
    let node = &world.nodes()[0];
    let (before, links) = (world.leased(node)?, world.pod_links(node)?);
    let names: Vec<String> = (0..PODS).map(|number| format!("force-{number}")).collect();
    for round in 0..2 {
        world.apply_all(
            names
                .iter()
                .map(|name| manifest(name, node, PAUSE))
                .collect(),
        )?;
        if round == 0 {
            for name in &names {
                world.wait(&format!("pod {name}"), || {
                    let pod = world.get(&["-n", NAMESPACE, "pod", name])?;
                    Ok((condition(&pod, "Ready") == Some("True")).then_some(()))
                })?;
            }
        }
        // The second time in the middle of their start.
        delete(world, &names)?;
    }
    freed(world, node, &before)?;
    world.wait("pod links to be gone", || {
        Ok((world.pod_links(node)? == links).then_some(()))
    })?;
    Ok(format!(
        "{PODS} running and {PODS} starting ones deleted: no lease, endpoint or link is left"
    ))
}

fn delete(world: &World, names: &[String]) -> Result<()> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    world.kubectl(
        &[
            &[
                "-n",
                NAMESPACE,
                "delete",
                "pods",
                "--grace-period=0",
                "--force",
            ],
            &names[..],
        ]
        .concat(),
    )?;
    Ok(())
}

fn freed(world: &World, node: &str, before: &BTreeSet<IpAddr>) -> Result<()> {
    world.wait(&format!("the leases of {node} to be as before"), || {
        Ok((world.leased(node)? == *before).then_some(()))
    })
}
